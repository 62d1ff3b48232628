"""Small TorchRL environments and policies whose returns are known, and the classes under test."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, GymEnv, RewardSum, StepCounter, TransformedEnv

# Other processes import this module by its name; a Ray cluster that starts later passes the variable on.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

SUBJECT = os.environ.get("RL_EVAL_SUBJECT", "rl_eval")
"""Whose classes are tested: ``rl_eval``, or ``torchrl`` to see what TorchRL's own do."""

if SUBJECT == "torchrl":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Importing them warns of TorchRL's own deprecations.
        from torchrl.collectors import Evaluator
        from torchrl.collectors.distributed import RayEvalWorker
else:
    from rl_eval.integrations.torchrl import Evaluator, RayEvalWorker  # type: ignore[assignment]

__all__ = ["SUBJECT", "Evaluator", "RayEvalWorker"]


class Steps(EnvBase):
    """Episodes of a fixed length, or of one that the seed draws; the reward of a step is the action.

    Args:
        length: Steps per episode.
        lengths: Drawn from instead.
        truncates: Whether an episode ends by ``truncated``, and not by ``terminated``.
        fails_at: Step that raises.
        seconds: Time that a step takes.
    """

    def __init__(
        self,
        length: int = 5,
        lengths: tuple[int, ...] = (),
        *,
        truncates: bool = False,
        fails_at: int = 0,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.observation_spec = Composite(observation=Unbounded(shape=(1,)))
        self.action_spec = Unbounded(shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        if truncates:
            self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())
        else:
            self.done_spec = Composite(done=flag, terminated=flag.clone())
        self._fixed, self._lengths, self._truncates = length, lengths, truncates
        self._fails_at, self._seconds = fails_at, seconds
        self._rng = np.random.default_rng(0)
        self.taken = 0

    def _set_seed(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(seed)

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self.taken = 0
        self._length = int(self._rng.choice(self._lengths)) if self._lengths else self._fixed
        return TensorDict({"observation": torch.zeros(1)}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        self.taken += 1
        assert self.taken <= self._length, "the environment was stepped after it was done"
        if self.taken == self._fails_at:
            raise ValueError("the simulator broke")
        if self._seconds:
            time.sleep(self._seconds)
        over = torch.tensor([self.taken >= self._length])
        never = torch.zeros(1, dtype=torch.bool)
        ends = {"done": over, "terminated": never if self._truncates else over}
        if self._truncates:
            ends["truncated"] = over
        return TensorDict(
            {"observation": torch.full((1,), float(self.taken)), "reward": tensordict["action"].clone(), **ends}, []
        )


class Constant(nn.Module):
    """Always the same action: its one weight."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation * 0 + self.weight


def constant(value: float = 1.0) -> TensorDictModule:
    return TensorDictModule(Constant(value), in_keys=["observation"], out_keys=["action"])


def make_constant(env: Any = None) -> TensorDictModule:
    return constant()


def steps(**kwargs: Any) -> Any:
    """A factory of :class:`Steps` with the bookkeeping that TorchRL recommends for evaluations."""
    return lambda: TransformedEnv(Steps(**kwargs), Compose(StepCounter(), RewardSum()))


def bare_steps(**kwargs: Any) -> Any:
    return lambda: Steps(**kwargs)


def cartpole() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))


def weights_of(value: float) -> TensorDict:
    return TensorDict.from_module(constant(value)).data.clone()

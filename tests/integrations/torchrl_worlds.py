"""Small TorchRL environments and policies whose returns are known."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, GymEnv, RewardSum, StepCounter, TransformedEnv, VecNormV2

# Other processes import this module by its name; a Ray cluster that starts later passes the variable on.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


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
        flags = ("done", "terminated", "truncated") if truncates else ("done", "terminated")
        self.done_spec = Composite({name: flag.clone() for name in flags})
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
        ends = {"done": over, "terminated": over & torch.tensor(not self._truncates)}
        if self._truncates:
            ends["truncated"] = over
        return TensorDict(
            {"observation": torch.full((1,), float(self.taken)), "reward": tensordict["action"].clone(), **ends}, []
        )


class Constant(nn.Module):
    """Always the same action: its one weight, so that a return shows which weights it is of; or 0 or twice of it.

    Args:
        value: The action.
        dropout: Whether it is dropped at random while the module trains.
    """

    def __init__(self, value: float = 1.0, *, dropout: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        self.dropout = nn.Dropout(0.5 if dropout else 0.0)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.dropout(observation * 0 + self.weight)


def constant(value: float = 1.0, *, dropout: bool = False) -> TensorDictModule:
    return TensorDictModule(Constant(value, dropout=dropout), in_keys=["observation"], out_keys=["action"])


def steps(**kwargs: Any) -> Any:
    """A factory of :class:`Steps` with the bookkeeping that TorchRL recommends for evaluations."""
    return lambda: TransformedEnv(Steps(**kwargs), Compose(StepCounter(), RewardSum()))


def cartpole() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))


def normalized() -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(VecNormV2(in_keys=["observation"]), StepCounter(20)))


def torque(env: Any = None) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def weights_of(value: float) -> TensorDict:
    return TensorDict.from_module(constant(value)).data.clone()

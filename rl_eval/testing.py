"""Environments and policies with known truth or known faults, for tests of evaluators.

Faults are drawn by (episode, attempt), never by a running generator: so the same episode fails in the same
place wherever it runs, and a retry can succeed. Every factory works as ``environment.env`` in a config, for
example ``env: "rl_eval.testing:flaky"``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.protocols import EnvContext

__all__ = [
    "DictObservation",
    "FlakyEnv",
    "ImpureEnv",
    "InjectedFault",
    "TwoLengthEnv",
    "dict_observation",
    "flaky",
    "impure",
    "make_dict_policy",
    "make_gru",
    "two_length",
]


_KILL_STEP: Final = 3


class InjectedFault(RuntimeError):
    """What :class:`FlakyEnv` raises."""


class FlakyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Raises in ``step``, at a place that depends on (episode, attempt) alone.

    Args:
        env: Environment to wrap.
        attempt_rates: Share of first, second, ... attempts that raise; later attempts do not.
        within_steps: Such an attempt raises at a step drawn uniformly from this many, if it lives that long.
        step_rate: Besides, the probability that a step raises, in every attempt.
        kill_episodes: Besides, each of these episodes once sends SIGKILL to its own process, at its third step.
        kill_folder: Where a file per killed episode remembers that it happened.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        attempt_rates: tuple[float, ...] | list[float] = (),
        within_steps: int = 20,
        step_rate: float = 0.0,
        kill_episodes: tuple[int, ...] | list[int] = (),
        kill_folder: str = "",
    ) -> None:
        super().__init__(env)
        self._kill_episodes = frozenset(kill_episodes)
        self._kill_folder = kill_folder
        self._kill_file: Path | None = None
        self._attempt_rates = tuple(attempt_rates)
        self._within_steps = within_steps
        self._step_rate = step_rate
        self._fatal_step: float = np.inf
        self._steps = 0
        self._label = ""

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Draw where this attempt raises."""
        rng = np.random.default_rng((index, attempt))
        rate = self._attempt_rates[attempt - 1] if attempt <= len(self._attempt_rates) else 0.0
        self._fatal_step = float(rng.integers(1, self._within_steps + 1)) if rng.random() < rate else np.inf
        if self._step_rate:
            self._fatal_step = min(self._fatal_step, float(rng.geometric(self._step_rate)))
        self._label = f"episode {index}, attempt {attempt}"
        killer = Path(self._kill_folder) / f"killed-{index}"
        self._kill_file = killer if index in self._kill_episodes and not killer.exists() else None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and the count of steps."""
        self._steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or raise.

        Raises:
            InjectedFault: This is the step.
        """
        self._steps += 1
        if self._kill_file is not None and self._steps == _KILL_STEP:
            self._kill_file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps >= self._fatal_step:
            raise InjectedFault(f"injected fault at step {self._steps} of {self._label}")
        return self.env.step(action)


class TwoLengthEnv(gym.Env[npt.NDArray[np.float32], np.int64]):
    """Half of the seeds give 5 steps worth 0, the other half 200 steps worth 1: the true mean return is 0.5.

    An evaluator that counts the first episodes to finish reports less.
    """

    SHORT: Final = 5
    LONG: Final = 200

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._length = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Draw the length."""
        super().reset(seed=seed)
        self._length = self.LONG if self.np_random.random() < 0.5 else self.SHORT
        self._steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count; the last step of a long episode is rewarded."""
        self._steps += 1
        done = self._steps >= self._length
        return self._observation(), float(done and self._length == self.LONG), done, False, {}

    def _observation(self) -> npt.NDArray[np.float32]:
        return np.array([self._steps / self.LONG, self._length == self.LONG], np.float32)


class DictObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Splits a vector observation into a nested dict, with an image and a discrete part beside it."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        box = env.observation_space
        assert isinstance(box, gym.spaces.Box)
        self.observation_space = gym.spaces.Dict(
            {
                "body": gym.spaces.Tuple(
                    (
                        gym.spaces.Box(box.low[:1], box.high[:1], dtype=np.float32),
                        gym.spaces.Box(box.low[1:], box.high[1:], dtype=np.float32),
                    )
                ),
                "camera": gym.spaces.Box(0, 255, (4, 4, 1), np.uint8),
                "side": gym.spaces.Discrete(2),
            }
        )

    def observation(self, observation: npt.NDArray[np.float32]) -> dict[str, Any]:
        """Split one observation."""
        pixels = np.full((4, 4, 1), int(abs(float(observation[0])) * 100) % 256, np.uint8)
        return {"body": (observation[:1], observation[1:]), "camera": pixels, "side": int(observation[0] > 0)}


class ImpureEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Leaks state across resets: its rewards grow with the number of episodes that this object has run."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._episodes = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset everything but the count of episodes."""
        self._episodes += 1
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, with the leak in the reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward) + 0.001 * self._episodes, terminated, truncated, info


def _wrapped(context: EnvContext) -> tuple[gym.Env[Any, Any], dict[str, Any]]:
    """Build the environment that the context's ``env`` names; return it with the other kwargs."""
    kwargs = dict(context)
    name = kwargs.pop("env", "CartPole-v1")
    inner = kwargs.pop("env_kwargs", {})
    if name == "two_length":
        return TwoLengthEnv(), kwargs
    return gym.make(name, **inner), kwargs


def flaky(context: EnvContext) -> FlakyEnv:
    """Build a :class:`FlakyEnv` from ``env`` (an id, or ``two_length``), ``env_kwargs`` and its own arguments."""
    env, kwargs = _wrapped(context)
    return FlakyEnv(env, **kwargs)


def impure(context: EnvContext) -> ImpureEnv:
    """Build an :class:`ImpureEnv` from ``env`` and ``env_kwargs``."""
    return ImpureEnv(_wrapped(context)[0])


def two_length(context: EnvContext) -> TwoLengthEnv:
    """Build a :class:`TwoLengthEnv`."""
    return TwoLengthEnv()


def dict_observation(context: EnvContext) -> gym.Env[Any, Any]:
    """Build a :class:`DictObservation`, flaky if it is given :class:`FlakyEnv`'s arguments."""
    env, kwargs = _wrapped(context)
    return FlakyEnv(DictObservation(env), **kwargs)


def make_gru(observation_space: gym.Space[Any], action_space: gym.Space[Any], hidden: int = 16, seed: int = 12) -> Any:
    """Build a recurrent policy with fixed weights: a GRU cell over flat observations, sampling actions by its logits.

    It implements :class:`rl_eval.Policy`, with a state of shape (batch, hidden).
    """
    import torch
    from torch import nn

    class GRUPolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.cell = nn.GRUCell(int(np.prod(observation_space.shape or ())), hidden)
            self.head = nn.Linear(hidden, int(action_space.n))  # type: ignore[attr-defined]
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.5, generator=generator)

        def initial_state(self, batch_size: int) -> torch.Tensor:
            return torch.zeros(batch_size, hidden)

        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            state = self.cell(torch.from_numpy(observations).float().flatten(1), state)
            logits = self.head(state).double().numpy()
            if noise is None:
                return logits.argmax(1), state
            gumbel = -np.log(-np.log(noise.uniform(logits.shape[1])))
            return (logits + gumbel).argmax(1), state

    return GRUPolicy()


def make_dict_policy(observation_space: gym.Space[Any]) -> Any:
    """Build a numpy policy for :class:`DictObservation`: it pushes towards where the pole leans, as a batch."""

    def act(observations: dict[str, Any]) -> npt.NDArray[np.int64]:
        cart, rest = observations["body"]
        lean = rest[:, 1] + 0.01 * cart[:, 0]
        picture = observations["camera"].reshape(len(lean), -1).mean(1) * 1e-5
        return np.asarray(lean + picture * (2 * observations["side"] - 1) > 0, np.int64)

    return act

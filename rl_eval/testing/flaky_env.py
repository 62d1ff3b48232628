"""Faults at random places: whether an attempt fails, and where, is drawn by (episode, attempt)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np

from rl_eval.protocols import EnvContext
from rl_eval.testing.environments import DictObservation, wrapped_env
from rl_eval.testing.kinds import InjectedFault

__all__ = ["FlakyEnv", "dict_observation", "flaky"]

_KILL_STEP: Final = 3


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


def flaky(context: EnvContext) -> FlakyEnv:
    """Build a :class:`FlakyEnv` from ``env`` and ``env_kwargs``, and its own arguments."""
    env, kwargs = wrapped_env(context)
    return FlakyEnv(env, **kwargs)


def dict_observation(context: EnvContext) -> gym.Env[Any, Any]:
    """Build a :class:`DictObservation`, flaky if it is given :class:`FlakyEnv`'s arguments."""
    env, kwargs = wrapped_env(context)
    return FlakyEnv(DictObservation(env), **kwargs)

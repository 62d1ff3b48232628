"""A policy of plain numpy: runners that act with it start without importing torch."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval import EvalConfig


def lean() -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    """Return a policy for CartPole that pushes to where the pole leans: 25 to 70 steps."""
    return lambda observations: (observations[:, 2] > 0).astype(np.int64)


class OfThisProcess:
    """Acts by a number that is another one in every process, as random initial weights are."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[npt.NDArray[np.int64], None]:
        return np.zeros(len(observations), np.int64), None

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return what the actions are chosen by."""
        return [np.full((len(observations), 1), float(os.getpid()))]


def config(runners: int = 2, lanes: int = 4, num_episodes: int = 60) -> EvalConfig:
    """CartPole with that policy."""
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("numpy_world:lean")
        .runners(num_runners=runners, num_envs_per_runner=lanes)
        .evaluation(num_episodes=num_episodes)
    )

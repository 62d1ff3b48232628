"""A policy of plain numpy: runners that act with it start without importing torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval import EvalConfig


def lean() -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    """Return a policy for CartPole that pushes to where the pole leans: 25 to 70 steps."""
    return lambda observations: (observations[:, 2] > 0).astype(np.int64)


def config(runners: int = 2, lanes: int = 4, num_episodes: int = 60) -> EvalConfig:
    """CartPole with that policy."""
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("numpy_world:lean")
        .runners(num_runners=runners, num_envs_per_runner=lanes)
        .evaluation(num_episodes=num_episodes)
    )

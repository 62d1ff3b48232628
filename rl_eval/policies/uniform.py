"""Policy that draws every action with equal probability, among those that a mask allows: the baseline of a game."""

from __future__ import annotations

from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.protocols import NoiseSource

__all__ = ["UniformPolicy", "make_uniform"]


@final
class UniformPolicy:
    """Uniform policy over discrete actions, which keeps to ``observation["action_mask"]`` where there is one.

    Args:
        count: Number of actions.
        start: The first one.
    """

    def __init__(self, count: int, start: int = 0) -> None:
        self._count = count
        self._start = start

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[np.int64], None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        if noise is None:
            raise ConfigError("a uniform policy has no most likely action: set policy.deterministic: false for it")
        drawn = noise.uniform(self._count)
        if isinstance(observations, dict) and "action_mask" in observations:
            drawn = np.where(observations["action_mask"] > 0, drawn, -1.0)
        return drawn.argmax(1) + self._start, None


def make_uniform(action_space: gym.Space[Any]) -> UniformPolicy:
    """Build a :class:`UniformPolicy` for an action space.

    Raises:
        ConfigError: The space is not Discrete.
    """
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ConfigError(f"make_uniform acts in Discrete spaces, not in {action_space}: write a policy of your own")
    return UniformPolicy(int(action_space.n), int(action_space.start))

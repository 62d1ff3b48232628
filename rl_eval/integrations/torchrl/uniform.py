"""Random actions in place of a policy, drawn from the noise of the episode."""

from __future__ import annotations

from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.protocols import NoiseSource

__all__ = ["UNIFORM", "UniformPolicy"]

Array = npt.NDArray[Any]

UNIFORM: Final = "uniform"
"""Mode of a policy whose actions are random."""


@final
class UniformPolicy:
    """Draws every action uniformly; where a Box has no bounds, from the standard normal distribution.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.
    """

    outputs: Final = None

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self._space = action_space

    def initial_state(self, batch_size: int) -> None:
        """Return no state."""

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return nothing: no action depends on an observation."""
        return []

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        if noise is None:
            raise ConfigError("policy.deterministic is True, but random actions are asked for: set it to False")
        return _drawn(self._space, noise, len(live)), state


def _drawn(space: gym.Space[Any], noise: NoiseSource, batch: int) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _drawn(part, noise, batch) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_drawn(part, noise, batch) for part in space.spaces)
    count = int(np.prod(space.shape or (), dtype=int))
    shape = (batch, *(space.shape or ()))
    if isinstance(space, gym.spaces.Discrete):
        return np.floor(noise.uniform(1)[:, 0] * int(space.n)).astype(np.int64) + int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.floor(noise.uniform(count).reshape(shape) * space.nvec).astype(np.int64) + space.start
    if isinstance(space, gym.spaces.MultiBinary):
        return (noise.uniform(count).reshape(shape) < 0.5).astype(np.int8)
    if isinstance(space, gym.spaces.Box):
        return _of_box(space, noise, shape, count)
    raise ConfigError(f"random actions cannot be drawn from {space}")


def _of_box(space: gym.spaces.Box, noise: NoiseSource, shape: tuple[int, ...], count: int) -> Array:
    bounded = space.bounded_below & space.bounded_above
    low, high = np.where(bounded, space.low, 0.0), np.where(bounded, space.high, 1.0)
    uniform, normal = noise.uniform(count).reshape(shape), noise.normal(count).reshape(shape)
    return np.asarray(np.where(bounded, low + uniform * (high - low), normal).astype(space.dtype))

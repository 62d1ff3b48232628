"""Uniform policy: random actions from each episode's own noise, as a baseline."""

from __future__ import annotations

from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.protocols import NoiseSource


@final
class UniformPolicy:
    """Policy that draws every action uniformly. If there is an action mask, it draws only from allowed actions.

    The mask is ``observation["action_mask"]``, as in PettingZoo and ``environment.action_masks``. Its shape is
    (batch, n) for a Discrete space, (batch, sum(nvec)) for MultiDiscrete and (batch, 2 * bits) for MultiBinary.

    As in ``Box.sample``, an unbounded dimension of a Box is drawn from the standard normal distribution. In a dimension
    with one bound, the distance to this bound is drawn from the exponential distribution.

    Args:
        action_space: Discrete, MultiDiscrete, MultiBinary or Box, or a Tuple or Dict of these.

    Raises:
        ConfigError: The action space has another type.
    """

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self._space = action_space
        _check(action_space)

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        if noise is None:
            problem = "a uniform policy has no most likely action"
            raise ConfigError(problem, key="policy.deterministic", value=True, fix="Set policy.deterministic to false.")
        mask = observations.get("action_mask") if isinstance(observations, dict) else None
        if mask is not None and (choices := _choices(self._space)):
            drawn = np.where(mask > 0, noise.uniform(sum(choices)), -1.0)
            parts = np.split(drawn, np.cumsum(choices)[:-1], axis=1)
            chosen = np.stack([part.argmax(1) for part in parts], 1).reshape(len(drawn), *(self._space.shape or ()))
            return (chosen + getattr(self._space, "start", 0)).astype(self._space.dtype), None
        return _draw(self._space, noise), None


def _choices(space: gym.Space[Any]) -> list[int]:
    """Return the number of choices of each part of a space; an empty list for a space without masks."""
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    return [2] * int(np.prod(space.shape)) if isinstance(space, gym.spaces.MultiBinary) else []


def _check(space: gym.Space[Any]) -> None:
    for part in _parts(space):
        _check(part)
    known = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary, gym.spaces.Box)
    if not isinstance(space, (*known, gym.spaces.Tuple, gym.spaces.Dict)):
        problem = f"a uniform policy cannot draw from {space}"
        raise ConfigError(problem, key="action_space", value=str(space), fix="Pass another policy.")


def _parts(space: gym.Space[Any]) -> tuple[gym.Space[Any], ...]:
    if isinstance(space, gym.spaces.Dict):
        return tuple(space.spaces.values())
    return space.spaces if isinstance(space, gym.spaces.Tuple) else ()


def _draw(space: gym.Space[Any], noise: NoiseSource) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _draw(part, noise) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_draw(part, noise) for part in space.spaces)
    if isinstance(space, gym.spaces.Discrete):
        return _below(noise.uniform(1)[:, 0], space.n) + space.start
    if isinstance(space, gym.spaces.MultiDiscrete):
        drawn = _below(noise.uniform(space.nvec.size), space.nvec.ravel())
        return (drawn.reshape(-1, *space.shape) + space.start).astype(space.dtype)
    if isinstance(space, gym.spaces.MultiBinary):
        bits = noise.uniform(int(np.prod(space.shape))) < 0.5
        return bits.reshape(-1, *space.shape).astype(space.dtype)
    assert isinstance(space, gym.spaces.Box)
    return _box(space, noise)


def _below(uniform: npt.NDArray[np.float64], count: Any) -> npt.NDArray[np.int64]:
    return np.asarray(uniform * count, np.int64)


def _box(space: gym.spaces.Box, noise: NoiseSource) -> npt.NDArray[Any]:
    whole = np.issubdtype(space.dtype, np.integer)
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64) + whole
    below, above = np.isfinite(low), np.isfinite(high)
    uniform, normal = noise.uniform(low.size), noise.normal(low.size)
    with np.errstate(invalid="ignore", over="ignore"):  # In values that are not selected.
        choices = low + uniform * (high - low), low - np.log(uniform), high + np.log(uniform)
    values = np.select([below & above, below, above], choices, normal)
    if whole:
        values = np.floor(values)
    return values.reshape(len(values), *space.shape).astype(space.dtype)

"""Trajectory of one episode as arrays, and the arrays that a space's values become."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError

__all__ = [
    "ACTION_LOG_PROB",
    "CompressedArray",
    "Key",
    "Leaf",
    "Trajectory",
    "action_leaves",
    "nested",
    "observation_leaves",
]

Array = npt.NDArray[Any]
Key = tuple[str, ...]

_RESERVED: Final = frozenset(
    ("action", "action_log_prob", "collector", "done", "info", "next", "reward", "terminated", "truncated")
)
"""Keys of a batch that no observation may have."""
ACTION_LOG_PROB: Final = ("action_log_prob",)
"""Key of the log-probabilities of actions, among the outputs of a policy."""
_LEAVES: Final = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


class Leaf(NamedTuple):
    """One array of a nested value."""

    key: Key
    """Its name in a batch."""
    path: tuple[Any, ...]
    """Where it is in the value."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, value: Any) -> Any:
        """Return the leaf of a value."""
        for part in self.path:
            value = value[part]
        return value

    @property
    def is_image(self) -> bool:
        """Whether it holds bytes in two or more dimensions."""
        return self.dtype == np.uint8 and len(self.shape) > 1


def observation_leaves(space: gym.Space[Any], root: Key = ()) -> list[Leaf]:
    """Return the arrays of an observation: those of a Dict space by their own keys, any other as ``observation``.

    A Dict space that has a key which the rest of a batch needs, such as ``action``, stands under ``observation`` too.

    Args:
        space: Of the observations.
        root: What all keys begin with.

    Raises:
        ConfigError: A part of the space has no arrays of one shape.
    """
    own_keys = isinstance(space, gym.spaces.Dict) and not _RESERVED & set(space.spaces)
    return _leaves(space, root if own_keys else (*root, "observation"), ())


def action_leaves(space: gym.Space[Any], root: Key = ()) -> list[Leaf]:
    """Return the arrays of an action, under ``action``; arguments and errors as of :func:`observation_leaves`."""
    return _leaves(space, (*root, "action"), ())


def nested(space: gym.Space[Any], arrays: Mapping[Key, Any], root: str = "observation") -> Any:
    """Return the arrays of a trajectory in the structure of their space.

    Args:
        space: Of the observations or actions.
        arrays: Observations or actions of a trajectory.
        root: ``observation`` or ``action``.
    """
    leaves = observation_leaves(space) if root == "observation" else action_leaves(space)
    by_path = {leaf.path: np.asarray(arrays[leaf.key]) for leaf in leaves}

    def filled(part: gym.Space[Any], path: tuple[Any, ...]) -> Any:
        if isinstance(part, gym.spaces.Tuple):
            return tuple(filled(one, (*path, place)) for place, one in enumerate(part.spaces))
        if isinstance(part, gym.spaces.Dict):
            return {name: filled(one, (*path, name)) for name, one in part.spaces.items()}
        return by_path[path]

    return filled(space, ())


def _leaves(space: gym.Space[Any], key: Key, path: tuple[Any, ...]) -> list[Leaf]:
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
        return [leaf for name, part in parts for leaf in _leaves(part, (*key, str(name)), (*path, name))]
    if isinstance(space, _LEAVES):
        return [Leaf(key, path, np.dtype(space.dtype or np.float64), tuple(space.shape or ()))]
    raise ConfigError(
        f"trajectories hold arrays, and {space} has none of one shape: wrap the environment so that it has Box, "
        "Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces only"
    )


def _overlap(one: Key, other: Key) -> bool:
    """Return whether a nested mapping cannot have an array under both keys."""
    return all(ours == theirs for ours, theirs in zip(one, other, strict=False))


@dataclass(frozen=True)
class CompressedArray:
    """Array in compressed blocks of rows; nothing is lost."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[bytes, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the array."""
        whole = np.empty(self.shape, self.dtype)
        rest = whole.reshape(-1).view(np.uint8)
        for block in self.blocks:
            rows = zlib.decompress(block)
            rest[: len(rows)] = np.frombuffer(rows, np.uint8)
            rest = rest[len(rows) :]
        return whole if dtype is None else whole.astype(dtype)


@dataclass(frozen=True)
class Trajectory:
    """Every step of one completed episode, of T steps."""

    index: int
    """Index of the episode in the plan."""
    seed: int
    attempt: int
    """The attempt that counted; others leave no trajectory."""
    weights_version: int
    """Version of the weights that acted."""
    terminated: bool
    """Whether its last step reached a terminal state."""
    truncated: bool
    """Whether it was cut short after its last step."""
    observations: Mapping[Key, Array | CompressedArray]
    """Observations in the dtypes of their space, each of shape (T + 1, \\*leaf_shape): the first is of the reset."""
    actions: Mapping[Key, Array]
    """Actions as the environment was given them, each of shape (T, \\*leaf_shape)."""
    rewards: npt.NDArray[np.float64]
    """Rewards, shape (T,); added in order, as ``np.cumsum`` does, they are the episode's return bit by bit."""
    infos: Mapping[str, npt.NDArray[np.float64]]
    """Scalars of ``evaluation.info_keys``, each of shape (T,); NaN at steps that do not report them."""
    outputs: Mapping[Key, Array]
    """What the policy computed besides actions, its ``outputs``, each of shape (T, \\*shape): above all
    ``action_log_prob``, the logarithms of the probabilities (densities) of the actions that it drew."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def told(self) -> dict[Key, Array]:
        """The outputs under keys that a batch has no other use for; an ``action`` is the policy's own form.

        A recurrent state, which is told before and after each step, comes before an observation of its name: an
        environment that declares it has zeros there.
        """
        taken = _RESERVED - {"action", *ACTION_LOG_PROB}
        states = {key for key in self.outputs if ("next", *key) in self.outputs}
        told = {
            key: array
            for key, array in self.outputs.items()
            if key[0] not in taken and (key in states or not any(_overlap(key, seen) for seen in self.observations))
        }
        return told | {("next", *key): self.outputs[("next", *key)] for key in states & told.keys()}

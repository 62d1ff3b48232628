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
from rl_eval.records.episode import EpisodeRecord

__all__ = [
    "ACTION_LOG_PROB",
    "CompressedArray",
    "Key",
    "Leaf",
    "Trajectory",
    "action_leaves",
    "agent_leaves",
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


def observation_leaves(space: gym.Space[Any]) -> list[Leaf]:
    """Return the arrays of an observation: those of a Dict space by their own keys, any other as ``observation``.

    A Dict space that has a key which the rest of a batch needs, such as ``action``, stands under ``observation`` too.

    Raises:
        ConfigError: A part of the space has no arrays of one shape.
    """
    own_keys = isinstance(space, gym.spaces.Dict) and not _RESERVED & set(space.spaces)
    return _leaves(space, () if own_keys else ("observation",), ())


def action_leaves(space: gym.Space[Any]) -> list[Leaf]:
    """Return the arrays of an action, under ``action``.

    Raises:
        ConfigError: A part of the space has no arrays of one shape.
    """
    return _leaves(space, ("action",), ())


def agent_leaves(agent: Any, observations: gym.Space[Any], actions: gym.Space[Any]) -> tuple[list[Leaf], list[Leaf]]:
    """Return the arrays of one of several agents, whose keys begin with ``agents`` and its name.

    Raises:
        ConfigError: A part of a space has no arrays of one shape.
    """
    root = ("agents", str(agent))
    seen, done = observation_leaves(observations), action_leaves(actions)
    named = [[leaf._replace(key=(*root, *leaf.key)) for leaf in leaves] for leaves in (seen, done)]
    return named[0], named[1]


def nested(space: gym.Space[Any], arrays: Mapping[Key, Any], root: str = "observation") -> Any:
    """Return the arrays of a trajectory in the structure of their space.

    Args:
        space: Of the observations or actions.
        arrays: Observations or actions of a trajectory.
        root: ``observation`` or ``action``.
    """
    leaves = observation_leaves(space) if root == "observation" else action_leaves(space)
    return _filled(space, {leaf.path: np.asarray(arrays[leaf.key]) for leaf in leaves}, ())


def _filled(space: gym.Space[Any], arrays: Mapping[tuple[Any, ...], Array], path: tuple[Any, ...]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _filled(part, arrays, (*path, name)) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_filled(part, arrays, (*path, place)) for place, part in enumerate(space.spaces))
    return arrays[path]


def _leaves(space: gym.Space[Any], key: Key, path: tuple[Any, ...]) -> list[Leaf]:
    if isinstance(space, gym.spaces.Dict):
        return [leaf for name, part in space.spaces.items() for leaf in _leaves(part, (*key, name), (*path, name))]
    if isinstance(space, gym.spaces.Tuple):
        parts = enumerate(space.spaces)
        return [leaf for place, part in parts for leaf in _leaves(part, (*key, str(place)), (*path, place))]
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

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, compressed."""
        return sum(map(len, self.blocks))


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

    @classmethod
    def of(cls, record: EpisodeRecord, **columns: Any) -> Trajectory:
        """Return the trajectory of an episode that has its record, with its columns by the names of their fields."""
        return cls(
            record.index,
            record.seed,
            record.attempts,
            record.weights_version,
            terminated=record.terminated,
            truncated=record.truncated,
            **columns,
        )

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

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        columns = (self.observations, self.actions, self.infos, self.outputs)
        return self.rewards.nbytes + sum(array.nbytes for column in columns for array in column.values())

"""Trajectories: the steps of episodes as arrays and tensordicts.

A recorder is an observer in the process that runs the episode. It reads a log of sweeps, or keeps an episode's steps in
growing arrays. A batch has the layout of TorchRL's episode data (TED): arrays by name, or a ``TensorDict``.

========================================  ==================================================================
key                                       value at a frame, one step of an episode
========================================  ==================================================================
``observation``, or the keys of a Dict    observation of the policy
``action``                                action passed to the environment
``action_log_prob``, other ``outputs``    other outputs of the policy; some are another form of ``action``
``done``, ``terminated``, ``truncated``   False, because no episode ends before its last step
``("next", ...)``                         observation, reward and flags after the step; ``("next", "info", key)``
``("collector", "traj_ids")``             index of the episode, also as ``("collector", "index")``
``("collector", "step")``                 number of the step in its episode, from 0
``("collector", "seed")`` and others      ``attempt`` and ``weights_version`` of the episode
``("collector", "mask")``                 in padded batches only: False for padding
``("collector", "arrival")``              in first-ready order only: the place of its episode among arrivals
========================================  ==================================================================
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.sweep_log import Steps
from rl_eval.records.episode import COLUMNS, EpisodeRecord, EpisodeSpec

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
    """Name in a batch."""
    path: tuple[Any, ...]
    """Path in the value."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, value: Any) -> Any:
        """Return the leaf of a value."""
        for part in self.path:
            value = value[part]
        return value

    @property
    def is_image(self) -> bool:
        """Whether the array contains bytes in two or more dimensions."""
        return self.dtype == np.uint8 and len(self.shape) > 1


def observation_leaves(space: gym.Space[Any], root: Key = ()) -> list[Leaf]:
    """Return the arrays of an observation: those of a Dict space by their own keys, any other as ``observation``.

    The keys of a Dict space with a reserved key, such as ``action``, also start with ``observation``.

    Args:
        space: Space of the observations.
        root: Prefix of all keys.

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
        space: Space of the observations or actions.
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
    problem = f"a trajectory contains arrays of one shape, but the values of {space} have different shapes"
    fix = "Wrap the environment: Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces are supported."
    raise ConfigError(problem, key="environment.env", value=str(space), fix=fix)


def _overlap(one: Key, other: Key) -> bool:
    """Return whether a nested mapping cannot have an array under both keys."""
    return all(ours == theirs for ours, theirs in zip(one, other, strict=False))


@dataclass(frozen=True)
class CompressedArray:
    """Array in blocks of rows, compressed without loss."""

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
    """Attempt that completed; other attempts leave no trajectory."""
    weights_version: int
    """Version of the weights that acted."""
    terminated: bool
    """Whether its last step reached a terminal state."""
    truncated: bool
    """Whether the episode was truncated after its last step."""
    observations: Mapping[Key, Array | CompressedArray]
    """Observations in the dtypes of their space, each of shape (T + 1, \\*leaf_shape); the first is of the reset."""
    actions: Mapping[Key, Array]
    """Actions passed to the environment, each of shape (T, \\*leaf_shape)."""
    rewards: npt.NDArray[np.float64]
    """Rewards, shape (T,). Their sum in order, as by ``np.cumsum``, is bitwise equal to the episode's return."""
    infos: Mapping[str, npt.NDArray[np.float64]]
    """Scalars of ``evaluation.info_keys``, each of shape (T,); NaN at steps that do not report them."""
    outputs: Mapping[Key, Array]
    """Outputs of the policy besides actions, each of shape (T, \\*shape), such as ``action_log_prob``: logarithms of
    the probabilities (densities) of drawn actions."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def told(self) -> dict[Key, Array]:
        """Outputs with keys that are free in a batch; an ``action`` is in the policy's own form.

        A recurrent state has values before and after each step. It replaces an observation with the same name: an
        environment that declares the state has only zeros in this observation.
        """
        taken = _RESERVED - {"action", *ACTION_LOG_PROB}
        states = {key for key in self.outputs if ("next", *key) in self.outputs}
        told = {
            key: array
            for key, array in self.outputs.items()
            if key[0] not in taken and (key in states or not any(_overlap(key, seen) for seen in self.observations))
        }
        return told | {("next", *key): self.outputs[("next", *key)] for key in states & told.keys()}


_COLUMNS: Final = {"traj_ids": "index"} | {name: name for name in ("index", "seed", "attempt", "weights_version")}
_SCALARS: Final = {("done",), ("terminated",), ("truncated",)} | {
    ("next", name) for name in ("reward", "done", "terminated", "truncated")
}
"""Keys that TorchRL stores as columns of shape (..., 1)."""


class Fragment(NamedTuple):
    """Steps ``start`` to ``stop - 1`` of a trajectory."""

    trajectory: Trajectory
    start: int
    stop: int

    @property
    def frames(self) -> int:
        """Number of steps."""
        return self.stop - self.start


def as_arrays(fragments: Sequence[Fragment], *, padded: bool = False, arrivals: bool = False) -> dict[str, Array]:
    r"""Return a batch as arrays, by the keys of this module's table joined with dots.

    Args:
        fragments: Fragments of the batch, in order; at least one.
        padded: Whether each fragment gets a separate row, padded with zeros. By default, frames are concatenated.
        arrivals: Whether the order is that of arrival; adds its key.

    Returns:
        Arrays of shape (frames, \*shape), or (fragments, longest, \*shape).
    """
    return {".".join(key): array for key, array in _batch(fragments, padded, arrivals).items()}


def as_tensordict(fragments: Sequence[Fragment], *, padded: bool = False, arrivals: bool = False) -> Any:
    """Return a batch as a ``TensorDict`` of batch size (frames,), or (fragments, longest); see :func:`as_arrays`."""
    import torch
    from tensordict import TensorDict

    arrays = _batch(fragments, padded, arrivals)
    size = arrays["collector", "traj_ids"].shape
    batch = TensorDict({}, batch_size=size)
    for key, array in arrays.items():
        tensor = torch.from_numpy(array)
        batch.set(key, tensor.unsqueeze(-1) if key in _SCALARS else tensor)
    return batch


def reserve(*files: Path) -> None:
    """Reserve disk space for memory-mapped files, because a write to a full disk kills the process.

    Raises:
        OSError: The disk does not have enough space.
    """
    for file in files:
        with file.open("r+b") as opened:
            if size := file.stat().st_size:
                os.posix_fallocate(opened.fileno(), 0, size)


def _batch(fragments: Sequence[Fragment], padded: bool, arrivals: bool) -> dict[Key, Array]:
    lengths = np.array([fragment.frames for fragment in fragments])
    flat = dict(_recorded(fragments)) | _flags(fragments, lengths) | _labels(fragments, lengths)
    if arrivals:
        flat["collector", "arrival"] = np.repeat(np.arange(len(fragments)), lengths)
    if not padded:
        return flat
    mask = np.arange(lengths.max()) < lengths[:, None]
    return {key: _padded(array, mask) for key, array in flat.items()} | {("collector", "mask"): mask}


def _recorded(fragments: Sequence[Fragment]) -> Iterator[tuple[Key, Array]]:
    r"""Return the recorded arrays, each of shape (frames, \*shape)."""
    first = fragments[0].trajectory
    for key in first.observations:
        wholes = [np.asarray(trajectory.observations[key]) for trajectory, _, _ in fragments]
        parts = list(zip(wholes, fragments, strict=True))
        yield key, np.concatenate([whole[start:stop] for whole, (_, start, stop) in parts])
        yield ("next", *key), np.concatenate([whole[start + 1 : stop + 1] for whole, (_, start, stop) in parts])
    for key in first.actions:
        yield key, np.concatenate([trajectory.actions[key][start:stop] for trajectory, start, stop in fragments])
    yield ("next", "reward"), np.concatenate([whole.rewards[start:stop] for whole, start, stop in fragments])
    for name in first.infos:
        yield ("next", "info", name), np.concatenate([one.infos[name][start:stop] for one, start, stop in fragments])
    for key in first.told:
        if all(key in one.outputs for one, _, _ in fragments):
            yield key, np.concatenate([one.outputs[key][start:stop] for one, start, stop in fragments])


def _flags(fragments: Sequence[Fragment], lengths: npt.NDArray[np.int64]) -> dict[Key, Array]:
    """Return the flags before each step (all False) and after it (True only at the end of an episode)."""
    frames, ends = int(lengths.sum()), lengths.cumsum() - 1
    whole = np.array([fragment.stop == len(fragment.trajectory) for fragment in fragments])
    after = {
        "done": whole,
        "terminated": whole & [fragment.trajectory.terminated for fragment in fragments],
        "truncated": whole & [fragment.trajectory.truncated for fragment in fragments],
    }
    flags: dict[Key, Array] = {(name,): np.zeros(frames, bool) for name in after}
    for name, at_end in after.items():
        flags["next", name] = np.zeros(frames, bool)
        flags["next", name][ends] = at_end
    return flags


def _labels(fragments: Sequence[Fragment], lengths: npt.NDArray[np.int64]) -> dict[Key, Array]:
    """Return the labels that identify the episode of each frame."""
    labels: dict[Key, Array] = {
        ("collector", name): np.repeat([getattr(one.trajectory, field) for one in fragments], lengths)
        for name, field in _COLUMNS.items()
    }
    starts = np.array([fragment.start for fragment in fragments])
    labels["collector", "step"] = np.arange(lengths.sum()) + np.repeat(starts - lengths.cumsum() + lengths, lengths)
    return labels


def _padded(flat: Array, mask: npt.NDArray[np.bool_]) -> Array:
    rows = np.zeros((*mask.shape, *flat.shape[1:]), flat.dtype)
    rows[mask] = flat
    return rows


_FIRST_ROWS: Final = 256
"""Initial capacity, in steps."""
_BLOCK: Final = 32
"""Images per compressed block."""
_FIELDS: Final = ("index", "seed", "attempts", "weights_version", "terminated", "truncated")
_of_record: Final = attrgetter(*_FIELDS)
_of_row: Final = itemgetter(*(list(COLUMNS).index(name) for name in _FIELDS))


@final
class TrajectoryRecorder:
    """Observer whose artifact is the :class:`Trajectory` of the episode.

    Its arrays live as long as the environment and are copied at the end of an episode. If there are several agents,
    each has its own columns, with zeros in steps without it, and a column ``acting``.

    Args:
        env: The observed environment.
        info_keys: Scalars of the step ``info`` to keep.
        compress_images: Compress observations of bytes in two or more dimensions, without loss, as they come in.

    Raises:
        ConfigError: A space has parts that are not arrays of one shape.
    """

    def __init__(self, env: Any, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> None:
        self._env = env
        # If the module is not imported, no environment is a TeamEnv.
        several = getattr(sys.modules.get("rl_eval.runners.multi_agent.team"), "TeamEnv", ())
        self._is_team = isinstance(env, several)
        if self._is_team:
            spaces = {agent: env.spaces(agent) for agent in env.agents}
        else:
            spaces = {None: (env.observation_space, env.action_space)}
        self._agents = {
            agent: _Columns(() if agent is None else ("agents", str(agent)), compress_images, *pair)
            for agent, pair in spaces.items()
        }
        self._infos = {key: Rows((), np.dtype(np.float64)) for key in info_keys}
        self._rewards = Rows((), np.dtype(np.float64))
        self._steps = 0
        self._silent = False
        """Whether the policy returned no outputs at some step."""

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Start with the observation of the reset; see :class:`rl_eval.runners.EpisodeObserver`."""
        self._steps, self._silent = 0, False
        for agent, columns in self._agents.items():
            columns.see(0, self._part(observation, agent))

    def on_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
        policy_outputs: Any,
    ) -> None:
        """Write a row of every column; see :class:`rl_eval.runners.EpisodeObserver`."""
        step = self._steps
        self._steps = step + 1
        self._silent = self._silent or policy_outputs is None
        self._rewards.write(step, reward if type(reward) is float else np.asarray(reward).item())
        for agent, columns in self._agents.items():
            chosen, outputs = self._part(action, agent), self._part(policy_outputs, agent) or {}
            if self._is_team:
                outputs = {"acting": chosen is not None, **outputs}
                columns.rewards.write(step, self._env.rewards.get(agent, 0.0))
            columns.act(step, chosen, outputs)
            columns.see(step + 1, self._part(observation, agent))
        for key, column in self._infos.items():
            column.write(step, np.asarray(info[key]).item() if key in info else np.nan)

    @property
    def reads_sweeps(self) -> bool:
        """Whether a log of sweeps is sufficient: there are no infos, and nothing to compress."""
        return not self._infos and not any(columns.compresses for columns in self._agents.values())

    def read_sweeps(self, steps: Steps) -> TrajectoryBlock:
        """Return the trajectories of episodes; see :class:`rl_eval.policies.inference.sweep_log.SweepRecorder`."""
        (columns,) = self._agents.values()
        return TrajectoryBlock(steps, columns.observed[0][0].key, columns.acted[0][0].key)

    def on_episode_end(self, record: EpisodeRecord) -> Trajectory:
        """Return the trajectory of the attempt that completed."""
        steps, agents = self._steps, list(self._agents.values())
        infos = dict(self._infos)
        if self._is_team:
            infos |= {f"reward/{agent}": columns.rewards for agent, columns in self._agents.items()}
            for agent, reward in self._env.unread.items():  # The episode was cut before it was the agent's turn.
                self._rewards.array[steps - 1] += reward
                self._agents[agent].rewards.array[steps - 1] += reward
        outputs = {} if self._silent and not self._is_team else {k: v for one in agents for k, v in one.outputs.items()}
        return Trajectory(
            **_by_field(_of_record(record)),
            observations={leaf.key: rows.taken(steps + 1) for one in agents for leaf, rows in one.observed},
            actions={leaf.key: rows.taken(steps) for one in agents for leaf, rows in one.acted},
            rewards=self._rewards.taken(steps),
            infos={key: rows.taken(steps) for key, rows in infos.items()},
            outputs={key: rows.taken(steps) for key, rows in outputs.items()},
        )

    def _part(self, value: Any, agent: Any) -> Any:
        """Return an agent's part of a value; None if it has none."""
        return (value or {}).get(agent) if self._is_team else value


class _Columns:
    """Columns of one agent."""

    def __init__(self, root: Key, compress_images: bool, observations: gym.Space[Any], actions: gym.Space[Any]) -> None:
        seen = observation_leaves(observations, root)
        self.compresses = compress_images and any(leaf.is_image for leaf in seen)
        self.observed = [
            (leaf, (CompressedRows if compress_images and leaf.is_image else Rows)(leaf.shape, leaf.dtype))
            for leaf in seen
        ]
        self.acted = [(leaf, Rows(leaf.shape, leaf.dtype)) for leaf in action_leaves(actions, root)]
        self.rewards = Rows((), np.dtype(np.float64))
        self.outputs: dict[Key, Rows] = {}
        """Outputs of the policy besides actions in this episode."""
        self._root = root

    def see(self, row: int, observation: Any) -> None:
        """Write an observation; None for zeros."""
        for leaf, rows in self.observed:
            rows.write(row, 0 if observation is None else leaf.read(observation))

    def act(self, row: int, action: Any, outputs: Mapping[str, Any]) -> None:
        """Write an action (None for zeros) and the other outputs of the policy."""
        if row == 0:
            self.outputs = {}
        for leaf, rows in self.acted:
            rows.write(row, 0 if action is None else leaf.read(action))
        told = {self._key(name): value for name, value in outputs.items()}
        for key in told.keys() - self.outputs.keys():
            self.outputs[key] = Rows(np.shape(told[key]), np.asarray(told[key]).dtype)
            for former in range(row):
                self.outputs[key].write(former, 0)
        for key, column in self.outputs.items():
            column.write(row, told.get(key, 0))

    def _key(self, name: str) -> Key:
        """Return the key of an output; one of the next step starts with ``next``."""
        path = tuple(name.split("."))
        return ("next", *self._root, *path[1:]) if path[0] == "next" else (*self._root, *path)


class Rows:
    """Rows of one array, which doubles when it is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.array = np.empty((0, *shape), dtype)

    def write(self, row: int, value: Any) -> None:
        """Write one row."""
        if row >= len(self.array):
            more = np.empty((max(_FIRST_ROWS, len(self.array)), *self.array.shape[1:]), self.array.dtype)
            self.array = np.concatenate([self.array, more])
        self.array[row] = value

    def taken(self, rows: int) -> Array:
        """Return a copy of the first rows."""
        return self.array[:rows].copy()


class CompressedRows:
    """Rows of images, compressed in blocks as soon as a block is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._block = np.empty((_BLOCK, *shape), dtype)
        self._blocks: list[bytes] = []

    def write(self, row: int, value: Any) -> None:
        """Write the next row; row 0 starts over."""
        place = row % _BLOCK
        if row == 0:
            self._blocks = []
        elif place == 0:
            self._blocks.append(_compressed(self._block))
        self._block[place] = value

    def taken(self, rows: int) -> CompressedArray:
        """Return all rows."""
        last = self._block[: (rows - 1) % _BLOCK + 1]
        return CompressedArray(
            str(self._block.dtype), (rows, *self._block.shape[1:]), (*self._blocks, _compressed(last))
        )


def _by_field(values: tuple[Any, ...]) -> dict[str, Any]:
    """Return a record's labels by their names in a trajectory."""
    return dict(zip([name.replace("attempts", "attempt") for name in _FIELDS], values, strict=True))


def _compressed(rows: Array) -> bytes:
    return zlib.compress(rows.tobytes(), 1)


@final
class TrajectoryBlock(Mapping[int, Trajectory]):
    """Trajectories of episodes by index; their arrays are views of common ones.

    Args:
        steps: Steps of all episodes.
        observation: Key of the observations.
        action: Key of the actions.
    """

    def __init__(self, steps: Steps, observation: Key, action: Key) -> None:
        self._labels = [_of_row(row) for row in steps.rows]
        self._stops = steps.lengths.cumsum().tolist()
        self._keys = observation, action
        self._observations, self._actions = steps.observations, steps.actions
        self._rewards = steps.rewards
        self._outputs = {tuple(name.split(".")): rows for name, rows in steps.outputs.items()}
        self._places = {index: place for place, (index, *_) in enumerate(self._labels)}

    def __getitem__(self, index: int) -> Trajectory:
        place = self._places[index]
        start, stop = self._stops[place - 1] if place else 0, self._stops[place]
        observation, action = self._keys
        return Trajectory(
            **_by_field(self._labels[place]),
            observations={observation: self._observations[start + place : stop + place + 1]},
            actions={action: self._actions[start:stop]},
            rewards=self._rewards[start:stop],
            infos={},
            outputs={key: rows[start:stop] for key, rows in self._outputs.items()},
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

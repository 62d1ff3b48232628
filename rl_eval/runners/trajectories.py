"""Trajectories: the steps of episodes as arrays and tensordicts.

A recorder is an observer in the process that runs the episode. It stores an episode's steps in growing arrays, or
reads the steps from the runner's sweep log (:mod:`rl_eval.policies.inference.sweep_log`). A batch has the layout of
TorchRL's episode data (TED), in arrays by name or in a ``TensorDict``. A frame is one step of an episode.

========================================  ==================================================================
key                                       value at a frame
========================================  ==================================================================
``observation``, or the keys of a Dict    observation of the policy
``action``                                action passed to the environment
``action_log_prob``, other ``outputs``    other outputs of the policy; an output ``action`` replaces ``action``
``done``, ``terminated``, ``truncated``   False, because no episode ends before its last step
``("next", ...)``                         observation, reward and flags after the step; ``("next", "info", key)``
``("collector", "traj_ids")``             index of the episode, also as ``("collector", "index")``
``("collector", "step")``                 number of the step in its episode, from 0
``("collector", "seed")`` and others      ``attempt`` and ``weights_version`` of the episode
``("collector", "mask")``                 in padded batches only: False for padding
``("collector", "arrival")``              with order ``first_ready`` only: position of the episode in the batch
========================================  ==================================================================
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.spaces import NUMBERS, dtype_of, fitting
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


class Leaf(NamedTuple):
    """One array in a nested observation or action."""

    key: Key
    """Key of the array in a batch."""
    path: tuple[Any, ...]
    """Keys and positions that lead to the array in the nested value."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, value: Any) -> Any:
        """Return this array from a nested value."""
        for part in self.path:
            value = value[part]
        return value

    @property
    def is_image(self) -> bool:
        """Whether the array has dtype uint8 and two or more dimensions."""
        return self.dtype == np.uint8 and len(self.shape) > 1


def observation_leaves(space: gym.Space[Any], root: Key = ()) -> list[Leaf]:
    """Return the arrays of an observation.

    The arrays of a Dict space have the keys of this space. If one of these keys is reserved, such as ``action``, all
    keys start with ``observation``. The keys of any other space start with ``observation`` too.

    Args:
        space: Space of the observations.
        root: Prefix of all keys.

    Raises:
        ConfigError: The values of a part of the space are not arrays of one fixed shape.
    """
    own_keys = isinstance(space, gym.spaces.Dict) and not _RESERVED & set(space.spaces)
    return _leaves(space, root if own_keys else (*root, "observation"), ())


def action_leaves(space: gym.Space[Any], root: Key = ()) -> list[Leaf]:
    """Return the arrays of an action, by keys that start with ``action``; see :func:`observation_leaves`."""
    return _leaves(space, (*root, "action"), ())


def nested(space: gym.Space[Any], arrays: Mapping[Key, Any], root: str = "observation") -> Any:
    """Return the observations or actions of a trajectory in the nested structure of their space.

    Args:
        space: Space of the observations or actions.
        arrays: Observations or actions of a trajectory, by key.
        root: ``observation`` if the arrays are observations, ``action`` if they are actions.
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
    if isinstance(space, (*NUMBERS, gym.spaces.Text)):
        return [Leaf(key, path, dtype_of(space), tuple(space.shape or ()))]
    problem = f"a trajectory needs arrays of one fixed shape, but the values of {space} can have different shapes"
    fix = "Wrap the environment: Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple spaces are supported."
    raise ConfigError(problem, key="environment.env", value=str(space), fix=fix)


def _overlap(one: Key, other: Key) -> bool:
    """Return whether one key starts with the other key, so that a nested mapping cannot contain arrays for both."""
    return all(ours == theirs for ours, theirs in zip(one, other, strict=False))


@dataclass(frozen=True)
class CompressedArray:
    """Array that is stored in blocks of rows. Each block is compressed without loss."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[bytes, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the decompressed array."""
        whole = np.empty(self.shape, self.dtype)
        rest = whole.reshape(-1).view(np.uint8)
        for block in self.blocks:
            rows = zlib.decompress(block)
            rest[: len(rows)] = np.frombuffer(rows, np.uint8)
            rest = rest[len(rows) :]
        return whole if dtype is None else whole.astype(dtype)


@dataclass(frozen=True)
class Trajectory:
    """All steps of one completed episode. T is the number of steps."""

    index: int
    """Index of the episode in the plan."""
    seed: int
    attempt: int
    """Number of the attempt that completed, from 1. Failed attempts have no trajectory."""
    weights_version: int
    """Version of the policy's weights in this episode."""
    terminated: bool
    """Whether the last step reached a terminal state."""
    truncated: bool
    """Whether the episode was truncated after its last step."""
    observations: Mapping[Key, Array | CompressedArray]
    """Observations in the dtypes of their space, each of shape (T + 1, \\*leaf_shape); row 0 comes from the reset."""
    actions: Mapping[Key, Array]
    """Actions passed to the environment, each of shape (T, \\*leaf_shape)."""
    rewards: npt.NDArray[np.float64]
    """Rewards, shape (T,). If they are added from first to last, as ``np.cumsum`` does, the sum is bitwise equal to the
    episode's return."""
    infos: Mapping[str, npt.NDArray[np.float64]]
    """Scalars of ``evaluation.info_keys``, each of shape (T,); NaN at steps whose info does not contain the key."""
    outputs: Mapping[Key, Array]
    """Outputs of the policy besides actions, each of shape (T, \\*shape). An example is ``action_log_prob``, the
    log-probability or log-density of each drawn action."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def told(self) -> dict[Key, Array]:
        """Outputs that a batch contains: all outputs whose keys do not collide with other keys of a batch.

        Two kinds of outputs are exceptions, and replace another array. An output ``action``, the raw action of the
        policy, replaces the action passed to the environment. A recurrent state, with values before and after each
        step, replaces an observation with the same key. If an environment declares the state as a part of its
        observation, this part of the observation contains only zeros.
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
    r"""Return a batch as arrays by name. Each name is a key of this module's table, joined with dots.

    Args:
        fragments: Fragments of the batch, in order; at least one.
        padded: Whether each fragment gets a separate row, padded with zeros. By default, frames are concatenated.
        arrivals: Whether the fragments are in the order in which their episodes finished. If so, the batch also has the
            key ``("collector", "arrival")``.

    Returns:
        Arrays of shape (frames, \*shape), or (fragments, longest, \*shape) if padded. ``longest`` is the number of
        frames of the longest fragment.
    """
    arrays = _batch(fragments, padded, arrivals)
    named = {".".join(key): array for key, array in arrays.items()}
    if len(named) < len(arrays):
        twice = next(name for name, count in Counter(map(".".join, arrays)).items() if count > 1)
        problem = f"two arrays have the key {twice!r}"
        raise ConfigError(problem, key=twice, fix="Use a TensorDict, or rename the keys of the environment's spaces.")
    return named


def as_tensordict(fragments: Sequence[Fragment], *, padded: bool = False, arrivals: bool = False) -> Any:
    """Return a batch as a ``TensorDict``; see :func:`as_arrays`.

    The batch size is (frames,), or (fragments, longest) if padded.
    """
    import torch
    from tensordict import TensorDict

    arrays = _batch(fragments, padded, arrivals)
    size = arrays["collector", "traj_ids"].shape
    batch = TensorDict({}, batch_size=size)
    for key, array in arrays.items():
        if array.dtype.kind == "U":
            problem = f"a TensorDict has tensors, but the values of {'.'.join(key)} are texts"
            raise ConfigError(problem, key=".".join(key), fix="Use arrays, or export to npz or minari.")
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
    r"""Yield the recorded arrays by their keys in a batch, each of shape (frames, \*shape)."""
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
    """Return the flags before each step (False) and after each step (True only after the last step of an episode)."""
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
    """Return the labels of each frame: its episode, and the number of its step."""
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
"""Initial capacity of growing arrays, in steps."""
_BLOCK: Final = 32
"""Number of images in a compressed block."""
_FIELDS: Final = ("index", "seed", "attempts", "weights_version", "terminated", "truncated")
_of_record: Final = attrgetter(*_FIELDS)
_of_row: Final = itemgetter(*(list(COLUMNS).index(name) for name in _FIELDS))


@final
class TrajectoryRecorder:
    """Observer whose artifact is the :class:`Trajectory` of the episode.

    The recorder uses the same arrays for all episodes of its environment, and copies them at the end of each episode.
    If there are several agents, each agent has separate columns. An observation or action that an agent does not have
    in a step is stored as zeros. The column ``acting`` shows whether the agent acted.

    Args:
        env: The observed environment.
        info_keys: Keys of the scalars to record from the ``info`` of each step.
        compress_images: Whether to compress images during the episode, without loss. Images are observations of dtype
            uint8 with two or more dimensions.

    Raises:
        ConfigError: The values of a part of a space are not arrays of one fixed shape.
    """

    def __init__(self, env: Any, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> None:
        self._env = env
        # If the module of TeamEnv is not imported, this environment is not a TeamEnv.
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

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Start an episode with the observation of the reset; see :class:`rl_eval.runners.EpisodeObserver`."""
        self._steps = 0
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
        """Write one row to every column; see :class:`rl_eval.runners.EpisodeObserver`."""
        step = self._steps
        self._steps = step + 1
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
        """Whether the recorder needs only the sweep log, because it records no infos and compresses no images."""
        return not self._infos and not any(columns.compresses for columns in self._agents.values())

    def read_sweeps(self, steps: Steps) -> TrajectoryBlock:
        """Return the trajectories of finished episodes.

        See :class:`rl_eval.policies.inference.sweep_log.SweepRecorder`.
        """
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
        # An agent of a team does not act in every step. Any other output must be there in every step.
        least = 0 if self._is_team else steps
        outputs = {key: rows for one in agents for key, rows in one.outputs.items() if one.counts[key] >= least}
        return Trajectory(
            **_by_field(_of_record(record)),
            observations={leaf.key: rows.taken(steps + 1) for one in agents for leaf, rows in one.observed},
            actions={leaf.key: rows.taken(steps) for one in agents for leaf, rows in one.acted},
            rewards=self._rewards.taken(steps),
            infos={key: rows.taken(steps) for key, rows in infos.items()},
            outputs={key: rows.taken(steps) for key, rows in outputs.items()},
        )

    def _part(self, value: Any, agent: Any) -> Any:
        """Return an agent's part of a value; None if the value has no part for this agent."""
        return (value or {}).get(agent) if self._is_team else value


class _Columns:
    """Columns with the observations, actions, rewards and other outputs of one agent."""

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
        self.counts: Counter[Key] = Counter()
        """Number of steps in which the policy returned each output."""
        self._root = root

    def see(self, row: int, observation: Any) -> None:
        """Write an observation to a row; if it is None, write zeros."""
        for leaf, rows in self.observed:
            if not self._root or observation is not None:  # An agent of a team may have no observation.
                rows.write(row, fitting(leaf.read(observation), leaf.dtype, leaf.shape))
            else:
                rows.write(row, leaf.dtype.type())

    def act(self, row: int, action: Any, outputs: Mapping[str, Any]) -> None:
        """Write an action (zeros if it is None) and the other outputs of the policy to a row."""
        if row == 0:
            self.outputs, self.counts = {}, Counter()
        for leaf, rows in self.acted:
            rows.write(row, 0 if action is None else leaf.read(action))
        told = {self._key(name): value for name, value in outputs.items()}
        self.counts.update(told.keys())
        for key in told.keys() - self.outputs.keys():
            self.outputs[key] = Rows(np.shape(told[key]), np.asarray(told[key]).dtype)
            for former in range(row):
                self.outputs[key].write(former, 0)
        for key, column in self.outputs.items():
            column.write(row, told.get(key, 0))

    def _key(self, name: str) -> Key:
        """Return the key of an output: the parts of its name, with the agent's prefix before them or after ``next``."""
        path = tuple(name.split("."))
        return ("next", *self._root, *path[1:]) if path[0] == "next" else (*self._root, *path)


class Rows:
    """Array with one row per step. Its capacity doubles when it is full."""

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
    """Images, one per row. A full block of images is compressed when the next image arrives."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._block = np.empty((_BLOCK, *shape), dtype)
        self._blocks: list[bytes] = []

    def write(self, row: int, value: Any) -> None:
        """Write the next row; row 0 discards the rows of the last episode."""
        place = row % _BLOCK
        if row == 0:
            self._blocks = []
        elif place == 0:
            self._blocks.append(_compressed(self._block))
        self._block[place] = value

    def taken(self, rows: int) -> CompressedArray:
        """Return all rows.

        Args:
            rows: Number of rows that were written.
        """
        last = self._block[: (rows - 1) % _BLOCK + 1]
        return CompressedArray(
            str(self._block.dtype), (rows, *self._block.shape[1:]), (*self._blocks, _compressed(last))
        )


def _by_field(values: tuple[Any, ...]) -> dict[str, Any]:
    """Return values of a record, in the order of ``_FIELDS``, as arguments of :class:`Trajectory`."""
    return dict(zip([name.replace("attempts", "attempt") for name in _FIELDS], values, strict=True))


def _compressed(rows: Array) -> bytes:
    return zlib.compress(rows.tobytes(), 1)


@final
class TrajectoryBlock(Mapping[int, Trajectory]):
    """Trajectories of episodes by index. Their arrays are views of arrays with the steps of all episodes.

    Args:
        steps: Steps of all episodes.
        observation: Key of the observations in a trajectory.
        action: Key of the actions in a trajectory.
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

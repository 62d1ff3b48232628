"""Recorder of trajectories: an observer that reads a log of sweeps, or keeps an episode's steps in arrays that grow."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.policies.inference.sweep_log import Steps
from rl_eval.recording.trajectories.trajectory import (
    CompressedArray,
    Key,
    Trajectory,
    action_leaves,
    observation_leaves,
)
from rl_eval.records.episode import COLUMNS, EpisodeRecord, EpisodeSpec

__all__ = ["CompressedRows", "Rows", "TrajectoryBlock", "TrajectoryRecorder"]

Array = npt.NDArray[Any]

_FIRST_ROWS: Final = 256
"""Steps that there is room for at first."""
_BLOCK: Final = 32
"""Images that are compressed together."""
_FIELDS: Final = ("index", "seed", "attempts", "weights_version", "terminated", "truncated")
_of_record: Final = attrgetter(*_FIELDS)
_of_row: Final = itemgetter(*(list(COLUMNS).index(name) for name in _FIELDS))


@final
class TrajectoryRecorder:
    """Observer whose artifact is the :class:`Trajectory` of the episode.

    Its arrays live as long as the environment and are copied at the end of an episode. Each of several agents has
    columns of its own, with zeros where it is not there, and a column ``acting``.

    Args:
        env: The environment that it sees.
        info_keys: Scalars of the step ``info`` to keep.
        compress_images: Compress observations of bytes in two or more dimensions, without loss, as they come in.

    Raises:
        ConfigError: A space has parts that are not arrays of one shape.
    """

    def __init__(self, env: Any, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> None:
        self._env = env
        # Where it has not been imported, no environment is one.
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
        """Whether the policy told no outputs at some step."""

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Begin with the observation of the reset; see :class:`rl_eval.runners.EpisodeObserver`."""
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
        """Whether a log of sweeps has all that it keeps: no infos, and nothing to compress."""
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
            **_labels(_of_record(record)),
            observations={leaf.key: rows.taken(steps + 1) for one in agents for leaf, rows in one.observed},
            actions={leaf.key: rows.taken(steps) for one in agents for leaf, rows in one.acted},
            rewards=self._rewards.taken(steps),
            infos={key: rows.taken(steps) for key, rows in infos.items()},
            outputs={key: rows.taken(steps) for key, rows in outputs.items()},
        )

    def _part(self, value: Any, agent: Any) -> Any:
        """Return an agent's part of a value, None if there is none."""
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
        """What the policy computed besides actions in this episode."""
        self._root = root

    def see(self, row: int, observation: Any) -> None:
        """Write an observation; None for zeros."""
        for leaf, rows in self.observed:
            rows.write(row, 0 if observation is None else leaf.read(observation))

    def act(self, row: int, action: Any, outputs: Mapping[str, Any]) -> None:
        """Write an action, None for zeros, and what the policy computed besides."""
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
        """Return the key of an output; one of the next step stands under ``next`` first, as everywhere."""
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
        """Write the next row; row 0 begins anew."""
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


def _labels(values: tuple[Any, ...]) -> dict[str, Any]:
    """Return a record's labels by the names that they have in a trajectory."""
    return dict(zip([name.replace("attempts", "attempt") for name in _FIELDS], values, strict=True))


def _compressed(rows: Array) -> bytes:
    return zlib.compress(rows.tobytes(), 1)


@final
class TrajectoryBlock(Mapping[int, Trajectory]):
    """Trajectories of episodes by index, whose arrays are parts of common ones.

    Args:
        steps: Of all episodes.
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
            **_labels(self._labels[place]),
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

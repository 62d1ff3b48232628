"""Recorder of trajectories: an observer that reads a log of sweeps, or keeps an episode's steps in arrays that grow."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners.sweep_log import Steps
from rl_eval.trajectories.block import TrajectoryBlock
from rl_eval.trajectories.trajectory import CompressedArray, Key, Leaf, Trajectory, action_leaves, observation_leaves

__all__ = ["TrajectoryRecorder", "check_one_agent"]

Array = npt.NDArray[Any]

_ROWS: Final = 256
"""Steps that there is room for at first."""
_BLOCK: Final = 32
"""Images that are compressed together."""


def check_one_agent(settings: EvalSettings) -> None:
    """Refuse to record what several agents do, who act at different times.

    Raises:
        ConfigError: The configuration has several agents.
    """
    if settings.runners.runner == "multi_agent":
        raise ConfigError(
            'runners.runner is "multi_agent", and trajectories are recorded of one agent: to keep what several agents '
            "do, write an observer and name it in evaluation.observers"
        )


@final
class TrajectoryRecorder:
    """Observer whose artifact is the :class:`Trajectory` of the episode.

    Its arrays live as long as the environment and are copied at the end of an episode.

    Args:
        env: The environment that it sees.
        info_keys: Scalars of the step ``info`` to keep.
        compress_images: Compress observations of bytes in two or more dimensions, without loss, as they come in.

    Raises:
        ConfigError: A space has parts that are no arrays of one shape.
    """

    def __init__(self, env: Any, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> None:
        self._observations = [
            (leaf, (_Images if compress_images and leaf.is_image else _Rows)(leaf.shape, leaf.dtype))
            for leaf in observation_leaves(env.observation_space)
        ]
        self._actions = [(leaf, _Rows(leaf.shape, leaf.dtype)) for leaf in action_leaves(env.action_space)]
        self._infos = {key: _Rows((), np.dtype(np.float64)) for key in info_keys}
        self._rewards = _Rows((), np.dtype(np.float64))
        self._outputs: dict[str, _Rows] = {}
        self._told = 0
        """Steps at which the policy told its outputs."""
        self._steps = 0

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        self._steps = self._told = 0
        _write(self._observations, 0, observation)

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
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        step = self._steps
        self._steps = step + 1
        self._rewards.write(step, reward if type(reward) is float else np.asarray(reward).item())
        _write(self._actions, step, action)
        _write(self._observations, step + 1, observation)
        for key, column in self._infos.items():
            column.write(step, np.asarray(info[key]).item() if key in info else np.nan)
        if policy_outputs is not None:
            self._write_outputs(step, policy_outputs)

    @property
    def reads_sweeps(self) -> bool:
        """Whether a log of sweeps has all that it keeps: no infos, and nothing to compress."""
        return not self._infos and not isinstance(self._observations[0][1], _Images)

    def read_sweeps(self, steps: Steps) -> TrajectoryBlock:
        """See :class:`rl_eval.runners.sweep_log.SweepRecorder`."""
        (observed, _), (acted, _) = self._observations[0], self._actions[0]
        return TrajectoryBlock(steps, observed.key, acted.key)

    def _write_outputs(self, step: int, outputs: Any) -> None:
        """Write a row of the policy's outputs, which have to be a dict of arrays."""
        if step == 0:
            self._outputs = {name: _Rows(np.shape(row), np.asarray(row).dtype) for name, row in outputs.items()}
        for name, column in self._outputs.items():
            column.write(step, outputs[name])
        self._told += 1

    def on_episode_end(self, record: EpisodeRecord) -> Trajectory:
        """Return the trajectory of the attempt that completed."""
        steps = self._steps
        return Trajectory(
            index=record.index,
            seed=record.seed,
            attempt=record.attempts,
            weights_version=record.weights_version,
            terminated=record.terminated,
            truncated=record.truncated,
            observations={leaf.key: column.taken(steps + 1) for leaf, column in self._observations},
            actions={leaf.key: column.taken(steps) for leaf, column in self._actions},
            rewards=self._rewards.taken(steps),
            infos={key: column.taken(steps) for key, column in self._infos.items()},
            outputs=self._taken_outputs(),
        )

    def _taken_outputs(self) -> dict[Key, Array]:
        if self._told != self._steps:
            return {}
        return {tuple(name.split(".")): column.taken(self._steps) for name, column in self._outputs.items()}


class _Rows:
    """Rows of one array, which doubles when it is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.array = np.empty((0, *shape), dtype)

    def write(self, row: int, value: Any) -> None:
        """Write one row."""
        if row >= len(self.array):
            more = np.empty((max(_ROWS, len(self.array)), *self.array.shape[1:]), self.array.dtype)
            self.array = np.concatenate([self.array, more])
        self.array[row] = value

    def taken(self, rows: int) -> Array:
        """Return a copy of the first rows."""
        return self.array[:rows].copy()


class _Images:
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


def _compressed(rows: Array) -> bytes:
    return zlib.compress(rows.tobytes(), 1)


def _write(columns: Sequence[tuple[Leaf, Any]], row: int, value: Mapping[Any, Any] | Any) -> None:
    """Write one value, leaf by leaf."""
    for leaf, column in columns:
        column.write(row, leaf.read(value) if leaf.path else value)

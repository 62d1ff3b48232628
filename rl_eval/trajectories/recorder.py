"""Recorder of trajectories: an observer that reads a log of sweeps, or keeps an episode's steps in arrays that grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners.sweep_log import Steps
from rl_eval.trajectories.block import TrajectoryBlock
from rl_eval.trajectories.rows import CompressedRows, Rows, rows_of
from rl_eval.trajectories.trajectory import Key, Leaf, Trajectory, action_leaves, observation_leaves

__all__ = ["TrajectoryRecorder"]

Array = npt.NDArray[Any]


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
            (leaf, rows_of(leaf, compress_images=compress_images)) for leaf in observation_leaves(env.observation_space)
        ]
        self._actions = [(leaf, Rows(leaf.shape, leaf.dtype)) for leaf in action_leaves(env.action_space)]
        self._infos = {key: Rows((), np.dtype(np.float64)) for key in info_keys}
        self._rewards = Rows((), np.dtype(np.float64))
        self._outputs: dict[str, Rows] = {}
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
        return not self._infos and not isinstance(self._observations[0][1], CompressedRows)

    def read_sweeps(self, steps: Steps) -> TrajectoryBlock:
        """See :class:`rl_eval.runners.sweep_log.SweepRecorder`."""
        (observed, _), (acted, _) = self._observations[0], self._actions[0]
        return TrajectoryBlock(steps, observed.key, acted.key)

    def _write_outputs(self, step: int, outputs: Any) -> None:
        """Write a row of the policy's outputs, which have to be a dict of arrays."""
        if step == 0:
            self._outputs = {name: Rows(np.shape(row), np.asarray(row).dtype) for name, row in outputs.items()}
        for name, column in self._outputs.items():
            column.write(step, outputs[name])
        self._told += 1

    def on_episode_end(self, record: EpisodeRecord) -> Trajectory:
        """Return the trajectory of the attempt that completed."""
        steps = self._steps
        return Trajectory.of(
            record,
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


def _write(columns: Sequence[tuple[Leaf, Any]], row: int, value: Mapping[Any, Any] | Any) -> None:
    """Write one value, leaf by leaf."""
    for leaf, column in columns:
        column.write(row, leaf.read(value) if leaf.path else value)

"""Writer of Minari data sets: one HDF5 file of raw arrays, written many episodes at a time."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from rl_eval.errors import ConfigError
from rl_eval.trajectories.trajectory import ACTION_LOG_PROB, Trajectory, nested
from rl_eval.trajectories.writers import Source

__all__ = ["MinariWriter"]


class MinariWriter:
    """Writes a data set that ``minari.load_dataset`` opens by its id, in Minari's folder (``MINARI_DATASETS_PATH``).

    Images are stored as they are, not as JPEG, and rewards as float64. The first of the T + 1 infos is NaN: that of the
    reset is not recorded. The metadata of an episode have its ``index``, ``attempt`` and ``weights_version``.

    Args:
        target: Id of the data set, such as ``cartpole/ppo-v0``.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        if missing := [name for name in ("minari", "h5py") if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"Minari data sets need the package {missing[0]}: pip install 'rl-eval[minari]' (Python 3.11 or newer)"
            )
        from minari import __version__
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.dataset.minari_storage import MinariStorage
        from minari.storage.datasets_root_dir import get_dataset_path

        if "jpeg_encoding" not in signature(MinariStorage.new).parameters:
            raise ConfigError(
                f"Minari {__version__} turns images into JPEG, which loses what they were: "
                "pip install 'minari>=0.5.4', on Python 3.11 or newer"
            )
        self._id = os.fspath(target)
        try:
            self._namespace = parse_dataset_id(self._id)[0]
        except ValueError as error:
            raise ConfigError(
                f"{self._id!r} is no id of a Minari data set, such as 'cartpole/ppo-v0': {error}"
            ) from error
        self.place: Path = get_dataset_path(self._id)
        self._written = 0

    def begin(self, source: Source, folder: Path) -> None:
        """See :class:`~rl_eval.trajectories.writers.Writer`."""
        import minari
        from minari.dataset.minari_storage import MinariStorage

        self._spaces = source.observation_space, source.action_space
        self._folder = folder / "dataset"
        (self._folder / "data").mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "env_spec is not serializable")
            self._storage = MinariStorage.new(
                self._folder / "data", *self._spaces, env_spec=source.env_spec, data_format="hdf5", jpeg_encoding=False
            )
        self._storage.update_metadata(
            {"dataset_id": self._id, "minari_version": minari.__version__, "description": source.title}
        )

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`~rl_eval.trajectories.writers.Writer`."""
        self._storage.update_episodes([self._buffer(one) for one in trajectories])
        labels = [
            {"index": one.index, "attempt": one.attempt, "weights_version": one.weights_version} for one in trajectories
        ]
        self._storage.update_episode_metadata(labels, range(self._written, self._written + len(trajectories)))
        self._written += len(trajectories)

    def finish(self) -> Path:
        """See :class:`~rl_eval.trajectories.writers.Writer`."""
        from minari.namespace import create_namespace, list_local_namespaces

        if self._namespace is not None and self._namespace not in list_local_namespaces():
            create_namespace(self._namespace)
        return self._folder

    def _buffer(self, trajectory: Trajectory) -> Any:
        from minari.data_collector.episode_buffer import EpisodeBuffer

        steps = len(trajectory)
        infos = dict(trajectory.infos)
        if ACTION_LOG_PROB in trajectory.outputs:
            infos["action_log_prob"] = trajectory.outputs[ACTION_LOG_PROB]
        ends = np.arange(1, steps + 1) == steps
        observation_space, action_space = self._spaces
        return EpisodeBuffer(
            seed=trajectory.seed,
            observations=nested(observation_space, trajectory.observations),
            actions=nested(action_space, trajectory.actions, root="action"),
            rewards=trajectory.rewards,
            terminations=ends & trajectory.terminated,
            truncations=ends & trajectory.truncated,
            infos={key: np.concatenate([[np.nan], values]) for key, values in infos.items()},
        )

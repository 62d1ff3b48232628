"""Writers of trajectories to disk: a new file or folder, whole or not at all, with a few episodes in memory."""

from __future__ import annotations

import importlib.util
import os
import warnings
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rl_eval.errors import ConfigError
from rl_eval.recording.trajectories.batch import Fragment, as_arrays, as_tensordict, reserve
from rl_eval.recording.trajectories.trajectory import ACTION_LOG_PROB, Trajectory, nested

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["MinariWriter", "NpzWriter", "TensorDictWriter", "Writer"]


class Writer(Protocol):
    """Writes trajectories to a place where nothing is yet; what it has begun is nowhere until it is published."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        """Find the place.

        Raises:
            ConfigError: It cannot be used, or a package is missing.
        """

    @property
    def place(self) -> Path:
        """What will be there; it must not exist."""

    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        """Begin.

        Args:
            folder: New folder on the disk of the place.
            env: An environment of the episodes.
            frames: Steps of all episodes together.
            title: Description of the data, in one line.
        """

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write some more, in order."""

    def finish(self) -> Path:
        """Write what is left, and return what is to be moved to the place."""


class NpzWriter:
    """Writer of one ``.npz`` file with :func:`~rl_eval.recording.trajectories.as_arrays` of all episodes."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.place = Path(target).absolute()
        self._arrays: dict[str, np.memmap[Any, Any]] = {}
        self._frames = 0

    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        """See :class:`Writer`."""
        self._folder, self._total = folder, frames

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`Writer`."""
        arrays = as_arrays(_whole(trajectories))
        for key in arrays.keys() - self._arrays.keys():
            # What the key is called is up to the environment's spaces.
            file, shape = self._folder / f"{len(self._arrays)}.memmap", (self._total, *arrays[key].shape[1:])
            self._arrays[key] = np.lib.format.open_memmap(file, "w+", arrays[key].dtype, shape)
            reserve(file)
        start, self._frames = self._frames, self._frames + sum(map(len, trajectories))
        for key, array in arrays.items():
            self._arrays[key][start : self._frames] = array

    def finish(self) -> Path:
        """See :class:`Writer`."""
        path = self._folder / "data.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for key, array in self._arrays.items():
                array.flush()
                archive.write(str(array.filename), f"{key}.npy")
        return path


class TensorDictWriter:
    """Writes a folder that ``TensorDict.load_memmap`` opens: all episodes, frame after frame."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.place = Path(target).absolute()
        self._data: Any = None
        self._frames = 0

    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        """See :class:`Writer`."""
        self._folder, self._total = folder / "data", frames

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`Writer`."""
        batch = as_tensordict(_whole(trajectories))
        if self._data is None:
            _make_folders(self._folder, batch)
            self._data = batch[:1].expand(self._total).memmap_like(self._folder)
            reserve(*self._folder.rglob("*.memmap"))
        start, self._frames = self._frames, self._frames + len(batch)
        self._data[start : self._frames].update_(batch)

    def finish(self) -> Path:
        """See :class:`Writer`."""
        return self._folder


def _make_folders(folder: Path, batch: TensorDictBase) -> None:
    """Make those of keys with a slash, in whose place tensordict writes another character since 0.13."""
    if tuple(map(int, version("tensordict").split(".")[:2])) < (0, 13):
        for key in batch.keys(include_nested=True, leaves_only=True):
            folder.joinpath(*((key,) if isinstance(key, str) else key)).parent.mkdir(parents=True, exist_ok=True)


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

    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        """See :class:`Writer`."""
        import minari
        from minari.dataset.minari_storage import MinariStorage

        self._spaces = env.observation_space, env.action_space
        self._folder = folder / "dataset"
        (self._folder / "data").mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "env_spec is not serializable")
            self._storage = MinariStorage.new(
                self._folder / "data",
                *self._spaces,
                env_spec=getattr(env, "spec", None),
                data_format="hdf5",
                jpeg_encoding=False,
            )
        self._storage.update_metadata(
            {"dataset_id": self._id, "minari_version": minari.__version__, "description": title}
        )

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`Writer`."""
        self._storage.update_episodes([self._buffer(one) for one in trajectories])
        labels = [
            {"index": one.index, "attempt": one.attempt, "weights_version": one.weights_version} for one in trajectories
        ]
        self._storage.update_episode_metadata(labels, range(self._written, self._written + len(trajectories)))
        self._written += len(trajectories)

    def finish(self) -> Path:
        """See :class:`Writer`."""
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


def _whole(trajectories: Sequence[Trajectory]) -> list[Fragment]:
    return [Fragment(one, 0, len(one)) for one in trajectories]

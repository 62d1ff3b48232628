"""Writers of trajectories to disk: a new file or folder, whole or not at all, with a few episodes in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rl_eval.trajectories.batch import Fragment, as_arrays, as_tensordict
from rl_eval.trajectories.disk import reserve
from rl_eval.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["NpzWriter", "Source", "TensorDictWriter", "Writer"]


@dataclass(frozen=True)
class Source:
    """What a writer has to know before the first trajectory."""

    observation_space: Any
    action_space: Any
    env_spec: Any
    """Gymnasium's spec of the environment; None if it has none."""
    frames: int
    """Steps of all episodes together."""
    title: str
    """What the data are, in one line."""


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

    def begin(self, source: Source, folder: Path) -> None:
        """Begin, in a new folder on the disk of the place."""

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write some more, in order."""

    def finish(self) -> Path:
        """Write what is left, and return what is to be moved to the place."""


class NpzWriter:
    """Writes one ``.npz`` file, whose arrays are those of :func:`~rl_eval.trajectories.as_arrays` of all episodes."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.place = Path(target).absolute()
        self._headers: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._frames = 0

    def begin(self, source: Source, folder: Path) -> None:
        """See :class:`Writer`."""
        self._folder = folder

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`Writer`."""
        arrays = as_arrays(_whole(trajectories))
        for number, (key, array) in enumerate(arrays.items()):
            self._headers[key] = array.dtype, array.shape[1:]
            with self._raw(number).open("ab") as file:
                file.write(array.tobytes())
        self._frames += sum(map(len, trajectories))

    def finish(self) -> Path:
        """See :class:`Writer`."""
        path = self._folder / "data.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, (key, (dtype, shape)) in enumerate(self._headers.items()):
                self._pack(archive, self._raw(number), key, dtype, (self._frames, *shape))
        return path

    def _raw(self, number: int) -> Path:
        """Return the file of one array: what its key is called is up to the environment's spaces."""
        return self._folder / str(number)

    def _pack(
        self, archive: zipfile.ZipFile, raw: Path, key: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with ExitStack() as stack:
            packed = stack.enter_context(archive.open(f"{key}.npy", "w", force_zip64=True))
            np.lib.format.write_array_header_1_0(packed, header)
            shutil.copyfileobj(stack.enter_context(raw.open("rb")), packed)
        raw.unlink()


class TensorDictWriter:
    """Writes a folder that ``TensorDict.load_memmap`` opens: all episodes, frame after frame."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.place = Path(target).absolute()
        self._data: Any = None
        self._frames = 0

    def begin(self, source: Source, folder: Path) -> None:
        """See :class:`Writer`."""
        self._folder, self._total = folder / "data", source.frames

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """See :class:`Writer`."""
        batch = as_tensordict(_whole(trajectories))
        if self._data is None:
            _make_folders(self._folder, batch)
            self._data = batch[:1].expand(self._total).memmap_like(self._folder)
            reserve(self._folder)
        stop = self._frames + len(batch)
        self._data[self._frames : stop].update_(batch)
        self._frames = stop

    def finish(self) -> Path:
        """See :class:`Writer`."""
        return self._folder


def _make_folders(folder: Path, batch: TensorDictBase) -> None:
    """Make those of keys with a slash, in whose place tensordict writes another character since 0.13."""
    if tuple(map(int, version("tensordict").split(".")[:2])) < (0, 13):
        for key in batch.keys(include_nested=True, leaves_only=True):
            folder.joinpath(*((key,) if isinstance(key, str) else key)).parent.mkdir(parents=True, exist_ok=True)


def publish(writer: Writer, finished: Path) -> None:
    """Move what was written to its place.

    Raises:
        FileExistsError: Something is there meanwhile.
    """
    if finished.is_dir():
        finished.rename(writer.place)
    else:
        os.link(finished, writer.place)


def workspace(place: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder beside a place, which goes with all that is left in it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent)


def _whole(trajectories: Sequence[Trajectory]) -> list[Fragment]:
    return [Fragment(one, 0, len(one)) for one in trajectories]

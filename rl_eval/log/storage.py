"""Decides how a file gets into a run folder: whole or not at all, on a disk as on an object store; and who wins a race.

A local file is written by :mod:`rl_eval.atomic_write`, so a crash leaves the old file, the new one or a temporary one
that nobody reads. An object store shows an object when its upload is complete, so
there a file is one upload. Other remote file systems write a temporary name and move it.

Of several processes that create the same file one wins: locally by ``O_EXCL``; elsewhere each writes a name of its own,
waits until the names of all who started with it must be visible, and the first name wins.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any, Final, Protocol, final

from rl_eval.atomic_write import is_temporary, make_folder, sweep, sync_folder, temporary_name, write_bytes
from rl_eval.errors import ConfigError
from rl_eval.redaction import learn, redact_text

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "is_unusable", "is_uri", "open_storage"]

SETTLE_SECONDS = 2.0
"""How long a racer on a remote file system waits for the names of the others."""

_OBJECT_STORES: Final = ("s3", "gcs", "abfs")
"""Kinds of file systems, as pyarrow names them, that show a file when it is complete."""

_UNUSABLE: Final = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
_UNUSABLE_REMOTE: Final = re.compile(
    r"NO_SUCH_BUCKET|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH"
    r"|RESOURCE_NOT_FOUND|[Bb]ucket '.*' not found|HTTP status 40[134]"
)


class Storage(Protocol):
    """Files of one run folder. Names are relative: ``manifest.json``, ``segments/...``."""

    label: str
    """The folder as messages name it, without credentials."""

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a subfolder, sorted; empty when there is no such folder."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all, over an older one."""
        ...

    def create(self, stem: str, data: bytes) -> str | None:
        """Write a file that only one of several racers gets.

        Args:
            stem: Beginning of its name.
            data: Its bytes.

        Returns:
            The whole name, or None if another process was first.
        """
        ...

    def move(self, name: str, target: str) -> None:
        """Give a file another name."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove what writes that were cut short left in a subfolder."""
        ...


def open_storage(run_dir: str | os.PathLike[str]) -> Storage:
    """Open a local path or a URI; nothing is created.

    Raises:
        ConfigError: It is no URI that pyarrow can open.
    """
    text = os.fspath(run_dir)
    if not text:
        raise ConfigError("run_dir is empty: give a folder, or a URI such as s3://bucket/folder")
    if not is_uri(text):
        return LocalStorage(Path(text))
    import pyarrow as pa
    from pyarrow import fs

    learn(text)
    label = redact_text(text)
    try:
        filesystem, path = fs.FileSystem.from_uri(text)
    except (OSError, pa.ArrowException, ImportError) as error:
        reason = str(error).replace(text, label)
        raise ConfigError(
            f"run_dir {label} cannot be opened: {reason}. Give a local folder or file://, s3://, gs://, abfs://"
        ) from error
    if filesystem.type_name == "local":
        return LocalStorage(Path(path))
    return RemoteStorage(filesystem, path, label)


def is_unusable(error: OSError) -> bool:
    """Whether an error says that the folder itself is wrong, so that trying again cannot help."""
    if error.errno is not None:
        return error.errno in _UNUSABLE
    return bool(_UNUSABLE_REMOTE.search(str(error)))


def is_uri(path: str) -> bool:
    """Tell a URI from a path."""
    return "://" in path


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


@final
class LocalStorage:
    """A folder that the operating system mounts.

    Args:
        root: The folder; created by the first write.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.label = str(root)

    def names(self, folder: str) -> list[str]:
        """See :class:`Storage`."""
        try:
            return _visible([path.name for path in (self._root / folder).iterdir()])
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """See :class:`Storage`."""
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """See :class:`Storage`."""
        write_bytes(self._root / name, data)

    def create(self, stem: str, data: bytes) -> str | None:
        """See :class:`Storage`; a crash half way leaves a file that cannot be parsed."""
        path = self._root / stem
        make_folder(path.parent)
        try:
            _put(path, data)
        except FileExistsError:
            return None
        sync_folder(path.parent)
        return stem

    def move(self, name: str, target: str) -> None:
        """See :class:`Storage`."""
        path = self._root / target
        make_folder(path.parent)
        (self._root / name).replace(path)
        sync_folder(path.parent)

    def sweep(self, folder: str) -> None:
        """See :class:`Storage`."""
        sweep(self._root / folder)


def _put(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


@final
class RemoteStorage:
    """A folder behind ``pyarrow.fs``.

    Args:
        filesystem: The opened file system.
        root: Path of the folder in it.
        label: The folder as messages name it.
    """

    def __init__(self, filesystem: Any, root: str, label: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._whole = filesystem.type_name in _OBJECT_STORES
        self.label = label

    def names(self, folder: str) -> list[str]:
        """See :class:`Storage`."""
        return _visible(self._all(folder))

    def read(self, name: str) -> bytes:
        """See :class:`Storage`."""
        with self._fs.open_input_file(self._path(name)) as stream:
            return bytes(stream.read())

    def write(self, name: str, data: bytes) -> None:
        """See :class:`Storage`."""
        if self._whole:
            self._put(name, data)
            return
        folder, _, file = name.rpartition("/")
        self._fs.create_dir(self._path(folder), recursive=True)
        temporary = f"{folder}/{temporary_name(file)}".lstrip("/")
        self._put(temporary, data)
        self.move(temporary, name)

    def create(self, stem: str, data: bytes) -> str | None:
        """See :class:`Storage`; exact as long as a write takes less than ``SETTLE_SECONDS``."""
        folder, _, file = stem.rpartition("/")
        # The time comes first, so that one who is late loses even when it was held up for longer than the wait.
        own = f"{file}-{time.time_ns():016x}{secrets.token_hex(4)}"
        self.write(f"{folder}/{own}", data)
        time.sleep(SETTLE_SECONDS)
        if min(name for name in [own, *self.names(folder)] if name.startswith(f"{file}-")) == own:
            return f"{folder}/{own}"
        self._fs.delete_file(self._path(f"{folder}/{own}"))
        return None

    def move(self, name: str, target: str) -> None:
        """See :class:`Storage`."""
        folder, _, file = target.rpartition("/")
        if not self._whole:
            self._fs.create_dir(self._path(folder), recursive=True)
            if file in self.names(folder):
                self._fs.delete_file(self._path(target))  # Not all of them move over an existing file.
        self._fs.move(self._path(name), self._path(target))

    def sweep(self, folder: str) -> None:
        """See :class:`Storage`."""
        for name in self._all(folder):
            if is_temporary(name):
                self._fs.delete_file(f"{self._path(folder)}/{name}")

    def _all(self, folder: str) -> list[str]:
        from pyarrow import fs

        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        return [info.base_name for info in self._fs.get_file_info(selector) if info.type == fs.FileType.File]

    def _put(self, name: str, data: bytes) -> None:
        stream = self._fs.open_output_stream(self._path(name))
        stream.write(data)
        stream.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

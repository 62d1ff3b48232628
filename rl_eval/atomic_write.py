"""Atomic writing of local files: a reader sees the complete old or new file, even after a power cut.

The content is written to a temporary file in the same folder, forced to disk, and renamed. The temporary name contains
a mark of this package and random characters. So two writers never use the same temporary file, even on two hosts with a
shared disk. :func:`sweep` recognises the files that killed writers left, and removes them. A running writer holds a
lock on its file, and the lock ends with the process. :func:`sweep` skips locked files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_MARK: Final = ".rl_eval-tmp"
_TEMPORARY: Final = re.compile(re.escape(_MARK) + r"\.[0-9a-f]{16}\..*", re.DOTALL)
_LONGEST: Final = 200
"""Maximum number of bytes that a temporary name takes from the real name, because file systems limit names to 255
bytes."""


def temporary_name(name: str) -> str:
    """Return a new temporary name with the suffix of the file, because some writers read the suffix."""
    return f"{_MARK}.{secrets.token_hex(8)}.{os.fsdecode(os.fsencode(name)[-_LONGEST:])}"


def is_temporary(name: str) -> bool:
    """Return whether a file name was made by :func:`temporary_name`."""
    return bool(_TEMPORARY.fullmatch(name))


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file atomically; replace an older one, and create missing folders.

    Args:
        path: The file.
        write: Function that writes the content. Its argument is the path of an empty temporary file. Its errors are
            raised unchanged.
    """
    target = Path(path)
    make_folder(target.parent)
    temporary = target.with_name(temporary_name(target.name))
    held = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _lock(held)
        write(temporary)
        _sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(held)
    sync_folder(target.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text to a file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files of killed writers from a folder, but not from its subfolders."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(folder).iterdir():
            if is_temporary(path.name) and path.is_file() and not path.is_symlink():
                _remove_unlocked(path)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and force them to disk.

    Raises:
        NotADirectoryError: A file has the name of a missing folder.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", str(folder))
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Force the entries of a folder to disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems do not support fsync, above all of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    # On a file system without locks, sweep cannot lock the file either, and skips it.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError):  # The file of another user, of a running writer, or one that was just removed.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)

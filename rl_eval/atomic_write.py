"""Atomic writing of local files: a reader sees the old file or the new one, whole, after a power cut too.

The content goes to a temporary file in the same folder, is forced to disk, and takes its name by one rename. The
temporary name carries a mark of this package and chance, so two writers, on two hosts of a shared disk too, never meet
in it, and what a killed writer left can be told from everybody else's files: :func:`sweep` removes it. A writer that
lives holds a lock on its file, which ends with its process; a file with such a lock is left alone.
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
"""Bytes of the real name that a temporary one repeats: file systems end names at 255 bytes."""


def temporary_name(name: str) -> str:
    """Return a new temporary name for a file; it ends as the file's own does, for writers that look at the suffix."""
    return f"{_MARK}.{secrets.token_hex(8)}.{os.fsdecode(os.fsencode(name)[-_LONGEST:])}"


def is_temporary(name: str) -> bool:
    """Return whether a file name was made by :func:`temporary_name`."""
    return bool(_TEMPORARY.fullmatch(name))


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file that appears whole or not at all, over an older one; missing folders are made.

    Args:
        path: The file.
        write: Called with the path of an empty temporary file, which it fills. What it raises is passed on.
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
    """Write bytes to a file that appears whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text to a file that appears whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files that killed writers left in a folder; nothing else, and nothing below it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(folder).iterdir():
            if is_temporary(path.name) and path.is_file() and not path.is_symlink():
                _remove_unlocked(path)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it so that they survive a power cut."""
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
    """Force the names in a folder to disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot do this, to folders above all; they have no other way either.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    # Where a file system has no locks, sweep cannot lock either and leaves the file alone.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError):  # Another's file, a writer that lives, or one that was quicker.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)

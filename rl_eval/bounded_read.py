"""Bounded reads of files that a stranger may have made.

Commands look into files before the user trusts them. A file of a few kilobytes can claim or inflate to any number of
bytes, by a compressed entry of an archive, a length in a header, or a hole in a sparse file. Here, such a file is an
``OSError`` that names the file, the size and the limit, before the memory is allocated.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from typing_extensions import override

FEW_MB: Final = 4 * 2**20
"""Limit of a read, and of a file that does not grow with the number of episodes."""
LARGE: Final = 2**30
"""Limit of a file that grows with the number of episodes."""
_BLOCK: Final = 2**20
"""Number of bytes of an archive to read at a time."""
_INFLATION: Final = 100
"""Maximum ratio of bytes in memory to bytes on the disk."""
_ALWAYS: Final = 32 * 2**20
"""Number of bytes to which any archive may inflate."""


@final
class BoundedFile(io.BufferedReader):
    """Regular file, open for reading.

    Args:
        path: The file.
        limit: Maximum number of bytes of one read. A larger read raises an ``OSError``.

    Raises:
        OSError: The file cannot be opened, is a device or a pipe, or is much larger than the data on the disk.
    """

    def __init__(self, path: Path, limit: int = FEW_MB) -> None:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # To open a pipe would block.
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        super().__init__(io.FileIO(path))
        self._path, self.limit = path, limit
        self.size, self.stored = os.fstat(self.fileno()).st_size, _stored(self.fileno())
        if self.size > max(FEW_MB, _INFLATION * self.stored):
            self.close()
            raise OSError(
                errno.EFBIG, f"it has {self.size:,} bytes, but only {self.stored:,} are on the disk", str(path)
            )

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next bytes. The error about too many bytes names the file, the number and the limit."""
        left = max(0, self.size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        _check_size("it", wanted, self.limit, self._path)
        return super().read(wanted)


def read_bytes(path: Path, limit: int = FEW_MB) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: The file cannot be read, or has more than ``limit`` bytes.
    """
    with BoundedFile(path, limit) as file:
        return file.read()


def read_named(path: Path, limit: int = FEW_MB) -> bytes:
    """Return the content of a file that the user names, which may also be a pipe.

    Raises:
        OSError: The file cannot be read, or has more than ``limit`` bytes.
    """
    if not path.is_fifo():
        return read_bytes(path, limit)
    with path.open("rb") as pipe:
        content = pipe.read(limit + 1)
    _check_size("it", len(content), limit, path)
    return content


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose table of contents has a few MB at most.

    Raises:
        OSError: The file cannot be read.
        zipfile.BadZipFile: The file is not a zip archive.
    """
    with BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def read_entry(archive: zipfile.ZipFile, name: str, path: Path, limit: int = FEW_MB) -> bytes:
    """Return an entry of a zip archive.

    Raises:
        KeyError: There is no such entry.
        OSError: The entry is too large, or its compression is not supported.
        zipfile.BadZipFile: The entry is damaged.
    """
    entry = archive.getinfo(name)
    _check_size(f"its entry {name}", _inflated([entry], path), limit, path)
    content = io.BytesIO()
    with archive.open(entry) as file:  # To read all at once would inflate more than the entry claims.
        shutil.copyfileobj(file, content, _BLOCK)
    return content.getvalue()


def check_inflation(archive: zipfile.ZipFile, path: Path) -> None:
    """Check that the entries of a zip archive are not much larger than the archive.

    Raises:
        OSError: The entries are too large, or their compression is not supported.
    """
    limit = max(_ALWAYS, _INFLATION * path.stat().st_size)
    _check_size("the sum of its entries", _inflated(archive.infolist(), path), limit, path)


def _inflated(entries: Sequence[zipfile.ZipInfo], path: Path) -> int:
    """Return the number of bytes of entries. Reject compressions other than deflate.

    For other compressions, ``zipfile`` inflates whole blocks, even beyond the size of the entry.
    """
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise OSError(errno.EINVAL, f"its entry {entry.filename} is not stored or deflated", str(path))
    return sum(entry.file_size for entry in entries)


def _stored(descriptor: int) -> int:
    """Return the number of bytes of a file that are not in holes."""
    stored = end = 0
    try:
        while True:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            stored += end - start
    except OSError as error:
        if error.errno == errno.EINVAL:  # The file system does not report holes.
            return os.fstat(descriptor).st_size
        if error.errno != errno.ENXIO:  # Otherwise, only a hole follows.
            raise
    os.lseek(descriptor, 0, os.SEEK_SET)
    return stored


def _check_size(what: str, size: int, limit: int, path: Path) -> None:
    if size > limit:
        raise OSError(errno.EFBIG, f"{what} has {size:,} bytes; at most {limit:,} are read", str(path))

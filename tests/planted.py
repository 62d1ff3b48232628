"""Secrets that tests plant, and the search for them in everything that was written and printed.

A planted secret has :data:`MARK` in it and is looked for in all its spellings. The files that plant it have a name that
begins with ``planted``; no other file under a test's folder, and no line that a test printed, may hold one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MARK = "pl4nted"
_SPELLINGS = re.compile(b"pl4nted|" + re.escape(MARK.encode("utf-16-le")) + b"|cGw0bnRlZ|BsNG50ZW|wbDRudGVk")
"""As it is, in UTF-16, and in base64 at its three offsets."""
_INPUT = "planted"


def secret(name: str) -> str:
    """Return a secret that no other place has."""
    return f"{MARK}-{name}/S3cr+t"


def leaks(text: str | bytes) -> list[str]:
    """Return the surroundings of every planted secret in what was printed or written."""
    content = text.encode() if isinstance(text, str) else text
    return [
        repr(content[max(0, found.start() - 60) : found.end() + 60].decode(errors="replace"))
        for found in _SPELLINGS.finditer(content)
    ]


def leaking_files(folder: Path) -> Iterator[str]:
    """Yield a line per planted secret in the files below a folder."""
    for path in sorted(folder.rglob("*")):
        if not path.name.startswith(_INPUT) and path.is_file() and not path.is_symlink() and not _is_hollow(path):
            yield from (f"{path}: {found}" for found in leaks(_read(path)))


def _is_hollow(path: Path) -> bool:
    """Whether a file is mostly a hole, as those that only claim to be large; reading one takes a minute."""
    found = path.stat()
    return found.st_size > 2**30 and found.st_blocks * 512 < found.st_size // 2


def _read(path: Path) -> bytes:
    """Return the content of a file; of Parquet that of its columns, which are compressed."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException):  # Some tests damage theirs.
            return path.read_bytes()
        return f"{table.schema.metadata} {table.to_pylist()}".encode()
    return path.read_bytes()

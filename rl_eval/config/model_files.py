"""Digests of files that a policy's factory is given, such as a model of Stable-Baselines3 and its normalizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import xxhash

__all__ = ["digest_of", "file_digests", "files_in"]

_CHUNK: Final = 2**20


def file_digests(kwargs: Mapping[str, Any], *, folders: bool) -> dict[str, str]:
    """Return the digest of each argument that is the path of a file on this machine, by the argument's name.

    Args:
        kwargs: Arguments of a factory.
        folders: Whether a folder is a model too; else it may be anything, of any size.
    """
    found = {}
    for name, value in kwargs.items():
        if isinstance(value, (str, os.PathLike)):
            with suppress(OSError, ValueError):  # A text that can be no path; a file that cannot be read.
                path = Path(value)
                if path.is_file() or (folders and path.is_dir()):
                    found[name] = digest_of(path)
    return found


def digest_of(path: Path) -> str:
    """Return the 128-bit xxh3 of a file, or of all names and files of a folder."""
    digest = xxhash.xxh3_128()
    for name, file in files_in(path):
        if name:
            digest.update(f"{len(name)} {name} {file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return str(digest.hexdigest())


def files_in(path: Path) -> list[tuple[str, Path]]:
    """Return the files of a folder with their relative names, in their order; a path of a file has the name ""."""
    if not path.is_dir():
        return [("", path)]
    return sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())

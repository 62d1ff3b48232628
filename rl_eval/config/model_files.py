"""Digests of files that a policy's factory is given, such as a model and its normalizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_eval.adapters import loader_of
from rl_eval.redaction import redact

__all__ = ["changed_files", "digest_of", "file_digests", "files_in"]

_CHUNK: Final = 2**20


def file_digests(factory: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each argument of a factory that is the path of a file on this machine, by its name.

    Lists and nested mappings are not looked into, secrets are left alone, and a folder may be anything, of any size: it
    has a digest only for a factory of a library whose models are folders.

    Args:
        factory: ``"module:attr"``; anything else takes no arguments.
        kwargs: Its arguments.
    """
    texts = {name: os.fspath(value) for name, value in kwargs.items() if isinstance(value, (str, os.PathLike))}
    shown = redact(texts, "policy", "policy_kwargs")
    found = {}
    for name, text in texts.items():
        if shown[name] == text:
            with suppress(OSError, ValueError, RuntimeError):  # What can be no path, has no home, or cannot be read.
                if (path := _loaded(factory, Path(text).expanduser())) is not None:
                    found[name] = digest_of(path)
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the arguments whose files both sides have and that differ."""
    return [name for name, digest in before.items() if now.get(name, digest) != digest]


def _loaded(factory: Any, path: Path) -> Path | None:
    """Return the file or folder that a factory loads that is given a path; None if it is not there."""
    library = loader_of(factory)
    for candidate in (Path(f"{path}{ending}") for ending in (library.endings if library else ("",))):
        if candidate.is_file():
            return candidate
    return path if library and library.folders and path.is_dir() else None


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

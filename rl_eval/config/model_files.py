"""Digests of files that a policy's factory is given, such as a model of Stable-Baselines3 and its normalizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_eval.redaction import redact

__all__ = ["changed_files", "digest_of", "file_digests", "files_in", "library_of", "loads_models"]

_CHUNK: Final = 2**20
_INTEGRATIONS: Final = "rl_eval.integrations."


def file_digests(factory: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each argument of a factory that is the path of a file on this machine, by its name.

    Lists and nested mappings are not looked into, secrets are left alone, and a folder may be anything, of any size: it
    has a digest only for a factory that loads checkpoints of RLlib.

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
                if (path := _loaded(str(factory), Path(text).expanduser())) is not None:
                    found[name] = digest_of(path)
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the arguments whose files both sides have and that differ."""
    return [name for name, digest in before.items() if now.get(name, digest) != digest]


def loads_models(factory: Any) -> bool:
    """Whether a factory is of our integrations: the files that another is given may be something else than a model."""
    return isinstance(factory, str) and factory.startswith(_INTEGRATIONS)


def library_of(factory: Any) -> str:
    """Return the name of our integration that a factory is of, such as ``sb3``; empty for any other."""
    return factory.removeprefix(_INTEGRATIONS).partition(":")[0] if loads_models(factory) else ""


def _loaded(factory: str, path: Path) -> Path | None:
    """Return what a factory loads that is given a path; None if that is not there."""
    endings = ("", ".zip", ".pkl") if factory.startswith("rl_eval.integrations.sb3:") else ("",)
    for candidate in (Path(f"{path}{ending}") for ending in endings):
        if candidate.is_file():
            return candidate
    return path if factory.startswith("rl_eval.integrations.rllib:") and path.is_dir() else None


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

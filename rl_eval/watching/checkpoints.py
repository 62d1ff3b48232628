"""Checkpoints of a training run: finding them, their order, whether they are complete, and copies of them.

A checkpoint is a file, or a folder, whose name matches a pattern. It is taken when size, time and inode of everything
in it are the same in two scans; it is copied then, and what is evaluated is the copy: the trainer may rewrite or remove
its own at any time. Its identity is its name and the digest of the copy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, final

import xxhash

from rl_eval.config.model_files import digest_of, files_in
from rl_eval.errors import ConfigError

__all__ = [
    "CheckpointFolder",
    "CheckpointInfo",
    "Snapshot",
    "SnapshotStore",
    "compile_step_pattern",
    "copy_checkpoint",
]

_LAST_NUMBER: Final = re.compile(r"(\d+)(?!.*\d)")
_GLOBS: Final = 20
_ORIGIN: Final = "origin.json"
_INCOMING: Final = ".incoming"
_OUTGOING: Final = ".outgoing"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as a scan found it."""

    name: str
    """Path relative to the watched folder, with ``/``."""
    step: int | None
    """Training step according to its name."""
    modified: float
    """Time of its last change, in seconds since 1970."""
    signature: str
    """Changes whenever a file of it does."""

    @property
    def order(self) -> tuple[bool, int, float, str]:
        """Sort key: by step, and those without one after them, by time."""
        return self.step is None, self.step or 0, self.modified, self.name

    def __str__(self) -> str:
        return self.name if self.step is None else f"step {self.step:,} ({self.name})"


@dataclass(frozen=True)
class Snapshot:
    """A copy of a checkpoint, which nobody else changes."""

    info: CheckpointInfo
    digest: str
    """128-bit xxh3 of its contents."""
    path: Path
    """The copy; it has the last part of the checkpoint's name."""
    companions: Mapping[str, Path] = field(default_factory=dict)
    """Files that belong to it, as the trainer has them, by the argument of the policy's factory that takes each."""

    @property
    def copies(self) -> dict[str, Path]:
        """Copies of its companions, which are beside its own."""
        return {name: self.path.parent / file.name for name, file in self.companions.items()}

    @property
    def id(self) -> str:
        """Name of its folders."""
        return identify(self.info.name, self.digest)

    def is_intact(self) -> bool:
        """Return whether the copy is what it was; a machine that went down may have left less."""
        try:
            return digest_of(self.path) == self.digest
        except OSError:
            return False


def copy_checkpoint(path: Path, target: Path) -> None:
    """Copy a checkpoint, which is a file or a folder."""
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)


def identify(name: str, digest: str) -> str:
    """Return a file name that no other checkpoint has."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name).lstrip('.')[-80:]}-{digest[:16]}"


def compile_step_pattern(text: str | None) -> re.Pattern[str]:
    """Compile the pattern whose first group is the step; by default the last number in the name.

    Raises:
        ConfigError: It is no regular expression, or has no group.
    """
    if text is None:
        return _LAST_NUMBER
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"--step-pattern {text!r} is not a regular expression: {error}") from None
    if pattern.groups < 1:
        raise ConfigError(rf"--step-pattern {text!r} has no group: put the number in one, as in 'step_(\d+)'")
    return pattern


@final
class CheckpointFolder:
    """The folder that a training run writes to.

    Args:
        folder: Which; it need not exist yet.
        pattern: Glob relative to it, of files or folders; hidden ones never match.
        step_pattern: Searched in the name without its suffix; its first group is the step.
        exclude: A folder whose contents are no checkpoints.
    """

    def __init__(self, folder: Path, pattern: str, step_pattern: re.Pattern[str], exclude: Path) -> None:
        self._folder = folder
        self._pattern = pattern
        self._step_pattern = step_pattern
        self._exclude = exclude
        self._last: dict[str, str] = {}
        self.found: tuple[CheckpointInfo, ...] = ()
        """Every checkpoint of the last scan, stable or not."""
        self.unstable: tuple[str, ...] = ()
        """Names of those that were new or had changed."""

    @property
    def absence(self) -> str:
        """Say that nothing is there, and where."""
        if not self._folder.is_dir():
            return f"there is no folder {str(self._folder)!r} yet"
        others = sorted({f"*{path.suffix}" for path in self._folder.iterdir() if path.is_file() and path.suffix})
        hint = f": for {' or '.join(others)} give a glob in quotes" if others and self._pattern not in others else ""
        return f"nothing in {str(self._folder)!r} matches {self._pattern!r}{hint}"

    def scan(self) -> list[CheckpointInfo]:
        """Return the checkpoints that have not changed since the last scan, in order.

        Raises:
            ConfigError: The pattern cannot be used.
        """
        found = {info.name: info for info in self._find()}
        former, self._last = self._last, {name: info.signature for name, info in found.items()}
        stable = [info for info in found.values() if former.get(info.name) == info.signature]
        self.found = tuple(found.values())
        self.unstable = tuple(sorted(found.keys() - {info.name for info in stable}))
        return sorted(stable, key=lambda info: info.order)

    @property
    def label(self) -> str:
        """Its name, for titles."""
        return self._folder.name

    def path(self, info: CheckpointInfo) -> Path:
        """Return the path of a checkpoint."""
        return self._folder / info.name

    def _find(self) -> Iterator[CheckpointInfo]:
        for path in self._paths():
            name = path.relative_to(self._folder)
            if any(part.startswith(".") for part in name.parts) or path.is_relative_to(self._exclude):
                continue
            try:
                signature, modified = signature_of(path)
            except OSError:
                continue  # It went while we looked.
            yield CheckpointInfo(name.as_posix(), self._step(path), modified, signature)

    def _paths(self) -> list[Path]:
        for _ in range(_GLOBS):
            # A folder that goes between its listing and its own turn ends the whole search.
            with suppress(FileNotFoundError):
                try:
                    return sorted(self._folder.glob(self._pattern))
                except (ValueError, NotImplementedError) as error:
                    raise ConfigError(f"CHECKPOINTS {self._pattern!r} cannot be used: {error}") from None
        return []

    def _step(self, path: Path) -> int | None:
        found = self._step_pattern.search(path.stem)
        try:
            return int(found[1]) if found else None
        except (TypeError, ValueError):
            return None


def signature_of(path: Path) -> tuple[str, float]:
    """Return what changes when a file does, or any file of a folder, and the time of its last change.

    Raises:
        OSError: It cannot be looked at.
    """
    facts = [(name, os.stat(file)) for name, file in files_in(path)]  # noqa: PTH116 - a path would be built for each.
    lines = [f"{name} {fact.st_size} {fact.st_mtime_ns} {fact.st_ino}" for name, fact in facts]
    modified = max((fact.st_mtime for _, fact in facts), default=path.stat().st_mtime)
    return str(xxhash.xxh3_64_hexdigest("\n".join(lines).encode())), modified


@final
class SnapshotStore:
    """Copies of the checkpoints that are being worked on.

    Args:
        folder: Where they are kept, one folder for each.
        own: Called with the id of a checkpoint before its folder is made.
    """

    def __init__(self, folder: Path, own: Callable[[str], object]) -> None:
        self._folder = folder
        self._own = own
        for name in (_INCOMING, _OUTGOING):
            shutil.rmtree(folder / name, ignore_errors=True)

    def take(self, path: Path, info: CheckpointInfo, companions: Mapping[str, Path] | None = None) -> Snapshot | None:
        """Copy a checkpoint; None if it has changed or gone since the scan, maybe during the copy.

        A copy that is there was completed: it appears under its name with a rename.

        Args:
            path: The checkpoint.
            info: As the scan found it.
            companions: Files that belong to it, by a name for each.

        Raises:
            OSError: It is unchanged, and cannot be copied.
        """
        companions = companions or {}
        beside = {name: str(file) for name, file in companions.items()}
        incoming = self._folder / _INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        copied = incoming / path.name
        try:
            copy_checkpoint(path, copied)
            for file in companions.values():
                shutil.copyfile(file, incoming / file.name)
        except OSError:
            # A trainer that removes a folder makes copytree collect one error per file: only its signature says why.
            if _is_unchanged(path, info) and all(file.exists() for file in companions.values()):
                raise
            return None
        if not _is_unchanged(path, info):
            return None
        digest = digest_of(copied)
        (incoming / _ORIGIN).write_text(json.dumps({"info": asdict(info), "digest": digest, "companions": beside}))
        home = self._folder / identify(info.name, digest)
        self._own(home.name)
        shutil.rmtree(home, ignore_errors=True)
        incoming.rename(home)
        return Snapshot(info, digest, home / path.name, companions)

    def found(self) -> list[Snapshot]:
        """Return the copies that are there, in order."""
        if not self._folder.is_dir():
            return []
        homes = [home for home in self._folder.iterdir() if not home.name.startswith(".")]
        found = [snapshot for home in homes if (snapshot := _read_origin(home))]
        return sorted(found, key=lambda snapshot: snapshot.info.order)

    def drop(self, checkpoint: str) -> None:
        """Remove a copy, by the id of its checkpoint; half a copy is never found."""
        home, outgoing = self._folder / checkpoint, self._folder / _OUTGOING
        if home.exists():
            shutil.rmtree(outgoing, ignore_errors=True)
            home.rename(outgoing)
            shutil.rmtree(outgoing, ignore_errors=True)


def _is_unchanged(path: Path, info: CheckpointInfo) -> bool:
    try:
        return signature_of(path)[0] == info.signature
    except OSError:
        return False


def _read_origin(home: Path) -> Snapshot | None:
    """Return the copy in a folder; None if it does not say what it is of."""
    try:
        origin = json.loads((home / _ORIGIN).read_text())
        info = CheckpointInfo(**origin["info"])
        companions = {name: Path(file) for name, file in origin["companions"].items()}
        return Snapshot(info, origin["digest"], home / Path(info.name).name, companions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

"""Checkpoints of a training run: scans of its folder, complete checkpoints, and copies.

A checkpoint is a file or folder whose name matches a pattern. It is complete if size, time and inode of all its files
are the same in two successive scans. The watcher evaluates a copy of a complete checkpoint, because the trainer may
rewrite or remove its own file at any time.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import xxhash

from rl_eval.adapters import loader_of
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import digest_of, file_digests, files_in, schemes
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError

_LAST_NUMBER: Final = re.compile(r"(\d+)(?!.*\d)")
_PATH: Final = "path"
"""Argument of the libraries' factories that names the model."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a scan found it."""

    name: str
    """Path relative to the watched folder, with ``/``."""
    step: int | None
    """Training step according to its name."""
    modified: float
    """Time of the last change of its files, in seconds since 1970."""
    signature: str
    """Digest of the sizes, times and inodes of its files."""

    @property
    def order(self) -> tuple[bool, int, float, str]:
        """Sort key. Checkpoints with a step come first, by step; checkpoints without a step follow, by time."""
        return self.step is None, self.step or 0, self.modified, self.name

    def __str__(self) -> str:
        return self.name if self.step is None else f"step {self.step:,} ({self.name})"


def compile_step_pattern(text: str | None) -> re.Pattern[str]:
    """Compile the pattern whose first group is the step; by default the last number in the name.

    Raises:
        ConfigError: The text is not a regular expression, or it has no group.
    """
    if text is None:
        return _LAST_NUMBER
    try:
        pattern = re.compile(text)
    except re.error as error:
        problem = f"--step-pattern {text!r} is not a regular expression: {error}"
        raise ConfigError(problem, key="--step-pattern", value=text) from None
    if pattern.groups < 1:
        problem, fix = f"--step-pattern {text!r} has no group", r"Put the number in a group, as in 'step_(\d+)'."
        raise ConfigError(problem, key="--step-pattern", value=text, fix=fix)
    return pattern


@final
class CheckpointFolder:
    """Folder that a training run writes checkpoints to.

    Args:
        folder: The folder; it need not exist yet.
        pattern: Glob of files or folders, relative to ``folder``. To match a hidden name, the glob must
            contain the dot of this name.
        step_pattern: Pattern to search in the name without its suffix; its first group is the step.
        exclude: Folder whose contents are never checkpoints.
    """

    def __init__(self, folder: Path, pattern: str, step_pattern: re.Pattern[str], exclude: Path) -> None:
        self.folder = folder
        self._pattern = pattern
        self._step_pattern = step_pattern
        self._exclude = exclude
        self.found: dict[str, Checkpoint] = {}
        """Every checkpoint of the last scan by name, complete or not."""
        self.unstable: list[str] = []
        """Names of the checkpoints that were new or had changed in the last scan."""

    @property
    def absence(self) -> str:
        """Message for a folder without checkpoints."""
        if not self.folder.is_dir():
            return f"there is no folder {str(self.folder)!r} yet"
        others = sorted({f"*{path.suffix}" for path in self.folder.iterdir() if path.is_file() and path.suffix})
        hint = f"; for {' or '.join(others)}, pass a glob in quotes" if others and self._pattern not in others else ""
        return f"nothing in {str(self.folder)!r} matches {self._pattern!r}{hint}"

    def scan(self) -> list[Checkpoint]:
        """Scan the folder; return the checkpoints that have not changed since the last scan, in order of training."""
        former, self.found = self.found, {checkpoint.name: checkpoint for checkpoint in self._find()}
        stable = [one for name, one in self.found.items() if name in former and former[name].signature == one.signature]
        self.unstable = sorted(self.found.keys() - {one.name for one in stable})
        return sorted(stable, key=lambda one: one.order)

    def _find(self) -> Iterator[Checkpoint]:
        # Unlike Path.glob, it continues if the trainer removes a folder during the search.
        for name in map(Path, glob.glob(self._pattern, root_dir=self.folder, recursive=True)):  # noqa: PTH207
            path = self.folder / name
            if path.is_relative_to(self._exclude):
                continue
            step = self._step_pattern.search(path.stem)
            with suppress(OSError):  # The trainer removed it during the scan.
                signature, modified = _signature(path)
                number = int(step[1]) if step and (step[1] or "").isdecimal() else None
                yield Checkpoint(name.as_posix(), number, modified, signature)


def copy_checkpoint(path: Path, checkpoint: Checkpoint, companions: Mapping[str, Path], target: Path) -> str | None:
    """Copy a checkpoint, its parts and its companions into a new folder.

    Args:
        path: The checkpoint.
        checkpoint: State of the checkpoint at the last scan.
        companions: Files that belong to the checkpoint, by argument of the policy's factory.
        target: Path of the new folder; an existing folder is removed first.

    Returns:
        Digest of the copy; None if the checkpoint has changed since the scan or was removed.

    Raises:
        OSError: The checkpoint is unchanged, but cannot be copied.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target / path.name)
        parts = {} if path.is_dir() else dict(files_in(path)[1:])
        for name, file in (parts | {file.name: file for file in companions.values()}).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)
    except OSError:
        # If the trainer removes a folder, copytree raises one error for many files, which does not show the cause. The
        # signature does.
        if _is_unchanged(path, checkpoint) and all(file.exists() for file in companions.values()):
            raise
        return None
    return digest_of(target / path.name) if _is_unchanged(path, checkpoint) else None


def _signature(path: Path) -> tuple[str, float]:
    """Return a digest of the sizes, times and inodes of all files, and the time of the last change."""
    facts = [(name, os.stat(file)) for name, file in files_in(path)]  # noqa: PTH116 - a path would be built for each.
    lines = [f"{name} {fact.st_size} {fact.st_mtime_ns} {fact.st_ino}" for name, fact in facts]
    modified = max((fact.st_mtime for _, fact in facts), default=path.stat().st_mtime)
    return str(xxhash.xxh3_64_hexdigest("\n".join(lines).encode())), modified


def _is_unchanged(path: Path, checkpoint: Checkpoint) -> bool:
    with suppress(OSError):
        return _signature(path)[0] == checkpoint.signature
    return False


# ---------------------------------------------------------------------- files beside a model, such as a normalizer


def companions_of(model: Path, settings: EvalSettings) -> dict[str, Path]:
    """Return the files that belong to a checkpoint, by argument of the policy's factory.

    Args:
        model: The checkpoint.
        settings: Settings with the policy. A file that is set in the policy's arguments is used for all checkpoints.

    Raises:
        ConfigError: The checkpoint has its own file for an argument, and its contents differ from the configured file.
    """
    configured, own = settings.policy.policy_kwargs, _own_files(model, settings.policy.policy)
    for name in own.keys() & configured.keys():
        shared = Path(str(configured[name])).expanduser()
        if shared.is_file() and digest_of(shared) != digest_of(own[name]):
            key = f"policy.policy_kwargs.{name}"
            problem = f"{model} has its own file {own[name].name}, whose contents differ from those of {shared} ({key})"
            raise ConfigError(problem, key=key, value=str(shared), fix=f"Remove {key}.")
    return {name: file for name, file in own.items() if name not in configured}


def companion_files(folder: Path, settings: EvalSettings) -> frozenset[str]:
    """Return the files below a folder that may belong to a model, by the naming scheme of the policy's library."""
    library = loader_of(settings.policy.policy)
    if library is None or not library.companions:
        return frozenset()
    return frozenset(glob.glob(f"**/{library.companions}", root_dir=folder, recursive=True))  # noqa: PTH207


def without_companions(settings: EvalSettings) -> EvalSettings:
    """Return settings without the files that belong to the configured model, because checkpoints replace this model."""
    configured = settings.policy.policy_kwargs
    own = _own_files(Path(configured.get(_PATH) or "").expanduser(), settings.policy.policy)
    kept = {name: value for name, value in configured.items() if name not in own or value != str(own[name])}
    return settings if len(kept) == len(configured) else with_values(settings, policy={"policy_kwargs": kept})


def _own_files(model: Path, factory: object) -> dict[str, Path]:
    """Return the files that belong to a model, by argument of its factory.

    If several files may belong to the model, return none. The factory then reports that a file is missing.
    """
    library = loader_of(factory)
    scheme = schemes().get(library.name) if library else None
    if scheme is not None and model.exists() and scheme.recognises(described(model)):
        with suppress(ConfigError):
            kwargs = scheme.source("", model, ()).kwargs
            return {name: Path(kwargs[name]) for name in file_digests(factory, kwargs) if name != _PATH}
    return {}

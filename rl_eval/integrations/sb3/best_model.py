"""The best model of a training, kept under the names of SB3: the model and its statistics, always those of one moment.

Both are in one folder, which is complete before anybody can find it::

    best_model.zip               -> best_model.d/best_model.zip
    best_model_vecnormalize.pkl  -> best_model.d/best_model_vecnormalize.pkl
    best_model.d                 -> best_model.step_64000.5f1c22ab
    best_model.step_64000.5f1c22ab/

The first two links never change. A new best renames one link, ``best_model.d``, so both names show the old pair until
then, and the new one from then on.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import is_temporary, sync_folder, temporary_name, write_atomically, write_bytes, write_text
from rl_eval.errors import ConfigError

__all__ = ["BestModel", "Candidate"]

_MODEL: Final = "best_model.zip"
_STATISTICS: Final = "best_model_vecnormalize.pkl"
_FACTS: Final = "best_model.json"
_POINTER: Final = "best_model.d"
_PAIR: Final = re.compile(r"best_model\.step_\d+\.[0-9a-f]{8}")


@dataclass(eq=False)
class Candidate:
    """A model that was submitted, in a folder of its own, until it is known whether it is the best."""

    step: int
    path: Path
    lock: int | None
    """Descriptor that is locked as long as its process lives; None once it is released, or where there are no locks."""

    def discard(self) -> None:
        """Remove it, unless it has become the best model."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let go of the lock; may be called again."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


@final
class BestModel:
    """The best model in a folder.

    Args:
        folder: Where it goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder, and remove what killed trainings have left in it.

        Raises:
            ConfigError: The folder cannot be used.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / _POINTER).exists() and not self._is_link(_POINTER):
            raise ConfigError(
                f"best_model_save_path has a {_POINTER} of somebody else: move {self._folder / _POINTER} away, or give "
                "another folder"
            )
        current = self._current()
        for path in self._folder.iterdir():
            if path != current:
                _remove_leftover(path)
        self._check_links()

    def save(self, model: Any, step: int) -> Candidate:
        """Save a model with its statistics, where it is not yet the best."""
        path = self._folder / temporary_name("best_model")
        path.mkdir()
        candidate = Candidate(step, path, _lock(path))
        try:
            write_atomically(path / _MODEL, model.save)
            if (wrapper := model.get_vec_normalize_env()) is not None:
                write_bytes(path / _STATISTICS, pickle.dumps(wrapper))
        except BaseException:
            candidate.discard()
            raise
        return candidate

    def keep(self, candidate: Candidate, facts: Mapping[str, Any]) -> None:
        """Make a candidate the best model.

        Args:
            candidate: It ceases to be one.
            facts: What is known of it, as JSON has it.
        """
        write_text(candidate.path / _FACTS, json.dumps({"step": candidate.step, **facts}, indent=2) + "\n")
        former = self._current()
        home = self._folder / f"best_model.step_{candidate.step}.{secrets.token_hex(4)}"
        candidate.path.rename(home)
        candidate.release()
        self._link(_POINTER, home.name)
        self._name_files(home)
        sync_folder(self._folder)
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)

    def _name_files(self, home: Path) -> None:
        """Show the pair under SB3's names; of files that a trainer of another kind wrote, the model goes first."""
        if not self._is_link(_MODEL):
            (self._folder / _MODEL).unlink(missing_ok=True)
        if (home / _STATISTICS).exists():
            self._link(_STATISTICS, f"{_POINTER}/{_STATISTICS}")
        elif self._is_link(_STATISTICS):
            (self._folder / _STATISTICS).unlink()
        self._link(_MODEL, f"{_POINTER}/{_MODEL}")

    def _current(self) -> Path | None:
        """Return the folder of the best model; None if there is none."""
        if not self._is_link(_POINTER):
            return None
        target = (self._folder / _POINTER).readlink()
        return self._folder / target if _PAIR.fullmatch(str(target)) else None

    def _is_link(self, name: str) -> bool:
        return (self._folder / name).is_symlink()

    def _link(self, name: str, target: str) -> None:
        if self._is_link(name) and str((self._folder / name).readlink()) == target:
            return
        temporary = self._folder / temporary_name(name)
        temporary.symlink_to(target)
        temporary.replace(self._folder / name)

    def _check_links(self) -> None:
        trial = self._folder / temporary_name("link")
        try:
            trial.symlink_to("nothing")
            trial.unlink()
        except OSError as error:
            raise ConfigError(
                f"best_model_save_path is {self._folder}, which takes no links ({error.strerror}): give a folder on "
                "another file system"
            ) from error


def _remove_leftover(path: Path) -> None:
    """Remove a folder or link of a training that was killed; a candidate of one that lives is locked."""
    if path.is_symlink():
        if is_temporary(path.name):
            path.unlink(missing_ok=True)
    elif path.is_dir() and _PAIR.fullmatch(path.name) and (path / _FACTS).exists():
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir() and is_temporary(path.name) and (lock := _lock(path)) is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None

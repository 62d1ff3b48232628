"""Best model of a training, with SB3's file names: the model and its statistics, always from the same step.

Both files are in one folder. The folder is complete before a link points to it::

    best_model.zip               -> best_model.d/best_model.zip
    best_model_vecnormalize.pkl  -> best_model.d/best_model_vecnormalize.pkl
    best_model.d                 -> best_model.step_64000.5f1c22ab
    best_model.step_64000.5f1c22ab/

The first two links never change. A new best model replaces one link, ``best_model.d``, so both names switch from the
old pair to the new pair at the same time.
"""

from __future__ import annotations

import json
import pickle
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import is_temporary, sync_folder, temporary_name, write_atomically, write_bytes, write_text
from rl_eval.errors import ConfigError

_MODEL: Final = "best_model.zip"
_STATISTICS: Final = "best_model_vecnormalize.pkl"
_FACTS: Final = "best_model.json"
_POINTER: Final = "best_model.d"
_PAIR: Final = re.compile(r"best_model\.step_\d+\.[0-9a-f]{8}")


@dataclass(eq=False)
class Candidate:
    """Saved model that waits for the result of its evaluation, in a separate folder. It may become the best model."""

    step: int
    path: Path

    def discard(self) -> None:
        """Remove the folder, unless the candidate has become the best model."""
        shutil.rmtree(self.path, ignore_errors=True)


@final
class BestModel:
    """Best model of a training, in a folder.

    Args:
        folder: Folder that contains the links and the model's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Create the folder, and remove leftovers of killed trainings.

        Raises:
            ConfigError: ``best_model.d`` in the folder is not a link.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / _POINTER).exists() and not self._is_link(_POINTER):
            problem = f"best_model_save_path: {self._folder / _POINTER} exists and is not a link"
            fix = f"Move {_POINTER} to another place, or pass another folder."
            raise ConfigError(problem, key="best_model_save_path", value=str(self._folder), fix=fix)
        for path in self._folder.iterdir():
            if path.is_symlink():
                if is_temporary(path.name):
                    path.unlink()
            elif path.is_dir() and path != self._current() and self._is_ours(path):
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _is_ours(path: Path) -> bool:
        return is_temporary(path.name) or bool(_PAIR.fullmatch(path.name) and (path / _FACTS).exists())

    def save(self, model: Any, step: int) -> Candidate:
        """Save a model and its VecNormalize statistics in a separate folder, as a candidate for the best model."""
        path = self._folder / temporary_name("best_model")
        path.mkdir()
        candidate = Candidate(step, path)
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
            candidate: The candidate; its folder is renamed.
            facts: JSON values that ``best_model.json`` stores together with the step.
        """
        write_text(candidate.path / _FACTS, json.dumps({"step": candidate.step, **facts}, indent=2) + "\n")
        former = self._current()
        home = self._folder / f"best_model.step_{candidate.step}.{secrets.token_hex(4)}"
        candidate.path.rename(home)
        self._link(_POINTER, home.name)
        self._name_files(home)
        sync_folder(self._folder)
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)

    def _name_files(self, home: Path) -> None:
        """Create the links with SB3's file names. First remove a ``best_model.zip`` that another trainer wrote."""
        if not self._is_link(_MODEL):
            (self._folder / _MODEL).unlink(missing_ok=True)
        if (home / _STATISTICS).exists():
            self._link(_STATISTICS, f"{_POINTER}/{_STATISTICS}")
        elif self._is_link(_STATISTICS):
            (self._folder / _STATISTICS).unlink()
        self._link(_MODEL, f"{_POINTER}/{_MODEL}")

    def _current(self) -> Path | None:
        """Return the folder of the best model; None if there is no best model."""
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

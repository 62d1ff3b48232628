"""The best checkpoint in a folder of its own: a copy, and the file that names and describes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import sweep, write_text
from rl_eval.watching.checkpoints import Staged

__all__ = ["BestCheckpoint"]

_FILE: Final = "best.json"


@final
class BestCheckpoint:
    """The copy of the best checkpoint.

    Args:
        folder: Where it is, or will be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sweep(folder)

    @property
    def id(self) -> str | None:
        """Id of the checkpoint that is kept; None if there is none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            checkpoint = json.loads((self._folder / _FILE).read_text())["checkpoint"]
            if (self._folder / checkpoint).exists():
                return str(checkpoint.partition("/")[0])
        return None

    def keep(self, staged: Staged, description: Mapping[str, Any]) -> None:
        """Keep another one: first its copy is made, then the file names it; the former one stays until :meth:`tidy`."""
        home = self._folder / staged.id
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        copied = home / staged.path.name
        if staged.path.is_dir():
            shutil.copytree(staged.path, copied)
        else:
            shutil.copyfile(staged.path, copied)
        described = {"checkpoint": f"{staged.id}/{copied.name}", **description}
        write_text(self._folder / _FILE, json.dumps(described, indent=2, allow_nan=False) + "\n")

    def tidy(self, owned: Collection[str]) -> None:
        """Remove the copies of former ones, which are those with these ids."""
        for former in set(owned) - {self.id}:
            home = self._folder / former
            if home.exists():
                shutil.rmtree(home, ignore_errors=True)

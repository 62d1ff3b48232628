"""The best checkpoint in a folder of its own: a copy, and the file that names and describes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import sweep, write_text
from rl_eval.config.settings import EvaluationSection
from rl_eval.watching.checkpoints import Snapshot, copy_checkpoint
from rl_eval.watching.journal import Entry, Score

__all__ = ["BestCheckpoint", "describe"]

_FILE: Final = "best.json"


@final
class BestCheckpoint:
    """The copy of the best checkpoint."""

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

    def keep(self, snapshot: Snapshot, description: Mapping[str, Any]) -> None:
        """Keep another one: first its copy is made, then the file names it; the former one stays until :meth:`tidy`."""
        home = self._folder / snapshot.id
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        copied = home / snapshot.path.name
        copy_checkpoint(snapshot.path, copied)
        for file in snapshot.copies.values():
            shutil.copyfile(file, home / file.name)
        described = {"checkpoint": f"{snapshot.id}/{copied.name}", **description}
        write_text(self._folder / _FILE, json.dumps(described, indent=2, allow_nan=False) + "\n")

    def tidy(self, owned: Collection[str]) -> None:
        """Remove the copies of former ones, which are those with these ids."""
        for former in set(owned) - {self.id}:
            home = self._folder / former
            if home.exists():
                shutil.rmtree(home, ignore_errors=True)


def describe(candidate: Entry, selection: EvaluationSection, num_held_out: int) -> dict[str, Any]:
    """Describe the best checkpoint by both its numbers, and say which of them is which."""
    held_out = candidate.held_out
    chosen = "greatest mean return of all checkpoints, so biased upward"
    return {
        "name": candidate.info.name,
        "step": candidate.info.step,
        "digest": candidate.digest,
        "selection": _number(candidate.selection, selection.num_episodes, chosen),
        "held_out": held_out and _number(held_out, num_held_out, _worth(held_out)),
    }


def _number(score: Score, num_episodes: int, meaning: str) -> dict[str, Any]:
    last = score.first_index + num_episodes - 1
    return {"episodes": f"indices {score.first_index} to {last}", "meaning": meaning, **asdict(score)}


def _worth(held_out: Score) -> str:
    advice = "depends on the layout, do not quote it" if held_out.determinism else "quote this one"
    return f"had no part in the choice: {advice}"

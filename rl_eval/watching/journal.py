"""State of a watcher: what is known of each checkpoint, and which one is the best candidate.

One file, ``watch.json``, written atomically at every change. It is the commit: a checkpoint without an entry is
evaluated, and its evaluation log says which of its episodes are left; one with an entry is not touched again. The
best candidate is the checkpoint with the greatest mean return over the selection episodes; among equals the first.

The file is also what makes the folder the watcher's own: it says so, and it lists the checkpoints for which folders
were made. No other folder is ever removed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import write_text
from rl_eval.errors import ConfigError
from rl_eval.log.code_changes import code_differences
from rl_eval.records.foreign import parse_json
from rl_eval.records.plain import plain
from rl_eval.results.result import EvalResult
from rl_eval.results.text import interval_text
from rl_eval.watching.checkpoints import CheckpointInfo, Snapshot, identify

__all__ = ["JOURNAL_FILE", "Entry", "Journal", "Score", "check_journal"]

SCHEMA: Final = "rl_eval watch"
"""Mark of the file; without it, it is somebody else's."""
FORMAT: Final = 1
JOURNAL_FILE: Final = "watch.json"

UNREADABLE: Final = "unreadable"
"""Status of a checkpoint that could not be evaluated at all; the others are those of results."""


@dataclass(frozen=True)
class Score:
    """Numbers of one evaluation."""

    status: str
    reason: str
    mean: float | None
    """Mean return; None when there is none, and likewise the ends of its interval."""
    low: float | None
    high: float | None
    num_episodes: int
    """Episodes that the numbers go over."""
    num_failed: int
    first_index: int
    """Where its plan begins."""
    fingerprint: str
    determinism: str = ""
    """What the determinism check found amiss; empty if nothing."""
    interval: str = ""
    """The interval in words, with its method and what there is to know about it."""

    @classmethod
    def of(cls, result: EvalResult) -> Score:
        """Take the numbers of a result."""
        return cls(
            result.status,
            result.reason,
            mean=_finite(result.mean_return),
            low=_finite(result.interval.low),
            high=_finite(result.interval.high),
            num_episodes=result.aggregates.count,
            num_failed=result.num_failed,
            first_index=result.plan.first_index,
            fingerprint=result.fingerprint,
            determinism=str(result.determinism) if result.determinism.passed is False else "",
            interval=interval_text(result.interval, "{:.6g}".format),
        )

    @classmethod
    def unreadable(cls, reason: str, first_index: int) -> Score:
        """Return the score of a checkpoint that could not be evaluated."""
        return cls(UNREADABLE, reason, None, None, None, 0, 0, first_index, "")

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.status}: {self.reason}"
        text = f"mean return {self.mean:.6g} over {self.num_episodes} episodes"
        if self.interval:
            text += f" ({self.interval})"
        if self.status != "complete":
            text += f"; {self.status}: {self.reason}"
        return f"{text}; {self.determinism}" if self.determinism else text


@dataclass(frozen=True)
class Entry:
    """Result of one checkpoint."""

    info: CheckpointInfo
    digest: str
    selection: Score
    """Over the episodes by which the best is chosen: of the best, biased upward."""
    held_out: Score | None = None
    """Over episodes that had no part in the choice; only a candidate has it."""

    @property
    def id(self) -> str:
        """Name of its folders."""
        return identify(self.info.name, self.digest)


@final
class Journal:
    """The entries of a watched folder.

    Args:
        folder: Where ``watch.json`` is, or will be.
        task: What is evaluated, as plain values by dotted key, and the digests of its ``code``; entries of another task
            are refused.

    Raises:
        ConfigError: There are entries of another task, or the file is damaged.
    """

    def __init__(self, folder: Path, task: Mapping[str, Any]) -> None:
        self._path = folder / JOURNAL_FILE
        self._task = plain(task)
        self.owned: dict[str, None] = {}
        """Ids of the checkpoints for which folders were made; only these may be removed."""
        self.entries: dict[str, Entry] = {}
        """By id."""
        self.superseded = self._load()
        """Whether the file is about another task, of which no evaluation was finished."""

    # ------------------------------------------------------------------ what is known

    def knows(self, info: CheckpointInfo) -> bool:
        """Return whether a checkpoint has an entry with its present signature."""
        return any(
            entry.info.name == info.name and entry.info.signature == info.signature for entry in self.entries.values()
        )

    @property
    def curve(self) -> list[Entry]:
        """The entries in the order of training."""
        return sorted(self.entries.values(), key=lambda entry: entry.info.order)

    @property
    def best_candidate(self) -> Entry | None:
        """The entry with the greatest mean return; None while no evaluation was complete."""
        complete = [
            entry for entry in self.curve if entry.selection.status == "complete" and entry.selection.mean is not None
        ]
        return max(complete, key=lambda entry: entry.selection.mean or 0.0, default=None)

    # ------------------------------------------------------------------ what happens

    def check(self, task: Mapping[str, Any]) -> None:
        """Make sure that what is evaluated next is still what the entries are about.

        Raises:
            ConfigError: It is something else, such as code that was edited meanwhile.
        """
        self._refuse(_changes(self._task, plain(task)))

    def begin(self) -> None:
        """Write the file, before there is anything that it should be about."""
        self._save()

    def own(self, checkpoint: str) -> None:
        """Record that folders are about to be made for a checkpoint, by its id."""
        if checkpoint not in self.owned:
            self.owned[checkpoint] = None
            self._save()

    def record(self, snapshot: Snapshot, selection: Score) -> Entry:
        """Commit what was found about a checkpoint."""
        entry = self.entries[snapshot.id] = Entry(snapshot.info, snapshot.digest, selection)
        self._save()
        return entry

    def record_held_out(self, entry: Entry, score: Score) -> Entry:
        """Commit what the held-out episodes of a candidate say."""
        entry = self.entries[entry.id] = replace(entry, held_out=score)
        self._save()
        return entry

    def touch(self, snapshot: Snapshot) -> None:
        """Record that a known checkpoint has another signature and the same contents."""
        self.entries[snapshot.id] = replace(self.entries[snapshot.id], info=snapshot.info)
        self._save()

    def forget_unreadable(self) -> None:
        """Remove the entries of checkpoints that could not be evaluated, so that they are tried again."""
        kept = {key: entry for key, entry in self.entries.items() if entry.selection.status != UNREADABLE}
        if kept != self.entries:
            self.entries = kept
            self._save()

    # ------------------------------------------------------------------ the file

    def _save(self) -> None:
        data = {
            "schema": SCHEMA,
            "format": FORMAT,
            "task": self._task,
            "folders": list(self.owned),
            "checkpoints": [asdict(entry) for entry in self.curve],
        }
        write_text(self._path, json.dumps(data, indent=1) + "\n")

    def _load(self) -> bool:
        """Read the entries, unless they are of another task; return whether they are."""
        if not self._path.exists():
            return False
        data = check_journal(self._path)
        try:
            entries, task = [_entry(item) for item in data.get("checkpoints", ())], dict(data.get("task", self._task))
            self.owned = dict.fromkeys(map(_plain_name, data.get("folders", ())))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _unusable(self._path, error) from error
        changes = _changes(task, self._task)
        if any(entry.selection.status != UNREADABLE for entry in entries):
            self._refuse(changes)
        if not changes:  # Else none was evaluated, perhaps because of what has changed.
            self.entries = {entry.id: entry for entry in entries}
        return bool(changes)

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ConfigError(
                f"{self._path} is about another evaluation, whose points do not belong on one curve (there -> here): "
                f"{'; '.join(changes)}. Put back what was changed, or give another --output"
            )


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return one line per difference of two tasks; code that only one of them knows is none."""
    return [
        f"{key}: {there.get(key)!r} -> {here.get(key)!r}"
        for key in {**there, **here}
        if key != "code" and there.get(key) != here.get(key)
    ] + code_differences(there.get("code", {}), here.get("code", {}))


def check_journal(path: Path) -> dict[str, Any]:
    """Read the file of a journal.

    Raises:
        ConfigError: It is damaged, or no journal of a watcher.
    """
    try:
        data = parse_json(path.read_text())
        if data["schema"] == SCHEMA and data.get("format", FORMAT) != FORMAT:
            raise ConfigError(f"{path} has format {data['format']!r}; this version reads {FORMAT}")
        if data["schema"] == SCHEMA:
            return dict(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, error) from error
    raise _unusable(path, ValueError(f"its schema is {data['schema']!r}"))


def _unusable(path: Path, error: Exception) -> ConfigError:
    mark = json.dumps({"schema": SCHEMA})
    return ConfigError(
        f"{path} is damaged, or was not written by rl-eval watch ({type(error).__name__}: {error}): give another "
        f"--output. If the folder is a watcher's, write {mark} into the file instead: evaluations that are there are "
        "not run again"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain_name(name: str) -> str:
    if name != Path(name).name:
        raise ValueError(f"{name!r} is no name of a folder")
    return name


def _entry(data: Mapping[str, Any]) -> Entry:
    held_out = data["held_out"]
    return Entry(
        CheckpointInfo(**data["info"]),
        data["digest"],
        Score(**data["selection"]),
        None if held_out is None else Score(**held_out),
    )

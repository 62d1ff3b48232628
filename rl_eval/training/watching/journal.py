"""Journal of a watcher: the state of each checkpoint, and the best checkpoint.

``watch.json`` is replaced atomically at every change. An entry without a score is pending: its evaluation log shows
which episodes remain. An entry with a score is final. The entries are also the list of folders that the watcher made;
it removes no other folder.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, final

import xxhash

from rl_eval.atomic_write import is_temporary, write_text
from rl_eval.bounded_read import LARGE, read_bytes
from rl_eval.errors import ConfigError, LogOwned
from rl_eval.log.manifest import code_differences
from rl_eval.records.plain import differences, parse_json, plain, typed
from rl_eval.results.result import EvalResult
from rl_eval.results.text import interval_text
from rl_eval.training.watching.checkpoints import Checkpoint

JOURNAL_FILE: Final = "watch.json"
_LOCK_FILE: Final = ".lock"
_locks: Final[weakref.WeakSet[IO[str]]] = weakref.WeakSet()
# A fork has every open file of its parent, and would keep the lock until it ends.
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _locks])

PENDING: Final = "pending"
"""Status of a checkpoint whose evaluation has not finished."""
UNREADABLE: Final = "unreadable"
"""Status of a checkpoint that could not be loaded. Any other status is that of a result."""


@dataclass(frozen=True)
class CheckpointScore:
    """Outcome of one evaluation of a checkpoint."""

    status: str
    reason: str = ""
    first_index: int = 0
    """Index of the first episode."""
    mean: float | None = None
    """Mean return; None if it is not finite. ``low`` and ``high`` are the ends of its interval, in the same form."""
    low: float | None = None
    high: float | None = None
    num_episodes: int = 0
    """Number of episodes in the mean."""
    num_failed: int = 0
    fingerprint: str = ""
    determinism: str = ""
    """Report of a failed determinism check; empty if it passed."""
    interval: str = ""
    """The interval as text, with its method and note."""

    @classmethod
    def of(cls, result: EvalResult) -> CheckpointScore:
        """Return the score of a result."""
        mean, low, high = (
            value if math.isfinite(value) else None
            for value in (result.aggregates.mean, result.interval.low, result.interval.high)
        )
        return cls(
            result.status,
            result.reason,
            result.plan.first_index,
            mean,
            low,
            high,
            num_episodes=result.aggregates.count,
            num_failed=result.num_failed,
            fingerprint=result.fingerprint,
            determinism=str(result.determinism) if result.determinism.passed is False else "",
            interval=interval_text(result.interval, "{:.6g}".format),
        )

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
    """State of one checkpoint."""

    info: Checkpoint
    digest: str
    """128-bit xxh3 of its contents."""
    companions: dict[str, Path] = field(default_factory=dict)
    """The trainer's files that belong to the checkpoint, by argument of the policy's factory."""
    selection: CheckpointScore = field(default_factory=lambda: CheckpointScore(PENDING))
    """Score on the selection episodes. The best checkpoint is chosen by this score."""
    held_out: CheckpointScore | None = None
    """Score on held-out episodes, which had no part in the choice; None for checkpoints that were never a candidate."""

    @property
    def id(self) -> str:
        """Name of both folders of this checkpoint: the folder of its copy and the folder of its evaluation logs."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.info.name).lstrip(".")
        # The digest includes the name, since different names may have the same shortened form.
        return f"{name[-80:]}-{xxhash.xxh3_64_hexdigest(f'{self.info.name} {self.digest}'.encode())}"

    @property
    def modified(self) -> float:
        """Time of the last change of the checkpoint and its companions, in seconds since 1970."""
        times = [self.info.modified]
        for file in self.companions.values():
            with suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times)


@dataclass
class _State:
    schema: Literal["rl_eval watch"]
    format: Literal[3]
    task: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[Entry] = field(default_factory=list)
    best: str | None = None


@final
class Journal:
    """Journal in an output folder, with one entry per checkpoint.

    Args:
        folder: Folder of ``watch.json``.
        task: Common settings of all evaluations, and the digests of their ``code``.

    Raises:
        ConfigError: ``watch.json`` is damaged, or contains scores of another task.
    """

    def __init__(self, folder: Path, task: Mapping[str, Any]) -> None:
        self._path = folder / JOURNAL_FILE
        self._task = plain(task)
        state = _read(self._path)
        self.entries = {entry.id: entry for entry in state.checkpoints}
        self.best = state.best
        """Id of the best checkpoint."""
        if any(entry.selection.status != UNREADABLE for entry in self.curve):
            self._compare(state.task, self._task)
        elif state.task != self._task:  # The old task may be the reason why no checkpoint could be loaded.
            self.entries = {}

    @property
    def curve(self) -> list[Entry]:
        """Entries with a score, in the order of training."""
        scored = [entry for entry in self.entries.values() if entry.selection.status != PENDING]
        return sorted(scored, key=lambda entry: entry.info.order)

    @property
    def candidate(self) -> Entry | None:
        """Entry with the highest mean return among complete evaluations; None if there is none.

        If several entries have the highest mean return, it is the first of them in the order of training.
        """
        complete = [one for one in self.curve if one.selection.status == "complete" and one.selection.mean is not None]
        return max(complete, key=lambda one: one.selection.mean or 0.0, default=None)

    def knows(self, info: Checkpoint) -> bool:
        """Return whether a checkpoint with this signature has a score."""
        return any(entry.info == info for entry in self.curve)

    def check(self, task: Mapping[str, Any]) -> None:
        """Check that a task is the task of this journal, so that its points belong on the same curve.

        Raises:
            ConfigError: Settings or code have changed.
        """
        self._compare(self._task, plain(task))

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        old, new = dict(before), dict(now)
        changes = code_differences(old.pop("code", {}), new.pop("code", {}))
        changes = [f"{leaf.key}: {leaf.a!r} -> {leaf.b!r}" for leaf in differences(old, new)] + changes
        if changes:
            problem = f"{self._path} has other settings or other code (before -> now): {'; '.join(changes)}"
            fix = "Undo the change, or pass another --output."
            raise ConfigError(problem, key=changes[0].partition(":")[0], value=str(self._path), fix=fix)

    def put(self, entry: Entry) -> None:
        """Add or replace an entry."""
        self.entries[entry.id] = entry
        self.save()

    def drop(self, entry: Entry) -> None:
        """Remove an entry."""
        del self.entries[entry.id]
        self.save()

    def drop_unreadable(self) -> None:
        """Remove the entries of checkpoints that could not be loaded."""
        for entry in self.curve:
            if entry.selection.status == UNREADABLE:
                self.drop(entry)

    def save(self) -> None:
        """Write ``watch.json``."""
        state = _State("rl_eval watch", 3, self._task, list(self.entries.values()), self.best)
        write_text(self._path, json.dumps(asdict(state), indent=1, default=str) + "\n")


def claim_output(folder: Path, output: Path) -> IO[str]:
    """Lock an output folder, and return the lock.

    The lock is released when it is closed or when the process ends, even by SIGKILL. Forks of the process do not have
    the lock.

    Args:
        folder: The watched folder, resolved.
        output: The output folder, resolved; created if it does not exist.

    Raises:
        ConfigError: The output folder contains files of another program or of the trainer, or cannot be written to.
        LogOwned: Another watcher uses the output folder, in this process or in another process.
    """
    if folder.is_relative_to(output):
        problem, fix = f"--output {output} contains the trainer's files", f"Pass a folder such as {folder / 'eval'}."
        raise ConfigError(problem, key="--output", value=str(output), fix=fix)
    names = {path.name for path in output.iterdir() if not is_temporary(path.name)} if output.is_dir() else set()
    if JOURNAL_FILE in names:
        _read(output / JOURNAL_FILE)
    elif others := names - {_LOCK_FILE}:
        problem = f"the output folder {output} contains {', '.join(sorted(others)[:3])}, but no {JOURNAL_FILE}"
        fix = "Pass an empty or a new folder as --output."
        raise ConfigError(problem, key="--output", value=str(output), fix=fix)
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / _LOCK_FILE).open("a+")
    except OSError as error:
        problem = f"the output folder {output} cannot be used: {error.strerror}"
        raise ConfigError(problem, key="--output", value=str(output)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        problem, fix = f"another watcher writes to {output}", "Stop that watcher, or pass another --output."
        raise LogOwned(problem, key="--output", value=str(output), fix=fix) from error
    _locks.add(lock)
    return lock


def _read(path: Path) -> _State:
    """Read a journal; if the file is missing, return an empty journal.

    Raises:
        ConfigError: The file is damaged, or this version of the watcher did not write it.
    """
    if not path.exists():
        return _State("rl_eval watch", 3)
    try:
        state = typed(_State, parse_json(read_bytes(path, LARGE)))
    except (OSError, ValueError) as error:
        reason = f"({type(error).__name__}: {error})"
        problem = f"{path} is damaged, or another version of rl-eval watch wrote it {reason}"
        raise ConfigError(problem, key="--output", value=str(path), fix="Pass another --output.") from error
    return state

"""Store of an evaluation's committed records.

Without an evaluation log, a record is committed when it arrives. With a log, it is committed when its segment is
written. Progress and result are read from this store, so they never contain an episode that a crash could still lose.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors.redaction import redact_text
from rl_eval.records.determinism import UNFINISHED
from rl_eval.records.episode import ROW, Batch, EpisodeTable, Fault, Pardon, RuleEnd, RunReport, without_place
from rl_eval.scheduling.rules import Rule, Rules

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog, LogContents, Manifest


FLUSH_TIMEOUT_S: Final = 120.0
_TIMES: Final = ("env_steps", "reset_seconds", "step_seconds", "inference_seconds", "answer_seconds")


@final
class RecordStore:
    """Records of one evaluation."""

    def __init__(
        self, num_episodes: int, info_keys: tuple[str, ...], log: EvaluationLog | None, rules: Mapping[str, Rule]
    ) -> None:
        self.table = EpisodeTable(num_episodes, info_keys)
        self.rules = Rules(rules, self.table) if rules else None
        """Rules that are asked about committed records; None if no rule is left to ask."""
        self.ended_by: RuleEnd | None = None
        """End of the evaluation by a rule."""
        self.totals: dict[str, float] = defaultdict(float)
        """Sums over all committed reports: number of steps, and seconds by activity."""
        self.numerics: dict[str, Any] = {}
        """Numerics key of all records; empty before the first record."""
        self.notes: dict[str, None] = {}
        """Notes of the result, as keys, without duplicates."""
        self.determinism = UNFINISHED
        """Finding of the determinism check."""
        self.num_runners = 0
        """Largest number of runner processes at one time, in any session."""
        self._log = log
        self._late: list[tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]] = []
        self._mismatches: set[int] = set()
        self._unwritten: dict[str, float] = defaultdict(float)
        self._unwritten_notes: list[str] = []
        self._clock: float | None = None
        self._committing = threading.RLock()

    @property
    def durable(self) -> bool:
        """Whether there is a log."""
        return self._log is not None

    @property
    def counted(self) -> EpisodeTable:
        """Table of the committed records that count."""
        return self.table if self.ended_by is None else self.table.head(self.ended_by.after)

    # ------------------------------------------------------------------ what happens

    def read(self, manifest: Callable[[], Manifest]) -> tuple[Manifest, LogContents] | None:
        """Return the contents of the log; None if the log is new. Any thread may call this. The store does not change.

        Raises:
            LogMismatch: The log belongs to another evaluation.
            LogError: The log is damaged.
        """
        if self._log is None:
            return None
        ours = manifest()
        return ours, self._log.begin(ours)

    def begin(self, found: LogContents) -> None:
        """Add the contents that :meth:`read` returned."""
        self.table.fill(found.set_aside)
        self._commit(found)
        self.numerics = dict(found.numerics)
        self.notes = dict.fromkeys(found.notes)
        self.num_runners = found.num_runners or 0
        self._mismatches.update(found.mismatches)
        self._ask()

    def note(self, text: str) -> None:
        """Add a note, unless a note on the same finding exists. The log receives the note with the next rows."""
        text = redact_text(text)
        if without_place(text) not in map(without_place, self.notes):
            self.notes[text] = None
            self._unwritten_notes.append(text)

    def start_clock(self, now: float) -> None:
        """Start to measure the evaluation's time."""
        self._clock = now if self._clock is None else self._clock

    def add(self, report: RunReport, positions: tuple[int, ...], faults: tuple[Fault, ...]) -> None:
        """Add the times and notes of a report, its rows at these positions, and faults."""
        for note in report.notes:
            self.note(note)
        for name in _TIMES:
            self._unwritten[name] += getattr(report, name)
        chosen = slice(None) if len(positions) == len(report.rows) else list(positions)
        self._enter(report.rows[chosen], report.infos[chosen], faults)

    def pardon(self, attempts: Iterable[tuple[int, int]], reason: str) -> None:
        """Cancel the charged faults of attempts: pairs (index, attempt)."""
        self._enter(*self._nothing, pardons=tuple(Pardon(index, attempt, reason) for index, attempt in attempts))

    def add_faults(self, faults: tuple[Fault, ...]) -> None:
        """Add faults, in order of time."""
        self._enter(*self._nothing, faults)

    def add_rows(self, rows: npt.NDArray[np.void]) -> None:
        """Add rows, shape (n,), that no runner reported."""
        self._enter(rows, np.full((len(rows), len(self.table.info_keys)), np.nan))

    def add_numerics(self) -> None:
        """Write the numerics key before the first row, and start to commit it."""
        if self._log is not None:
            self._log.append(Batch(*self._nothing, numerics=self.numerics, num_runners=self.num_runners))
            self._log.hurry()

    def add_end(self) -> None:
        """Write the finding of the determinism check and the remaining notes, as the last entry of the log."""
        if self._log is not None:
            notes, self._unwritten_notes = tuple(self._unwritten_notes), []
            found, ended = self.determinism.to_dict(), self.ended_by
            self._log.append(Batch(*self._nothing, (), {}, {}, notes, found, self.num_runners, ended))

    def audit(self, rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64]) -> None:
        """Compare rows of episodes that ran again with their records, as soon as these records are committed."""
        self._late.append((rows, infos))

    def settle(self) -> bool:
        """Add newly committed rows to the table, and ask the rules; return whether all records are committed.

        Raises:
            LogFenced: Another process has taken over the log.
            LogError: The log cannot be written.
            EvalError: A rule raised an exception.
        """
        settled = self._log is None or self._log.settled
        if self._log is not None:
            self._collect(self._log)
        if self.rules is not None:
            self._ask()
        return settled and (self._log is None or self._log.settled)

    def hurry(self) -> None:
        """Start to commit all records in another thread. :meth:`settle` returns whether the commit has ended."""
        if self._log is not None:
            self._log.hurry()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Commit all records. Any thread may call this.

        Raises:
            LogFenced: Another process has taken over the log.
            LogError: The log cannot be written, or writing takes longer than ``timeout_s``.
        """
        if self._log is not None:
            self._log.flush(timeout_s)
            self._collect(self._log)

    def snapshot(self) -> EpisodeTable:
        """Return a copy of the table with the committed records. Any thread may call this."""
        with self._committing:
            return self.table.copy()

    def close(self) -> None:
        """Release the log for other processes."""
        if self._log is not None:
            self._log.close()

    def mismatches(self) -> tuple[int, ...]:
        """Return the indices of episodes that ran twice with different outcomes. Any thread may call this."""
        found = set(self._mismatches)
        for rows, infos in self._late:
            known = self.table.filled[rows["index"]]
            found.update(self.table.mismatches(rows[known], infos[known]))
        return tuple(sorted(found))

    # ------------------------------------------------------------------ inside

    @property
    def _nothing(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]:
        """Rows and infos of a batch without episodes."""
        return np.zeros(0, ROW), np.zeros((0, len(self.table.info_keys)))

    def _ask(self) -> None:
        """Ask the rules about the committed records. The log receives the first answer at once."""
        with self._committing:
            self.ended_by = self.rules.ask() if self.rules else None
        if self.ended_by is not None:
            self.rules = None
            if self._log is not None:
                self._log.append(Batch(*self._nothing, num_runners=self.num_runners, ended_by=self.ended_by))
                self._log.hurry()

    def _collect(self, log: EvaluationLog) -> None:
        with self._committing:
            for batch in log.poll():
                self._commit(batch)

    def _enter(
        self,
        rows: npt.NDArray[np.void],
        infos: npt.NDArray[np.float64],
        faults: tuple[Fault, ...] = (),
        pardons: tuple[Pardon, ...] = (),
    ) -> None:
        if self._log is not None and not (len(rows) or faults or pardons):
            return  # Times alone wait for the next row.
        now = time.monotonic()
        if self._clock is not None:
            self._unwritten["wall_seconds"] += now - self._clock
            self._clock = now
        notes = tuple(self._unwritten_notes)
        parts = rows, infos, faults, dict(self._unwritten), self.numerics, notes
        batch = Batch(*parts, num_runners=self.num_runners, pardons=pardons)
        self._unwritten.clear()
        self._unwritten_notes.clear()
        if self._log is None:
            self._commit(batch)
        else:
            self._log.append(batch)

    def _commit(self, durable: Batch | LogContents) -> None:
        with self._committing:
            self.table.fill(durable.rows, durable.infos, durable.faults, durable.pardons)
        for name, value in durable.totals.items():
            self.totals[name] += value

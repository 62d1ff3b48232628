"""Writer of an evaluation log: a thread that commits the batches of the driver.

The driver calls ``append`` and ``poll``, which do not wait for a disk. ``poll`` returns a batch only after it is in the
log. So a batch that was reported to the user cannot be lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Final, final

from rl_eval.errors import ConfigError, EvalError, LogMismatch
from rl_eval.log import ownership
from rl_eval.log.contents import LogContents, Scan, check_ours, fold, read_manifest, scan, set_aside
from rl_eval.log.manifest import (
    MANIFEST_FILE,
    Amendment,
    Manifest,
    amend,
    ask_again,
    code_differences,
    counts,
    newest_code,
    read_changes,
)
from rl_eval.log.ownership import Ownership, take_ownership
from rl_eval.log.segments import Kind, encode, name_of
from rl_eval.log.storage import Storage, is_unusable, log_error, open_storage
from rl_eval.records.episode import Batch

_logger: Final = logging.getLogger(__name__)

FLUSH_SHARE: Final = 0.05
"""Flush interval as a fraction of the session's age. So the number of segments first grows with the logarithm of the
age."""
FLUSH_SECONDS: Final = (1.0, 30.0)
"""Shortest and longest flush interval."""

RETRIES = 13
"""Number of retries of a failed write."""
RETRY_SECONDS = (0.25, 5.0)
"""First and longest retry pause. Each pause is twice the previous one. The longest pause must be shorter than the time
after which a driver counts as dead."""

_FAILURES_SAID: Final = 4
"""Number of consecutive failed writes before a warning, after about two seconds. Single failures are normal for object
stores."""

CLOSE_SECONDS: Final = 10.0
"""Longest wait of :meth:`EvaluationLog.close` for a running write."""

_ACCEPT_CODE: Final = (
    "If the change only repairs failed episodes, or cannot affect the completed ones (see rl-eval show {}), pass "
    "accept_code_change=True (--accept-code-change). Completed episodes stay, and the result has a note on the change. "
    "Otherwise restore the former code, or evaluate again with another output (--output)."
)


FOLDERS: Final = ("owners", "segments", "damaged", "amendments", "retries")
"""Folders of a log."""


def other_run(
    label: str, theirs: Manifest, ours: Manifest, amendments: Sequence[Amendment], *, accept: bool
) -> LogMismatch | None:
    """Return an error if a run may not continue a log; None if it may.

    Args:
        label: Folder of the log.
        theirs: Manifest in the log.
        ours: Manifest of the run.
        amendments: Accepted code changes of the log.
        accept: Whether to accept a change of the code.
    """
    if found := theirs.differences(ours):
        text, fix = "has another run (there -> now):", "Pass another output (--output), or delete that run (--force)."
    elif not accept and (found := code_differences(newest_code(theirs, amendments), ours.code)):
        text, fix = "was started with other code (there -> now):", _ACCEPT_CODE.format(label)
    else:
        return None
    return LogMismatch("\n  ".join([f"{label} {text}", *found]), fix)


def retry_pause(failures: int) -> float | None:
    """Return the pause after ``failures`` consecutive failed writes, in seconds; None if there is no further retry."""
    first, longest = RETRY_SECONDS
    return min(first * 2 ** (failures - 1), longest) if failures <= RETRIES else None


@dataclass
class _Flush:
    """Batches of one flush, and the files of this flush that are not written yet."""

    batches: list[Batch]
    files: list[tuple[Kind, bytes]]


@final
class EvaluationLog:
    """Log of one evaluation, open for writing.

    One thread calls ``append`` and ``poll``. Any thread may call ``flush`` and ``close``, also in a signal handler.
    """

    def __init__(self, storage: Storage, owner: Ownership, *, accept_code_change: bool = False) -> None:
        self._storage = storage
        self._owner = owner
        self._accept_code_change = accept_code_change
        self._info_keys: tuple[str, ...] = ()
        # Protects the attributes below. Reentrant, because a signal handler may flush while its thread appends.
        self._changed = threading.Condition(threading.RLock())
        self._pending: list[Batch] = []
        self._committed: list[Batch] = []
        self._num_appended = self._num_committed = self._num_urgent = 0
        self._closing = False
        self._error: EvalError | None = None
        self._trouble: OSError | None = None
        """Error of the last write, if it failed."""
        self._retry_at = 0.0
        # Only for the writer thread.
        self._flush: _Flush | None = None
        self._failures = 0
        self._segments = 0
        """Number of committed segments."""
        self._opened = self._flushed_at = self._beaten_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="rl_eval-log", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ open and continue

    @classmethod
    def open(cls, place: str | os.PathLike[str], *, accept_code_change: bool = False) -> EvaluationLog:
        """Claim a run folder, which may be empty or absent.

        Args:
            place: Folder or URI of the run.
            accept_code_change: Whether to continue a log that was written with other code. An amendment then records
                the change.

        Raises:
            ConfigError: The folder or URI cannot be used.
            LogOwned: Another driver is writing the log.
            LogError: The log cannot be written now.
        """
        storage = open_storage(place)
        try:
            check_ours(storage)
            owner = take_ownership(storage)
            for folder in ("", *FOLDERS):
                storage.sweep(folder)
        except OSError as error:
            if is_unusable(error):
                problem, fix = f"output {storage.label} cannot be used: {error}", "Pass a writable folder or URI."
                raise ConfigError(problem, key="output", value=storage.label, fix=fix) from error
            raise log_error(storage, f"cannot be written: {error}") from error
        return cls(storage, owner, accept_code_change=accept_code_change)

    def begin(self, manifest: Manifest, again: Collection[int] = ()) -> LogContents:
        """Start the log, or continue an existing one.

        Damaged segments are set aside. The returned contents name these segments, but do not contain their episodes.

        Args:
            manifest: Manifest of this run.
            again: Failed episodes that will run again. A note on changed code does not count them.

        Raises:
            LogMismatch: The existing log has another plan, policy, environment or weights, or other code.
            LogError: The existing log cannot be continued, or the folder cannot be read or written.
            LogFenced: Another driver took the log over.
        """
        self._info_keys = manifest.info_keys
        try:
            return self._begin(manifest, again)
        except OSError as error:
            raise log_error(self._storage, f"cannot be read or written: {error}") from error

    def _begin(self, ours: Manifest, again: Collection[int]) -> LogContents:
        self._owner.check()
        theirs = read_manifest(self._storage)
        if theirs is None:
            self._storage.write(MANIFEST_FILE, ours.to_json().encode())
            return fold(ours, Scan(), self._storage.label)
        amendments, retries = read_changes(self._storage)
        if other := other_run(self._storage.label, theirs, ours, amendments, accept=self._accept_code_change):
            raise other
        found = scan(self._storage)
        found.set_aside[:] = set_aside(self._storage, found)
        contents = fold(theirs, found, self._storage.label, amendments, retries)
        # Without this permission, other code is another run, which is an error above.
        if not (self._accept_code_change and code_differences(newest_code(theirs, amendments), ours.code)):
            return contents
        kept = counts(contents.rows, 0, dict.fromkeys(again, 1)).sum()
        amendments.append(amend(self._storage, theirs, amendments, ours, int(kept)))
        return fold(theirs, found, self._storage.label, amendments, retries)

    def retry(self, manifest: Manifest, indices: Collection[int]) -> None:
        """Set the failed records of some episodes aside, so that a process that continues the log runs them again.

        Raises:
            LogMismatch, LogError, LogFenced: For the same reasons as in :meth:`begin`. Then no record is set aside.
            LogError: The request cannot be written.
        """
        self.begin(manifest, indices)
        try:
            ask_again(self._storage, self._owner.epoch, indices, read_changes(self._storage)[1])
        except OSError as error:
            raise log_error(self._storage, f"cannot be written: {error}") from error

    # ------------------------------------------------------------------ the driver's side

    def append(self, batch: Batch) -> None:
        """Add a batch to the batches of the next flush."""
        with self._changed:
            self._pending.append(batch)
            self._num_appended += 1
            if len(self._pending) == 1:
                self._changed.notify_all()

    def poll(self) -> list[Batch]:
        """Return the batches that were committed since the last call, in the order of appending.

        Raises:
            LogFenced: Another driver took the log over; nothing more is written.
            LogError: The log cannot be written.
        """
        with self._changed:
            committed, self._committed = self._committed, []
            if not committed:
                self._raise_error()
        return committed

    def hurry(self) -> None:
        """Request an immediate commit of all appended batches, and return without waiting for the commit."""
        with self._changed:
            self._num_urgent = self._num_appended
            self._retry_at = 0.0
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether all appended batches are committed."""
        with self._changed:
            return self._num_committed == self._num_appended

    def flush(self, timeout_s: float) -> None:
        """Commit all appended batches, and wait until they are in the log.

        Raises:
            LogFenced: Another driver took the log over; nothing more is written.
            LogError: The log cannot be written, was closed, or writing takes longer than ``timeout_s``.
        """
        give_up = time.monotonic() + timeout_s
        with self._changed:
            self.hurry()
            wanted = self._num_urgent
            while self._num_committed < wanted:
                self._raise_error()
                left = give_up - time.monotonic()
                if left <= 0 or self._closing:
                    reason = "the log was closed" if self._closing else "a write is still running"
                    if self._trouble:
                        reason = f"the last write failed: {self._trouble}"
                    raise log_error(
                        self._storage,
                        f"was not written within {timeout_s:g} s: {reason}. "
                        f"{wanted - self._num_committed} batches are not in the log",
                        fix="Continue the run. The episodes of these batches run again.",
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """Stop writing, and release the log for the next driver. Batches that are not committed are dropped."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            # If the release fails, the next driver finds the claim of a dead process.
            with suppress(OSError, EvalError):
                self._owner.release(self._segments)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise copy(self._error) from self._error

    # ------------------------------------------------------------------ the writer's side

    def _serve(self) -> None:
        while self._wait():
            try:
                self._work()
            except OSError as error:
                self._retry_later(error)
            except EvalError as error:
                self._give_up(error)
            except Exception as error:  # The driver waits for this thread and must get its error.
                self._give_up(log_error(self._storage, f"cannot be written: {type(error).__name__}: {error}"))
            if self._error is not None:
                return

    def _wait(self) -> bool:
        """Wait until a task is due; return False if the log is closed."""
        with self._changed:
            while not self._closing and (rest := self._due() - time.monotonic()) > 0:
                self._changed.wait(rest)
            return not self._closing

    def _due(self) -> float:
        return max(self._retry_at, min(self._flush_due(), self._beaten_at + ownership.BEAT_SECONDS))

    def _flush_due(self) -> float:
        if not self._pending and not self._flush:
            return float("inf")
        if self._flush or self._num_urgent > self._num_committed:
            return 0.0
        shortest, longest = FLUSH_SECONDS
        age = self._flushed_at - self._opened
        return self._flushed_at + min(max(FLUSH_SHARE * age, shortest), longest)

    def _work(self) -> None:
        now = time.monotonic()
        if self._beaten_at + ownership.BEAT_SECONDS <= now:
            self._owner.beat(self._segments)
            self._beaten_at = now
        if self._flush_due() <= now:
            self._commit()
            self._flushed_at = now
        self._failures = 0
        self._trouble = None

    def _commit(self) -> None:
        if self._flush is None:
            with self._changed:
                batches, self._pending = self._pending, []
            self._flush = _Flush(batches, encode(batches, self._info_keys, self._owner.session))
        while self._flush.files:
            kind, data = self._flush.files[0]
            self._owner.check()
            name = name_of(data, self._owner.epoch, self._segments + 1, kind)
            self._storage.write(f"segments/{name}", data)
            self._segments += 1
            del self._flush.files[0]
        with self._changed:
            self._committed += self._flush.batches
            self._num_committed += len(self._flush.batches)
            self._flush = None
            self._changed.notify_all()

    def _retry_later(self, error: OSError) -> None:
        self._failures += 1
        pause = retry_pause(self._failures)
        if pause is None:
            self._give_up(log_error(self._storage, f"cannot be written, after {RETRIES} retries: {error}"))
            return
        if self._failures == _FAILURES_SAID:
            _logger.warning("%s cannot be written (%s). rl_eval retries", self._storage.label, error)
        with self._changed:
            self._trouble = error
            self._retry_at = time.monotonic() + pause

    def _give_up(self, error: EvalError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

"""Opening of an evaluation: its weights are taken, and its log is read, before any episode runs."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Final, final

from rl_eval.execution.jobs import Job, WeightsSync
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import Member
from rl_eval.execution.session import EpisodeSession
from rl_eval.results.provenance import manifest_of
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import HeldWeights

if TYPE_CHECKING:
    from rl_eval.log import LogContents, Manifest

__all__ = ["Opening"]

_LAST_READ_S: Final = 5.0
"""For a read that is under way when the evaluation fails: its folder must not be given up while it is read."""


@final
class Opening(Job):
    """First job of an evaluation; the session follows.

    Args:
        outcome: What the evaluation writes into.
        sync: The job, posted before this one, that sends the weights to evaluate; if it fails, so does this one.
        held: Gets the weights that are evaluated.
    """

    exclusive = True
    waits_for_disk = True

    def __init__(self, outcome: EvalOutcome, sync: WeightsSync | None = None, held: HeldWeights | None = None) -> None:
        self._outcome = outcome
        self._sync = sync
        self._held = held
        self._reading: Future[tuple[Manifest, LogContents] | None] = Future()
        self._next: list[Job] | None = None
        self._taken = False

    def start(self, now: float) -> None:
        """See :class:`Job`."""
        self._taken = self._outcome.take()
        if not self._taken:
            return
        if self._sync is not None and (error := self._sync.future.exception()) is not None:
            self._outcome.fail(error)  # Nothing is being read yet that could be waited for.
            return
        self._outcome.take_weights(self.pool)
        if self._held is not None:
            self._held.snapshot = self._outcome.weights
        if self._outcome.store.durable:
            Thread(target=self._read, name="rl_eval read log", daemon=True).start()
        else:
            self._next = [EpisodeSession(self._outcome)]

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """See :class:`Job`."""
        self._outcome.lost(member, crash_report)
        return False

    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self.done or not self._reading.done():
            return
        try:
            if found := self._reading.result():
                self._outcome.take_log(*found)
        except Exception as error:
            self._outcome.fail(error)
        else:
            self._next = [EpisodeSession(self._outcome)]

    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        if self._taken and self._outcome.store.durable and not self.done:
            with suppress(Exception):
                self._reading.result(_LAST_READ_S)
        if self._taken or self._outcome.take():
            self._outcome.fail(error)

    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self._next is not None or self._outcome.done

    def successors(self) -> list[Job]:
        """See :class:`Job`."""
        return self._next or []

    def _read(self) -> None:
        outcome = self._outcome
        try:
            read = outcome.store.read(lambda: manifest_of(outcome.settings, outcome.plan, outcome.weights))
        except BaseException as error:
            self._reading.set_exception(error)
        else:
            self._reading.set_result(read)

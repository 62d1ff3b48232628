"""Opening of an evaluation: the job that takes the weights and reads the log before the episodes run."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from rl_eval.execution.jobs import Job, WeightsSync
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import Member
from rl_eval.execution.session import EpisodeSession
from rl_eval.results.provenance import manifest_of
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import HeldWeights

if TYPE_CHECKING:
    from rl_eval.log import LogContents, Manifest


_LAST_READ_S: Final = 5.0
"""Time limit of a running read when the evaluation fails, in seconds. The folder must not be released while it is
read."""


@final
class Opening(Job):
    """First job of an evaluation; the session follows.

    Args:
        outcome: Outcome of the evaluation.
        sync: Job that sends the weights, and was posted before this job. If it fails, this job fails, too.
        held: Object that receives the evaluated weights.
    """

    exclusive = True
    waits_for_disk = True

    def __init__(self, outcome: EvalOutcome, sync: WeightsSync | None = None, held: HeldWeights | None = None) -> None:
        self._outcome = outcome
        self._sync = sync
        self._held = held
        self._reading: Future[tuple[Manifest, LogContents] | None] = Future()
        self._taken = False

    @override
    def start(self, now: float) -> None:
        self._taken = self._outcome.take()
        if not self._taken:
            return
        if self._sync is not None and (error := self._sync.future.exception()) is not None:
            self._outcome.fail(error)  # The read has not started.
            return
        self._outcome.take_weights(self.pool)
        if self._held is not None:
            self._held.snapshot = self._outcome.weights
        if self._outcome.store.durable:
            Thread(target=self._read, name="rl_eval read log", daemon=True).start()
        else:
            self._outcome.state = "running"

    @override
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        self._outcome.lost(member, crash_report)
        return False

    @override
    def tick(self, now: float) -> None:
        if self.done or not self._reading.done():
            return
        try:
            if found := self._reading.result():
                self._outcome.take_log(*found)
        except Exception as error:
            self._outcome.fail(error)
        else:
            self._outcome.state = "running"

    @override
    def fail(self, error: BaseException) -> None:
        if self._taken and self._outcome.store.durable and not self.done:
            with suppress(Exception):
                self._reading.result(_LAST_READ_S)
        if self._taken or self._outcome.take():
            self._outcome.fail(error)

    @property
    @override
    def done(self) -> bool:
        return self._outcome.state != "waiting"

    @override
    def successors(self) -> list[Job]:
        return [EpisodeSession(self._outcome)] if self._outcome.state == "running" else []

    def _read(self) -> None:
        outcome = self._outcome
        try:
            read = outcome.store.read(
                lambda: manifest_of(outcome.settings, outcome.plan, outcome.weights, outcome.subject)
            )
        except BaseException as error:
            self._reading.set_exception(error)
        else:
            self._reading.set_result(read)

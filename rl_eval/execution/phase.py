"""Phase of an evaluation: a job in which runners play episodes, what may end it early, and the commit that follows."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from functools import partial
from typing import Final, final

from rl_eval.backends.requests import Run
from rl_eval.errors import EvalError
from rl_eval.execution.jobs import Job
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.record_store import FLUSH_TIMEOUT_S
from rl_eval.execution.runner_pool import Member
from rl_eval.records.determinism import Determinism
from rl_eval.supervision.flight_recorder import CrashReport

__all__ = ["CALLS_IN_FLIGHT", "Commit", "Phase"]

CALLS_IN_FLIGHT: Final = 2
"""Per runner: while one runs, the next waits in its mailbox, so no lane waits for the control loop."""


class Phase(Job):
    """Job that has runners play episodes.

    Args:
        outcome: What the evaluation writes into.
    """

    exclusive = True

    def __init__(self, outcome: EvalOutcome) -> None:
        self._outcome = outcome
        self._reason = ""
        """Why it was ended early."""

    @abc.abstractmethod
    def _begin(self, now: float) -> None:
        """Give the runners their first episodes."""

    @abc.abstractmethod
    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Go on without a member; return whether an episode is to blame."""

    @abc.abstractmethod
    def _watch(self, now: float) -> None:
        """See what time brings about."""

    @abc.abstractmethod
    def _abandon(self, now: float) -> None:
        """Have everything dropped: episodes that live on would report into the next evaluation."""

    @property
    @abc.abstractmethod
    def _complete(self) -> bool:
        """Whether nothing is left to do."""

    @final
    def start(self, now: float) -> None:
        """See :class:`Job`."""
        self._reason = self._outcome.cancelled
        if not self._reason:
            self._begin(now)

    @final
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """See :class:`Job`."""
        if self._over:
            return False
        member.condemned = True  # Whatever follows must not be given to it.
        self._outcome.lost(member, crash_report)
        return self._lost(member, crash_report, now)

    @final
    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self.done or not self.started:
            return
        try:
            self._outcome.store.settle()
        except EvalError as error:
            self.fail(error)
            return
        if reason := self._outcome.cancelled or self._outcome.failure:
            self._abandon(now)
            self._reason = reason
        elif self.pool.hopeless:
            self._reason = f"no runner is left, the last was lost because: {self.pool.last_loss}"
        else:
            self._watch(now)

    @final
    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        if not self.done:
            self._outcome.fail(error)
            if self.started:
                self._abandon(time.monotonic())

    @final
    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self._over or (self.started and self._complete)

    @property
    def _over(self) -> bool:
        """Whether nothing counts any more."""
        return bool(self._reason) or self._outcome.done

    @final
    def _abort(self, runner: int, now: float) -> None:
        """Tell a runner to drop everything."""
        if member := self.pool.members.get(runner):
            self.pool.call(member, Run(budget_s=0.0, abort=True), tag=self.tag, now=now)

    @final
    def _end(self, determinism: Determinism, now: float) -> list[Job]:
        """Return what ends the evaluation."""
        self._outcome.finish(self._reason, determinism, now)
        return [Commit(self._outcome, partial(self._outcome.conclude, self._reason))]


@final
class Commit(Job):
    """Waits until everything that an evaluation has recorded is committed.

    Args:
        outcome: What the evaluation writes into.
        then: Called when it is; returns what follows.
    """

    exclusive = True
    waits_for_disk = True

    def __init__(self, outcome: EvalOutcome, then: Callable[[], list[Job]]) -> None:
        self._outcome = outcome
        self._then = then
        self._next: list[Job] | None = None
        self._ends = 0.0

    def start(self, now: float) -> None:
        """See :class:`Job`."""
        self._outcome.store.hurry()
        self._ends = now + FLUSH_TIMEOUT_S
        self.tick(now)

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """See :class:`Job`."""
        self._outcome.lost(member, crash_report)
        return False

    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self.done or not self.started:
            return
        store = self._outcome.store
        try:
            settled = store.is_settled()
            if not settled and now > self._ends:
                store.flush(0.0)  # Raises, and says why.
        except EvalError as error:
            self.fail(error)
            return
        if settled:
            self._next = self._then()

    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        self._outcome.fail(error)

    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self._next is not None or self._outcome.done

    def successors(self, now: float) -> list[Job]:
        """See :class:`Job`."""
        return self._next or []

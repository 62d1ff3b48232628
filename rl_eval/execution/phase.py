"""Phase of an evaluation: a job in which runners play episodes, and whose records are committed at its end."""

from __future__ import annotations

import abc
import time
from typing import Final, final

from rl_eval.backends.requests import Run
from rl_eval.errors import EvalError
from rl_eval.execution.jobs import Job
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.record_store import FLUSH_TIMEOUT_S
from rl_eval.execution.runner_pool import Member
from rl_eval.supervision.flight_recorder import CrashReport

__all__ = ["CALLS_IN_FLIGHT", "Phase"]

CALLS_IN_FLIGHT: Final = 2
"""Per runner: while one runs, the next waits in its mailbox, so no lane waits for the control loop."""


class Phase(Job):
    """Job that has runners play episodes; done when all that it has recorded is committed."""

    exclusive = True

    def __init__(self, outcome: EvalOutcome) -> None:
        self._outcome = outcome
        self._reason = ""
        """Why it was ended early."""
        self._next: Job | None = None
        """Job that follows as soon as everything is committed."""
        self._commit_ends = 0.0
        """When the last commit must be over; 0 before it has begun."""
        self._successors: list[Job] | None = None

    @abc.abstractmethod
    def _begin(self, now: float) -> None:
        """Give the runners their first episodes."""

    @abc.abstractmethod
    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Go on without a member; return whether an episode is to blame."""

    @abc.abstractmethod
    def _watch(self, now: float) -> None:
        """Check timeouts, and the size of the pool."""

    @abc.abstractmethod
    def _abandon(self, now: float) -> None:
        """Abort all live episodes, so that they cannot report into the next evaluation."""

    @property
    @abc.abstractmethod
    def _complete(self) -> bool:
        """Whether nothing is left to run."""

    @abc.abstractmethod
    def _ended(self) -> None:
        """Record what came of it."""

    @final
    def start(self, now: float) -> None:
        """See :class:`Job`."""
        self._reason = self._outcome.cancelled
        if not self._reason:
            self._begin(now)
        self.tick(now)

    @final
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """See :class:`Job`."""
        if self.done:
            return False
        member.terminated = True  # Whatever follows must not be given to it.
        self._outcome.lost(member, crash_report)
        return not self._over and self._lost(member, crash_report, now)

    @final
    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self.done or not self.started:
            return
        try:
            self._outcome.store.settle()
            if not (self._over or self._complete):
                self._look(now)
            if self._over or self._complete:
                self._commit(now)
        except EvalError as error:
            self.fail(error)

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
        return self._successors is not None or self._outcome.done

    @final
    def successors(self) -> list[Job]:
        """See :class:`Job`."""
        return self._successors or []

    @final
    @property
    def _over(self) -> bool:
        """Whether nothing counts any more."""
        return bool(self._reason) or self._outcome.done

    @final
    def _look(self, now: float) -> None:
        """End early if there is a reason to."""
        if reason := self._outcome.cancelled or self._outcome.failure:
            self._abandon(now)
            self._reason = reason
        elif self.pool.hopeless:
            self._reason = f"no runner is left, the last was lost because: {self.pool.last_loss}"
        else:
            self._watch(now)

    @final
    def _commit(self, now: float) -> None:
        outcome, store = self._outcome, self._outcome.store
        if not self._commit_ends:
            self._commit_ends, self.waits_for_disk = now + FLUSH_TIMEOUT_S, True
            self._ended()
            self._next = None if self._reason else outcome.next_job()
            if self._next is None:
                outcome.finish(self._reason, now)
            store.hurry()
        if store.is_settled():
            self._successors = [self._next] if self._next is not None else outcome.conclude(self._reason)
        elif now > self._commit_ends:
            store.flush(0.0)  # Raises, and says why.

    @final
    def _abort(self, runner: int, now: float) -> None:
        """Send a runner the request to drop everything."""
        if member := self.pool.members.get(runner):
            self.pool.call(member, Run(budget_s=0.0, abort=True), tag=self.tag, now=now)

"""Outcome of an evaluation: its records, its runners, and the handle of its caller.

The jobs of an evaluation write into the outcome, one after the other. At the end, only the result in the handle is
kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError
from rl_eval.execution.handle import EvalHandle, EvalProgress, EventRing
from rl_eval.execution.jobs import Job
from rl_eval.execution.record_store import RecordStore
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.policies.subject import Subject
from rl_eval.records.determinism import UNFINISHED
from rl_eval.records.episode import EpisodeTable, Lease, RunReport, set_aside_rows
from rl_eval.results.metrics import Timing
from rl_eval.results.result import EvalResult, decide_status
from rl_eval.runners import Layout
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import WeightsSnapshot

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog, LogContents, Manifest


_LAST_FLUSH_S: Final = 5.0
"""Time limit of the last flush of a failed evaluation, in seconds. Its group may have to stop within ten seconds."""


class Aspect:
    """Base class of an aspect of an evaluation. By default, a hook does nothing.

    The control loop's thread calls the hooks; any thread may call :meth:`describe`. See
    :mod:`rl_eval.execution.aspects`.
    """

    def __init__(self, outcome: EvalOutcome) -> None:
        self.outcome = outcome

    def continued(self, ours: Manifest, found: LogContents) -> None:
        """Handle the contents of a continued log."""

    def begin(self, pool: RunnerPool) -> None:
        """Handle the start of the session: weights and log are known, and no episode of this session has started."""

    def joined(self, pool: RunnerPool) -> None:
        """Handle a runner that joined."""

    def granted(self, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """Return the leases that a runner gets; an aspect may change them."""
        return leases

    def reported(self, member: Member, report: RunReport) -> None:
        """Check a report before its rows are used.

        Raises:
            EvalError: The runner must not take part.
        """

    def counted(self, report: RunReport, indices: set[int]) -> None:
        """Handle a report. Its rows with these indices have just been recorded."""

    def lost(self, member: Member, crash_report: CrashReport | None) -> None:
        """Handle a lost runner."""

    def follow_up(self) -> Job | None:
        """Return a job that uses the runners after the last episode; None if there is no such job."""
        return None

    def finish(self) -> None:
        """Add the last notes, after all runners' work and before the last commit."""

    def describe(self, fields: dict[str, Any]) -> None:
        """Add fields to the result."""


class Committing(NamedTuple):
    """State of an evaluation: no episode runs, and the last records are being committed."""

    reason: str
    """Reason for an early end; empty if there is none."""
    following: Job | None
    """Job that runs after the commit; None if the evaluation ends."""
    deadline: float


@final
class EvalOutcome:
    """State and result of one evaluation.

    Args:
        settings: Settings of the evaluation.
        layout: Layout of the group's runners.
        plan: Episodes of the evaluation.
        log: Open evaluation log; None without a log.
        follow_up: Function that takes the result, and returns the jobs that follow.
        aspects: Functions that build the aspects of the evaluation.
        subject: Policies of the evaluation; None for those that the settings name.
    """

    def __init__(
        self,
        settings: EvalSettings,
        layout: Layout,
        plan: EpisodePlan,
        log: EvaluationLog | None = None,
        follow_up: Callable[[EvalResult], list[Job]] | None = None,
        aspects: Sequence[Callable[[EvalOutcome], Aspect]] = (),
        subject: Subject | None = None,
    ) -> None:
        self.settings, self.layout, self.plan = settings, layout, plan
        self.subject = subject or Subject(settings.policy)
        self.store = RecordStore(len(plan), layout.runner.columns(settings), log, settings.rules())
        self.weights: WeightsSnapshot | None = None
        self.ring = EventRing()
        self.artifacts: dict[int, dict[str, Any]] = {}
        """Values that observers returned, by index."""
        self.exclusions: list[str] = []
        """Excluded runners, with reasons."""
        self.refusals: list[str] = []
        """Rejected runners, with reasons."""
        self.withdrawals: list[str] = []
        """Reasons why records were set aside."""
        self.suspect = ""
        """Reason why a policy cannot run episodes again for a check; empty if there is none."""
        self.asked = 1
        """Largest number of runners that were expected at one time."""
        self.started = 0.0
        """Time at which the first runner took part."""
        self.activity = ""
        """Description of the work after the last episode."""
        self.failure = ""
        """Reason for an early end that is not a cancellation."""
        self.cancelled = ""
        """Reason for a cancellation after the start."""
        self.state: Literal["waiting", "running", "done"] | Committing = "waiting"
        """State of the evaluation: it waits for the jobs before it or for its log, runners work, the last records are
        being committed, or it has a result or an error."""
        self._taken = threading.Lock()
        """Lock that is held after the start of the evaluation, or after a cancellation before the start."""
        self._follow_up = follow_up
        self._pool: RunnerPool | None = None
        self._ended = 0.0
        self._earlier = (0, 0)
        """Number of episodes, and number of steps, of earlier sessions of the log."""
        self._aspects = [aspect(self) for aspect in aspects]
        self._granted = self._overridden(Aspect.granted)
        self._reported = self._overridden(Aspect.reported)
        self._counted = self._overridden(Aspect.counted)
        self._undone = list(self._aspects)
        """Aspects whose follow-up job was not requested yet."""
        self.handle = EvalHandle(
            self.progress, self._request_cancel, self.store.flush, snapshot=self._snapshot, moves=self.ring.moves
        )

    # ------------------------------------------------------------------ what happens

    def take(self) -> bool:
        """Claim the right to start the evaluation, or to cancel it before its start.

        Return whether the claim succeeded.
        """
        return self._taken.acquire(blocking=False)

    def take_weights(self, pool: RunnerPool) -> None:
        """Use the present weights of the runners, when the evaluation starts."""
        self._pool = pool
        self.asked = max(1, pool.expected())
        self.weights = pool.weights.sent and pool.weights.sent.snapshot
        self.handle.weights_version = self.weights_version

    def take_log(self, ours: Manifest, found: LogContents) -> None:
        """Continue with the records of earlier sessions."""
        self.store.begin(found)
        self._earlier = int(self.store.table.filled.sum()), int(self.store.totals["env_steps"])
        for aspect in self._aspects:
            aspect.continued(ours, found)

    def begin(self, pool: RunnerPool) -> None:
        """Start with the episodes that have no record."""
        for aspect in self._aspects:
            aspect.begin(pool)

    def granted(self, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """Return the leases that a runner gets; an aspect may change them."""
        for change in self._granted:
            leases = change(leases)
        return leases

    def joined(self, pool: RunnerPool, now: float) -> None:
        """Handle a runner that joined."""
        self.started = self.started or now
        self.store.start_clock(now)
        if self.settings.runners.num_runners:
            self.store.num_runners = max(self.store.num_runners, len(pool.ready()))
        for aspect in self._aspects:
            aspect.joined(pool)

    def lost(self, member: Member, crash_report: CrashReport | None) -> None:
        """Handle a lost runner."""
        for aspect in self._aspects:
            aspect.lost(member, crash_report)

    def check_report(self, member: Member, report: RunReport) -> None:
        """Check that a report belongs to this evaluation, and that its rows are comparable.

        Raises:
            NumericsMismatch: The runner computes floats differently from the other runners.
            EvalError: The runner used other weights.
        """
        version = self.weights_version
        if report.weights_version != version:
            problem = f"runner {member.position} used weights version {report.weights_version} instead of {version}"
            raise EvalError(problem, key="weights_version", value=report.weights_version, runner=member.position)
        for check in self._reported:
            check(member, report)

    def counted(self, report: RunReport, indices: set[int]) -> None:
        """Store the artifacts of recorded rows."""
        for name, kept in report.artifacts:
            for index in indices & kept.keys():
                self.artifacts.setdefault(index, {})[name] = kept[index]
        for handle in self._counted:
            handle(report, indices)

    def set_aside(self, indices: Sequence[int], why: str) -> None:
        """Set the records of episodes aside: the log keeps them, but they do not count. Add the reason as a note."""
        self.store.add_rows(set_aside_rows(indices, self.plan.seeds))
        self.store.note(why)
        # Rules have seen these records. When the run is continued, they are asked anew.
        self.store.rules = self.store.ended_by = None
        self.withdrawals.append(why)
        self.suspect = "the policy changed during the evaluation"
        for index in indices:
            self.artifacts.pop(index, None)

    @property
    def weights_version(self) -> int:
        """Version of the evaluated weights."""
        return 0 if self.weights is None else self.weights.version

    # ------------------------------------------------------------------ the end

    def next_job(self) -> Job | None:
        """Return the next follow-up job of an aspect; None after the last."""
        while self._undone:
            if (job := self._undone.pop(0).follow_up()) is not None:
                return job
        return None

    def finish(self, reason: str, now: float) -> None:
        """Add the last notes, after all runners' work and before the last commit."""
        self._ended = now
        for aspect in self._aspects:
            aspect.finish()
        if not reason:
            self.store.add_end()

    def conclude(self, reason: str) -> list[Job]:
        """Set the result of the handle, and return the jobs that follow."""
        try:
            result = self._result(reason, self.store.table)
        except Exception as error:
            self._close()
            self._end_with(error)
            return []
        self._close()
        self._end_with(result)
        return [] if self._follow_up is None else self._follow_up(result)

    def fail(self, error: BaseException) -> None:
        """Set the error of the handle. Finished episodes stay in the log."""
        if self.state == "done":
            return
        with suppress(EvalError):
            self.store.flush(_LAST_FLUSH_S)
        self._close()
        self._end_with(error)

    # ------------------------------------------------------------------ how far it is

    def progress(self) -> EvalProgress:
        """Return the progress. Any thread may call this."""
        away = self._pool and self._pool.unavailable
        return EvalProgress.of_table(
            self.store.table,
            env_steps=int(self.store.totals.get("env_steps", 0)) - self._earlier[1],
            seconds=(self._ended or time.monotonic()) - self.started if self.started else 0.0,
            num_runners=len(self._pool.ready()) if self._pool else 0,
            num_earlier=self._earlier[0],
            waiting=Timing.of_totals(self.store.totals, self.store.num_runners).waiting,
            phase=self.activity or ("waiting to start" if self._pool is None else self._pool.phase),
            unavailable=away.problem if away else "",
        )

    # ------------------------------------------------------------------ inside

    def _overridden(self, hook: Callable[..., Any]) -> list[Callable[..., Any]]:
        """Return the methods of the aspects that override a hook, which is called in every turn."""
        name = hook.__name__
        return [getattr(aspect, name) for aspect in self._aspects if getattr(type(aspect), name) is not hook]

    def _request_cancel(self, reason: str, unless_started: bool) -> None:
        if self.take():
            self._withdraw(reason)
        elif not unless_started:
            self.cancelled = reason

    def _withdraw(self, reason: str) -> None:
        """End the evaluation before its start.

        This happens in the calling thread, because many cancellations could block the loop's thread.
        """
        try:
            for job in self.conclude(reason):
                job.fail(EvalError(reason))
        except BaseException as error:  # Ctrl-C, too: no other thread can end it now.
            if self.state != "done":
                self._end_with(EvalError(f"{reason}; interrupted by {type(error).__name__}"))
            raise

    def _close(self) -> None:
        """Release the log, and the references of the handle to this evaluation."""
        self.store.close()
        self.handle.release(self.progress())
        self.weights = None

    def _end_with(self, result: EvalResult | BaseException) -> None:
        """Set the handle's result or error, and then the state.

        If an interrupt comes before the state, another thread can still end the evaluation.
        """
        if isinstance(result, BaseException):
            self.handle.set_error(result)
        else:
            self.handle.set_result(result)
        self.state = "done"

    def _snapshot(self, reason: str) -> EvalResult:
        """Return a result of the finished episodes; may be called from any thread, while episodes run or hang."""
        return self._result(reason, self.store.snapshot())

    def _result(self, reason: str, table: EpisodeTable) -> EvalResult:
        store = self.store
        why = reason or "; ".join(self.withdrawals)
        status, text = decide_status(table, self.settings.fault_tolerance.max_failed_episodes, why, store.ended_by)
        fields: dict[str, Any] = {
            # The reason of an early end comes first.
            "reason": self.failure if reason and reason == self.failure else text,
            "provenance": {"runners_refused": self.refusals, "runners_excluded": self.exclusions},
            "determinism": UNFINISHED,
        }
        for aspect in self._aspects:
            aspect.describe(fields)
        fields["provenance"]["notes"] = [*store.notes]
        return EvalResult(
            table=table,
            plan=self.plan,
            status=status,
            timing=Timing.of_totals(store.totals, store.num_runners),
            return_bounds=self.settings.evaluation.return_bounds,
            condition_target=self.settings.evaluation.condition_target,
            audit_mismatches=store.mismatches(),
            artifacts=dict(self.artifacts),
            ended_by=store.ended_by,
            **fields,
        )

"""Evaluation under way: reports become records, and the schedule's commands become calls.

It waits for no disk: while a log is read or written it is in a state that a tick ends.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from typing_extensions import assert_never

from rl_eval.backends.requests import Run
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError, NumericsMismatch
from rl_eval.errors import RunnerLost as RunnerLostError
from rl_eval.execution.determinism_phase import DeterminismPhase
from rl_eval.execution.handle import EvalHandle, EvalProgress
from rl_eval.execution.jobs import Job, WeightsSync
from rl_eval.execution.record_store import FLUSH_TIMEOUT_S, RecordStore
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeTable, Fault, Lease, Outcome, RunReport, charged_attempts, failed_row
from rl_eval.redaction import redact_text
from rl_eval.results.provenance import manifest_of, provenance
from rl_eval.results.result import EvalResult, Timing, decide_status
from rl_eval.scheduling.attribution import attribute_loss
from rl_eval.scheduling.events import (
    Abort,
    Audit,
    Cancelled,
    Charge,
    Command,
    Exclude,
    GiveUp,
    Grant,
    PoolSized,
    Reclaim,
    Record,
    RunnerJoined,
    RunnerLost,
    RunnerReported,
)
from rl_eval.scheduling.fail_fast import FailFast
from rl_eval.scheduling.numerics_agreement import NumericsAgreement
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import HeldWeights, WeightsSnapshot

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog, LogContents, Manifest

__all__ = ["Evaluation"]

_CALLS_IN_FLIGHT = 2
"""Per runner: while one runs, the next waits in its mailbox, so no lane waits for the driver."""

_LAST_FLUSH_S: Final = 5.0
"""For a last flush of an evaluation that has failed: its group may have to stop in ten."""

_LOSSES_TOLD = 100
"""In the provenance, in words."""

_PATIENCE_S: Final = 10.0
"""How long episodes that failed wait for runners that have not come up yet, before they run where they failed."""


@final
class Evaluation(Job):
    """Runs the episodes of a plan on a pool.

    Args:
        tag: Mark of its calls.
        settings: What to evaluate.
        plan: Which episodes.
        log: Where their records are kept, if anywhere besides the result.
        sync: The job, posted before this one, that sends the weights to evaluate; if it fails, so does this one.
        follow_up: Given the result, what else is done before any other job.
        held: Gets the weights that are evaluated, when it starts.
    """

    exclusive = True

    def __init__(
        self,
        tag: int,
        settings: EvalSettings,
        plan: EpisodePlan,
        log: EvaluationLog | None = None,
        sync: WeightsSync | None = None,
        follow_up: Callable[[EvalResult], list[Job]] | None = None,
        held: HeldWeights | None = None,
    ) -> None:
        super().__init__(tag)
        self._held = held
        self._sync = sync
        self._follow_up = follow_up
        self._settings = settings
        self._plan = plan
        self._weights: WeightsSnapshot | None = None
        self._artifacts: dict[int, dict[str, Any]] = {}
        self._store = RecordStore(len(plan), settings.runners.runner_class.columns(settings), log)
        self._cancelled = self._cancelled_while_waiting = ""
        self.handle = EvalHandle(self.progress, self._request_cancel, self._store.flush, snapshot=self._snapshot)
        self._pool: RunnerPool | None = None
        self._schedule = Schedule(plan)
        self._leases: dict[int, list[Lease]] = defaultdict(list)
        self._reclaims: dict[int, list[int]] = defaultdict(list)
        self._started = self._ended = 0.0
        """When the first runner took part, and when it was over."""
        self._pool_size = self._asked = 1
        self._most_runners = 0
        self._earlier = (0, 0)
        """Episodes and steps of former sessions."""
        self._agreement = NumericsAgreement()
        self._fail_fast: FailFast | None = None
        self._failure = ""
        self._recheck = DeterminismPhase(len(plan), settings)
        self._losses_before = 0
        self._losses: list[str] = []
        self._exclusions: list[str] = []
        self._excluded: set[int] = set()
        """Positions on which nothing has completed since a runner there was excluded."""
        self._impatient = 0.0
        """When episodes will have waited for long enough for more runners; 0 while none do."""
        self._reading: Future[tuple[Manifest, LogContents] | None] | None = None
        self._then: Callable[[float], None] | None = None
        """What follows as soon as all records are committed."""
        self._commit_ends = 0.0
        self._finishing = False

    # ------------------------------------------------------------------ the job

    def start(self, pool: RunnerPool, now: float) -> None:
        """See :class:`Job`."""
        self.tick(now)  # It may have been cancelled before it was ever waiting.
        if self.done:
            return
        self._pool = pool
        self._losses_before = pool.losses
        if self._sync is not None and (error := self._sync.future.exception()) is not None:
            self.fail(error)
            return
        self._weights = pool.weights and pool.weights.snapshot
        if self._held is not None:
            self._held.snapshot = self._weights
        self.handle.weights_version = 0 if self._weights is None else self._weights.version
        self._pool_size = self._asked = max(1, pool.expected())
        if self._store.durable:
            self._reading = _in_thread(
                lambda: self._store.read(lambda: manifest_of(self._settings, self._plan, self._weights))
            )
        else:
            self._open(now)

    def _open(self, now: float) -> None:
        """Begin with the episodes that no former session has finished."""
        assert self._pool is not None
        table, faults = self._store.table, self._settings.fault_tolerance
        self._earlier = int(table.filled.sum()), int(self._store.totals["env_steps"])
        self._recheck.begin(table.filled)
        if faults.fail_fast and not table.completed.any():
            self._fail_fast = FailFast(self._pool_size * self._settings.runners.lanes)
        self._schedule = Schedule(
            self._plan,
            self._pool_size,
            done=np.flatnonzero(table.filled).tolist(),
            attempts=charged_attempts(table),
            max_attempts=faults.max_attempts_per_episode,
        )
        # The first event gives up what had no attempt left when the former driver ended.
        self._obey(self._schedule.handle(PoolSized(self._pool_size)), None, now)
        self._check_complete(now)
        for member in self._pool.ready():
            self.joined(member, now)

    def _take_log(self, now: float) -> None:
        """Go on with what the log holds, once it is read."""
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        try:
            if found := reading.result():
                self._store.begin(*found)
        except Exception as error:
            self.fail(error)
        else:
            self._open(now)

    def joined(self, member: Member, now: float) -> None:
        """See :class:`Job`."""
        if self._over or self._reading is not None:
            return
        assert self._pool is not None
        self._started = self._started or now
        self._store.start_clock(now)
        self._most_runners = max(self._most_runners, len(self._pool.ready()))
        if self._recheck.running:
            self._pump(member, now)
            return
        self._obey(self._schedule.handle(RunnerJoined(member.incarnation, self._settings.runners.lanes)), None, now)

    def lost(self, member: Member, crash_report: CrashReport | None) -> bool:
        """See :class:`Job`."""
        if self._over:
            return False
        member.terminated = True  # Whatever follows must not be given to it.
        self._leases.pop(member.incarnation, None)
        self._reclaims.pop(member.incarnation, None)
        if crash_report is not None and len(self._losses) < _LOSSES_TOLD:
            self._losses.append(f"runner {member.index}: {crash_report}")
        now = time.monotonic()
        self._agreement.forget(member.incarnation)
        if self._recheck.running:
            self._recheck.lost(member.incarnation)
            self._go_on_checking(now)
            return False
        # What an excluded runner held is not its own any more.
        known = self._schedule.knows(member.incarnation)
        attribution = attribute_loss(crash_report if known else None, member.index).within(self._plan)
        commands = self._schedule.handle(RunnerLost(member.incarnation, attribution.charged, attribution.suspects))
        charges = {(command.index, command.attempt) for command in commands if isinstance(command, Charge)}
        faults = tuple(replace(fault, charged=(fault.index, fault.attempt) in charges) for fault in attribution.faults)
        self._store.add_faults(faults)
        self._note_failures(faults)
        self._obey(commands, None, now)
        self._check_complete(now)
        return bool(charges)

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Take a report.

        Raises:
            NumericsMismatch: The runner computes floats in another way than the others.
            EvalError: The runner used other weights.
        """
        if self._over:
            return  # Nothing is added to the table any more.
        report: RunReport = value
        self._check_origin(member, report)
        if self._recheck.running:
            self._recheck.reported(member.incarnation, member.index, report)
            self._go_on_checking(now)
            return
        event = RunnerReported(
            member.incarnation,
            report.rows["index"].tolist(),
            [(fault.index, fault.attempt) for fault in report.faults],
            report.returned,
            [progress.index for progress in report.progress],
        )
        commands = self._schedule.handle(event)
        counted = next((command.positions for command in commands if isinstance(command, Record)), ())
        self._store.add(report, counted)
        if counted:
            assert self._pool is not None
            self._pool.progressed(member)
            self._excluded.discard(member.index)
        self._note_completed(report, counted)
        self._note_failures(report.faults)
        self._obey(commands, report, now)
        self._check_complete(now)
        if not self._over:
            self._pump(member, now)

    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self.done:
            return
        if self._pool is None:
            self._tick_while_waiting(now)
            return
        self._take_log(now)
        if self.done or self._reading is not None:
            return
        try:
            self._store.settle()
        except EvalError as error:
            self.fail(error)
            return
        reason = self._cancelled or self._failure
        if self._finishing or (self._then is not None and not reason):
            self._go_on_committing(now)
        elif reason:
            self._abandon(now)
            self._finish(reason, now)
        else:
            self._watch(self._pool, now)

    def _tick_while_waiting(self, now: float) -> None:
        """End if it was cancelled before its turn came."""
        if reason := self._cancelled or self._cancelled_while_waiting:
            if self._sync is not None:
                self._sync.superseded = True
            self._finish(reason, now)

    def _watch(self, pool: RunnerPool, now: float) -> None:
        """See whether runners are missing, or the check takes too long."""
        if self._recheck.expired(now, len(pool.ready())):
            self._abandon(now)
            self._recheck.stop("it took many times as long as the first run")
            self._finish("", now)
        elif pool.hopeless:
            self._finish(f"no runner is left, the last was lost because: {pool.last_loss}", now)
        elif self._is_impatient(now):
            self._obey(self._schedule.handle(PoolSized(self._schedule.runners)), None, now)
        elif (expected := pool.expected()) != self._pool_size:
            self._pool_size, self._asked = expected, max(self._asked, expected)
            self._obey(self._schedule.handle(PoolSized(expected)), None, now)

    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        if self.done:
            return
        if self._reading is not None:  # Its folder must not be given up while it is read.
            with suppress(Exception):
                self._reading.result(_LAST_FLUSH_S)
        with suppress(EvalError):  # What is finished is kept, whatever became of the rest.
            self._store.flush(_LAST_FLUSH_S)
        self._close()
        self.handle.set_error(error)
        if self._pool is not None:
            self._abandon(time.monotonic())

    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self.handle.done()

    @property
    def _over(self) -> bool:
        """Whether no record is added any more."""
        return self.done or self._finishing

    @property
    def waits_for_disk(self) -> bool:
        """See :class:`Job`."""
        return self._reading is not None or self._then is not None

    def successors(self) -> list[Job]:
        """See :class:`Job`."""
        if self._follow_up is None or self.handle.exception() is not None:
            return []
        return self._follow_up(self.handle.result())

    # ------------------------------------------------------------------ commands and calls

    def _obey(self, commands: list[Command], report: RunReport | None, now: float) -> None:
        assert self._pool is not None
        touched: dict[int, None] = {}
        for command in commands:
            match command:
                case Grant(runner, leases):
                    self._leases[runner] += self._recheck.mark(leases)
                    touched[runner] = None
                case Reclaim(runner, indices):
                    self._reclaims[runner] += indices
                    touched[runner] = None
                case Abort(runner):
                    self._abort(runner, now)
                case Audit(positions):
                    assert report is not None
                    self._store.audit(report.rows[list(positions)])
                case GiveUp(index, seed, attempts):
                    version = 0 if self._weights is None else self._weights.version
                    self._store.add_row(failed_row(index, seed, attempts, version))
                    self._pool.progressed()
                case Exclude(runner, failures, uncharged):
                    self._exclude(runner, failures, uncharged)
                case Charge() | Record():
                    pass  # Acted on where the event came from.
                case _:
                    assert_never(command)
        for runner in touched:
            if member := self._pool.members.get(runner):
                self._pump(member, now)

    def _pump(self, member: Member, now: float) -> None:
        """Keep two calls in flight; new leases go with the next one."""
        assert self._pool is not None
        if self._recheck.running:
            positions = [other.index for other in self._pool.ready()]
            self._leases[member.incarnation] += self._recheck.take(member.incarnation, member.index, positions)
        holds = (self._recheck if self._recheck.running else self._schedule).holds
        while member.calls[self.tag] < _CALLS_IN_FLIGHT and holds(member.incarnation):
            leases = tuple(self._leases.pop(member.incarnation, ()))
            reclaim = tuple(self._reclaims.pop(member.incarnation, ()))
            self._pool.call(member, Run(leases, self._pool.slice_s, reclaim), tag=self.tag, now=now)

    def _exclude(self, runner: int, failures: int, uncharged: tuple[tuple[int, int], ...]) -> None:
        """End a runner on which everything fails; another process may take its place, within its restart budget."""
        assert self._pool is not None
        member = self._pool.members[runner]
        last = self._store.fault_of(member.index, uncharged[-1]) if uncharged else None
        self._store.uncharge(member.index, uncharged)
        why = f"all of the last {failures} attempts failed on it, while others completed episodes"
        if last is not None:
            why += f"; the last on {last.node} in {last.phase}: {last.error_type}: {last.message}"
        text = f"runner {member.index} was excluded, and its failures charged to no episode: {why}"
        self._exclusions.append(text)
        self._excluded.add(member.index)
        self._store.note(text)
        self._leases.pop(runner, None)
        self._reclaims.pop(runner, None)
        self._pool.terminate(member, RunnerLostError(text), broken=True)

    def _is_impatient(self, now: float) -> bool:
        """Whether episodes have waited for long enough for runners that have not come up."""
        if not self._schedule.awaits_runners:
            self._impatient = 0.0
            return False
        self._impatient = self._impatient or now + _PATIENCE_S
        return now > self._impatient

    def _abandon(self, now: float) -> None:
        """Have everything dropped: episodes that live on would report into the next evaluation."""
        assert self._pool is not None
        self._obey(self._schedule.handle(Cancelled()), None, now)
        for runner in filter(self._recheck.holds, list(self._pool.members)):
            self._abort(runner, now)

    def _abort(self, runner: int, now: float) -> None:
        assert self._pool is not None
        if member := self._pool.members.get(runner):
            self._pool.call(member, Run(budget_s=0.0, abort=True), tag=self.tag, now=now)

    def _check_complete(self, now: float) -> None:
        """When every episode has its record, end, or run a few of them again."""
        if self._schedule.complete and not (self._over or self._recheck.running or self._then):
            self._when_committed(self._start_check, now)

    def _start_check(self, now: float) -> None:
        assert self._pool is not None
        seconds = now - self._started if self._started else 0.0
        self._recheck.start(self._store.table, seconds, max(1, len(self._pool.ready())), now)
        self._go_on_checking(now)

    def _when_committed(self, then: Callable[[float], None], now: float) -> None:
        """Go on as soon as all records are committed."""
        self._store.hurry()
        self._then, self._commit_ends = then, now + FLUSH_TIMEOUT_S
        self._go_on_committing(now)

    def _go_on_committing(self, now: float) -> None:
        if self._then is None:
            return
        try:
            settled = self._store.is_settled()
            if not settled and now > self._commit_ends:
                self._store.flush(0.0)  # Raises, and says why.
        except EvalError as error:
            self.fail(error)
            return
        if settled:
            then, self._then = self._then, None
            then(now)

    def _go_on_checking(self, now: float) -> None:
        """Go on with the determinism check, or end."""
        assert self._pool is not None
        if self._recheck.done:
            self._finish("", now)
            return
        for member in self._pool.ready():
            self._pump(member, now)

    def _note_completed(self, report: RunReport, counted: tuple[int, ...]) -> None:
        rows = report.rows[list(counted)]
        if report.artifacts:
            kept = report.artifacts.keys() & rows["index"].tolist()
            self._artifacts |= {index: dict(report.artifacts[index]) for index in kept}
        self._recheck.recorded(report, rows)
        if self._fail_fast is not None and (rows["outcome"] == Outcome.COMPLETED).any():
            self._fail_fast.completed()

    def _note_failures(self, faults: tuple[Fault, ...]) -> None:
        if self._fail_fast is not None:
            self._failure = self._failure or self._fail_fast.failed(fault for fault in faults if fault.charged)

    def _check_origin(self, member: Member, report: RunReport) -> None:
        version = 0 if self._weights is None else self._weights.version
        if report.weights_version != version:
            raise EvalError(f"runner {member.index} used weights version {report.weights_version} instead of {version}")
        if report.numerics:
            self._agree_on_numerics(member, report)

    def _agree_on_numerics(self, member: Member, report: RunReport) -> None:
        store = self._store
        self._agreement.cast(member.incarnation, report.numerics, report.built_weights)
        if not store.numerics:
            if not len(report.rows):
                return
            store.numerics = self._agreement.most_frequent()
        sent = self._weights is not None
        try:
            self._agreement.check(
                member.incarnation, member.index, store.numerics, weights_sent=sent, durable=store.durable
            )
        except NumericsMismatch as error:
            store.note(f"{error}; it took no part")
            raise

    # ------------------------------------------------------------------ the end

    def _request_cancel(self, reason: str, unless_started: bool) -> None:
        if unless_started:
            self._cancelled_while_waiting = reason
        else:
            self._cancelled = reason

    def _finish(self, reason: str, now: float) -> None:
        if self._over:
            return
        self._ended, self._finishing = now, True
        self._recheck.stop(reason)
        determinism = self._recheck.finding
        for position in self._excluded:  # What took its place has failed too, if not yet often enough.
            self._store.uncharge_all(position)
        if not reason:
            self._store.add_determinism(determinism)
        self._when_committed(lambda _: self._conclude(reason, determinism), now)

    def _conclude(self, reason: str, determinism: Determinism) -> None:
        try:
            result = self._result(reason, determinism)
        except Exception as error:
            self._close()
            self.handle.set_error(error)
        else:
            self._close()
            self.handle.set_result(result)

    def _close(self) -> None:
        """Give the log up; a handle that is kept keeps nothing of this evaluation."""
        self._store.close()
        self.handle.release(self.progress())

    def _snapshot(self, reason: str) -> EvalResult:
        """Return a result of what has finished; may be called from any thread, while episodes go on or hang."""
        return self._result(reason, Determinism(remark="the evaluation was not finished"), self._store.snapshot())

    def _result(self, reason: str, determinism: Determinism, table: EpisodeTable | None = None) -> EvalResult:
        store = self._store
        notes = self._runner_notes() if table is None else []
        table = store.table if table is None else table
        status, text = decide_status(table, self._settings.fault_tolerance.max_failed_episodes, reason)
        # What ended it at once is said first.
        reason = self._failure if reason and reason == self._failure else text
        lost = self._pool.losses - self._losses_before if self._pool else 0
        return EvalResult(
            table=table,
            plan=self._plan,
            status=status,
            reason=redact_text(reason),
            timing=Timing.of_totals(store.totals, self._most_runners if self._settings.runners.num_runners else 0),
            provenance=provenance(self._settings, self._weights, store.numerics or self._agreement.most_frequent())
            | store.code
            | {
                "runners_lost": lost,
                "losses": [redact_text(loss) for loss in self._losses],
                "runners_refused": [redact_text(refusal) for refusal in self._agreement.refused],
                "runners_excluded": [redact_text(text) for text in self._exclusions],
                "notes": [*store.notes, *notes],
            },
            return_bounds=self._settings.evaluation.return_bounds,
            audit_mismatches=store.mismatches(),
            determinism=determinism,
            artifacts=dict(self._artifacts),
        )

    def _runner_notes(self) -> list[str]:
        """Say why fewer runners took part than were asked for."""
        pool, refused = self._pool, self._agreement.refused
        if pool is None or pool.hopeless or refused or not 0 < self._most_runners < self._asked:
            return []
        return [f"{self._most_runners} of {self._asked} runners took part: {pool.absence()}"]

    @property
    def phase(self) -> str:
        """What it is busy with, in a few words."""
        if self._pool is None:
            return "waiting for its turn"
        if self._recheck.running:
            return "checking determinism"
        return self._pool.phase

    def progress(self) -> EvalProgress:
        """Return how far it is; may be called from any thread."""
        return EvalProgress.of_table(
            self._store.table,
            env_steps=int(self._store.totals.get("env_steps", 0)) - self._earlier[1],
            seconds=(self._ended or time.monotonic()) - self._started if self._started else 0.0,
            num_runners=len(self._pool.ready()) if self._pool else 0,
            num_earlier=self._earlier[0],
            phase=self.phase,
        )


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="rl_eval read log", daemon=True).start()
    return future

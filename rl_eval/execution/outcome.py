"""Outcome of an evaluation: its records, who took part, and the handle by which its caller follows it.

The jobs of an evaluation write into it, one after the other; when it is done it keeps nothing but the handle's result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError, NumericsMismatch
from rl_eval.execution.event_ring import EventRing
from rl_eval.execution.handle import EvalHandle, EvalProgress
from rl_eval.execution.jobs import Job
from rl_eval.execution.record_store import RecordStore
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeTable, RunReport
from rl_eval.redaction import redact_text
from rl_eval.results.provenance import provenance
from rl_eval.results.result import EvalResult, Timing, decide_status
from rl_eval.scheduling.numerics_agreement import NumericsAgreement
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import WeightsSnapshot

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog, LogContents, Manifest

__all__ = ["UNFINISHED", "EvalOutcome"]

_LAST_FLUSH_S: Final = 5.0
"""For a last flush of an evaluation that has failed: its group may have to stop in ten."""
_LOSSES_TOLD: Final = 100
"""In the provenance, in words."""
UNFINISHED: Final = Determinism(remark="the evaluation was not finished")


@final
class EvalOutcome:
    """What an evaluation has come to."""

    def __init__(
        self,
        settings: EvalSettings,
        plan: EpisodePlan,
        log: EvaluationLog | None = None,
        follow_up: Callable[[EvalResult], list[Job]] | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.store = RecordStore(len(plan), settings.runners.runner_class.columns(settings), log)
        self.weights: WeightsSnapshot | None = None
        self.ring = EventRing()
        self.artifacts: dict[int, dict[str, Any]] = {}
        """What observers returned, by index."""
        self.exclusions: list[str] = []
        self.excluded: set[int] = set()
        """Positions on which nothing has completed since a runner there was excluded."""
        self.asked = 1
        """Most runners that were expected at one time."""
        self.started = 0.0
        """When the first runner took part."""
        self.checking = False
        """Whether episodes run again for the determinism check."""
        self.failure = ""
        """Why it ends although nobody cancelled it."""
        self.cancelled = ""
        """Why it ends although it has begun."""
        self._taken = threading.Lock()
        """Held from when it begins, or is ended before."""
        self._follow_up = follow_up
        self._agreement = NumericsAgreement()
        self._determinism = UNFINISHED
        self._pool: RunnerPool | None = None
        self._ended = 0.0
        self._earlier = (0, 0)
        """Episodes and steps of former sessions."""
        self._most_runners = 0
        self._losses_before = 0
        self._losses: list[str] = []
        self.handle = EvalHandle(
            self.progress, self._request_cancel, self.store.flush, snapshot=self._snapshot, moves=self.ring.moves
        )

    # ------------------------------------------------------------------ what happens

    def take(self) -> bool:
        """Claim the right to begin it, or to end it before; return whether nobody, in any thread, had it yet."""
        return self._taken.acquire(blocking=False)

    def begin(self, pool: RunnerPool) -> None:
        """Its turn has come: from now on it has the weights that the runners have."""
        self._pool, self._losses_before = pool, pool.losses
        self.asked = max(1, pool.expected())
        self.weights = pool.weights and pool.weights.snapshot
        self.handle.weights_version = self.weights_version

    def take_log(self, ours: Manifest, found: LogContents) -> None:
        """Go on with what former sessions have recorded."""
        self.store.begin(ours, found)
        self._earlier = int(self.store.table.filled.sum()), int(self.store.totals["env_steps"])

    def joined(self, now: float) -> None:
        """A runner takes part."""
        assert self._pool is not None
        self.started = self.started or now
        self.store.start_clock(now)
        self._most_runners = max(self._most_runners, len(self._pool.ready()))
        if self.settings.runners.num_runners:
            self.store.num_runners = max(self.store.num_runners, self._most_runners)

    def lost(self, member: Member, crash_report: CrashReport | None) -> None:
        """A runner is gone."""
        if crash_report is not None and len(self._losses) < _LOSSES_TOLD:
            self._losses.append(f"runner {member.index}: {crash_report}")
        self._agreement.forget(member.incarnation)

    def check_origin(self, member: Member, report: RunReport) -> None:
        """See that a report is of this evaluation, and that its floats may stand beside the others.

        Raises:
            NumericsMismatch: The runner computes floats in another way than the others.
            EvalError: The runner used other weights.
        """
        version = self.weights_version
        if report.weights_version != version:
            raise EvalError(f"runner {member.index} used weights version {report.weights_version} instead of {version}")
        if report.numerics:
            self._agree_on_numerics(member, report)

    @property
    def weights_version(self) -> int:
        """Version of the weights that are evaluated."""
        return 0 if self.weights is None else self.weights.version

    # ------------------------------------------------------------------ the end

    @property
    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self.handle.done()

    def finish(self, reason: str, determinism: Determinism, now: float) -> None:
        """Nothing runs any more; what has been recorded is yet to be committed."""
        self._ended, self._determinism = now, determinism
        for position in self.excluded:  # What took its place has failed too, if not yet often enough.
            self.store.uncharge_all(position)
        self._note_absence()
        if not reason:
            self.store.add_determinism(determinism)

    def conclude(self, reason: str) -> list[Job]:
        """Set the result; return what follows it."""
        try:
            result = self._result(reason, self._determinism, self.store.table)
        except Exception as error:
            self._close()
            self.handle.set_error(error)
            return []
        self._close()
        self.handle.set_result(result)
        return [] if self._follow_up is None else self._follow_up(result)

    def fail(self, error: BaseException) -> None:
        """Set an error; what is finished is kept, whatever became of the rest."""
        if self.done:
            return
        with suppress(EvalError):
            self.store.flush(_LAST_FLUSH_S)
        self._close()
        self.handle.set_error(error)

    # ------------------------------------------------------------------ how far it is

    def progress(self) -> EvalProgress:
        """Return how far it is; may be called from any thread."""
        return EvalProgress.of_table(
            self.store.table,
            env_steps=int(self.store.totals.get("env_steps", 0)) - self._earlier[1],
            seconds=(self._ended or time.monotonic()) - self.started if self.started else 0.0,
            num_runners=len(self._pool.ready()) if self._pool else 0,
            num_earlier=self._earlier[0],
            phase=self._phase,
        )

    @property
    def _phase(self) -> str:
        if self._pool is None:
            return "waiting to start"
        return "checking determinism" if self.checking else self._pool.phase

    # ------------------------------------------------------------------ inside

    def _request_cancel(self, reason: str, unless_started: bool) -> None:
        if self.take():
            self._withdraw(reason)
        elif not unless_started:
            self.cancelled = reason

    def _withdraw(self, reason: str) -> None:
        """End it before it has begun.

        Not in the control loop: requests that come and go as fast as it can end them would leave it no time.
        """
        try:
            for job in self.conclude(reason):
                job.fail(EvalError(reason))
        except BaseException as error:  # Ctrl-C, too: nobody else can end it any more.
            if not self.done:
                self.handle.set_error(EvalError(f"{reason}, and that was interrupted by {type(error).__name__}"))
            raise

    def _close(self) -> None:
        """Give the log up; a handle that is kept keeps nothing of this evaluation."""
        self.store.close()
        self.handle.release(self.progress())
        self.weights = None

    def _agree_on_numerics(self, member: Member, report: RunReport) -> None:
        store = self.store
        self._agreement.cast(member.incarnation, report.numerics, report.built_weights)
        if not store.numerics:
            if not len(report.rows):
                return
            store.numerics = self._agreement.most_frequent()
        sent = self.weights is not None
        try:
            self._agreement.check(
                member.incarnation, member.index, store.numerics, weights_sent=sent, durable=store.durable
            )
        except NumericsMismatch as error:
            store.note(f"{error}; it took no part")
            raise

    def _snapshot(self, reason: str) -> EvalResult:
        """Return a result of what has finished; may be called from any thread, while episodes go on or hang."""
        return self._result(reason, UNFINISHED, self.store.snapshot())

    def _result(self, reason: str, determinism: Determinism, table: EpisodeTable) -> EvalResult:
        store = self.store
        status, text = decide_status(table, self.settings.fault_tolerance.max_failed_episodes, reason)
        # What ended it at once is said first.
        reason = self.failure if reason and reason == self.failure else text
        return EvalResult(
            table=table,
            plan=self.plan,
            status=status,
            reason=redact_text(reason),
            timing=Timing.of_totals(store.totals, store.num_runners),
            provenance=provenance(self.settings, self.weights, store.numerics or self._agreement.most_frequent())
            | store.code
            | {
                "runners_lost": self._pool.losses - self._losses_before if self._pool else 0,
                "losses": [redact_text(loss) for loss in self._losses],
                "runners_refused": [redact_text(refusal) for refusal in self._agreement.refused],
                "runners_excluded": [redact_text(text) for text in self.exclusions],
                "notes": [*store.notes],
            },
            return_bounds=self.settings.evaluation.return_bounds,
            audit_mismatches=store.mismatches(),
            determinism=determinism,
            artifacts=dict(self.artifacts),
        )

    def _note_absence(self) -> None:
        """Note why fewer runners took part than were asked for."""
        pool, refused = self._pool, self._agreement.refused
        if pool is None or pool.hopeless or refused or not 0 < self._most_runners < self.asked:
            return
        self.store.note(f"{self._most_runners} of {self.asked} runners took part: {pool.absence()}")

"""One evaluation under way: reports become records, and the schedule's commands become calls."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any, final

import numpy as np

from rl_eval.episode import EpisodeTable, Lease, Outcome, RunReport
from rl_eval.errors import ConfigError, EvalError, NumericsMismatch
from rl_eval.fleet import Fleet, Member
from rl_eval.handle import EvalHandle, EvalProgress
from rl_eval.jobs import Job
from rl_eval.plan import EpisodePlan
from rl_eval.provenance import provenance
from rl_eval.result import EvalResult, Timing
from rl_eval.schedule import (
    Abort,
    Audit,
    Cancelled,
    Command,
    FleetSized,
    Grant,
    Reclaim,
    Record,
    RunnerJoined,
    RunnerLost,
    RunnerReported,
    Schedule,
)
from rl_eval.settings import EvalSettings
from rl_eval.weights import WeightsSnapshot

__all__ = ["Evaluation"]

_CALLS_IN_FLIGHT = 2
"""Per runner: while one runs, the next waits in its mailbox, so no lane waits for the driver."""


@final
class Evaluation(Job):
    """Runs the episodes of a plan on a fleet.

    Args:
        tag: Mark of its calls.
        settings: What to evaluate.
        plan: Which episodes.
    """

    exclusive = True

    def __init__(self, tag: int, settings: EvalSettings, plan: EpisodePlan) -> None:
        super().__init__(tag)
        self._settings = settings
        self._plan = plan
        self._weights: WeightsSnapshot | None = None
        self._table = EpisodeTable(len(plan), settings.evaluation.info_keys)
        self._cancel_requested = False
        self.handle = EvalHandle(self.progress, self._request_cancel)
        self._fleet: Fleet | None = None
        self._schedule = Schedule(plan)
        self._fleet_size = 1
        self._leases: dict[int, list[Lease]] = defaultdict(list)
        self._reclaims: dict[int, list[int]] = defaultdict(list)
        self._late: list[Any] = []
        self._mismatches: set[int] = set()
        self._numerics: dict[str, Any] = {}
        self._totals: dict[str, float] = defaultdict(float)
        self._started = self._ended = 0.0
        """When the first runner took part, and when it was over."""
        self._most_runners = 0
        self._refused: list[str] = []
        self._losses_before = 0

    # ------------------------------------------------------------------ the job

    def start(self, fleet: Fleet, now: float) -> None:
        """See :class:`Job`."""
        self._fleet = fleet
        self._losses_before = fleet.losses
        self._weights = fleet.weights and fleet.weights.snapshot
        self._fleet_size = max(1, fleet.expected())
        self._schedule = Schedule(self._plan, self._fleet_size)
        for member in fleet.ready():
            self.joined(member, now)

    def joined(self, member: Member, now: float) -> None:
        """See :class:`Job`."""
        assert self._fleet is not None
        self._started = self._started or now
        self._most_runners = max(self._most_runners, len(self._fleet.ready()))
        self._obey(self._schedule.handle(RunnerJoined(member.incarnation, self._settings.runners.lanes)), None, now)

    def lost(self, member: Member) -> None:
        """See :class:`Job`."""
        self._leases.pop(member.incarnation, None)
        self._reclaims.pop(member.incarnation, None)
        self._obey(self._schedule.handle(RunnerLost(member.incarnation)), None, time.monotonic())

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Take a report.

        Raises:
            NumericsMismatch: The runner computes floats in another way than the others.
            EvalError: The runner used other weights.
        """
        if self.done:
            return  # The result is out, and with it the table.
        report: RunReport = value
        self._check_origin(member, report)
        for fault in report.faults:
            self._table.add_fault(fault)
        for name in ("env_steps", "reset_seconds", "step_seconds", "inference_seconds"):
            self._totals[name] += getattr(report, name)
        event = RunnerReported(
            member.incarnation,
            report.rows["index"].tolist(),
            [(fault.index, fault.attempt) for fault in report.faults],
            report.returned,
            [progress.index for progress in report.progress],
        )
        self._obey(self._schedule.handle(event), report, now)
        if self._schedule.complete:
            self._finish("", now)
        else:
            self._pump(member, now)

    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        if self._fleet is None:
            if self._cancel_requested:
                self._finish("cancelled", now)
        elif self._cancel_requested:
            self._obey(self._schedule.handle(Cancelled()), None, now)
            self._finish("cancelled", now)
        elif self._fleet.hopeless:
            self._finish(f"no runner is left, the last was lost because: {self._fleet.last_loss}", now)
        elif (size := max(1, self._fleet.expected())) != self._fleet_size:
            self._fleet_size = size
            self._obey(self._schedule.handle(FleetSized(size)), None, now)

    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        if self.done:
            return
        self.handle._set_error(error)
        if self._fleet is not None:
            # Lanes that live on would report into the next evaluation.
            self._obey(self._schedule.handle(Cancelled()), None, time.monotonic())

    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self.handle.done()

    # ------------------------------------------------------------------ commands and calls

    def _obey(self, commands: list[Command], report: RunReport | None, now: float) -> None:
        touched: dict[int, None] = {}
        for command in commands:
            match command:
                case Grant(runner, leases):
                    self._leases[runner] += leases
                    touched[runner] = None
                case Reclaim(runner, indices):
                    self._reclaims[runner] += indices
                    touched[runner] = None
                case Abort(runner):
                    self._abort(runner, now)
                case Record(positions):
                    assert report is not None
                    self._record(report, positions)
                case Audit(positions):
                    assert report is not None
                    self._late.append(report.rows[list(positions)])
        assert self._fleet is not None
        for runner in touched:
            if member := self._fleet.members.get(runner):
                self._pump(member, now)

    def _pump(self, member: Member, now: float) -> None:
        """Keep two calls in flight; new leases go with the next one."""
        assert self._fleet is not None
        while member.calls[self.tag] < _CALLS_IN_FLIGHT and self._schedule.holds(member.incarnation):
            leases = tuple(self._leases.pop(member.incarnation, ()))
            reclaim = tuple(self._reclaims.pop(member.incarnation, ()))
            self._fleet.call(member, "run", leases, self._fleet.slice_s, reclaim, tag=self.tag, now=now)

    def _abort(self, runner: int, now: float) -> None:
        assert self._fleet is not None
        if member := self._fleet.members.get(runner):
            self._fleet.call(member, "run", (), 0.0, (), True, tag=self.tag, now=now)

    def _record(self, report: RunReport, positions: tuple[int, ...]) -> None:
        chosen = slice(None) if len(positions) == len(report.rows) else list(positions)
        self._table.fill(report.rows[chosen], report.infos[chosen])
        assert self._fleet is not None
        self._fleet.progressed()

    def _check_origin(self, member: Member, report: RunReport) -> None:
        version = 0 if self._weights is None else self._weights.version
        if report.weights_version != version:
            raise EvalError(f"runner {member.index} used weights version {report.weights_version} instead of {version}")
        if not report.numerics:
            return
        self._numerics = self._numerics or report.numerics
        different = [key for key in self._numerics if self._numerics[key] != report.numerics.get(key)]
        if different == ["outputs"] and self._weights is None:
            raise ConfigError(
                f"runner {member.index} built another policy than the others: a factory that initializes weights at "
                "random needs policy.weights, or sync_weights before the evaluation"
            )
        if different:
            shown = ", ".join(
                f"{key} is {report.numerics.get(key)!r}, not {self._numerics[key]!r}" for key in different
            )
            self._refused.append(f"runner {member.index} would compute other floats than its group: {shown}")
            raise NumericsMismatch(self._refused[-1])

    # ------------------------------------------------------------------ the end

    def _request_cancel(self) -> None:
        self._cancel_requested = True

    def _finish(self, reason: str, now: float) -> None:
        if self.done:
            return
        self._ended = now
        for rows in self._late:
            known = rows[self._table.filled[rows["index"]]]
            self._mismatches.update(self._table.mismatches(known))
        try:
            self.handle._set_result(self._result(reason))
        except Exception as error:
            self.handle._set_error(error)

    def _result(self, reason: str) -> EvalResult:
        status, reason = _status(self._table, self._settings.fault_tolerance.max_failed_episodes, reason)
        lost = self._fleet.losses - self._losses_before if self._fleet else 0
        return EvalResult(
            table=self._table,
            plan=self._plan,
            status=status,
            reason=reason,
            timing=Timing(
                wall_seconds=self._ended - (self._started or self._ended),
                env_steps=int(self._totals["env_steps"]),
                reset_seconds=self._totals["reset_seconds"],
                step_seconds=self._totals["step_seconds"],
                inference_seconds=self._totals["inference_seconds"],
                num_runners=self._most_runners if self._settings.runners.num_runners else 0,
            ),
            provenance=provenance(self._settings, self._weights, self._numerics)
            | {"runners_lost": lost, "runners_refused": self._refused},
            return_bounds=self._settings.evaluation.return_bounds,
            audit_mismatches=tuple(sorted(self._mismatches)),
        )

    def progress(self) -> EvalProgress:
        """Return how far it is; may be called from any thread."""
        rows = self._table.rows
        prefix = rows[: self._table.prefix()]
        returns = prefix["episode_return"][prefix["outcome"] == Outcome.COMPLETED]
        count = len(returns)
        return EvalProgress(
            num_episodes=len(rows),
            num_finished=int(self._table.filled.sum()),
            num_failed=int((rows["outcome"] == Outcome.FAILED).sum()),
            num_faults=sum(map(len, list(self._table.faults.values()))),
            num_prefix=len(prefix),
            mean_return=float(np.mean(returns)) if count else math.nan,
            half_width=1.96 * float(np.std(returns, ddof=1)) / math.sqrt(count) if count > 1 else math.nan,
            env_steps=int(self._totals["env_steps"]),
            seconds=(self._ended or time.monotonic()) - self._started if self._started else 0.0,
            num_runners=len(self._fleet.ready()) if self._fleet else 0,
        )


def _status(table: EpisodeTable, limit: float | None, reason: str) -> tuple[Any, str]:
    """Decide between complete, partial and failed, and say why."""
    failed = int((table.rows["outcome"] == Outcome.FAILED).sum())
    missing = int((~table.filled).sum())
    if missing:
        reason = f"{missing} of {len(table)} episodes did not run: {reason}"
        return ("partial" if table.completed.any() else "failed"), reason
    if not failed:
        return "complete", ""
    first = int(np.argmax(table.rows["outcome"] == Outcome.FAILED))
    reason = f"{failed} of {len(table)} episodes failed; first: {table.faults[first][-1]}"
    allowed = len(table) if limit is None else limit * len(table) if limit < 1 else limit
    return ("failed" if failed > allowed or failed == len(table) else "partial"), reason

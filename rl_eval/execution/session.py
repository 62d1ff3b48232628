"""Session of an evaluation: reports become events, and the schedule's commands become calls, until all is recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
from typing_extensions import assert_never

from rl_eval.backends.requests import Run
from rl_eval.errors import RunnerLost
from rl_eval.execution.determinism_check import DeterminismCheck, DeterminismSample
from rl_eval.execution.jobs import Job
from rl_eval.execution.outcome import UNFINISHED, EvalOutcome
from rl_eval.execution.phase import CALLS_IN_FLIGHT, Phase
from rl_eval.execution.runner_pool import Member
from rl_eval.records.episode import Fault, Lease, RunReport, charged_attempts, failed_row
from rl_eval.scheduling import events
from rl_eval.scheduling.attribution import attribute_loss
from rl_eval.scheduling.fail_fast import FailFast
from rl_eval.scheduling.schedule import Schedule
from rl_eval.supervision.flight_recorder import CrashReport

__all__ = ["EpisodeSession"]

_PATIENCE_S: Final = 10.0
"""How long episodes that failed wait for runners that have not come up yet, before they run where they failed."""


@final
class EpisodeSession(Phase):
    """Runs the episodes of a plan that have no record yet."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._schedule = Schedule(outcome.plan)
        self._sample = DeterminismSample(outcome.settings, outcome.store.table.filled)
        self._fail_fast: FailFast | None = None
        self._pool_size = 1
        self._leases: defaultdict[int, tuple[Lease, ...]] = defaultdict(tuple)
        self._reclaims: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
        self._impatient = 0.0
        """When episodes will have waited for long enough for more runners; 0 while none do."""

    # ------------------------------------------------------------------ the job

    def _begin(self, now: float) -> None:
        """Begin with the episodes that no former session has finished."""
        outcome, settings = self._outcome, self._outcome.settings
        table, faults = outcome.store.table, settings.fault_tolerance
        self._pool_size = max(1, self.pool.expected())
        if faults.fail_fast and not table.completed.any():
            self._fail_fast = FailFast(self._pool_size * settings.runners.lanes)
        self._schedule = Schedule(
            outcome.plan,
            self._pool_size,
            done=np.flatnonzero(table.filled).tolist(),
            attempts=charged_attempts(table),
            max_attempts=faults.max_attempts_per_episode,
        )
        # The first event gives up what had no attempt left when the former driver ended.
        self._obey(self._handle(events.PoolSized(self._pool_size), now), None, now)
        for member in self.pool.ready():
            self.joined(member, now)

    def joined(self, member: Member, now: float) -> None:
        """See :class:`Job`."""
        if not self._over:
            self._outcome.joined(now)
            self._outcome.ring.positions[member.incarnation] = member.index
            lanes = self._outcome.settings.runners.lanes
            self._obey(self._handle(events.RunnerJoined(member.incarnation, lanes), now), None, now)

    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        runner = member.incarnation
        self._leases.pop(runner, None)
        self._reclaims.pop(runner, None)
        # What an excluded runner held is not its own any more.
        known = self._schedule.knows(runner)
        found = attribute_loss(crash_report if known else None, member.index).within(self._outcome.plan)
        commands = self._handle(events.RunnerLost(runner, found.charged, found.suspects), now)
        charges = {(command.index, command.attempt) for command in commands if isinstance(command, events.Charge)}
        faults = tuple(replace(fault, charged=(fault.index, fault.attempt) in charges) for fault in found.faults)
        self._outcome.store.add_faults(faults)
        self._note_failures(faults)
        self._obey(commands, None, now)
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
        self._outcome.check_origin(member, report)
        event = events.RunnerReported(
            member.incarnation,
            report.rows["index"].tolist(),
            [(fault.index, fault.attempt) for fault in report.faults],
            report.returned,
            [progress.index for progress in report.progress],
        )
        commands = self._handle(event, now)
        self._record(member, report, commands)
        self._obey(commands, report, now)
        self._pump(member, now)

    def _watch(self, now: float) -> None:
        if self._is_impatient(now):
            self._obey(self._handle(events.PoolSized(self._schedule.runners), now), None, now)
        elif (expected := self.pool.expected()) != self._pool_size:
            self._pool_size = expected
            self._outcome.asked = max(self._outcome.asked, expected)
            self._obey(self._handle(events.PoolSized(expected), now), None, now)

    @property
    def _complete(self) -> bool:
        return self._schedule.complete

    def _ended(self, now: float) -> Callable[[], list[Job]]:
        if self._reason:
            return self._conclude(UNFINISHED, now)
        return lambda: [DeterminismCheck(self._outcome, self._sample)]

    # ------------------------------------------------------------------ events, commands and calls

    def _handle(self, event: events.Event, now: float) -> list[events.Command]:
        commands = self._schedule.handle(event)
        self._outcome.ring.append(now, event, commands)
        return commands

    def _obey(self, commands: list[events.Command], report: RunReport | None, now: float) -> None:
        touched: dict[int, None] = {}
        for command in commands:
            match command:
                case events.Grant(runner, leases):
                    self._leases[runner] += self._sample.mark(leases)
                    touched[runner] = None
                case events.Reclaim(runner, indices):
                    self._reclaims[runner] += indices
                    touched[runner] = None
                case events.Abort(runner):
                    self._abort(runner, now)
                case events.Audit(positions):
                    assert report is not None
                    self._outcome.store.audit(report.rows[list(positions)], report.infos[list(positions)])
                case events.GiveUp(index, seed, attempts):
                    self._outcome.store.add_row(failed_row(index, seed, attempts, self._outcome.weights_version))
                    self.pool.progressed()
                case events.Exclude(runner, failures, uncharged):
                    self._exclude(runner, failures, uncharged)
                case events.Charge() | events.Record():
                    pass  # Acted on where the event came from.
                case _:
                    assert_never(command)
        for runner in touched:
            if member := self.pool.members.get(runner):
                self._pump(member, now)

    def _pump(self, member: Member, now: float) -> None:
        """Keep two calls in flight; new leases go with the next one."""
        runner = member.incarnation
        while member.calls[self.tag] < CALLS_IN_FLIGHT and self._schedule.holds(runner):
            leases, reclaim = self._leases.pop(runner, ()), self._reclaims.pop(runner, ())
            self.pool.call(member, Run(leases, self.pool.slice_s, reclaim), tag=self.tag, now=now)

    def _record(self, member: Member, report: RunReport, commands: list[events.Command]) -> None:
        """Take the rows that count, and all faults."""
        outcome = self._outcome
        counted = next((command.positions for command in commands if isinstance(command, events.Record)), ())
        outcome.store.add(report, counted)
        if counted:
            self.pool.progressed(member)
            outcome.excluded.discard(member.index)
            if self._fail_fast is not None:
                self._fail_fast.completed()
        self._note_failures(report.faults)
        self._sample.recorded(report.construct_seconds)
        if report.traces or report.artifacts:
            indices = set(report.rows["index"][list(counted)].tolist())
            self._sample.traces |= {index: report.traces[index] for index in indices & report.traces.keys()}
            for name, kept in report.artifacts:
                for index in indices & kept.keys():
                    outcome.artifacts.setdefault(index, {})[name] = kept[index]

    def _exclude(self, runner: int, failures: int, uncharged: tuple[tuple[int, int], ...]) -> None:
        """End a runner on which everything fails; another process may take its place, within its restart budget."""
        outcome, member = self._outcome, self.pool.members[runner]
        last = outcome.store.fault_of(member.index, uncharged[-1]) if uncharged else None
        outcome.store.uncharge(member.index, uncharged)
        why = f"all of the last {failures} attempts failed on it, while others completed episodes"
        if last is not None:
            why += f"; the last on {last.node} in {last.phase}: {last.error_type}: {last.message}"
        text = f"runner {member.index} was excluded, and its failures charged to no episode: {why}"
        outcome.exclusions.append(text)
        outcome.excluded.add(member.index)
        outcome.store.note(text)
        self._leases.pop(runner, None)
        self._reclaims.pop(runner, None)
        self.pool.terminate(member, RunnerLost(text), broken=True)

    def _note_failures(self, faults: tuple[Fault, ...]) -> None:
        if self._fail_fast is not None:
            failure = self._fail_fast.failed(fault for fault in faults if fault.charged)
            self._outcome.failure = self._outcome.failure or failure

    def _is_impatient(self, now: float) -> bool:
        """Whether episodes have waited for long enough for runners that have not come up."""
        if not self._schedule.awaits_runners:
            self._impatient = 0.0
            return False
        self._impatient = self._impatient or now + _PATIENCE_S
        return now > self._impatient

    def _abandon(self, now: float) -> None:
        self._obey(self._schedule.handle(events.Cancelled()), None, now)

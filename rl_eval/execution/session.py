"""Session of an evaluation: it runs the episodes that have no record yet.

A *phase* is a job in which runners run episodes, such as the session or the determinism check.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from typing_extensions import assert_never, override

from rl_eval.backends.requests import Run
from rl_eval.errors import EvalError, PolicyUnavailable, RunnerLost
from rl_eval.execution.jobs import Job
from rl_eval.execution.mistakes import FailFast
from rl_eval.execution.outcome import Committing, EvalOutcome
from rl_eval.execution.record_store import FLUSH_TIMEOUT_S
from rl_eval.execution.runner_pool import Member
from rl_eval.records.episode import Fault, RunReport, failed_row, used_attempts
from rl_eval.scheduling import events
from rl_eval.scheduling.blocks import schedule_of
from rl_eval.scheduling.runner_failures import attribute_loss
from rl_eval.scheduling.schedule import Schedule
from rl_eval.supervision.flight_recorder import CrashReport

CALLS_IN_FLIGHT: Final = 2
"""Number of calls per runner. One call runs and the next call is queued, so that no lane waits for the control loop."""


class Phase(Job):
    """Job in which runners run episodes. It has ended when all its records are committed."""

    exclusive = True
    done = False

    def __init__(self, outcome: EvalOutcome) -> None:
        self._outcome = outcome
        self._successors: list[Job] = []

    @abc.abstractmethod
    def _begin(self, now: float) -> None:
        """Assign the first episodes."""

    @abc.abstractmethod
    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Take back the episodes of a lost member; return whether an episode caused the loss."""

    @abc.abstractmethod
    def _watch(self, now: float) -> None:
        """Check time limits, and handle changes of the number of runners."""

    @abc.abstractmethod
    def _abandon(self, now: float) -> None:
        """Abort all live episodes, so that they do not continue in the calls of the next evaluation."""

    @property
    @abc.abstractmethod
    def _complete(self) -> bool:
        """Whether no episode is left to run."""

    @abc.abstractmethod
    def _ended(self, reason: str) -> None:
        """Record the outcome of the phase.

        Args:
            reason: Reason for an early end; empty if there is none.
        """

    @final
    @override
    def start(self, now: float) -> None:
        if reason := self._outcome.cancelled:
            self._end(reason, now)
        else:
            self._outcome.state = "running"
            self._begin(now)
        self.tick(now)

    @final
    @override
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        if self.done:
            return False
        member.terminated = True  # Later work must not be assigned to it.
        self._outcome.lost(member, crash_report)
        return self._outcome.state == "running" and self._lost(member, crash_report, now)

    @final
    @override
    def tick(self, now: float) -> None:
        if self.started and not self.done:
            try:
                self._advance(now)
            except EvalError as error:
                self.fail(error)

    @final
    @override
    def fail(self, error: BaseException) -> None:
        if not self.done:
            self._outcome.fail(error)
            self.done = True
            if self.started:
                self._abandon(time.monotonic())

    @final
    @override
    def successors(self) -> list[Job]:
        return self._successors

    @final
    def _advance(self, now: float) -> None:
        outcome, store = self._outcome, self._outcome.store
        settled = store.settle()
        if outcome.state == "running" and (reason := self._reason_to_end(now)) is not None:
            self._end(reason, now)
            settled = store.settle()
        match outcome.state:
            case Committing(reason, following) if settled:
                self._successors = [following] if following is not None else outcome.conclude(reason)
                self.done = True
            case Committing(deadline=deadline) if now > deadline:
                store.flush(0.0)  # Raises with the reason.

    @final
    def _reason_to_end(self, now: float) -> str | None:
        """Return the reason for an early end, an empty string if no episode is left, or None to continue.

        Raises:
            PolicyUnavailable: The policy stayed unavailable until no runner was left, and no episode completed.
        """
        reason = self._outcome.cancelled or self._outcome.failure
        hopeless = not self.pool.members and self.pool.hopeless
        if not (reason or hopeless):
            self._watch(now)
        if self._complete:
            return ""
        if hopeless and not reason:
            why, store = self.pool.last_loss, self._outcome.store
            reason = f"no runner is left: {why}"
            if isinstance(why, PolicyUnavailable):
                store.flush()
                if not store.table.completed.any():
                    raise why
                reason = str(why)
        return reason or None

    @final
    def _end(self, reason: str, now: float) -> None:
        """Abort live episodes, and start the last commit of the phase. From now on, reports are ignored."""
        self._abandon(now)
        self._ended(reason)
        following = None if reason else self._outcome.next_job()
        if following is None:
            self._outcome.finish(reason, now)
        self._outcome.state, self.waits_for_disk = Committing(reason, following, now + FLUSH_TIMEOUT_S), True
        self._outcome.store.hurry()

    @final
    def _abort(self, runner: int, now: float) -> None:
        """Ask a runner to drop all its episodes."""
        if member := self.pool.members.get(runner):
            self.pool.call(member, Run(budget_s=0.0, abort=True), tag=self.tag, now=now)


_logger: Final = logging.getLogger(__name__)

_LONG_WAIT_S: Final = 30.0
_LONG_EPISODE: Final = 100_000


@final
class Waiting:
    """Detector of an evaluation that waits for its episodes. It reports once.

    Args:
        max_episode_steps: Limit of ``evaluation.max_episode_steps``.
    """

    def __init__(self, max_episode_steps: int | None) -> None:
        self._limit = max_episode_steps
        self._since: float | None = None
        """Time of the first runner or of the last finished episode."""
        self._longest = {"index": 0, "step": 0}
        self._reported = False

    def joined(self, now: float) -> None:
        """Start to wait, because there is a runner."""
        self._since = self._since or now

    def paused(self, now: float) -> None:
        """Start to wait again, because no episode could go on until now."""
        self._since = self._since and now

    def reported(self, report: RunReport, now: float) -> None:
        """Store the time of the last finished episode, and the longest of the running ones."""
        if len(report.rows):
            self._since = now
        if len(report.progress):
            longest = report.progress[report.progress["step"].argmax()]
            self._longest = {name: int(longest[name]) for name in self._longest}

    def reason(self, now: float) -> str:
        """Return the cause of a long wait, once; otherwise an empty string."""
        if self._reported or self._since is None:
            return ""
        seconds, (index, steps) = now - self._since, self._longest.values()
        if seconds < _LONG_WAIT_S and steps < _LONG_EPISODE:
            return ""
        self._reported = True
        if not steps:
            return f"no episode has finished for {seconds:.0f} s, and no runner has reported a step of one"
        limited = (
            "evaluation.max_episode_steps is not set, so an episode may be endless"
            if self._limit is None
            else f"evaluation.max_episode_steps ends an episode after {self._limit:,} steps"
        )
        return f"no episode has finished for {seconds:.0f} s. Waiting for episode {index}, step {steps:,}: {limited}"


_PATIENCE_S: Final = 10.0
"""Seconds that failed episodes wait for starting runners, before they run again on the same runner."""


def _judged(faults: Iterable[Fault], verdict: events.Verdict) -> tuple[Fault, ...]:
    """Return the faults, one per attempt, each charged if the verdict charges its attempt."""
    charged = set(verdict.charge)
    by_attempt = {(fault.index, fault.attempt): fault for fault in faults}
    return tuple(replace(fault, charged=attempt in charged) for attempt, fault in by_attempt.items())


@final
class EpisodeSession(Phase):
    """Job that runs the episodes of a plan that have no record yet."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._schedule = Schedule(outcome.plan)
        self._history: list[Any] = []
        """Arguments and events of the schedule, with ``RL_EVAL_VALIDATE=1``; otherwise empty."""
        self._fail_fast: FailFast | None = None
        """Counter of failures until the first episode completes; None if they do not end the evaluation."""
        self._starting_until = 0.0
        """Time until which another runner may start."""
        self._pool_size = 1
        self._unsent: defaultdict[int, Run] = defaultdict(Run)
        """Leases and reclaims for the next call of each runner."""
        self._excluded: dict[int, list[tuple[int, int]]] = {}
        """Charged attempts at each position since a runner there was excluded, until an episode completes there."""
        self._failures: dict[int, Fault] = {}
        """Last charged fault in a report of each runner."""
        self._waiting = Waiting(outcome.settings.evaluation.max_episode_steps)
        self._impatient = 0.0
        """Time from which failed episodes no longer wait for more runners; 0 while no episode waits."""

    # ------------------------------------------------------------------ the job

    def _begin(self, now: float) -> None:
        """Start with the episodes that no earlier session finished."""
        outcome, settings = self._outcome, self._outcome.settings
        table, faults = outcome.store.table, settings.fault_tolerance
        outcome.begin(self.pool)
        if self._complete:  # By a rule, before this session.
            return
        self._pool_size = max(1, self.pool.expected())
        if faults.fail_fast and not table.completed.any():
            self._fail_fast = FailFast(self._pool_size * outcome.layout.lanes)
            self._starting_until = now + settings.runners.runner_start_timeout_s
        done, (attempts, pardoned) = np.flatnonzero(table.filled).tolist(), used_attempts(table)
        arguments: dict[str, Any] = {
            "expected_runners": self._pool_size,
            "done": done,
            "attempts": attempts,
            "max_attempts": faults.max_attempts_per_episode,
            "pardoned": pardoned,
        }
        block_size = outcome.layout.block_size
        self._schedule = schedule_of(outcome.plan, block_size, **arguments)
        if os.environ.get("RL_EVAL_VALIDATE") == "1":
            self._history = [{"plan": outcome.plan.to_dict(), "block_size": block_size, **arguments}]
        # The first event gives up episodes that had no attempt left in the earlier session.
        self._send(events.PoolSized(self._pool_size), now)
        for member in self.pool.ready():
            self.joined(member, now)

    @override
    def joined(self, member: Member, now: float) -> None:
        if self._outcome.state == "running":
            self._waiting.joined(now)
            self._outcome.joined(self.pool, now)
            self._outcome.ring.positions[member.number] = member.position
            self._send(events.RunnerJoined(member.number, self._outcome.layout.lanes), now)

    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        runner = member.number
        self._unsent.pop(runner, None)
        # An excluded runner no longer holds episodes.
        known = self._schedule.knows(runner)
        found = attribute_loss(crash_report if known else None, member.position).within(self._outcome.plan)
        decision = self._handle(events.RunnerLost(runner, found.charged, found.suspects), now)
        faults = _judged(found.faults, decision.verdict)
        self._outcome.store.add_faults(faults)
        self._obey(decision.commands, now)
        self._note_failures(faults, now)
        return bool(decision.verdict.charge)

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Handle a report of a runner.

        Raises:
            NumericsMismatch: The runner computes floats differently from the other runners.
            EvalError: The runner used other weights.
        """
        if self._outcome.state != "running":
            return  # The table no longer changes.
        report: RunReport = value
        self._outcome.check_report(member, report)
        self._waiting.reported(report, now)
        event = events.RunnerReported(
            member.number,
            report.rows["index"].tolist(),
            [(fault.index, fault.attempt) for fault in report.faults if fault.charged],
            report.returned,
            report.progress["index"].tolist(),
            [(fault.index, fault.attempt) for fault in report.faults if not fault.charged],
        )
        decision = self._handle(event, now)
        verdict, store, faults = decision.verdict, self._outcome.store, _judged(report.faults, decision.verdict)
        store.add(report, verdict.record, faults)
        if verdict.charge:
            self._failures[member.number] = next(fault for fault in faults[::-1] if fault.charged)
            if member.position in self._excluded:
                self._excluded[member.position] += verdict.charge
        if verdict.record:
            self._count(member, report, verdict.record)
        if verdict.audit:
            store.audit(report.rows[[*verdict.audit]], report.infos[[*verdict.audit]])
        self._note_failures(faults, now)
        self._obey(decision.commands, now, member)

    def _watch(self, now: float) -> None:
        if self.pool.unavailable is not None:
            self._waiting.paused(now)
        elif reason := self._waiting.reason(now):
            with suppress(Exception):  # A handler of the caller may raise.
                _logger.warning(reason)
        if self._is_impatient(now):
            self._send(events.PoolSized(self._schedule.runners), now)
        elif (expected := self.pool.expected()) != self._pool_size:
            self._pool_size = expected
            self._outcome.asked = max(self._outcome.asked, expected)
            self._send(events.PoolSized(expected), now)

    @property
    def _complete(self) -> bool:
        return self._schedule.complete or self._outcome.store.ended_by is not None

    def _ended(self, reason: str) -> None:
        for position, failed in self._excluded.items():  # Too few failures to exclude the replacement, too.
            pardoned = [(index, attempt) for index, attempt in failed if not self._schedule.gave_up(index)]
            text = f"runner {position} replaced an excluded runner, and completed no episode"
            self._outcome.store.pardon(pardoned, text)

    # ------------------------------------------------------------------ events, commands and calls

    def _handle(self, event: events.Event, now: float) -> events.Decision:
        decision = self._schedule.handle(event)
        self._outcome.ring.append(now, event, decision.commands)
        if self._history:
            self._history.append(events.to_list(event))
            self._validate()
        return decision

    def _send(self, event: events.Event, now: float) -> None:
        """Handle an event that has no verdict."""
        self._obey(self._handle(event, now).commands, now)

    def _validate(self) -> None:
        """Check the rules of the schedule.

        Raises:
            EvalError: A rule is broken; a file contains the history of the schedule.
        """
        try:
            self._schedule.validate()
        except AssertionError as error:
            history, self._history = self._history, []  # The end of the evaluation is not checked.
            path = Path(tempfile.mkdtemp(prefix="rl_eval_")) / "history.json"
            path.write_text(json.dumps(history, default=int))
            problem, fix = f"the schedule broke a rule: {error}", f"Report this error with the file {path}."
            raise EvalError(problem, key="RL_EVAL_VALIDATE", value=str(path), fix=fix) from error

    def _obey(self, commands: Iterable[events.Command], now: float, reporter: Member | None = None) -> None:
        """Carry out commands, in order. Keep calls in flight on the runners that they concern, and on a reporter."""
        outcome, touched = self._outcome, dict[int, None]() if reporter is None else {reporter.number: None}
        for command in commands:
            match command:
                case events.Grant(runner, leases):
                    unsent = self._unsent[runner]
                    self._unsent[runner] = replace(unsent, leases=unsent.leases + outcome.granted(leases))
                    touched[runner] = None
                case events.Reclaim(runner, indices):
                    unsent = self._unsent[runner]
                    self._unsent[runner] = replace(unsent, reclaim=unsent.reclaim + indices)
                    touched[runner] = None
                case events.Abort(runner):
                    self._abort(runner, now)
                case events.GiveUp(index, seed, attempts):
                    outcome.store.add_rows(failed_row(index, seed, attempts, outcome.weights_version))
                    self.pool.progressed()
                case events.Exclude(runner, failures, pardoned):
                    self._exclude(runner, failures, pardoned)
                case _:
                    assert_never(command)
        for runner in touched:
            if (holder := self.pool.members.get(runner)) is not None:
                self._pump(holder, now)

    def _pump(self, member: Member, now: float) -> None:
        """Keep two calls of a runner in flight. New leases are sent with the next call."""
        runner = member.number
        while member.in_flight(self.tag) < CALLS_IN_FLIGHT and self._schedule.holds(runner):
            run = self._unsent.pop(runner, Run())
            self.pool.call(member, replace(run, budget_s=self.pool.slice_s), tag=self.tag, now=now)

    def _count(self, member: Member, report: RunReport, positions: tuple[int, ...]) -> None:
        """Handle a report, whose rows at some positions were recorded."""
        self._outcome.counted(report, set(report.rows["index"][list(positions)].tolist()))
        self.pool.progressed(member)
        self._excluded.pop(member.position, None)
        self._fail_fast = None

    def _note_failures(self, faults: tuple[Fault, ...], now: float) -> None:
        if self._fail_fast is not None:
            alone = self.pool.expected() < 2 or (now > self._starting_until and len(self.pool.ready()) < 2)
            failure = self._fail_fast.failed((fault for fault in faults if fault.charged), alone=alone)
            self._outcome.failure = self._outcome.failure or failure

    def _exclude(self, runner: int, failures: int, pardoned: tuple[tuple[int, int], ...]) -> None:
        """End a runner on which every attempt fails. A replacement may start, which counts as a restart."""
        outcome, member, last = self._outcome, self.pool.members[runner], self._failures.pop(runner)
        why = f"all of the last {failures} attempts failed on this runner, while other runners completed episodes"
        outcome.store.pardon(pardoned, f"runner {member.position} was excluded: {why}")
        why += f"; last failure on {last.node} in {last.phase}: {last.error_type}: {last.message}"
        text = f"runner {member.position} was excluded, and its failures do not use up attempts of episodes: {why}"
        outcome.exclusions.append(text)
        self._excluded[member.position] = []
        outcome.store.note(text)
        self._unsent.pop(runner, None)
        self.pool.terminate(member, RunnerLost(text, runner=member.position), broken=True)

    def _is_impatient(self, now: float) -> bool:
        """Whether episodes have waited long enough for runners that have not joined."""
        if not self._schedule.awaits_runners:
            self._impatient = 0.0
            return False
        self._impatient = self._impatient or now + _PATIENCE_S
        return now > self._impatient

    def _abandon(self, now: float) -> None:
        self._send(events.Cancelled(), now)

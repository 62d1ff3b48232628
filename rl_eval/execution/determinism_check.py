"""Determinism check of an evaluation: the job that has a few of its episodes run again before anything else does."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final, final

from rl_eval.backends.requests import Run
from rl_eval.execution.determinism_reruns import Reruns
from rl_eval.execution.determinism_sample import DeterminismSample
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.phase import CALLS_IN_FLIGHT, Phase
from rl_eval.execution.runner_pool import Member
from rl_eval.records.determinism import UNFINISHED, Determinism
from rl_eval.supervision.flight_recorder import CrashReport

__all__ = ["DeterminismCheck"]

_PATIENCE: Final = 20.0
"""Longest check, as a multiple of what the same episodes took the first time."""
_LEAST_PATIENCE_S: Final = 60.0


@final
class DeterminismCheck(Phase):
    """Runs a sample of the episodes again and compares; a re-run that does not complete is a finding too."""

    def __init__(self, outcome: EvalOutcome, sample: DeterminismSample) -> None:
        super().__init__(outcome)
        self._sample = sample
        self._reruns: Reruns | None = None
        self._finding = UNFINISHED
        self._patience_s = self._ends = math.inf

    def _begin(self, now: float) -> None:
        outcome = self._outcome
        run_seconds = now - outcome.started if outcome.started else 0.0
        alone = outcome.store.numerics.get("reference") == "row"
        choice = self._sample.choose(outcome.store.table, run_seconds, max(1, len(self.pool.ready())), alone=alone)
        if not choice.origins:
            self._finding = Determinism(remark=choice.remark)
            return
        settings = outcome.settings
        reused = settings.environment.env_reuse == "lane"
        keys = outcome.store.table.info_keys
        self._reruns = Reruns(choice.origins, reused, settings.runners.num_runners, choice.remark, keys)
        self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * choice.seconds)
        self._ends = now + self._patience_s
        outcome.activity = "checking determinism"
        self._pump_all(now)

    def joined(self, member: Member, now: float) -> None:
        """See :class:`Job`."""
        if not self._over:
            self._outcome.joined(self.pool, now)
            self._pump_all(now)

    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        assert self._reruns is not None
        self._reruns.lost(member.incarnation)
        self._pump_all(now)
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Take a report; see :meth:`EvalOutcome.check_report` for what it raises."""
        if self._reruns is not None and not self._over:
            self._outcome.check_report(member, value)
            self._reruns.reported(member.incarnation, member.index, value)
            self._pump_all(now)

    def _watch(self, now: float) -> None:
        if not self.pool.ready():  # Time without any runner that is up does not count.
            self._ends = now + self._patience_s
        elif now > self._ends and self._reruns is not None:
            self._abandon(now)
            self._reruns.stop("it took many times as long as the first run")

    def _abandon(self, now: float) -> None:
        if self._reruns is not None:
            for runner in filter(self._reruns.holds, list(self.pool.members)):
                self._abort(runner, now)

    @property
    def _complete(self) -> bool:
        return self._reruns is None or self._reruns.done

    def _ended(self) -> None:
        if self._reruns is not None:
            self._reruns.stop(self._reason)
            self._finding = self._reruns.result
        self._outcome.store.determinism = self._finding

    def _pump_all(self, now: float) -> None:
        members = self.pool.ready()
        positions = [member.index for member in members]
        for member in members:
            self._pump(member, positions, now)

    def _pump(self, member: Member, positions: Collection[int], now: float) -> None:
        """Keep two calls in flight; new episodes go with the next one."""
        reruns, runner = self._reruns, member.incarnation
        if reruns is None or member.in_flight(self.tag) >= CALLS_IN_FLIGHT:
            return
        taken = reruns.take(runner, member.index, self._outcome.settings.runners.lanes, positions)
        leases = tuple(lease._replace(seating=self._outcome.plan.seating(lease.index)) for lease in taken)
        while member.in_flight(self.tag) < CALLS_IN_FLIGHT and reruns.holds(runner):
            self.pool.call(member, Run(leases, self.pool.slice_s), tag=self.tag, now=now)
            leases = ()

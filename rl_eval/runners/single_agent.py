"""One environment, one episode at a time: the loop of a textbook."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar, final

from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.base import EvalRunner
from rl_eval.supervision.flight_recorder import ACT

__all__ = ["SingleAgentEvalRunner"]


@final
class SingleAgentEvalRunner(EvalRunner):
    """Runs one episode after the other in one environment."""

    default_lanes: ClassVar[int] = 1
    max_lanes: ClassVar[int | None] = 1
    acts_in_sweeps: ClassVar[bool] = True

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """See :meth:`EvalRunner.run`."""
        deadline = perf_counter() + budget_s
        if self._accept(leases, reclaim, abort):
            return self._report()
        lane = self._lanes[0]
        while lane.lease is not None or self._queue:
            if lane.lease is not None or (self._may_begin(lane) and self._begin(lane)):
                self._act_and_step()
            if perf_counter() >= deadline or (lane.lease is None and not self._may_begin(lane)):
                break
        return self._report()

    def _act_and_step(self) -> None:
        """Choose one action and take it."""
        self._expire()
        self._reject_nan()
        lane = self._lanes[0]
        if lane.lease is None:
            return
        started = perf_counter()
        self._recorder.enter(ACT)
        actions, errors = self._inference.act()
        acted = perf_counter()
        self._inference_clock += acted - started
        self._pending.inference_seconds += acted - started
        if errors:
            self._charge_policy(lane, errors[0])
            return
        self._turn_started = acted
        if self._try_env_step(lane, actions[0]):
            lane.step_seconds += perf_counter() - acted

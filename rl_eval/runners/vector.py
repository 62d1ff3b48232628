"""Runners of single-agent environments: many environments with one forward pass per step, or one in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, ClassVar, final

from typing_extensions import override

from rl_eval.config.settings import EvalSettings
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.base import EvalRunner
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.lane import Lane
from rl_eval.supervision.flight_recorder import ACT, NOW, SINCE, FlightRecorder


class VectorEvalRunner(EvalRunner):
    """Runner of k lanes with batched inference. Each lane runs its own episode and is reset on its own.

    A sweep is one forward pass and one step of every live lane. If a sweep exceeds the budget of a call, the next call
    continues it with the next lane. So a slow simulator delays a report by one step at most.
    """

    facts: ClassVar[RunnerFacts] = RunnerFacts(sweeps=True)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        super().__init__(settings, runner_index, policy)
        self._sweep: Iterator[tuple[Lane, Any]] | None = None
        self._acting = FlightRecorder.mark(ACT, 0)

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if abort:
            self._sweep = None
        if self._accept(leases, reclaim, abort):
            return self._report()
        while True:
            began = self._sweep is None and self._refill(deadline)
            # Every call begins an episode or takes a step, even with a budget of 0.
            if not began or perf_counter() < deadline:
                self._sweep = self._sweep or self._choose_actions()
                if self._sweep is not None:
                    self._step(deadline)
                elif not (self._queue and any(map(self._may_begin, self._lanes))):
                    break
            if perf_counter() >= deadline or self._starving():
                break
        return self._report()

    def _refill(self, deadline: float) -> bool:
        """Start queued episodes in free lanes, until the deadline; return whether a start was tried."""
        began = False
        for lane in self._lanes if self._queue else ():
            if self._may_begin(lane):
                self._begin(lane)
                began = True
                if not self._queue or perf_counter() >= deadline:
                    break
        return began

    def _choose_actions(self) -> Iterator[tuple[Lane, Any]] | None:
        """Run the policy on all live lanes; return pairs of lane and action, or None if no lane is live."""
        self._expire()
        self._reject_nan()
        live = [lane for lane in self._lanes if lane.lease is not None]
        if not live:
            return None
        started = perf_counter()
        self._clock[SINCE] = started
        self._cells[NOW] = self._acting
        actions, errors = self._inference.act()
        seconds = perf_counter() - started
        self._pending.inference_seconds += seconds
        self._inference_clock += seconds / len(live)
        for row, error in errors.items():
            self._charge_policy(self._lanes[row], error)
        if len(live) == len(self._lanes) and not errors:
            return zip(live, actions, strict=False)
        return iter([(lane, actions[lane.index]) for lane in live if lane.index not in errors])

    def _step(self, deadline: float) -> None:
        """Step the lanes of the sweep, until the deadline."""
        assert self._sweep is not None
        try_env_step = self._try_env_step
        then = perf_counter()
        for lane, action in self._sweep:
            self._turn_started = then
            alive = try_env_step(lane, action)
            now = perf_counter()
            if alive:
                lane.step_seconds += now - then
            then = now
            if now >= deadline:
                return
        self._sweep = None

    def _starving(self) -> bool:
        """Whether to report early, because half the lanes are idle.

        A lane is idle if no lease is left, or if its environment may be replaced only after the next report.
        """
        if self._queue:
            return 2 * self._spent >= len(self._lanes)
        return bool(self._pending) and 2 * sum(lane.lease is None for lane in self._lanes) >= len(self._lanes)


@final
class SingleAgentEvalRunner(EvalRunner):
    """Runner of one environment, one episode after the other."""

    facts: ClassVar[RunnerFacts] = RunnerFacts(default_lanes=1, max_lanes=1, sweeps=True)

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
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
        """Choose an action and step the environment."""
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

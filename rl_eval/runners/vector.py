"""Runners of single-agent environments: many environments with one forward pass per step, or one in a plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from time import perf_counter
from typing import Any, ClassVar, final

from typing_extensions import override

from rl_eval.config.settings import EvalSettings
from rl_eval.policies.inference.pass_times import SLOW_S
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.base import LEAST_WAIT_S, LOOK_S, EvalRunner
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.lane import Lane
from rl_eval.supervision.flight_recorder import ACT


class VectorEvalRunner(EvalRunner):
    """Runner of k lanes with batched inference. Each lane runs its own episode and is reset on its own.

    A sweep is one forward pass and one step of every live lane. If a sweep exceeds the budget of a call, the next call
    continues it with the next lane. So a slow simulator delays a report by one step at most.

    If the policy answers later, some lanes wait for answers while others step.
    """

    facts: ClassVar[RunnerFacts] = RunnerFacts(sweeps=True)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        super().__init__(settings, runner_index, policy)
        self._defer()
        self._sweep: Iterable[tuple[Lane, Any]] | None = None

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if abort:
            self._sweep = None
        if self.accept(leases, reclaim, abort):
            return self.report()
        while True:
            began = self._sweep is None and self._refill(deadline)
            # Every call begins an episode or takes a step, even with a budget of 0.
            if not began or perf_counter() < deadline:
                self._sweep = self._sweep or self._chosen(deadline) or None
                if self._sweep is not None:
                    self._step(deadline)
                elif not (self._awaited or (self.queue and any(map(self.may_begin, self.slots)))):
                    break
            if perf_counter() >= deadline or self._starving():
                break
        return self.report()

    def _refill(self, deadline: float) -> bool:
        """Start queued episodes in free lanes, until the deadline; return whether a start was tried."""
        began = False
        for lane in self.slots if self.queue else ():
            if self.may_begin(lane):
                self.begin(lane)
                began = True
                if not self.queue or perf_counter() >= deadline:
                    break
        return began

    def _chosen(self, deadline: float) -> Iterable[tuple[Lane, Any]]:
        """Return pairs of slot and action for the next sweep: of all live lanes, or of those with a late answer."""
        if (requests := self._requests) is None:
            return self.choose_actions()
        self._expire()
        started, live = perf_counter(), max(1, sum(lane.lease is not None for lane in self.slots))
        self._ask([lane for lane in self.slots if not requests.waiting[lane.index]])
        taken = list(self._answered())
        if not taken and requests.awaited:
            wait([requests.policy.fileno()], min(max(deadline - perf_counter(), LEAST_WAIT_S), LOOK_S))
            taken = list(self._answered())
        seconds = perf_counter() - started
        self._pending.inference_seconds += seconds
        self._inference_clock += seconds / live
        return self._overlapped(taken) if taken else ()

    def _ask(self, lanes: Sequence[Lane]) -> None:
        """Send the rows of those lanes whose episodes go on."""
        self._recorder.enter(ACT)
        self._reject_nan()
        if rows := [lane.index for lane in lanes if lane.lease is not None]:
            self._inference.ask(rows)

    def _overlapped(self, taken: Sequence[tuple[Lane, Any]]) -> Iterator[tuple[Lane, Any]]:
        """Yield pairs of slot and action. Meanwhile, send the rows of the slots that have stepped.

        The rows of fast steps are sent together, because a request costs time, too.
        """
        stepped: list[Lane] = []
        sent = perf_counter()
        for lane, action in taken:
            yield lane, action
            stepped.append(lane)
            if perf_counter() - sent >= SLOW_S:
                self._ask(stepped)
                stepped, sent = [], perf_counter()

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
        if self.queue:
            return 2 * self._spent >= len(self.slots)
        return bool(self._pending) and 2 * sum(lane.lease is None for lane in self.slots) >= len(self.slots)


@final
class SingleAgentEvalRunner(EvalRunner):
    """Runner of one environment, one episode after the other."""

    facts: ClassVar[RunnerFacts] = RunnerFacts(default_lanes=1, max_lanes=1, sweeps=True)

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if self.accept(leases, reclaim, abort):
            return self.report()
        lane = self.slots[0]
        while lane.lease is not None or self.queue:
            if lane.lease is not None or (self.may_begin(lane) and self.begin(lane)):
                self._act_and_step()
            if perf_counter() >= deadline or (lane.lease is None and not self.may_begin(lane)):
                break
        return self.report()

    def _act_and_step(self) -> None:
        """Choose an action and step the environment."""
        self._expire()
        self._reject_nan()
        lane = self.slots[0]
        if lane.lease is None:
            return
        started = perf_counter()
        self._recorder.enter(ACT)
        actions, errors = self._inference.act()
        acted = perf_counter()
        self._inference_clock += acted - started
        self._pending.inference_seconds += acted - started
        if errors:
            self.fail(0, "policy", "act", errors[0])
            return
        self._turn_started = acted
        if self._try_env_step(lane, actions[0]):
            lane.step_seconds += perf_counter() - acted

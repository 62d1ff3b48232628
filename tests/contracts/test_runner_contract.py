"""The project's runners keep the runners' contract, and the suite notices runners that do not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from rl_eval import EvalConfig, EvalRunner, SingleAgentEvalRunner, VectorEvalRunner
from rl_eval.config.settings import EvalSettings
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners import RunnerFacts
from rl_eval.testing import EvalRunnerContract
from rl_eval.testing.contracts.suite import Reference
from tests.chunk_world import config as chunks


class Recurrent(EvalRunnerContract):
    """Recurrent and sampled, in episodes of at most 25 steps; the reference loop has run once for all tests."""

    config = (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("rl_eval.testing:make_gru", deterministic=False)
        .evaluation(max_episode_steps=25)
    )
    num_episodes = 6

    @property
    def reference(self) -> Reference:  # type: ignore[override]
        """See :class:`EvalRunnerContract`."""
        return reference_of(max(self.lane_counts))


@cache
def reference_of(most_lanes: int) -> Reference:
    """Return the reference of :class:`Recurrent`."""
    return suite_of(VectorEvalRunner, most_lanes).reference_of()


def suite_of(runner: type[EvalRunner], lanes: int = 1) -> EvalRunnerContract:
    """Build the suite of a runner."""
    made: EvalRunnerContract = type("Suite", (Recurrent,), {"runner": runner, "lane_counts": (lanes,)})()
    return made


class TestVector(Recurrent):
    """In fewer lanes than there are episodes, and in more."""

    runner = VectorEvalRunner
    lane_counts = (3, 8)


class TestVectorOverABlock(EvalRunnerContract):
    """More lanes than a block of inference has rows, and a module whose weights are drawn anew for every test."""

    runner = "vector"
    config = (
        EvalConfig().environment("CartPole-v1").policy("rl_eval.policies.mlp:make_mlp").evaluation(max_episode_steps=25)
    )
    lane_counts = (17,)


class TestVectorOfChunks(EvalRunnerContract):
    """A sampled policy that is asked for a new chunk every four steps, and is three steps late."""

    runner = "vector"
    config = chunks(4, 3).policy(policy_kwargs={"sampled": True}, deterministic=False, actions="none")
    lane_counts = (1, 3)


class TestVectorNested(EvalRunnerContract):
    """Nested observations, an environment for every episode, a policy without weights."""

    runner = "rl_eval.runners.vector:VectorEvalRunner"
    config = (
        EvalConfig()
        .environment("rl_eval.testing:dict_observation", env_reuse="episode")
        .policy("rl_eval.testing:make_dict_policy")
        .evaluation(max_episode_steps=30)
    )
    lane_counts = (1, 3)


class TestSingleAgent(Recurrent):
    """One environment."""

    runner = SingleAgentEvalRunner


# ------------------------------------------------------------------------------ broken runners


def reseeded(lease: Lease, seed: int) -> Lease:
    return lease._replace(spec=lease.spec._replace(seed=seed))


class Textbook(EvalRunner):
    """A runner of its own, with one lane, to break."""

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = time.perf_counter() + self.budget(budget_s)
        self.accept(leases, reclaim, abort)
        lane = self.slots[0]
        while lane.lease is not None or self.queue:
            if lane.lease is not None or (self.may_begin(lane) and self.begin(lane)):
                self.turn()
            if time.perf_counter() >= deadline or not self.goes_on():
                break
        return self.report()

    def budget(self, budget_s: float) -> float:
        return budget_s

    def goes_on(self) -> bool:
        lane = self.slots[0]
        return lane.lease is not None or self.may_begin(lane)

    def turn(self) -> None:
        for slot, action in self.choose_actions():
            self.step(slot, action)


class Sound(Textbook):
    """As it should be."""


class LosesAnEpisode(Textbook):
    """Never runs episode 0."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept([lease for lease in leases if lease.index], reclaim, abort)


class RunsTwice(Textbook):
    """Reports episode 0 twice, the second time at the very end."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept([*leases, *(lease for lease in leases if not lease.index)], reclaim, abort)


class OwnSeeds(Textbook):
    """Resets with other seeds than the leases', and hides it."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept([reseeded(lease, lease.index) for lease in leases], reclaim, abort)

    def report(self) -> RunReport:
        report = super().report()
        report.rows["seed"] = self.true_seeds(report.rows["index"])
        return report

    def true_seeds(self, indices: Any) -> Any:
        from rl_eval.scheduling.plan import EpisodePlan

        return EpisodePlan(1000).seeds[indices]


class NewSeedPerAttempt(Textbook):
    """Rolls the dice again after a fault."""

    def begin(self, lane: Any) -> bool:
        lease = self.queue.popleft()
        self.queue.appendleft(reseeded(lease, lease.seed + lease.attempt - 1))
        return super().begin(lane)


class IgnoresItsBudget(Textbook):
    """Works until everything is done."""

    def budget(self, budget_s: float) -> float:
        return 1e9

    def goes_on(self) -> bool:
        return True


class KeepsState(Textbook):
    """Never resets the recurrent state."""

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        super().__init__(settings, runner_index, policy)
        self._inference._fresh_state = self._inference._state


class ShowsNan(Textbook):
    """Lets the policy see what the environment should not have returned."""

    def _reject_nan(self) -> None:
        """Do nothing."""


class NeverExpires(Textbook):
    """Forgets the timeout of episodes."""

    def _expire(self) -> None:
        """Do nothing."""


class ReclaimsLiveEpisodes(Textbook):
    """Ends live episodes that are reclaimed."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept(leases, reclaim, abort or bool(reclaim))


class ReclaimsNothing(Textbook):
    """Does not hear."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept(leases, (), abort)


class AbortsTheQueueOnly(Textbook):
    """Leaves live lanes alone."""

    def _abort(self) -> None:
        self._pending.returned += [lease.index for lease in self.queue]
        self.queue.clear()


class SwapsWeights(Textbook):
    """Takes weights at any time."""

    def set_weights(self, snapshot: Any) -> int:
        lanes, self.slots = self.slots, []
        try:
            return super().set_weights(snapshot)
        finally:
            self.slots = lanes


class LeavesEnvironmentsOpen(Textbook):
    """Stops without closing."""

    def stop(self) -> None:
        """Do nothing."""


class ChargesNobody(Textbook):
    """Keeps the faults to itself."""

    def report(self) -> RunReport:
        self._pending.faults.clear()
        return super().report()


class ForgetsVersions(Textbook):
    """Stamps no version."""

    def report(self) -> RunReport:
        report = super().report()
        report.rows["weights_version"] = 0
        return report


class CountsItsSlots(Textbook):
    """Has other episodes where it has more slots."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        shifted = [reseeded(lease, lease.seed + len(self.slots) - 1) for lease in leases]
        super().accept(shifted, reclaim, abort)


class Crowded(VectorEvalRunner):
    """Has more live episodes than slots."""

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        runners = settings.runners.model_copy(update={"num_envs_per_runner": self.facts.lanes(settings) + 1})
        super().__init__(settings.model_copy(update={"runners": runners}), runner_index, policy)


class DefaultAboveItsMost(Textbook):
    """Cannot run as many episodes as it does by default."""

    facts = RunnerFacts(default_lanes=4, max_lanes=2)


class HidesAStep(Textbook):
    """Takes the second step of every episode behind its observers' back."""

    def turn(self) -> None:
        lane = self.slots[0]
        observed, lane.observed = lane.observed, None if lane.length == 1 else lane.observed
        super().turn()
        lane.observed = observed


class ShowsStepsTwice(Textbook):
    """Its observers see everything twice."""

    def _observed(self, slot: int, env: Any) -> Any:
        made = super()._observed(slot, env)
        observe = made.step

        def twice(*given: Any) -> None:
            observe(*given)
            observe(*given)

        made.step = twice
        return made


class HidesRetries(Textbook):
    """Does not tell observers that an attempt begins anew."""

    def _observed(self, slot: int, env: Any) -> Any:
        made = super()._observed(slot, env)
        kept = self.__dict__.setdefault("kept", made._observers)
        made._observers = {name: Deaf(observer) for name, observer in kept.items()}
        return made


class Deaf:
    """Observer that takes no note of a second attempt."""

    def __init__(self, observer: Any) -> None:
        self.on_step, self.on_episode_end = observer.on_step, observer.on_episode_end
        self.observer = observer

    def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
        if attempt == 1:
            self.observer.on_episode_start(spec, attempt, observation)
        self.observer.start = (spec.index, spec.seed, attempt)


class FailsWithItsObservers(Textbook):
    """What observers raise in a step is the episode's fault."""

    def _observed(self, slot: int, env: Any) -> Any:
        made = super()._observed(slot, env)
        attribute = made._attribute

        def fail(name: str, where: str, error: Exception) -> None:
            attribute(name, where, error)
            if where == "on_step":
                raise error

        made._attribute = fail
        return made


class SilencesItsObservers(Textbook):
    """Has no note of what they raise."""

    def report(self) -> RunReport:
        return dataclasses.replace(super().report(), notes=())


class ShowsReruns(Textbook):
    """Observes the determinism check as well."""

    def accept(self, leases: Any, reclaim: Any, abort: bool) -> None:
        super().accept([lease.with_how(again=False) for lease in leases], reclaim, abort)


BROKEN: dict[type[EvalRunner], str] = {
    CountsItsSlots: "test_any_number_of_slots_gives_the_same_rows",
    Crowded: "test_any_number_of_slots_gives_the_same_rows",
    DefaultAboveItsMost: "test_any_number_of_slots_gives_the_same_rows",
    HidesAStep: "test_an_observer_sees_every_step_of_each_episode_in_order",
    ShowsStepsTwice: "test_an_observer_sees_every_step_of_each_episode_in_order",
    HidesRetries: "test_an_observer_sees_a_new_attempt_from_its_start",
    FailsWithItsObservers: "test_what_an_observer_raises_is_its_own",
    SilencesItsObservers: "test_what_an_observer_raises_is_its_own",
    ShowsReruns: "test_an_episode_that_runs_to_be_compared_is_not_observed",
    LosesAnEpisode: "test_every_lease_gets_exactly_one_row",
    RunsTwice: "test_every_lease_gets_exactly_one_row",
    OwnSeeds: "test_rows_are_those_of_the_reference_loop",
    KeepsState: "test_rows_are_those_of_the_reference_loop",
    IgnoresItsBudget: "test_a_spent_budget_ends_the_call",
    NewSeedPerAttempt: "test_a_fault_is_retried_with_the_same_seed",
    ChargesNobody: "test_a_fault_is_retried_with_the_same_seed",
    ShowsNan: "test_a_nan_observation_is_the_environments_fault",
    NeverExpires: "test_an_endless_episode_runs_into_its_timeout",
    ReclaimsLiveEpisodes: "test_reclaim_gives_back_only_what_has_not_started",
    ReclaimsNothing: "test_reclaim_gives_back_only_what_has_not_started",
    AbortsTheQueueOnly: "test_abort_gives_everything_back",
    SwapsWeights: "test_weights_are_refused_while_an_episode_is_live",
    ForgetsVersions: "test_rows_carry_the_version_of_the_weights",
    LeavesEnvironmentsOpen: "test_stop_closes_every_environment",
}


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_a_broken_runner_is_noticed(broken: type[EvalRunner], test: str) -> None:
    """Each way of breaking the contract fails the test that is named after it."""
    with pytest.raises(AssertionError):
        getattr(suite_of(broken), test)()


@pytest.mark.parametrize("test", sorted({*BROKEN.values()}))
def test_the_runner_that_was_broken_is_sound(test: str) -> None:
    """Without the break, the same tests pass: it is the break that they notice."""
    check: Callable[[], None] = getattr(suite_of(Sound), test)
    check()

"""The laws of the schedule: examples to read first, then thousands of random histories."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_eval.records.episode import ROW, EpisodeTable, Lease, Outcome
from rl_eval.scheduling.events import (
    Command,
    Decision,
    Exclude,
    GiveUp,
    Grant,
    PoolSized,
    Reclaim,
    RunnerJoined,
    RunnerLost,
    RunnerReported,
    Verdict,
)
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule
from tests.unit.schedule_world import World, run_history

HISTORIES = 400


def make(
    num_episodes: int, runners: int = 1, done: Collection[int] = (), attempts: Mapping[int, int] | None = None
) -> Schedule:
    return Schedule(EpisodePlan(num_episodes), expected_runners=runners, done=done, attempts=attempts)


def attempts_granted(decision: Decision) -> dict[int, int]:
    """Return the granted attempt of each index."""
    return {lease.index: lease.attempt for c in decision.commands if isinstance(c, Grant) for lease in c.leases}


def granted(decision: Decision) -> dict[int, list[int]]:
    """Return the granted indices of each runner."""
    return {c.runner: [lease.index for lease in c.leases] for c in decision.commands if isinstance(c, Grant)}


def reclaimed(decision: Decision) -> dict[int, tuple[int, ...]]:
    """Return the indices that each runner is asked for."""
    return {c.runner: c.indices for c in decision.commands if isinstance(c, Reclaim)}


# ------------------------------------------------------------------------------ grant, report, record


def test_an_episode_is_granted_reported_and_recorded() -> None:
    """A lease says which episode, which seed, which attempt and whose; its row is recorded."""
    plan = EpisodePlan(1, seed=5)
    schedule = Schedule(plan)
    assert schedule.handle(RunnerJoined(7, lanes=1)).commands == (Grant(7, (Lease(plan[0], 1, 7),)),)
    assert schedule.holds(7)
    assert schedule.handle(RunnerReported(7, finished=[0])) == Decision(Verdict(record=(0,)), ())
    assert schedule.complete
    assert not schedule.holds(7)


def test_leases_are_granted_in_index_order() -> None:
    """The first runner gets the first episodes: its lanes, and as many ahead."""
    schedule = make(100)
    assert granted(schedule.handle(RunnerJoined(0, lanes=3))) == {0: [0, 1, 2, 3, 4, 5]}
    assert granted(schedule.handle(RunnerReported(0, finished=[4]))) == {0: [6]}


def test_short_episodes_deepen_the_queue() -> None:
    """A runner that finishes many episodes per report gets two reports' worth ahead."""
    schedule = make(1000)
    schedule.handle(RunnerJoined(0, lanes=2))
    assert granted(schedule.handle(RunnerReported(0, finished=[0, 1, 2, 3]))) == {0: [*range(4, 14)]}


# ------------------------------------------------------------------------------ losses and attempts


def test_what_a_lost_runner_held_goes_to_another() -> None:
    """A loss is not the episode's fault: the next lease is for the same attempt."""
    schedule = make(2)
    schedule.handle(RunnerJoined(0, lanes=2))
    assert schedule.handle(RunnerJoined(1, lanes=2)).commands == ()
    [grant] = schedule.handle(RunnerLost(0)).commands
    assert isinstance(grant, Grant)
    assert [(lease.index, lease.attempt, lease.runner) for lease in grant.leases] == [(0, 1, 1), (1, 1, 1)]


def two_runners(num_episodes: int) -> Schedule:
    schedule = make(num_episodes, runners=2)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerJoined(1, lanes=1))
    return schedule


def test_a_failed_attempt_is_charged_and_runs_again_elsewhere() -> None:
    """The runner on which it failed gets fresh episodes; the other one gets the retry, with the next attempt."""
    schedule = two_runners(6)
    assert granted(schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))) == {0: [4]}
    assert attempts_granted(schedule.handle(RunnerReported(1, finished=[2]))) == {0: 2, 5: 1}


def test_the_only_runner_retries_where_it_failed() -> None:
    """There is no other, and none is expected."""
    schedule = make(1)
    schedule.handle(RunnerJoined(0, lanes=1))
    assert attempts_granted(schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))) == {0: 2}


def test_a_retry_waits_for_runners_that_are_expected_until_there_are_none() -> None:
    """The first runner that is up must not use up the attempts of an episode alone."""
    schedule = make(1, runners=2)
    schedule.handle(RunnerJoined(0, lanes=1))
    assert schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)])) == Decision(Verdict(charge=((0, 1),)), ())
    assert schedule.awaits_runners
    assert attempts_granted(schedule.handle(PoolSized(1))) == {0: 2}
    assert not schedule.awaits_runners


def test_a_late_fault_is_not_charged() -> None:
    """A runner that no longer holds a lease cannot use up its attempts."""
    schedule = make(1)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerLost(0))
    schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))
    [grant] = schedule.handle(RunnerJoined(1, lanes=1)).commands
    assert isinstance(grant, Grant)
    assert grant.leases[0].attempt == 1


def test_a_runner_joins_once() -> None:
    """A replacement must come under another number, else late rows of the first would count."""
    schedule = make(2)
    schedule.handle(RunnerJoined(0, lanes=1))
    with pytest.raises(ValueError, match="0"):
        schedule.handle(RunnerJoined(0, lanes=1))


# ------------------------------------------------------------------------------ evidence and isolation


def one_suspect() -> Schedule:
    """Runner 0 held 0, 1, 2, 3 and vanished in episode 1; runner 1 finished the others."""
    schedule = make(4)
    schedule.handle(RunnerJoined(0, lanes=2))
    schedule.handle(RunnerLost(0, suspects=[(1, 1)]))
    assert granted(schedule.handle(RunnerJoined(1, lanes=2))) == {1: [0, 2, 3]}
    return schedule


def test_a_second_death_alone_is_charged() -> None:
    """Nothing else was running: the suspect is guilty, and its next attempt follows, alone again."""
    schedule = one_suspect()
    schedule.handle(RunnerReported(1, finished=[0, 2, 3]))
    assert schedule.handle(RunnerLost(1, suspects=[(1, 1)])) == Decision(Verdict(charge=((1, 1),)), ())
    assert attempts_granted(schedule.handle(RunnerJoined(2, lanes=2))) == {1: 2}


def test_many_suspects_are_cleared_in_groups() -> None:
    """One of 64 episodes ended a forward pass: groups of eight run apart; one that dies too is split again."""
    schedule = make(64)
    schedule.handle(RunnerJoined(0, lanes=64))
    schedule.handle(RunnerLost(0, suspects=[(index, 1) for index in range(64)]))
    first = [granted(schedule.handle(RunnerJoined(runner, lanes=64)))[runner] for runner in (1, 2)]
    assert first == [[*range(8)], [*range(8, 16)]]
    assert schedule.handle(RunnerLost(1, suspects=[(index, 1) for index in range(8)])).verdict == Verdict()
    assert granted(schedule.handle(RunnerJoined(3, lanes=64))) == {3: [0]}


def test_a_kill_in_a_wide_forward_pass_costs_three_episode_lengths_at_most() -> None:
    """8 runners of 64 lanes, 2048 equal episodes, one process killed: all suspects are done soon after the rest."""
    schedule = make(2048, runners=8)
    held: dict[int, list[int]] = {runner: [] for runner in range(8)}

    def obey(decision: Decision) -> None:
        for runner, indices in granted(decision).items():
            held[runner] += indices

    for runner in range(8):
        obey(schedule.handle(RunnerJoined(runner, lanes=64)))
    killed, held[8] = held.pop(0)[:64], []
    obey(schedule.handle(RunnerLost(0, suspects=[(index, 1) for index in killed])))
    obey(schedule.handle(RunnerJoined(8, lanes=64)))
    suspected, rounds, late = set(killed), 0, 0
    while not schedule.complete:
        rounds += 1
        common_left = any(index not in suspected for indices in held.values() for index in indices)
        late += not common_left
        for runner in list(held):
            now, held[runner] = held[runner][:64], held[runner][64:]
            if now:
                obey(schedule.handle(RunnerReported(runner, finished=now)))
    assert late <= 3
    assert rounds <= 2048 // 512 + 3


# ------------------------------------------------------------------------------ balance


def dry_and_busy() -> Schedule:
    """Runner 0 has nothing to do; runners 1 and 2 hold 2, 3 and 4, 5: one live, one queued each."""
    schedule = make(8, runners=3)
    for runner in range(3):
        schedule.handle(RunnerJoined(runner, lanes=1))
    assert granted(schedule.handle(RunnerReported(0, finished=[0, 1]))) == {0: [6, 7]}
    assert reclaimed(schedule.handle(RunnerReported(0, finished=[6, 7]))) == {2: (5,)}
    return schedule


def test_a_queued_lease_moves_to_an_idle_runner() -> None:
    """The lease granted last is asked for; it is granted again when it is returned, not before."""
    schedule = dry_and_busy()
    assert granted(schedule.handle(RunnerReported(1))) == {}
    assert granted(schedule.handle(RunnerReported(2, returned=[5]))) == {0: [5]}
    assert schedule.handle(RunnerReported(0, finished=[5])) == Decision(Verdict((0,)), (Reclaim(1, (3,)),))


# ------------------------------------------------------------------------------ cancellation, resume


def test_resume_runs_what_is_not_done() -> None:
    """A resumed run is the same schedule with some episodes done: the others run, in index order."""
    schedule = make(6, done=[0, 2, 3])
    assert schedule.unfinished == 3
    assert granted(schedule.handle(RunnerJoined(0, lanes=4))) == {0: [1, 4, 5]}
    assert schedule.handle(RunnerReported(0, finished=[1, 4, 5])).verdict == Verdict(record=(0, 1, 2))
    assert schedule.complete


@pytest.mark.parametrize("index", [-1, 3])
def test_a_resumed_run_has_the_same_plan(index: int) -> None:
    """Episodes that the plan does not have are refused, finished or begun."""
    with pytest.raises(ValueError, match=str(index)):
        make(3, done=[index])
    with pytest.raises(ValueError, match=str(index)):
        make(3, attempts={index: 1})


# ------------------------------------------------------------------------------ broken machines


class Group:
    """Runners of equal lanes: faulty attempts, and all on broken runners, fail at once; others need some turns."""

    def __init__(
        self,
        num_episodes: int,
        lanes: int,
        broken: int,
        healthy: int,
        turns: int,
        faulty: Collection[tuple[int, int]] = (),
    ) -> None:
        self.schedule = make(num_episodes, runners=broken + healthy)
        self.broken, self.lanes, self.turns = set(range(broken)), lanes, turns
        self.held: dict[int, dict[int, int]] = {}
        self.queued: dict[int, list[Lease]] = {}
        self.faulty = faulty
        self.attempt: dict[int, int] = {}
        self.told: list[Command] = []
        self.now = 0

    def join(self, runner: int) -> None:
        self.held[runner], self.queued[runner] = {}, []
        self.obey(self.schedule.handle(RunnerJoined(runner, self.lanes)))

    def obey(self, decision: Decision) -> None:
        self.told += decision.commands
        for command in decision.commands:
            if isinstance(command, Grant):
                self.queued[command.runner] += command.leases
            if isinstance(command, Exclude):
                del self.queued[command.runner]

    def turn(self) -> None:
        self.now += 1
        for runner in list(self.queued):
            if runner not in self.queued:
                continue  # Excluded by what another one reported.
            live, queue = self.held[runner], self.queued[runner]
            while queue and len(live) < self.lanes:
                lease = queue.pop(0)
                fails = runner in self.broken or (lease.index, lease.attempt) in self.faulty
                live[lease.index] = self.now if fails else self.now + self.turns
                self.attempt[lease.index] = lease.attempt if fails else 0
            over = [index for index, due in live.items() if due <= self.now]
            for index in over:
                del live[index]
            failed = [(index, self.attempt[index]) for index in over if self.attempt[index]]
            finished = [index for index in over if not self.attempt[index]]
            if over or self.now % 10 == 0:
                self.obey(self.schedule.handle(RunnerReported(runner, finished, failed, live=list(live))))


@pytest.mark.parametrize(("lanes", "broken", "healthy"), [(1, 1, 1), (4, 1, 1), (8, 1, 3), (1, 2, 6)])
@pytest.mark.parametrize("first", [False, True])
def test_a_broken_machine_costs_no_episode(lanes: int, broken: int, healthy: int, first: bool) -> None:
    """All attempts on it fail at once, and healthy ones are slow: it is excluded, and nothing is given up."""
    group = Group(200, lanes, broken, healthy, turns=50)
    for runner in range(broken):
        group.join(runner)
    for _ in range(20 * first):
        group.turn()
    for runner in range(broken, broken + healthy):
        group.join(runner)
    while not group.schedule.complete and group.now < 100_000:
        group.turn()
    assert group.schedule.complete
    assert not [command for command in group.told if isinstance(command, GiveUp)]
    excluded = [command for command in group.told if isinstance(command, Exclude)]
    assert sorted(command.runner for command in excluded) == [*range(broken)]
    assert all(len(command.pardoned) == command.failures <= 50 * lanes for command in excluded)


def test_episodes_that_fail_everywhere_exclude_nobody() -> None:
    """Then it is not the machines: attempts are used up, and every episode is given up."""
    group = Group(30, lanes=2, broken=3, healthy=0, turns=1)
    for runner in range(3):
        group.join(runner)
    while not group.schedule.complete and group.now < 10_000:
        group.turn()
    kinds = Counter(type(command) for command in group.told)
    assert (kinds[GiveUp], kinds[Exclude]) == (30, 0)


@pytest.mark.parametrize(("lanes", "runners"), [(8, 2), (16, 3), (1, 2)])
def test_attempts_that_fail_by_themselves_exclude_nobody(lanes: int, runners: int) -> None:
    """Failures come at once and completions late: a runner that has only failed so far is not broken for that."""
    for seed in range(25):
        draws = random.Random(seed)
        faulty = {(index, attempt) for index in range(120) for attempt in (1, 2) if draws.random() < 0.5}
        group = Group(120, lanes, broken=0, healthy=runners, turns=50, faulty=faulty)
        for runner in range(runners):
            group.join(runner)
        while not group.schedule.complete and group.now < 100_000:
            group.turn()
        assert not any(isinstance(command, Exclude) for command in group.told), seed


# ------------------------------------------------------------------------------ any history


def test_no_history_breaks_a_law() -> None:
    """Every law of the referee holds after every event; see ``schedule_world``."""
    assert all(run_history(seed).sessions for seed in range(HISTORIES))


@pytest.mark.slow
def test_no_history_of_many_breaks_a_law() -> None:
    """The same, for longer."""
    assert all(run_history(seed).sessions for seed in range(HISTORIES, 20 * HISTORIES))


def happened(world: World) -> Counter[str]:
    """Count what makes a history hard."""
    counts: Counter[str] = Counter(sessions=len(world.sessions))
    for referee in world.sessions:
        for event, decision in referee.log:
            counts[type(event).__name__] += 1
            counts["returned"] += len(getattr(event, "returned", ()))
            counts["failed attempts"] += len(getattr(event, "failed_attempts", ()))
            counts["suspects"] += len(getattr(event, "suspects", ()))
            counts["deaths without a word"] += isinstance(event, RunnerLost) and not (event.charged or event.suspects)
            counts["audit"] += len(decision.verdict.audit)
            counts["charge"] += len({*decision.verdict.charge} - {*getattr(event, "failed_attempts", ())})
            for command in decision.commands:
                counts[type(command).__name__] += 1
                counts["reclaimed"] += len(command.indices) if isinstance(command, Reclaim) else 0
                leases = command.leases if isinstance(command, Grant) else ()
                counts["carried attempts"] += sum(lease.attempt > 1 for lease in leases)
        counts["isolated"] += len(referee.named)
        counts["acquitted"] += len(referee.named.keys() & referee.recorded)
    return counts


def test_histories_are_hard() -> None:
    """Each thing that can go wrong goes wrong often, reclaims that come too late included."""
    counts: Counter[str] = Counter()
    for seed in range(HISTORIES // 2):
        counts += happened(run_history(seed))
    for name in (
        *("RunnerLost", "PoolSized", "Cancelled", "audit", "Abort", "returned", "carried attempts"),
        *("charge", "GiveUp", "suspects", "deaths without a word", "isolated", "acquitted", "Exclude"),
    ):
        assert counts[name] >= 15, name
    assert counts["sessions"] > HISTORIES // 2 + 20
    assert counts["reclaimed"] > 100


def test_the_same_seed_makes_the_same_history() -> None:
    """A failure can be replayed from its seed."""
    for seed in range(20):
        ours, theirs = run_history(seed), run_history(seed)
        assert [referee.log for referee in ours.sessions] == [referee.log for referee in theirs.sessions]


# ------------------------------------------------------------------------------ rules

CORRUPTIONS: dict[str, Callable[[Any], object]] = {
    "the holder of an episode holds it": lambda schedule: schedule._holder.update({0: 0}),
    "an episode is held or waits once": lambda schedule: schedule._runners[0].held.update({0: None}),
    "only an episode without a record is held": lambda schedule: schedule._done.__setitem__(0, 1),
    "only an episode that was granted before": lambda schedule: schedule._again.append(39),
    "is unfinished until the end": lambda schedule: setattr(schedule, "_unfinished", 1),
    "without an attempt left is given up": lambda schedule: schedule._attempts.update({0: 3}),
    "an isolated episode runs apart": lambda schedule: schedule._isolation.suspect([0]),
    "isolated episodes are counted": lambda schedule: setattr(schedule, "_num_isolated", 1),
    "retries wait in order": lambda schedule: schedule._again.reverse(),
    "a lease is reclaimed from its holder": lambda schedule: schedule._runners[0].reclaiming.add(39),
    "a runner without leases is idle": lambda schedule: schedule._runners.dry.add(0),
    "a runner with spare leases is loaded": lambda schedule: schedule._runners.backlogged.clear(),
}


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_a_broken_rule_is_named(rule: str) -> None:
    """Two runners hold leases, and two episodes wait to run again, because a third runner is expected."""
    schedule = make(40, runners=3)
    for runner in (0, 1):
        schedule.handle(RunnerJoined(runner, lanes=2))
    schedule.handle(RunnerLost(1))
    schedule.handle(RunnerReported(0, failed_attempts=[(0, 1), (1, 1)]))
    schedule.handle(RunnerJoined(1, lanes=1))
    schedule.validate()
    CORRUPTIONS[rule](schedule)
    with pytest.raises(AssertionError, match=rule):
        schedule.validate()


# ------------------------------------------------------------------------------ cost


def drain(schedule: Schedule, runners: int, lanes: int, table: EpisodeTable | None = None) -> None:
    """Finish all episodes of every runner in turn, until the evaluation is complete."""
    held: dict[int, list[int]] = {runner: [] for runner in range(runners)}

    def obey(decision: Decision) -> None:
        for runner, indices in granted(decision).items():
            held[runner] += indices

    for runner in held:
        obey(schedule.handle(RunnerJoined(runner, lanes)))
    while not schedule.complete:
        for runner, indices in held.items():
            held[runner] = []
            if table is not None:
                table.fill(rows_of(indices))
            obey(schedule.handle(RunnerReported(runner, finished=indices)))


def rows_of(indices: list[int]) -> npt.NDArray[np.void]:
    rows = np.zeros(len(indices), ROW)
    rows["index"], rows["outcome"] = indices, Outcome.COMPLETED
    return rows


def calls_per_episode(num_episodes: int, runners: int) -> float:
    """Count the Python calls that the schedule makes per episode."""
    schedule, calls = make(num_episodes, runners), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith("schedule.py")

    former = sys.getprofile()
    sys.setprofile(count)
    try:
        drain(schedule, runners, lanes=4)
    finally:
        sys.setprofile(former)
    return calls / num_episodes


def test_an_episode_costs_the_same_in_a_long_plan() -> None:
    """The number of calls per episode does not grow with the number of episodes."""
    assert calls_per_episode(8_000, runners=8) < 1.2 * calls_per_episode(1_000, runners=8)


def test_an_episode_costs_the_same_in_a_large_fleet() -> None:
    """Ten times as many runners, each of which runs as many, cost less than one call more per episode."""
    assert calls_per_episode(20_000, runners=100) < 1 + calls_per_episode(2_000, runners=10)


def test_a_finished_episode_costs_at_most_200_bytes() -> None:
    """Plan, schedule and table together peak below 200 bytes per episode."""
    num_episodes = 60_000
    tracemalloc.start()
    try:
        plan = EpisodePlan(num_episodes)
        table = EpisodeTable(num_episodes)
        drain(Schedule(plan, expected_runners=4), runners=4, lanes=16, table=table)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.filled.all()
    assert peak <= 200 * num_episodes, f"{peak / num_episodes:.0f} bytes per episode"

"""The laws of the schedule: examples to read first, then thousands of random histories."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_eval.records.episode import ROW, EpisodeTable, Lease, Outcome
from rl_eval.scheduling.events import (
    Abort,
    Audit,
    Cancelled,
    Charge,
    Command,
    Exclude,
    GiveUp,
    Grant,
    PoolSized,
    Reclaim,
    Record,
    RunnerJoined,
    RunnerLost,
    RunnerReported,
)
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule
from tests.unit.schedule_world import World, run_history

HISTORIES = 400


def make(
    num_episodes: int, runners: int = 1, done: Collection[int] = (), attempts: Mapping[int, int] | None = None
) -> Schedule:
    return Schedule(EpisodePlan(num_episodes), expected_runners=runners, done=done, attempts=attempts)


def gave_up(index: int, attempts: int = 3) -> GiveUp:
    return GiveUp(index, EpisodePlan(index + 1)[index].seed, attempts)


def attempts_granted(commands: list[Command]) -> dict[int, int]:
    """Return the granted attempt of each index."""
    return {lease.index: lease.attempt for c in commands if isinstance(c, Grant) for lease in c.leases}


def granted(commands: list[Command]) -> dict[int, list[int]]:
    """Return the granted indices of each runner."""
    return {c.runner: [lease.index for lease in c.leases] for c in commands if isinstance(c, Grant)}


def reclaimed(commands: list[Command]) -> dict[int, tuple[int, ...]]:
    """Return the indices that each runner is asked for."""
    return {c.runner: c.indices for c in commands if isinstance(c, Reclaim)}


# ------------------------------------------------------------------------------ grant, report, record


def test_an_episode_is_granted_reported_and_recorded() -> None:
    """A lease says which episode, which seed, which attempt and whose; its row is recorded."""
    plan = EpisodePlan(1, seed=5)
    schedule = Schedule(plan)
    assert schedule.handle(RunnerJoined(7, lanes=1)) == [Grant(7, (Lease(0, plan[0].seed, 1, 7),))]
    assert schedule.holds(7)
    assert schedule.handle(RunnerReported(7, finished=[0])) == [Record((0,))]
    assert schedule.complete
    assert not schedule.holds(7)


def test_leases_are_granted_in_index_order() -> None:
    """The first runner gets the first episodes: its lanes, and as many ahead."""
    schedule = make(100)
    assert granted(schedule.handle(RunnerJoined(0, lanes=3))) == {0: [0, 1, 2, 3, 4, 5]}
    assert granted(schedule.handle(RunnerReported(0, finished=[4]))) == {0: [6]}


def test_a_runner_leaves_their_share_to_those_that_will_join() -> None:
    """Four episodes for four expected runners are one each, however many lanes the first one has."""
    schedule = make(4, runners=4)
    for runner in range(4):
        assert granted(schedule.handle(RunnerJoined(runner, lanes=64))) == {runner: [runner]}


def test_a_smaller_fleet_has_larger_shares() -> None:
    """When fewer runners will come than expected, those that are there get what was left for the others."""
    schedule = make(4, runners=4)
    schedule.handle(RunnerJoined(0, lanes=4))
    assert granted(schedule.handle(PoolSized(1))) == {0: [1, 2, 3]}


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
    assert schedule.handle(RunnerJoined(1, lanes=2)) == []
    [grant] = schedule.handle(RunnerLost(0))
    assert isinstance(grant, Grant)
    assert [(lease.index, lease.attempt, lease.runner) for lease in grant.leases] == [(0, 1, 1), (1, 1, 1)]


def two_runners(num_episodes: int) -> Schedule:
    schedule = make(num_episodes, runners=2)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerJoined(1, lanes=1))
    return schedule


def test_a_failed_attempt_is_charged_and_runs_again_elsewhere() -> None:
    """The runner on which it failed gets what is fresh; the other one gets the retry, with the next attempt."""
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
    assert schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)])) == []
    assert schedule.awaits_runners
    assert attempts_granted(schedule.handle(PoolSized(1))) == {0: 2}
    assert not schedule.awaits_runners


def test_a_retry_goes_to_a_free_lane_beyond_the_share() -> None:
    """It has waited long enough."""
    schedule = make(2, runners=2)
    schedule.handle(RunnerJoined(0, lanes=2))
    schedule.handle(RunnerJoined(1, lanes=2))
    assert granted(schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))) == {1: [0]}


def test_when_attempts_are_used_up_the_episode_is_given_up() -> None:
    """By the schedule, wherever the last attempt failed."""
    schedule = two_runners(1)
    assert attempts_granted(schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))) == {0: 2}
    schedule.handle(RunnerReported(1, failed_attempts=[(0, 2)]))
    schedule.handle(RunnerReported(0, failed_attempts=[(0, 3)]))
    schedule.handle(RunnerReported(1, failed_attempts=[(0, 3)]))
    assert schedule.complete


def test_a_late_row_is_audited() -> None:
    """A runner that was given up reports after all: its row is compared, and the holder's is recorded."""
    schedule = make(1, runners=2)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerLost(0))
    schedule.handle(RunnerJoined(1, lanes=1))
    assert schedule.handle(RunnerReported(0, finished=[0])) == [Audit((0,))]
    assert schedule.handle(RunnerReported(1, finished=[0])) == [Record((0,))]


def test_a_late_fault_is_not_charged() -> None:
    """A runner that no longer holds a lease cannot use up its attempts."""
    schedule = make(1)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerLost(0))
    schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))
    [grant] = schedule.handle(RunnerJoined(1, lanes=1))
    assert isinstance(grant, Grant)
    assert grant.leases[0].attempt == 1


def test_a_repeated_row_is_audited() -> None:
    """The same row twice, in one report or in two, is recorded once."""
    schedule = make(2)
    schedule.handle(RunnerJoined(0, lanes=2))
    assert schedule.handle(RunnerReported(0, finished=[1, 0, 1])) == [Record((0, 1)), Audit((2,))]
    assert schedule.handle(RunnerReported(0, finished=[0])) == [Audit((0,))]


def test_nothing_happens_when_a_runner_is_lost_twice() -> None:
    """Two sources may tell of one death; runners that never joined may die too."""
    schedule = make(2)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerLost(0))
    assert schedule.handle(RunnerLost(0)) == []
    assert schedule.handle(RunnerLost(99)) == []


def test_a_runner_joins_once() -> None:
    """A replacement must come under another number, else late rows of the first would count."""
    schedule = make(2)
    schedule.handle(RunnerJoined(0, lanes=1))
    with pytest.raises(ValueError, match="runner 0 joined twice"):
        schedule.handle(RunnerJoined(0, lanes=1))


# ------------------------------------------------------------------------------ evidence and isolation


def one_suspect() -> Schedule:
    """Runner 0 held 0, 1, 2, 3 and vanished in episode 1; runner 1 finished the others."""
    schedule = make(4)
    schedule.handle(RunnerJoined(0, lanes=2))
    schedule.handle(RunnerLost(0, suspects=[(1, 1)]))
    assert granted(schedule.handle(RunnerJoined(1, lanes=2))) == {1: [0, 2, 3]}
    return schedule


def test_a_suspect_is_not_charged_and_runs_after_all_others() -> None:
    """The first time nobody knows whose fault it was: the same attempt runs again, when nothing else is left."""
    schedule = one_suspect()
    assert schedule.handle(RunnerReported(1, finished=[0, 2])) == [Record((0, 1))]
    commands = schedule.handle(RunnerReported(1, finished=[3]))
    assert attempts_granted(commands) == {1: 1}


def test_a_suspect_that_runs_well_alone_is_done() -> None:
    """It was not its fault after all."""
    schedule = one_suspect()
    schedule.handle(RunnerReported(1, finished=[0, 2, 3]))
    assert schedule.handle(RunnerReported(1, finished=[1])) == [Record((0,))]
    assert schedule.complete


def test_a_second_death_alone_is_charged() -> None:
    """Nothing else was running: the suspect is guilty, and its next attempt follows, alone again."""
    schedule = one_suspect()
    schedule.handle(RunnerReported(1, finished=[0, 2, 3]))
    assert schedule.handle(RunnerLost(1, suspects=[(1, 1)])) == [Charge(1, 1)]
    assert attempts_granted(schedule.handle(RunnerJoined(2, lanes=2))) == {1: 2}


def test_a_death_alone_that_leaves_no_word_is_not_charged() -> None:
    """The node went, say: the same attempt runs again, still alone."""
    schedule = one_suspect()
    schedule.handle(RunnerReported(1, finished=[0, 2, 3]))
    assert schedule.handle(RunnerLost(1)) == []
    assert attempts_granted(schedule.handle(RunnerJoined(2, lanes=2))) == {1: 1}
    assert schedule.handle(RunnerLost(2, suspects=[(1, 1)])) == [Charge(1, 1)]


def test_what_is_proven_is_charged_at_once_and_isolated() -> None:
    """An attempt that hung is used up; the episode takes nobody with it when it hangs again."""
    schedule = make(3)
    schedule.handle(RunnerJoined(0, lanes=2))
    assert schedule.handle(RunnerLost(0, charged=[(0, 1)])) == [Charge(0, 1)]
    assert attempts_granted(schedule.handle(RunnerJoined(1, lanes=2))) == {1: 1, 2: 1}
    assert attempts_granted(schedule.handle(RunnerReported(1, finished=[1, 2]))) == {0: 2}


def test_an_episode_without_attempts_is_given_up() -> None:
    """No runner is left to write its record, so the schedule says that it failed, and counts it as done."""
    schedule = make(1)
    for runner, attempt in enumerate((1, 2)):
        schedule.handle(RunnerJoined(runner, lanes=1))
        assert schedule.handle(RunnerLost(runner, charged=[(0, attempt)])) == [Charge(0, attempt)]
    schedule.handle(RunnerJoined(2, lanes=1))
    assert schedule.handle(RunnerLost(2, charged=[(0, 3)])) == [Charge(0, 3), gave_up(0)]
    assert (schedule.complete, schedule.unfinished, len(schedule._holder)) == (True, 0, 0)


def test_attempts_that_a_live_runner_reported_count() -> None:
    """Two exceptions and a hang are three attempts."""
    schedule = make(1)
    schedule.handle(RunnerJoined(0, lanes=1))
    for attempt in (1, 2):
        schedule.handle(RunnerReported(0, failed_attempts=[(0, attempt)]))
    assert schedule.handle(RunnerLost(0, charged=[(0, 3)])) == [Charge(0, 3), gave_up(0)]


def test_an_attempt_is_charged_once() -> None:
    """Evidence about an attempt that ended before, as a recorder that lags may give, charges nothing."""
    schedule = make(1)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerReported(0, failed_attempts=[(0, 1)]))
    assert schedule.handle(RunnerLost(0, charged=[(0, 1)])) == []
    assert attempts_granted(schedule.handle(RunnerJoined(1, lanes=1))) == {0: 2}


def test_evidence_against_what_the_lost_runner_did_not_hold_means_nothing() -> None:
    """Its recorder may name an episode that it has returned or reported."""
    schedule = make(2, runners=2)
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(RunnerJoined(1, lanes=1))
    assert schedule.handle(RunnerLost(0, charged=[(1, 3)], suspects=[(99, 1)])) == []
    schedule.handle(RunnerLost(1))
    assert attempts_granted(schedule.handle(RunnerJoined(2, lanes=2))) == {0: 1}
    assert attempts_granted(schedule.handle(RunnerJoined(3, lanes=2))) == {1: 1}


def test_suspects_run_alone_on_every_idle_runner() -> None:
    """In parallel, one on each, in the order of the plan; who has one gets nothing else."""
    schedule = make(3)
    schedule.handle(RunnerJoined(0, lanes=3))
    schedule.handle(RunnerLost(0, suspects=[(0, 1), (2, 1)]))
    assert granted(schedule.handle(RunnerJoined(2, lanes=3))) == {2: [1]}
    assert granted(schedule.handle(RunnerJoined(1, lanes=3))) == {1: [0]}
    assert granted(schedule.handle(RunnerJoined(3, lanes=3))) == {3: [2]}
    assert schedule.handle(PoolSized(7)) == []
    assert schedule.handle(RunnerLost(1, suspects=[(0, 1)])) == [Charge(0, 1)]
    assert attempts_granted(schedule.handle(RunnerReported(3, finished=[2]))) == {0: 2}


def test_many_suspects_are_cleared_in_groups() -> None:
    """One of 64 episodes ended a forward pass: groups of eight run apart; one that dies too is split again."""
    schedule = make(64)
    schedule.handle(RunnerJoined(0, lanes=64))
    schedule.handle(RunnerLost(0, suspects=[(index, 1) for index in range(64)]))
    first = [granted(schedule.handle(RunnerJoined(runner, lanes=64)))[runner] for runner in (1, 2)]
    assert first == [[*range(8)], [*range(8, 16)]]
    assert schedule.handle(RunnerLost(1, suspects=[(index, 1) for index in range(8)])) != [Charge(0, 1)]
    assert granted(schedule.handle(RunnerJoined(3, lanes=64))) == {3: [0]}


def test_what_a_group_leaves_behind_when_one_of_it_is_proven_is_not_charged() -> None:
    """A deadline names its episode, also among suspects."""
    schedule = make(16)
    schedule.handle(RunnerJoined(0, lanes=16))
    schedule.handle(RunnerLost(0, suspects=[(index, 1) for index in range(16)]))
    assert granted(schedule.handle(RunnerJoined(1, lanes=16))) == {1: [0, 1]}
    assert schedule.handle(RunnerLost(1, charged=[(1, 1)])) == [Charge(1, 1)]


def test_a_kill_in_a_wide_forward_pass_costs_three_episode_lengths_at_most() -> None:
    """8 runners of 64 lanes, 2048 equal episodes, one process killed: all suspects are done soon after the rest."""
    schedule = make(2048, runners=8)
    held: dict[int, list[int]] = {runner: [] for runner in range(8)}

    def obey(commands: list[Command]) -> None:
        for runner, indices in granted(commands).items():
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


def test_what_is_in_isolation_is_nobodys_share() -> None:
    """Two episodes that may run now are one each for two runners, though two more wait in isolation."""
    schedule = make(4, runners=2)
    schedule.handle(RunnerJoined(0, lanes=2))
    schedule.handle(RunnerJoined(1, lanes=2))
    commands = schedule.handle(RunnerLost(0, suspects=[(0, 1), (1, 1)]))
    assert commands == []
    schedule.handle(RunnerLost(1))
    assert granted(schedule.handle(RunnerJoined(2, lanes=2))) == {2: [2]}
    assert granted(schedule.handle(RunnerJoined(3, lanes=2))) == {3: [3]}


def test_verdicts_are_passed_after_the_cancellation_too() -> None:
    """A runner that hangs instead of dropping its episodes is charged, and nothing more is granted."""
    schedule = make(2, attempts={1: 2})
    schedule.handle(RunnerJoined(0, lanes=1))
    schedule.handle(Cancelled())
    assert schedule.handle(RunnerLost(0, charged=[(0, 1), (1, 3)])) == [Charge(0, 1), Charge(1, 3), gave_up(1)]
    assert schedule.handle(RunnerJoined(1, lanes=1)) == []
    assert (len(schedule._holder), schedule.unfinished) == (0, 1)


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
    assert schedule.handle(RunnerReported(0, finished=[5])) == [Record((0,)), Reclaim(1, (3,))]


def test_a_reclaim_may_cross_the_report_of_the_episode() -> None:
    """An episode that is finished before the request arrives is recorded for its holder."""
    schedule = dry_and_busy()
    commands = schedule.handle(RunnerReported(2, finished=[4, 5]))
    assert commands[0] == Record((0, 1))
    assert reclaimed(commands) == {1: (3,)}


def test_a_live_episode_is_never_taken() -> None:
    """An idle runner waits when all others hold no more than they have lanes."""
    schedule = make(4, runners=2)
    schedule.handle(RunnerJoined(0, lanes=2))
    schedule.handle(RunnerJoined(1, lanes=2))
    assert schedule.handle(RunnerReported(1, finished=[2, 3])) == [Record((0, 1))]


def test_a_refused_reclaim_does_not_count_as_an_answer_to_come() -> None:
    """When the asked runner has started the episode already, another runner is asked."""
    schedule = dry_and_busy()
    assert reclaimed(schedule.handle(RunnerReported(2, finished=[4], live=[5]))) == {1: (3,)}


# ------------------------------------------------------------------------------ cancellation, resume


def test_a_cancelled_evaluation_grants_nothing_more() -> None:
    """Runners that hold leases are told to drop them; what they finished first still counts."""
    schedule = make(5)
    schedule.handle(RunnerJoined(0, lanes=2))
    assert schedule.handle(Cancelled()) == [Abort(0)]
    assert schedule.handle(RunnerJoined(1, lanes=2)) == []
    assert schedule.handle(RunnerReported(0, finished=[0], returned=[1, 2, 3])) == [Record((0,))]
    assert (len(schedule._holder), schedule.unfinished, schedule.complete) == (0, 4, False)


def test_resume_runs_what_is_not_done() -> None:
    """A resumed run is the same schedule with some episodes done: the others run, in index order."""
    schedule = make(6, done=[0, 2, 3])
    assert schedule.unfinished == 3
    assert granted(schedule.handle(RunnerJoined(0, lanes=4))) == {0: [1, 4, 5]}
    assert schedule.handle(RunnerReported(0, finished=[1, 4, 5])) == [Record((0, 1, 2))]
    assert schedule.complete


def test_nothing_is_left_to_do_when_all_is_done() -> None:
    """A run that was finished before it resumed is complete, and grants nothing."""
    schedule = make(3, done=[2, 0, 1])
    assert schedule.complete
    assert schedule.handle(RunnerJoined(0, lanes=4)) == []


def test_resume_goes_on_with_the_next_attempt() -> None:
    """What was charged before the driver died stays charged; attempts of finished episodes mean nothing."""
    schedule = make(3, done=[2], attempts={0: 1, 2: 3})
    assert attempts_granted(schedule.handle(RunnerJoined(0, lanes=2))) == {0: 2, 1: 1}


def test_resume_gives_up_what_has_no_attempt_left() -> None:
    """With the first event, whatever it is, and without a runner; until then it is unfinished."""
    schedule = make(3, attempts={0: 3, 2: 4})
    assert schedule.unfinished == 3
    assert schedule.handle(PoolSized(2)) == [gave_up(0), gave_up(2, attempts=4)]
    assert schedule.unfinished == 1
    assert granted(schedule.handle(RunnerJoined(0, lanes=4))) == {0: [1]}


@pytest.mark.parametrize("index", [-1, 3])
def test_a_resumed_run_has_the_same_plan(index: int) -> None:
    """Episodes that the plan does not have are refused, finished or begun."""
    with pytest.raises(ValueError, match=f"episode {index} cannot have run: the plan has 3 episodes"):
        make(3, done=[index])
    with pytest.raises(ValueError, match=f"episode {index} cannot have run: the plan has 3 episodes"):
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

    def obey(self, commands: list[Command]) -> None:
        self.told += commands
        for command in commands:
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
    assert all(len(command.uncharged) == command.failures <= 50 * lanes for command in excluded)


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
    """Whatever happens, every law of the referee holds after every event; see ``schedule_world``."""
    assert all(run_history(seed).sessions for seed in range(HISTORIES))


@pytest.mark.slow
def test_no_history_of_many_breaks_a_law() -> None:
    """The same, for longer."""
    assert all(run_history(seed).sessions for seed in range(HISTORIES, 20 * HISTORIES))


def happened(world: World) -> Counter[str]:
    """Count what makes a history hard."""
    counts: Counter[str] = Counter(sessions=len(world.sessions))
    for referee in world.sessions:
        for event, commands in referee.log:
            counts[type(event).__name__] += 1
            counts["returned"] += len(getattr(event, "returned", ()))
            counts["failed attempts"] += len(getattr(event, "failed_attempts", ()))
            counts["suspects"] += len(getattr(event, "suspects", ()))
            counts["deaths without a word"] += isinstance(event, RunnerLost) and not (event.charged or event.suspects)
            for command in commands:
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
        *("RunnerLost", "PoolSized", "Cancelled", "Audit", "Abort", "returned", "carried attempts"),
        *("Charge", "GiveUp", "suspects", "deaths without a word", "isolated", "acquitted", "Exclude"),
    ):
        assert counts[name] >= 15, name
    assert counts["sessions"] > HISTORIES // 2 + 20
    assert counts["reclaimed"] > 100


def test_the_same_seed_makes_the_same_history() -> None:
    """A failure can be replayed from its seed."""
    for seed in range(20):
        ours, theirs = run_history(seed), run_history(seed)
        assert [referee.log for referee in ours.sessions] == [referee.log for referee in theirs.sessions]


# ------------------------------------------------------------------------------ cost


def drain(schedule: Schedule, runners: int, lanes: int, table: EpisodeTable | None = None) -> None:
    """Let every runner finish all that it holds, in turn, until the evaluation is complete."""
    held: dict[int, list[int]] = {runner: [] for runner in range(runners)}

    def obey(commands: list[Command]) -> None:
        for runner, indices in granted(commands).items():
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

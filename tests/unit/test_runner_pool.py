"""Termination and replacement of runners, and the end of a pool, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Apply, Request, Run, RunnerRequest, SetWeights, Start
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import EnvError, PolicyUnavailable, RunnerLost, RunnerStartError
from rl_eval.execution.runner_pool import Member, PublishedWeights, RunnerPool
from rl_eval.records.episode import PROGRESS, ROW, Fault, RunReport
from rl_eval.weights import snapshot_weights
from tests.refused import refused, untold
from tests.unit.pool_world import FakeBackend

RUN, APPLY = Run(), Apply(repr)
LOST = RunnerLost("runner process lost")


class World:
    """A pool, its backend, and the time."""

    def __init__(self, runners: int = 2, **changes: Any) -> None:
        config = EvalConfig().environment("CartPole-v1").runners(num_runners=runners)
        for key, value in changes.items():
            config.set(key.replace("__", "."), value)
        self.backend = FakeBackend()
        self.pool = RunnerPool(self.backend, config.build())
        self.now = 100.0

    def grow(self, count: int = 2) -> World:
        self.pool.grow(count, self.now)
        return self

    def member(self, index: int) -> Member:
        return next(member for member in self.pool.members.values() if member.position == index)

    def started(self, *indices: int) -> World:
        for index in indices:
            self.answer(index, Start(index, None), tag=0)
            self.pool.start_answered(self.member(index), self.now)
        return self

    def answer(self, index: int, request: Request = RUN, tag: int = 1) -> Member | None:
        return self.pool.answered(Reply(Call(self.member(index).number, request, tag)), self.now)

    def call(self, index: int, request: RunnerRequest = RUN, tag: int = 1) -> None:
        self.pool.call(self.member(index), request, tag=tag, now=self.now)

    def lose(self, index: int, why: Exception = LOST) -> None:
        self.pool.lose(self.member(index), why, self.now)

    def wait(self, seconds: float) -> list[tuple[int, BaseException]]:
        """Let time pass; return the positions that were terminated in it, and why."""
        self.now += seconds
        before = len(self.backend.terminated)
        self.pool.tick(self.now)
        return [(self.pool.members[runner].position, why) for runner, why in self.backend.terminated[before:]]

    def until_spawn(self, limit_s: float = 60.0) -> float:
        """Wait until the next replacement; return how long it took."""
        before, spawned = self.now, len(self.backend.spawned)
        while len(self.backend.spawned) == spawned and self.now - before < limit_s:
            self.wait(0.125)
        return self.now - before


# ------------------------------------------------------------------------------ growing and shrinking


def test_every_position_gets_a_runner() -> None:
    """Positions count from 0, numbers never repeat, and a runner is ready when its start is answered."""
    world = World().grow(3)
    assert world.backend.spawned == [(0, 0), (1, 1), (2, 2)]
    assert (world.pool.ready(), world.pool.expected(), world.pool.hopeless) == ([], 3, False)
    world.started(2, 0)
    assert [member.position for member in world.pool.ready()] == [0, 2]
    world.grow(1)
    assert world.backend.spawned[-1] == (3, 3)
    assert world.pool.expected() == 4


def test_shrinking_takes_the_last_positions() -> None:
    """The members that go are the ones with the highest positions; they are killed and not replaced."""
    world = World().grow(4).started(0, 1, 2, 3)
    gone = world.pool.shrink(2)
    assert sorted(member.position for member in gone) == [2, 3]
    assert sorted(world.backend.killed) == [2, 3]
    assert world.pool.shrink(0) == []
    world.wait(60)
    assert [member.position for member in world.pool.ready()] == [0, 1]
    assert len(world.backend.spawned) == 4


def test_a_position_that_waits_for_its_replacement_can_be_taken_away() -> None:
    """Shrinking counts positions: one that is being replaced goes before one that works."""
    world = World().grow(2).started(0, 1)
    world.lose(1)
    world.pool.shrink(1)
    world.wait(60)
    assert [member.position for member in world.pool.members.values()] == [0]
    assert world.pool.expected() == 1


def test_reports_of_members_that_are_gone_are_kept() -> None:
    """Of those that were lost, and of those that were taken away; each once."""
    world = World().grow().started(0, 1)
    fault = Fault(0, 0, 1, "env", "step", 1, "E", "broke", "", 0, "", 0.0)
    report = RunReport(np.zeros(2, ROW), np.zeros((2, 0)), (fault,), np.zeros(0, PROGRESS), (), 40, 0.0, 0.0, 0.0, 0)
    for index in (0, 1):
        world.call(index)
        world.pool.answered(Reply(Call(world.member(index).number, RUN, 1), report), world.now)
        world.member(index).count(report)
    assert not world.pool.reported
    assert world.pool.counters() == {"episodes": 4, "faults": 2, "env_steps": 80}
    world.lose(0)
    assert world.pool.reported == {"episodes": 2, "faults": 1, "env_steps": 40}
    world.pool.shrink(2)
    assert world.pool.reported == world.pool.counters() == {"episodes": 4, "faults": 2, "env_steps": 80}


def test_slices_grow_with_the_fleet() -> None:
    """A tenth of a second each, or two milliseconds per runner so that one driver keeps up."""
    world = World()
    assert world.grow(2).pool.slice_s == 0.1
    assert world.grow(98).pool.slice_s == pytest.approx(0.2)


# ------------------------------------------------------------------------------ starting


def test_the_start_timeout_says_what_was_asked_for_and_what_there_is() -> None:
    """If no runner starts in time, the error names the key, its value and the shortage."""
    world = World(runners__runner_start_timeout_s=30.0).grow()
    assert world.wait(30.0) == []
    with refused(RunnerStartError, "runners.runner_start_timeout_s", value=30.0) as caught:
        world.wait(0.01)
    assert world.backend.shortage() in str(caught.value)


def test_a_long_wait_for_the_first_runner_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the shortage, long before the timeout."""
    world = World(runners__runner_start_timeout_s=120.0).grow()
    world.wait(14.0)
    assert not caplog.records
    world.wait(2.0)
    world.wait(20.0)
    (record,) = caplog.records
    assert world.backend.shortage() in record.getMessage()


def test_a_long_wait_for_a_replacement_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each time that no runner is left; it ends with a runner, and not by the start timeout of the first one."""
    world = World(runners__runner_start_timeout_s=20.0).grow(1)
    for number in (1, 2):
        world.started(0).wait(1.0)
        world.lose(0)
        world.wait(14.0)
        assert len(caplog.records) == number - 1
        world.wait(2.0)
        world.wait(1.0)
        assert len(caplog.records) == number
        assert world.backend.shortage() in caplog.records[-1].getMessage()


def test_a_policy_that_is_away_is_the_reason_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Until a runner answers a run, it is told once, and nothing is guessed."""
    world, away = World().grow(1), PolicyUnavailable("no server at 127.0.0.1:8")
    for number in (1, 2):
        for _ in range(2):
            world.started(0)
            world.lose(0, away)
            world.wait(20.0)
            assert world.pool.unavailable is away
        assert len(caplog.records) == number
        assert not untold(caplog.records[-1].getMessage(), "127.0.0.1:8")
        world.started(0).call(0)
        world.answer(0)
        assert world.pool.unavailable is None


def test_a_policy_that_is_away_is_the_error_of_the_start_timeout() -> None:
    """Runners that wait for resources do not hide it."""
    world, away = World(runners__runner_start_timeout_s=20.0).grow(), PolicyUnavailable("no server")
    world.lose(0, away)
    with refused(PolicyUnavailable):
        world.wait(21.0)


def test_nobody_waits_if_no_runner_will_come(caplog: pytest.LogCaptureFixture) -> None:
    """The evaluations end, and idle groups stay silent."""
    world = World(fault_tolerance__max_runner_restarts=0).grow(1).started(0)
    world.lose(0)
    world.wait(1.0)
    world.wait(100.0)
    assert world.pool.hopeless
    assert not caplog.records


def test_the_start_timeout_counts_from_the_first_spawn() -> None:
    """Replacing runners that die while they start does not extend the wait for the first one."""
    world = World(runners__runner_start_timeout_s=30.0).grow()
    for _ in range(3):
        world.wait(9.0)
        world.lose(0)
    with pytest.raises(RunnerStartError):
        world.wait(3.5)


def test_one_runner_is_enough() -> None:
    """After one runner is ready there is no start error; others that take too long are terminated one by one."""
    world = World(runners__runner_start_timeout_s=30.0).grow().started(0)
    assert world.wait(30.0) == []
    ((index, why),) = world.wait(0.5)
    assert index == 1
    assert isinstance(why, RunnerLost)
    assert why.runner == 1
    assert world.backend.shortage() in str(why)


def test_a_replacement_has_the_whole_start_timeout() -> None:
    """The wait of a late runner counts from its own spawn."""
    world = World(runners__runner_start_timeout_s=30.0).grow(1).started(0)
    world.now += 1000
    world.lose(0)
    world.until_spawn()
    assert world.wait(29.0) == []
    assert [index for index, _ in world.wait(2.0)] == [0]


def published(handle: str) -> PublishedWeights:
    return PublishedWeights(handle, snapshot_weights({"w": torch.zeros(1)}, 1))


def test_a_runner_that_comes_up_gets_the_weights_first() -> None:
    """Weights are sent before any other call, to replacements too; without weights nothing is sent."""
    world = World().grow().started(0)
    assert world.backend.calls == []
    world.pool.weights.send(published("handle 1"))
    world.started(1)
    assert world.backend.calls == [(1, SetWeights("handle 1"), 0)]
    world.pool.weights.send(published("handle 2"))
    world.lose(1)
    world.until_spawn()
    world.started(1)
    assert world.backend.calls[-1] == (2, SetWeights("handle 2"), 0)


# ------------------------------------------------------------------------------ losses


def test_a_lost_runner_is_killed_and_replaced() -> None:
    """Another runner fills its position; replies of the old one are ignored."""
    world = World().grow().started(0, 1)
    old = world.member(1)
    world.lose(1)
    assert world.backend.killed == [1]
    assert (world.pool.expected(), [member.position for member in world.pool.ready()]) == (2, [0])
    assert world.pool.last_loss is LOST
    world.until_spawn()
    assert world.backend.spawned[-1] == (2, 1)
    assert world.pool.restarts == 1
    assert world.member(1) is not old
    assert not world.member(1).ready
    assert world.pool.answered(Reply(Call(old.number, RUN, 1)), world.now) is None


def test_the_back_off_doubles_up_to_its_limit() -> None:
    """A quarter of a second, then twice as long with each loss, never more than ten seconds."""
    world = World(fault_tolerance__max_runner_restarts=100).grow().started(0, 1)
    waits = []
    for _ in range(9):
        world.lose(0)
        waits.append(world.until_spawn())
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 10, 10, 10]


def test_progress_sets_the_back_off_and_the_budget_back() -> None:
    """A finished episode shows that runners can work: losses before it count no longer."""
    world = World(fault_tolerance__max_runner_restarts=2).grow(1).started(0)
    for _ in range(10):
        for expected in (0.25, 0.5):
            world.lose(0)
            assert world.until_spawn() == expected
        world.pool.progressed()
    assert world.pool.restarts == 20
    assert not world.pool.hopeless


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_restart_budget_is_a_limit(budget: int) -> None:
    """After the maximum of consecutive losses a position stays empty; without positions, the pool is hopeless."""
    world = World(fault_tolerance__max_runner_restarts=budget).grow(1).started(0)
    for _ in range(budget):
        world.lose(0)
        assert not world.pool.hopeless
        world.until_spawn()
    world.lose(0)
    assert world.pool.hopeless
    assert world.pool.expected() == 0
    world.until_spawn()
    assert len(world.backend.spawned) == 1 + budget
    assert world.pool.restarts == budget


def test_an_excluded_runner_is_not_replaced() -> None:
    """A runner that cannot serve, such as one that computes other floats, is given up for good."""
    world = World().grow().started(0, 1)
    world.pool.exclude(world.member(1), why := EnvError("other floats"))
    assert world.pool.last_loss is why
    assert world.backend.killed == [1]
    world.until_spawn()
    assert len(world.backend.spawned) == 2
    assert (world.pool.expected(), world.pool.restarts) == (1, 0)


def test_patience_ends_when_something_is_due() -> None:
    """The driver sleeps until the next replacement, at most a second, and never a negative time."""
    world = World(fault_tolerance__max_runner_restarts=100).grow().started(0, 1)
    assert world.pool.patience(world.now) == 1.0
    world.lose(0)
    assert world.pool.patience(world.now) == 0.25
    assert world.pool.patience(world.now + 0.2) == pytest.approx(0.05)
    assert world.pool.patience(world.now + 5) == 0.0


# ------------------------------------------------------------------------------ silence


def silence_limit(world: World) -> float:
    """Wait until a runner is given up for its silence; return how long it took."""
    before = world.now
    while world.now - before < 10_000:
        if lost := world.wait(0.125):
            assert [index for index, _ in lost] == [0]
            assert isinstance(lost[0][1], RunnerLost)
            assert lost[0][1].runner == 0
            return world.now - before
    pytest.fail("it was never given up")


def working(**changes: Any) -> World:
    """Return a pool of one runner that has answered a call and owes the answer to another."""
    world = World(**changes).grow(1).started(0)
    world.call(0)
    world.answer(0)
    world.call(0)
    return world


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"fault_tolerance__runner_timeout_s": 5.0}, 5.0),
        ({"fault_tolerance__runner_timeout_s": 5.0, "fault_tolerance__episode_timeout_s": 50.0}, 5.0),
        ({"fault_tolerance__episode_timeout_s": 50.0}, 50.0),
        ({"fault_tolerance__episode_timeout_s": None, "fault_tolerance__runner_timeout_s": 20.0}, 20.0),
        ({"fault_tolerance__episode_timeout_s": 50.0, "fault_tolerance__step_timeout_s": 5.0}, 50.0),
    ],
)
def test_a_silent_runner_is_given_up(changes: dict[str, Any], limit: float) -> None:
    """A call that stays unanswered for longer than a step may take, and the slice, is a lost runner."""
    assert limit + 0.1 < silence_limit(working(**changes)) < limit + 3.0


def test_the_first_call_has_more_time() -> None:
    """It also probes the policy and builds environments, which is not silence."""
    world = World(fault_tolerance__runner_timeout_s=5.0).grow(1).started(0)
    world.call(0)
    assert silence_limit(world) > silence_limit(working(fault_tolerance__runner_timeout_s=5.0)) + 10


def test_one_answer_of_two_breaks_the_silence() -> None:
    """With two calls in flight, the answer to the first restarts the wait for the second."""
    world = working(fault_tolerance__runner_timeout_s=5.0)
    world.call(0)
    assert world.wait(5.0) == []
    world.answer(0)
    assert world.wait(5.0) == []
    assert [index for index, _ in world.wait(5.0)] == [0]


def test_a_runner_without_calls_may_be_silent() -> None:
    """An idle runner has no time limit; the limit starts with its next call."""
    world = working(fault_tolerance__runner_timeout_s=5.0)
    world.answer(0)
    assert world.wait(10_000) == []
    world.call(0)
    assert world.wait(5.0) == []
    assert silence_limit(world) < 3.0


def test_without_limits_silence_is_no_reason() -> None:
    """Without both timeouts, a runner has no time limit."""
    world = working(fault_tolerance__episode_timeout_s=None)
    assert world.wait(1e6) == []


def test_the_runner_in_this_process_is_never_silent() -> None:
    """With num_runners=0 the driver itself steps the environments: it cannot give itself up."""
    world = working(runners=0, fault_tolerance__episode_timeout_s=1.0)
    assert world.wait(1e6) == []


def test_calls_are_counted_by_tag() -> None:
    """Each job knows its number of unanswered calls; the start does not belong to a job."""
    world = World().grow(1).started(0)
    member = world.member(0)
    assert not member.probed
    world.call(0, tag=1)
    world.call(0, tag=1)
    world.call(0, APPLY, tag=2)
    assert [member.in_flight(tag) for tag in (0, 1, 2)] == [0, 2, 1]
    assert world.answer(0, APPLY, tag=2) is member  # Its answer is small, and overtakes a large one on its way.
    assert [member.in_flight(tag) for tag in (0, 1, 2)] == [0, 2, 0]
    world.answer(0, tag=1)
    assert [member.in_flight(tag) for tag in (0, 1, 2)] == [0, 1, 0]
    assert member.probed
    assert world.backend.calls == [(0, RUN, 1), (0, RUN, 1), (0, APPLY, 2)]


# ------------------------------------------------------------------------------ what is said


def test_why_there_are_fewer_runners_than_asked_for() -> None:
    """There is no room, or some were lost, or they were late; an unreachable cluster is not a reason."""
    world = World().grow(2).started(0)
    late, shortage = world.pool.absence(), world.backend.shortage()
    for room, reason in ((2, late), (1, shortage), (0, late)):
        world.backend.room = room
        assert world.pool.absence() == reason
    world.backend.room = None
    world.lose(1)
    assert str(world.pool.last_loss) in world.pool.absence()


def test_the_phase_is_that_of_the_runner_which_is_ahead() -> None:
    """Starting, until one is up; its weights and its first call come before the episodes."""
    world = World().grow(2)
    assert world.pool.phase == "starting 2"
    world.pool.weights.send(PublishedWeights("handle", snapshot_weights({"w": torch.zeros(1)}, 1)))
    world.started(0)
    assert world.pool.phase == "sending weights"
    world.answer(0, SetWeights("handle"), tag=0)
    assert world.pool.phase == "probing the policy"
    world.call(0)
    world.answer(0)
    world.started(1)
    assert world.pool.phase == "running"


def test_a_replacement_is_told_and_what_is_raised_then_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the position, when the new runner starts; the first start is not a replacement."""
    world, told = World().grow(), list[int]()

    def tell(index: int) -> None:
        told.append(index)
        raise OSError("disk full")

    world.pool.on_restart = tell
    world.started(0, 1)
    world.lose(1)
    assert told == []
    world.until_spawn()
    assert told == [1]
    assert all(named in caplog.text for named in ("on_runner_restart", "disk full"))

"""One evaluation against a backend that only writes down what it is asked: what is lost, late, or from another plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_eval import EvalConfig
from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Run, RunnerRequest
from rl_eval.errors import ConfigError, NumericsMismatch, RunnerLost
from rl_eval.execution.evaluation import Evaluation
from rl_eval.execution.record_store import RecordStore
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.records.episode import ROW, Fault, Outcome, RunReport
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport, LaneEntry, Moment

PLAN = EpisodePlan(4, 0)


class FakeBackend:
    """Writes down calls; the test plays the runners."""

    busy = False

    def __init__(self) -> None:
        self.called: list[tuple[int, Run]] = []

    def spawn(self, runner: int, index: int) -> None:
        pass

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        if isinstance(request, Run):
            self.called.append((runner, request))

    def kill(self, runner: int) -> None:
        pass

    def terminate(self, runner: int, why: RunnerLost) -> None:
        pass

    def wait(self, timeout_s: float) -> list[Reply]:
        return []

    def starting(self, runners: Sequence[int]) -> str:
        return f"starting {len(runners)}"

    def capacity(self) -> int | None:
        return None


class World:
    """Two runners of two lanes, and an evaluation of four episodes that has begun."""

    def __init__(self, *, up: int = 2, **evaluation: Any) -> None:
        config = EvalConfig().environment("CartPole-v1").runners(num_runners=2, num_envs_per_runner=2)
        settings = config.evaluation(num_episodes=len(PLAN), **evaluation).build()
        self.backend = FakeBackend()
        self.pool = RunnerPool(self.backend, settings)
        self.evaluation = Evaluation(1, settings, PLAN)
        self.pool.grow(2, 0.0)
        for member in list(self.pool.members.values())[:up]:
            self.pool.start_answered(member, 0.0)
        self.evaluation.start(self.pool, 0.0)

    def member(self, index: int) -> Member:
        return next(member for member in self.pool.members.values() if member.index == index)

    def given(self, member: Member) -> list[int]:
        """Return the episodes that a runner was given since the last time."""
        mine = [call for call in self.backend.called if call[0] == member.incarnation]
        self.backend.called = [call for call in self.backend.called if call not in mine]
        return [lease.index for _, run in mine for lease in run.leases]

    def finish(self, index: int) -> list[int]:
        """Have a runner finish what it was given; return which episodes that was."""
        member = self.member(index)
        indices = self.given(member)
        member.calls.clear()
        self.evaluation.replied(member, report(indices, index), 1.0)
        return indices

    def lose(self, index: int, crash_report: CrashReport | None = None) -> bool:
        """Lose a runner, in the order in which the driver tells it."""
        member = self.member(index)
        charged = self.evaluation.lost(member, crash_report)
        self.pool.lose(member, RunnerLost("gone"), 2.0, free=charged)
        return charged

    def replace(self) -> None:
        self.pool.tick(100.0)
        for member in self.pool.members.values():
            if not member.ready:
                self.pool.start_answered(member, 100.0)
                self.evaluation.joined(member, 100.0)


def row(index: int, runner: int) -> npt.NDArray[np.void]:
    filled = np.zeros(1, ROW)
    filled["index"], filled["seed"], filled["runner"] = index, PLAN.seeds[index], runner
    filled["outcome"], filled["attempts"] = Outcome.COMPLETED, 1
    return filled


def report(indices: list[int], runner: int) -> RunReport:
    rows = np.concatenate([np.zeros(0, ROW), *(row(index, runner) for index in indices)])
    return RunReport(rows, np.zeros((len(rows), 0)), (), (), (), 1, 0.0, 0.0, 0.0, 0)


def test_a_loss_during_the_determinism_check_does_not_hang_it() -> None:
    """What the lost runner held is given to others, and the evaluation ends."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    assert not world.evaluation.done
    world.lose(1)
    world.replace()
    for _ in range(5):
        for index in (0, 1):
            if not world.evaluation.done:
                world.finish(index)
    assert world.evaluation.done
    found = world.evaluation.handle.result().determinism
    assert found.passed
    assert found.checked == len(PLAN)


def test_a_cancelled_determinism_check_leaves_nothing_running() -> None:
    """Every runner that holds an episode is told to drop it: the next evaluation would take it for its own."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    busy = {runner for runner, run in world.backend.called if run.leases}
    assert busy
    world.evaluation.handle.cancel()
    world.evaluation.tick(3.0)
    aborted = {runner for runner, run in world.backend.called if run.abort}
    assert aborted >= busy
    assert world.evaluation.handle.result().status == "complete"


def dying(phase: Any, seed: int, index: int) -> CrashReport:
    entry = LaneEntry(phase != "close", index, seed, 1, 0.0)
    return CrashReport("deadline", Moment(phase, 0, 5, 1.0, (entry,)), 2.0, "longer than x", "stack", "host")


@pytest.mark.parametrize(("phase", "index"), [("step", 0), ("close", 995)])
def test_what_was_another_plans_is_not_charged_to_this_one(phase: str, index: int) -> None:
    """A runner may still have been in a step, or a close, of the evaluation before."""
    world = World()
    assert not world.lose(0, dying(phase, seed=12345, index=index))
    world.replace()
    while not world.evaluation.done:
        for runner in (0, 1):
            if not world.evaluation.done:
                world.finish(runner)
    result = world.evaluation.handle.result()
    assert result.status == "complete"
    assert result.faults == []


def test_progress_says_what_the_evaluation_is_busy_with() -> None:
    """From its place in the queue to the check of its episodes."""
    world = World(up=0, determinism_check=1.0)
    phases = [Evaluation(2, world.evaluation._settings, PLAN).phase, world.evaluation.progress().phase]
    for member in world.pool.members.values():
        world.pool.start_answered(member, 1.0)
        world.evaluation.joined(member, 1.0)
    phases.append(world.evaluation.progress().phase)
    world.pool.answered(Reply(Call(world.member(0).incarnation, Run(), 1)), 2.0)
    phases.append(world.evaluation.progress().phase)
    world.finish(0)
    world.finish(1)
    phases.append(world.evaluation.progress().phase)
    assert phases == ["waiting for its turn", "starting 2", "probing the policy", "running", "checking determinism"]


def test_fewer_runners_than_asked_for_is_a_note_with_the_reason() -> None:
    """Those that came up before the end took part, whatever was up at the start."""
    world = World(up=1)
    while not world.evaluation.done:
        world.finish(0)
    (note,) = world.evaluation.handle.result().provenance["notes"]
    assert note == "1 of 2 runners took part: the evaluation was over before the others were up"

    late = World(up=1)
    member = late.member(1)
    late.pool.start_answered(member, 1.0)
    late.evaluation.joined(member, 1.0)
    while not late.evaluation.done:
        late.finish(0)
        if not late.evaluation.done:
            late.finish(1)
    assert late.evaluation.handle.result().provenance["notes"] == []


def test_a_snapshot_is_a_result_of_what_has_finished() -> None:
    """And does not change with what finishes later."""
    world = World(determinism_check=0)
    done = world.finish(0)
    snapshot = world.evaluation.handle.snapshot("seen enough")
    assert [record.index for record in snapshot.episodes] == done
    assert snapshot.status == "partial"
    assert "seen enough" in snapshot.reason
    world.finish(1)
    assert world.evaluation.done
    assert [record.index for record in snapshot.episodes] == done


def test_a_snapshot_can_be_had_until_the_result_is_there() -> None:
    """SIGTERM may come when the evaluation is over and its result is not given yet."""
    world = World(determinism_check=0)
    done = world.finish(0)
    handle = world.evaluation.handle
    world.evaluation._close()
    assert [record.index for record in handle.snapshot().episodes] == done
    result = handle.snapshot()
    handle.set_result(result)
    assert handle.snapshot() is result


def test_a_snapshot_keeps_what_repeated_rows_tell() -> None:
    """A row that came before the one that counts is compared with it later, however often it is looked at."""
    store, late = RecordStore(len(PLAN), (), None), row(1, 0)
    late["episode_return"] = 5.0
    store.audit(late)
    assert store.mismatches() == ()
    store.add_row(row(1, 1))
    assert store.mismatches() == (1,)


def test_a_step_of_this_plan_is_charged() -> None:
    """The same death with a seed of the plan is evidence."""
    world = World()
    held = world.given(world.member(0))
    assert world.lose(0, dying("step", seed=int(PLAN.seeds[held[0]]), index=held[0]))
    world.replace()
    while not world.evaluation.done:
        for runner in (0, 1):
            if not world.evaluation.done:
                world.finish(runner)
    result = world.evaluation.handle.result()
    assert [(fault.index, fault.charged) for fault in result.faults] == [(held[0], True)]
    assert result.provenance["losses"] == ["runner 0: deadline, in step for 2.0 s, longer than x, on host"]


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ("a", "b", ConfigError),  # They built other weights.
        ("a", "a", NumericsMismatch),  # The same weights give other outputs: it is how they compute.
        ("", "", ConfigError),  # Without a module, what they built cannot be looked at, and is the likelier cause.
    ],
)
def test_another_policy_is_only_said_of_other_weights(first: str, second: str, error: type[Exception]) -> None:
    """Other outputs of the same weights are other floats, whose runner does not take part."""
    world = World()
    mine = world.given(world.member(0))[:1], world.given(world.member(1))[:1]
    keyed = [
        replace(report(mine[index], index), numerics={"outputs": str(index)}, built_weights=weights)
        for index, weights in enumerate((first, second))
    ]
    world.evaluation.replied(world.member(0), keyed[0], 1.0)
    with pytest.raises(error, match="another policy" if error is ConfigError else "other floats"):
        world.evaluation.replied(world.member(1), keyed[1], 1.0)


def test_a_check_that_takes_too_long_leaves_nothing_running_and_is_no_verdict() -> None:
    """Its runners are told to drop what they hold, so that the next weights can come."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    assert not world.evaluation.done
    world.evaluation.tick(1e6)
    assert world.evaluation.done
    assert world.evaluation.handle.result().determinism.passed is None
    aborted = {runner for runner, run in world.backend.called if run.abort}
    assert aborted == {member.incarnation for member in world.pool.members.values()}


def test_the_time_without_runners_is_not_the_checks() -> None:
    """A run that lacks only its check waits for its runners as long as any other."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    world.lose(0)
    world.lose(1)
    world.evaluation.tick(1e6)
    assert not world.evaluation.done
    world.replace()
    while not world.evaluation.done:
        for index in (0, 1):
            if not world.evaluation.done:
                world.finish(index)
    assert world.evaluation.handle.result().determinism.passed


@pytest.mark.parametrize("charged", [False, True])
def test_only_charged_faults_end_an_evaluation_early(charged: bool) -> None:
    """A pre-empted runner makes suspects of all its lanes, and takes no attempt from any of them."""
    world = World()
    fault = Fault(0, 1, 1, "runner", "act", 0, "RunnerLost", "gone", "", 0, "", 0.0, charged=charged)
    told = replace(report([], 0), faults=(fault,) * 30)
    world.evaluation.replied(world.member(0), told, 1.0)
    world.evaluation.tick(2.0)
    assert world.evaluation.done == charged

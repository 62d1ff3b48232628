"""One evaluation against a backend that only writes down what it is asked: what is lost, late, or from another plan."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rl_eval
from rl_eval import EvalConfig, evaluate
from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Run, Start
from rl_eval.errors import ConfigError, EvalError, NumericsMismatch, RunnerLost
from rl_eval.execution import mistakes
from rl_eval.execution.aspects import default_aspects
from rl_eval.execution.determinism_check import DeterminismCheck
from rl_eval.execution.loop import ControlLoop
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.record_store import RecordStore
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.log import EvaluationLog
from rl_eval.records.episode import PROGRESS, ROW, Fault, Outcome, RunReport
from rl_eval.records.guarantee import NUMERICS
from rl_eval.runners import layout_of
from rl_eval.scheduling.blocks import repeat_decisions
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule
from rl_eval.supervision.flight_recorder import CrashReport, LaneEntry, Moment
from rl_eval.testing import FaultyEnv
from tests.refused import refused
from tests.unit.pool_world import FakeBackend

PLAN = EpisodePlan(4, 0)
DEFAULT_ASPECTS = default_aspects(dict)


class World:
    """Two runners of two lanes, and an evaluation of four episodes that has begun."""

    def __init__(
        self, *, up: int = 2, log: EvaluationLog | None = None, aspects: Any = DEFAULT_ASPECTS, **evaluation: Any
    ) -> None:
        config = EvalConfig().environment("CartPole-v1").runners(num_runners=2, num_envs_per_runner=2)
        settings = config.evaluation(num_episodes=len(PLAN), **evaluation).build()
        self.backend, self.now = FakeBackend(), 1.0
        self.pool = RunnerPool(self.backend, settings)
        self.loop = ControlLoop(self.backend, self.pool, clock=lambda: self.now)
        self.outcome = EvalOutcome(settings, layout_of(settings), PLAN, log, aspects=aspects)
        self.handle = self.outcome.handle
        self.pool.grow(2, self.now)
        self.come_up(up)
        self.loop.post(Opening(self.outcome))
        self.turn()

    def turn(self, *replies: Reply) -> None:
        self.now += 0.01
        self.backend.ready += replies
        self.loop._turn()

    def come_up(self, count: int = 2) -> None:
        starting = [member for member in self.pool.members.values() if not member.ready][:count]
        self.turn(*(Reply(Call(member.number, Start(member.position, None), 0)) for member in starting))

    def member(self, index: int) -> Member:
        return next(member for member in self.pool.members.values() if member.position == index)

    def runs(self, index: int) -> list[Call]:
        """Take the unanswered calls of a runner."""
        runner = self.member(index).number
        mine = [call for call in self.backend.calls if call[0] == runner]
        self.backend.calls = [call for call in self.backend.calls if call[0] != runner]
        return [Call(*call) for call in mine]

    def given(self, index: int) -> list[int]:
        """Return the episodes that a runner was given and has not reported."""
        runner = self.member(index).number
        return [lease.index for other, run, _ in self.backend.calls if other == runner for lease in run.leases]

    def finish(self, index: int, **changes: Any) -> list[int]:
        """Have a runner finish what it was given; return which episodes that was."""
        given, runs = self.given(index), self.runs(index)
        reports = [report([lease.index for lease in run.request.leases], index) for run in runs]
        self.turn(*(Reply(run, replace(value, **changes)) for run, value in zip(runs, reports, strict=True)))
        return given

    def finish_all(self) -> None:
        for _ in range(100):
            for index in (0, 1):
                if not self.handle.done():
                    self.finish(index)
        assert self.handle.done()

    def lose(self, index: int, crash_report: CrashReport | None = None) -> None:
        lost = Call(self.member(index).number, Run(), 0)
        self.turn(Reply(lost, error=RunnerLost("gone"), lost=True, crash_report=crash_report))

    def replace(self) -> None:
        self.now += 2.0
        self.turn()
        self.come_up()

    @property
    def aborted(self) -> set[int]:
        """Runners that were told to drop everything."""
        return {runner for runner, run, _ in self.backend.calls if run.abort}


def row(index: int, runner: int) -> npt.NDArray[np.void]:
    filled = np.zeros(1, ROW)
    filled["index"], filled["seed"], filled["runner"] = index, PLAN.seeds[index], runner
    filled["outcome"], filled["attempts"] = Outcome.COMPLETED, 1
    return filled


def report(indices: list[int], runner: int) -> RunReport:
    rows = np.concatenate([np.zeros(0, ROW), *(row(index, runner) for index in indices)])
    return RunReport(rows, np.zeros((len(rows), 0)), (), np.zeros(0, PROGRESS), (), 1, 0.0, 0.0, 0.0, 0)


def test_a_loss_during_the_determinism_check_does_not_hang_it() -> None:
    """The episodes of the lost runner go to others, and the evaluation ends."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    assert not world.handle.done()
    world.lose(1)
    world.replace()
    world.finish_all()
    found = world.handle.result().determinism
    assert found.passed
    assert found.checked == len(PLAN)


def test_a_cancelled_determinism_check_leaves_nothing_running() -> None:
    """Every runner with an episode gets a request to drop it: it must not report into the next evaluation."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    busy = {runner for runner, run, _ in world.backend.calls if run.leases}
    assert busy
    world.handle.cancel()
    world.turn()
    assert world.aborted >= busy
    assert world.handle.result().status == "complete"


def dying(phase: Any, seed: int, index: int) -> CrashReport:
    entry = LaneEntry(phase != "close", index, seed, 1, 0.0)
    return CrashReport("deadline", Moment(phase, 0, 5, 1.0, (entry,)), 2.0, "longer than x", "stack", "host")


@pytest.mark.parametrize(("phase", "index"), [("step", 0), ("close", 995)])
def test_what_was_another_plans_is_not_charged_to_this_one(phase: str, index: int) -> None:
    """A runner may still have been in a step, or a close, of the evaluation before."""
    world = World()
    world.lose(0, dying(phase, seed=12345, index=index))
    world.replace()
    world.finish_all()
    result = world.handle.result()
    assert result.status == "complete"
    assert result.faults == []


def test_progress_says_what_the_evaluation_is_busy_with() -> None:
    """From its place in the queue to the check of its episodes."""
    world = World(up=0, determinism_check=1.0)
    phases = [
        EvalOutcome(world.outcome.settings, world.outcome.layout, PLAN).progress().phase,
        world.handle.progress().phase,
    ]
    world.come_up()
    phases.append(world.handle.progress().phase)
    world.finish(0)
    phases.append(world.handle.progress().phase)
    world.finish(1)
    phases.append(world.handle.progress().phase)
    assert phases == ["waiting to start", "starting 2", "probing the policy", "running", "checking determinism"]


def test_fewer_runners_than_asked_for_is_a_note_with_the_reason() -> None:
    """Those that came up before the end took part, whatever was up at the start."""
    world = World(up=1)
    while not world.handle.done():
        world.finish(0)
    (note,) = world.handle.result().provenance["notes"]
    assert note == f"1 of 2 runners took part: {world.pool.absence()}"

    late = World(up=1)
    late.come_up()
    late.finish_all()
    assert late.handle.result().provenance["notes"] == []


@pytest.mark.parametrize("up", [1, 2])
def test_a_log_tells_as_many_runners_as_the_run_did(up: int, tmp_path: Path) -> None:
    """With the reason, if there were fewer than asked for."""
    world = World(up=up, log=EvaluationLog.open(tmp_path))
    give_up = time.monotonic() + 60
    while not world.handle.done():
        assert time.monotonic() < give_up
        world.turn()
        for index in range(up):
            if not world.handle.done():
                world.finish(index)
        time.sleep(0.001)  # A thread reads and writes the log.
    result, loaded = world.handle.result(), rl_eval.load(tmp_path)
    assert result.timing.num_runners == up
    assert loaded.timing == result.timing
    assert list(loaded.provenance["notes"]) == result.provenance["notes"]
    assert len(result.provenance["notes"]) == 2 - up


def test_a_snapshot_is_a_result_of_what_has_finished() -> None:
    """And does not change with what finishes later."""
    world = World(determinism_check=0)
    done = world.finish(0)
    snapshot = world.handle.snapshot("seen enough")
    assert [record.index for record in snapshot.episodes] == done
    assert snapshot.status == "partial"
    assert "seen enough" in snapshot.reason
    world.finish(1)
    assert world.handle.done()
    assert [record.index for record in snapshot.episodes] == done


def test_a_snapshot_can_be_had_until_the_result_is_there() -> None:
    """SIGTERM may come when the evaluation is over and its result is not given yet."""
    world = World(determinism_check=0)
    done = world.finish(0)
    handle = world.handle
    world.outcome._close()
    assert [record.index for record in handle.snapshot().episodes] == done
    result = handle.snapshot()
    handle.set_result(result)
    assert handle.snapshot() is result


def test_a_snapshot_keeps_what_repeated_rows_tell() -> None:
    """A row that came before the one that counts is compared with it later, however often it is looked at."""
    store, late = RecordStore(len(PLAN), (), None, {}), row(1, 0)
    late["episode_return"] = 5.0
    store.audit(late, np.zeros((len(late), 0)))
    assert store.mismatches() == ()
    store.add_rows(row(1, 1))
    assert store.mismatches() == (1,)


def test_a_step_of_this_plan_is_charged() -> None:
    """The same death with a seed of the plan is evidence."""
    world = World()
    held = world.given(0)
    world.lose(0, dying("step", seed=int(PLAN.seeds[held[0]]), index=held[0]))
    world.replace()
    world.finish_all()
    result = world.handle.result()
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
    world = World(determinism_check=0)
    world.finish(0, numerics={"outputs": "0"}, extra={NUMERICS: first})
    world.finish(1, numerics={"outputs": "1"}, extra={NUMERICS: second})
    if error is ConfigError:
        exception = world.handle.exception()
        assert isinstance(exception, ConfigError)
        assert (exception.key, exception.runner) == ("policy.weights", 1)
    else:
        assert isinstance(world.pool.last_loss, NumericsMismatch)
        assert world.pool.last_loss.key == "outputs"
        assert [member.position for member in world.pool.ready()] == [0]


def test_a_check_that_takes_too_long_leaves_nothing_running_and_is_no_verdict() -> None:
    """Its runners are told to drop what they hold, so that the next weights can come."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    assert not world.handle.done()
    world.now += 100.0
    world.turn()
    assert world.handle.result(timeout=0).determinism.passed is None
    assert world.aborted == {member.number for member in world.pool.members.values()}


def test_the_start_of_runners_takes_no_time_of_the_check(tmp_path: Path) -> None:
    """A run that lacks only its check waits for its runners as long as any other."""

    def turn_until(world: World, ready: Callable[[], object], count: int) -> None:
        give_up = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < give_up
            world.turn()
            for index in range(count):
                if not world.handle.done():
                    world.finish(index)
            time.sleep(0.001)  # A thread reads and writes the log.

    first = World(log=EvaluationLog.open(tmp_path), determinism_check=0)
    turn_until(first, first.handle.done, 2)
    world = World(up=0, log=EvaluationLog.open(tmp_path), determinism_check=1.0)
    turn_until(world, lambda: world.outcome.activity, 0)
    world.now += 100.0
    world.turn()
    assert not world.handle.done()
    world.come_up()
    turn_until(world, world.handle.done, 2)
    assert world.handle.result().determinism.passed


@pytest.mark.parametrize("charged", [False, True])
def test_only_charged_faults_end_an_evaluation_early(charged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pre-empted runner makes suspects of all its lanes, and takes no attempt from any of them."""
    monkeypatch.setattr(mistakes, "_FEWEST", 2)
    monkeypatch.setattr(mistakes, "_PER_LANE", 0)
    world = World()
    for runner in (0, 1):
        failed = ("runner", "act", 0, "RunnerLost", "gone", "", runner, "", 0.0)
        faults = tuple(Fault(index, 1, 1, *failed, charged=charged) for index in world.given(runner))
        world.turn(Reply(world.runs(runner)[0], replace(report([], runner), faults=faults)))
    assert world.handle.done() == charged


@pytest.mark.parametrize("left_out", [None, *range(len(DEFAULT_ASPECTS))])
def test_an_evaluation_has_the_same_records_without_any_of_its_aspects(left_out: int | None) -> None:
    """Each aspect stands beside the story, and can be taken out alone."""
    whole = World(determinism_check=0.5)
    whole.finish_all()
    aspects = [] if left_out is None else [*DEFAULT_ASPECTS]
    if left_out is not None:
        del aspects[left_out]
    world = World(determinism_check=0.5, aspects=aspects)
    world.finish_all()
    assert world.handle.result().fingerprint == whole.handle.result().fingerprint
    assert world.handle.result().status == "complete"


def test_a_check_waits_only_seconds_for_runners() -> None:
    """The result is finished: runners that cannot come must not hold it back."""
    world = World(determinism_check=1.0)
    world.finish(0)
    world.finish(1)
    world.lose(0)
    world.lose(1)
    world.turn()
    assert not world.handle.done()
    world.now += 15.0
    world.turn()
    result = world.handle.result(10)
    assert (result.status, result.determinism.passed, result.determinism.failed) == ("complete", None, ())


def test_a_runner_may_be_lost_while_a_check_without_episodes_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing that it could have held."""
    world, slow = World(determinism_check=0), True
    checking = lambda: any(isinstance(job, DeterminismCheck) for job in world.loop._active.values())  # noqa: E731
    monkeypatch.setattr(world.outcome.store, "settle", lambda: not (slow and checking()))
    while not checking():
        for index in (0, 1):
            world.finish(index)
    world.lose(0)
    slow = False
    world.turn()
    assert world.handle.result(10).status == "complete"


def test_the_history_of_a_run_with_a_broken_rule_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an evaluation names a file, from which the same schedule makes the same decisions."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def complete_is_wrong(schedule: Schedule) -> None:
        assert not schedule.complete

    config = EvalConfig().environment("CartPole-v1", wrappers=[partial(FaultyEnv, episodes=[3], attempts=[1])])
    config.runners(num_envs_per_runner=4).evaluation(num_episodes=20, max_episode_steps=10)
    with monkeypatch.context() as planted:
        planted.setattr(Schedule, "validate", complete_is_wrong)
        with refused(EvalError, "RL_EVAL_VALIDATE") as caught:
            evaluate(config, lambda observations: np.zeros(len(observations), int))
    history = json.loads(Path(caught.value.value).read_text())
    decisions = [*repeat_decisions(history)]
    recorded = [event[2][at] for event, one in zip(history[1:], decisions, strict=True) for at in one.verdict.record]
    assert sorted(recorded) == [*range(20)]
    assert [one.verdict.charge for one in decisions if one.verdict.charge] == [((3, 1),)]

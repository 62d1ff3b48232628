"""The control loop on a fake backend and a clock that the test moves: what one failure means for the others."""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from rl_eval import EvalConfig, EvalResult
from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import GetWeightsVersion, Run, SetWeights, Start
from rl_eval.errors import (
    ClusterDied,
    ClusterError,
    ConfigError,
    EnvError,
    EvalError,
    NumericsMismatch,
    PolicyUnavailable,
    RunnerLost,
    WeightsError,
)
from rl_eval.execution.aspects import default_aspects
from rl_eval.execution.jobs import ApplyToAll, ApplyToReady, Do, Job, WeightsSync
from rl_eval.execution.loop import ControlLoop
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import Committing, EvalOutcome
from rl_eval.execution.runner_pool import PublishedWeights, RunnerPool
from rl_eval.log import EvaluationLog
from rl_eval.log.storage import LocalStorage
from rl_eval.records.episode import PROGRESS, ROW, Fault, Outcome, Row, RunReport
from rl_eval.runners import layout_of
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.runner_failures import Consequence, judge
from rl_eval.weights import snapshot_weights
from tests.refused import refused, untold
from tests.unit.pool_world import FakeBackend

NO_LICENCE = EnvError("no licence on this node")


class Backend(FakeBackend):
    """A start is a call that the test answers like others."""

    def spawn(self, runner: int, index: int, weights: object) -> None:
        self.calls.append((runner, Start(index, weights), 0))


class World:
    """A driver and its runners; each turn takes a tenth of a second."""

    def __init__(self, runners: int = 4, lanes: int = 1, **faults: Any) -> None:
        config = EvalConfig().environment("CartPole-v1").policy(lambda o: o)
        config = config.runners(num_runners=runners, num_envs_per_runner=lanes).fault_tolerance(**faults)
        self.settings = config.evaluation(num_episodes=200, determinism_check=0).build()
        self.backend, self.now = Backend(), 1000.0
        self.pool = RunnerPool(self.backend, self.settings)
        self.loop = ControlLoop(self.backend, self.pool, clock=lambda: self.now)
        self.pool.grow(runners, self.now)
        self.faults: list[Fault] = []
        """Faults of all reports."""

    def turn(self, *replies: Reply) -> None:
        self.backend.ready += replies
        self.now += 0.1
        self.loop._turn()

    def start(self, *runners: int, error: Exception | None = None) -> None:
        self.backend.calls = [call for call in self.backend.calls if call[0] not in runners]
        self.turn(*(Reply(Call(runner, Start(runner, None), 0), error=error) for runner in runners))

    def post(self, job: Any) -> Any:
        self.loop.post(job)
        self.turn()
        return job

    def answer(self, broken: Sequence[int] = (), faulty: Sequence[int] = ()) -> None:
        """Answer all calls: every attempt completes, but for those on broken positions or of faulty episodes."""
        calls, self.backend.calls = self.backend.calls, []
        for runner, request, tag in calls:
            if member := self.pool.members.get(runner):
                fails = range(200) if member.position in broken else faulty
                value: Any = 1
                if isinstance(request, Run):
                    value = played(request, member.position, fails)
                    self.faults += value.faults
                self.turn(Reply(Call(runner, request, tag), value))


def played(run: Run, position: int, failing: Sequence[int]) -> RunReport:
    """Return the report of a runner that ends all it is given."""
    rows, faults = [], []
    for lease in run.leases:
        if lease.index in failing:
            text = "ImportError", "no licence", "File"
            faults.append(Fault(lease.index, lease.seed, lease.attempt, "env", "reset", 0, *text, position, "bad", 0.0))
        else:
            kept = {"index": lease.index, "seed": lease.seed, "runner": position, "attempts": lease.attempt}
            rows.append(Row(**kept, outcome=Outcome.COMPLETED))
    nothing = np.zeros((len(rows), 0)), tuple(faults), np.zeros(0, PROGRESS), ()
    return RunReport(np.array(rows, ROW), *nothing, len(rows), 0.0, 0.0, 0.0, 0)


def evaluate(world: World, broken: Sequence[int] = ()) -> Any:
    outcome = EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(200))
    world.post(Opening(outcome))
    for _ in range(10_000):
        if outcome.state == "done":
            break
        world.turn()
        world.answer(broken)
    return outcome.handle.result(timeout=0)


# ------------------------------------------------------------------------------ one of several fails


def test_a_runner_that_cannot_start_and_answers_first_costs_only_itself() -> None:
    """The evaluation completes on the other three."""
    world = World()
    world.start(0, error=NO_LICENCE)
    world.start(1, 2, 3)
    assert world.loop._fatal is None
    result = evaluate(world)
    assert (result.status, len(result.episodes)) == ("complete", 200)
    assert {record.runner for record in result.episodes} <= {0, 1, 2, 3}


def test_a_broken_runner_is_excluded_and_named() -> None:
    """200 of 200 complete, and none is charged with what failed on it."""
    world = World(runners=2, lanes=4)
    world.start(0, 1)
    result = evaluate(world, broken=[0])
    assert (result.status, len(result.episodes)) == ("complete", 200)
    assert {record.runner for record in result.episodes} == {1}
    assert result.faults
    assert not [fault for fault in result.faults if fault.charged]
    (note,) = {note for note in result.provenance["notes"] if "no licence" in note}
    assert untold(note, "runner 0") == []
    assert len(result.provenance["runners_excluded"]) <= 1 + world.settings.fault_tolerance.max_runner_restarts


@pytest.mark.parametrize("stopped", [False, True])
def test_a_pardoned_attempt_is_not_charged_after_a_resume(tmp_path: Path, stopped: bool) -> None:
    """Episode 0 fails on a broken runner, and then three times on others, whether or not the run stops in between."""

    def run(broken: Sequence[int], stop: bool) -> EvalResult:
        world = World(runners=2, lanes=4)
        world.start(0, 1)
        outcome = EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(200), EvaluationLog.open(tmp_path))
        world.post(Opening(outcome))
        while not outcome.handle.done():
            world.turn()
            world.answer(broken, faulty=[0])
            if stop and outcome.exclusions and any(one.index == 0 and one.runner == 1 for one in world.faults):
                outcome.handle.cancel()
            time.sleep(0.001)
        return outcome.handle.result()

    result = run(broken=[0], stop=stopped)
    if stopped:
        assert result.status == "partial"
        assert not result.table.filled[0]
        result = run(broken=[], stop=False)
    (failed,) = (record for record in result.episodes if record.outcome == "failed")
    assert failed.index == 0
    assert [fault.charged for fault in failed.faults].count(True) == 3
    assert [fault.attempt for fault in failed.faults] == [*range(1, len(failed.faults) + 1)]
    assert failed.attempts == len(failed.faults) > 3


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), EnvError("no room")])
def test_weights_that_do_not_fit_on_one_machine_cost_only_its_runner(error: Exception) -> None:
    """Those of a start and those of a broadcast alike; the others go on."""
    world = World()
    weights = PublishedWeights("ref", snapshot_weights({"w": torch.zeros(1)}, 1))
    world.start(0, 1, 2, 3)
    sync = world.post(WeightsSync(weights))
    world.turn(Reply(Call(0, SetWeights("ref"), sync.tag), error=error))
    world.turn(*(Reply(Call(runner, SetWeights("ref"), sync.tag), 1) for runner in (1, 2, 3)))
    assert sync.future.result(timeout=0) == [1, 1, 1]
    assert world.loop._fatal is None
    assert [member.position for member in world.pool.ready()] == [1, 2, 3]


def test_what_fails_on_every_runner_fails_the_call_with_the_original_error() -> None:
    """The machines are not the cause then, and the evaluation does not wait for restarts."""
    world = World(runners=2)
    world.start(0, 1)
    weights = PublishedWeights("ref", snapshot_weights({"w": torch.zeros(1)}, 1))
    sync = world.post(WeightsSync(weights))
    for runner in (0, 1):
        world.turn(Reply(Call(runner, SetWeights("ref"), sync.tag), error=NO_LICENCE))
    assert sync.future.exception(timeout=0) is NO_LICENCE
    assert world.loop._fatal is None


def test_weights_that_one_runner_refuses_are_taken_from_those_that_have_them() -> None:
    """A usage error on one runner ends the evaluation on all."""
    world = World(runners=2)
    world.start(0, 1)
    world.pool.weights.send(PublishedWeights("good", snapshot_weights({"w": torch.zeros(1)}, 0)))
    sync = world.post(WeightsSync(PublishedWeights("bad", snapshot_weights({"v": torch.zeros(1)}, 1))))
    world.turn(Reply(Call(0, SetWeights("bad"), sync.tag), 1))
    world.turn(Reply(Call(1, SetWeights("bad"), sync.tag), error=WeightsError("weights lack 'w'")))
    assert isinstance(sync.future.exception(timeout=0), WeightsError)
    assert [call[:2] for call in world.backend.calls[-2:]] == [(0, SetWeights("good")), (1, SetWeights("good"))]


def test_a_start_that_fails_everywhere_ends_the_group() -> None:
    """With the original error, as soon as the last one has failed."""
    world = World(runners=2)
    world.start(0, error=EnvError("first"))
    assert world.loop._fatal is None
    world.start(1, error=NO_LICENCE)
    assert world.loop._fatal is NO_LICENCE


def test_a_usage_error_ends_the_group_at_once() -> None:
    """Nothing would be different elsewhere."""
    world = World()
    world.start(2, error=ConfigError("environment.env: no such module"))
    assert isinstance(world.loop._fatal, ConfigError)


def test_an_error_of_an_evaluation_that_has_ended_is_nobodys() -> None:
    """Both calls in flight raise; the first ends the evaluation, the second not the group."""
    world = World(runners=1)
    world.start(0)
    outcome = EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(200))
    world.post(Opening(outcome))
    world.turn()
    calls, world.backend.calls = world.backend.calls, []
    assert len([request for _, request, _ in calls if isinstance(request, Run)]) == 2
    for runner, request, tag in calls:
        world.turn(Reply(Call(runner, request, tag), error=ConfigError("no statistics yet")))
    assert isinstance(outcome.handle.exception(), ConfigError)
    assert evaluate(world).status == "complete"


def test_what_a_callers_function_raises_is_for_the_caller() -> None:
    """Its runner lives on."""
    world = World(runners=2)
    world.start(0, 1)
    job = world.post(ApplyToReady(lambda runner: None))
    runner, request, tag = world.backend.calls[-1]
    world.turn(Reply(Call(runner, request, tag), error=ValueError("mine")))
    assert isinstance(job.future.exception(timeout=0), ValueError)
    assert len(world.pool.ready()) == 2


def answer_job(world: World, job: Job) -> None:
    """Answer the calls of a job with the runner's number, but no start."""
    for runner, request, tag in [call for call in world.backend.calls if call[2] == job.tag]:
        world.backend.calls.remove((runner, request, tag))
        world.turn(Reply(Call(runner, request, tag), runner))


def test_a_call_can_wait_for_all_positions() -> None:
    """For a runner that starts, and for the one in the place of a lost one; each position answers once."""
    world = World(runners=3)
    world.start(0, 1)
    job = world.post(ApplyToAll(lambda runner: None, 60.0))
    answer_job(world, job)
    world.turn(Reply(Call(1, Start(1, None), 0), error=RunnerLost("killed"), lost=True))
    assert not job.done
    world.start(2)
    answer_job(world, job)
    assert job.future.result(timeout=0) == [0, 1, 2]
    job = world.post(ApplyToAll(lambda runner: None, 60.0))
    answer_job(world, job)
    assert not job.done
    world.now += 1.0
    world.turn()
    world.start(3)
    answer_job(world, job)
    assert job.future.result(timeout=0) == [0, 3, 2]


def test_a_call_that_waits_for_all_positions_has_a_limit() -> None:
    """The error names the first that is missing; a position that was removed is not waited for."""
    world = World(runners=2)
    world.start(0)
    job = world.post(ApplyToAll(lambda runner: None, 5.0))
    answer_job(world, job)
    world.now += 5.0
    world.turn()
    with refused(ClusterError, "timeout_s", value=5.0, runner=1):
        job.future.result(timeout=0)
    job = world.post(ApplyToAll(lambda runner: None, 5.0))
    answer_job(world, job)
    assert not job.done
    world.post(Do(lambda pool, now: world.loop.forget(pool.shrink(1))))
    assert job.future.result(timeout=0) == [0]


@pytest.mark.parametrize("before", [True, False])
def test_a_call_does_not_wait_for_a_position_that_stays_empty(before: bool) -> None:
    """Its runner was lost as often as the settings allow, before the call or during it."""
    world = World(runners=2, max_runner_restarts=0)
    world.start(0, 1)
    loss = Reply(Call(1, Start(1, None), 0), error=RunnerLost("killed"), lost=True)
    if before:
        world.turn(loss)
    job = world.post(ApplyToAll(lambda runner: None, 600.0))
    if not before:
        world.turn(loss)
    world.turn()
    with refused(ClusterError, "timeout_s", value=600.0, runner=1):
        job.future.result(timeout=0)


# ------------------------------------------------------------------------------ one evaluation, several jobs


def checked_world() -> tuple[World, EvalOutcome]:
    world = World(runners=2)
    world.settings = world.settings.model_copy(
        update={"evaluation": world.settings.evaluation.model_copy(update={"determinism_check": 0.1})}
    )
    world.start(0, 1)
    return world, EvalOutcome(
        world.settings,
        layout_of(world.settings),
        EpisodePlan(200),
        follow_up=lambda result: [Do(lambda *_: None)],
        aspects=default_aspects(dict),
    )


def test_no_weights_come_between_an_evaluation_and_its_check() -> None:
    """A broadcast that waited all along is sent when the last re-run has been reported, and what follows is done."""
    world, outcome = checked_world()
    weights = PublishedWeights("ref", snapshot_weights({"w": torch.zeros(1)}, 1))
    world.post(Opening(outcome))
    sync = world.post(WeightsSync(weights))
    phases = []
    while outcome.state != "done":
        assert not [request for _, request, _ in world.backend.calls if isinstance(request, SetWeights)]
        phases.append(outcome.progress().phase)
        world.answer()
    assert "checking determinism" in phases
    assert outcome.handle.result().determinism.checked == 20
    assert world.pool.counters()["episodes"] == 200
    assert [type(request) for _, request, tag in world.backend.calls if tag == sync.tag] == [SetWeights, SetWeights]


def test_an_evaluation_has_one_state() -> None:
    """It waits for the one before it, runs in the session and in the check, and is done; a late answer is ignored."""
    world, outcome = checked_world()
    job = world.post(Opening(EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(200))))
    world.post(Opening(outcome))
    states = []
    while outcome.state != "done":
        states.append((outcome.state, bool(outcome.activity)))
        world.answer()
    assert list(dict.fromkeys(states)) == [("waiting", False), ("running", False), ("running", True)]
    assert job.done
    world.answer()
    assert outcome.state == "done"


def test_the_records_are_committed_before_an_evaluation_is_done(tmp_path, monkeypatch) -> None:
    """While a slow disk writes them, no answer changes the evaluation."""
    disk, write = Event(), LocalStorage.write

    def when_ready(storage: LocalStorage, name: str, data: bytes) -> None:
        assert not name.startswith("segments") or disk.wait(60)
        write(storage, name, data)

    monkeypatch.setattr(LocalStorage, "write", when_ready)
    world = World(runners=1)
    world.start(0)
    outcome = EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(200), EvaluationLog.open(tmp_path))
    world.post(Opening(outcome))
    while not isinstance(outcome.state, Committing):
        world.answer()
        world.turn()
    assert outcome.state.reason == ""
    assert not outcome.store.table.filled.any()
    world.answer()
    assert isinstance(outcome.state, Committing)
    assert not outcome.handle.done()
    disk.set()
    outcome.store.flush()
    world.turn()
    assert outcome.handle.result().status == "complete"


def test_a_group_that_stops_in_the_check_fails_the_evaluation() -> None:
    """And what a follow-up was to do is nobody's."""
    world, outcome = checked_world()
    world.post(Opening(outcome))
    while not outcome.activity:
        world.answer()
    world.loop._die(NO_LICENCE)
    assert outcome.handle.exception() is NO_LICENCE
    assert world.loop._active == {}


def test_a_chain_of_jobs_that_have_nothing_to_wait_for_takes_one_turn() -> None:
    """An evaluation that is over before it begins costs no poll of the inbox per job."""
    world = World(runners=1)
    world.start(0)
    done: list[int] = []

    class Chained(Do):
        def successors(self) -> list[Job]:
            done.append(self.tag)
            return [Chained(lambda *_: None)] if len(done) < 5 else []

    world.post(Chained(lambda *_: None))
    assert len(set(done)) == 5


# ------------------------------------------------------------------------------ silence


def test_replies_that_lay_there_while_the_loop_was_busy_break_the_silence() -> None:
    """Two seconds with a limit of half a second: no runner is terminated, since all had answered."""
    world = World(runner_timeout_s=0.5)
    world.start(0, 1, 2, 3)
    for member in world.pool.ready():
        world.pool.call(member, Run(), tag=7, now=world.now)
        member.probed = True
    world.now += 2.0
    world.turn(*(Reply(Call(runner, Run(), 7)) for runner in range(4)))
    assert world.backend.terminated == []


def test_a_silent_runner_is_ended_and_replaced() -> None:
    """Where nothing came."""
    world = World(runner_timeout_s=0.5)
    world.start(0, 1, 2, 3)
    (member,) = world.pool.ready()[:1]
    world.pool.call(member, GetWeightsVersion(), tag=7, now=world.now)
    member.probed = True
    world.now += 2.0
    world.turn()
    assert [runner for runner, _ in world.backend.terminated] == [0]
    world.turn()
    assert world.pool.losses == 1
    world.now += 1.0
    world.turn()
    assert any(isinstance(request, Start) and runner > 3 for runner, request, _ in world.backend.calls)


def test_a_preempted_node_is_not_counted_against_its_position() -> None:
    """It may be taken away as often as it likes."""
    world = World(runners=2, max_runner_restarts=0)
    world.start(0, 1)
    for _ in range(5):
        member = world.pool.ready()[0]
        lost = Call(member.number, Run(), 0)
        world.turn(Reply(lost, error=RunnerLost("preempted"), lost=True, preempted=True))
        world.now += 1.0
        world.turn()
        newest = max(world.pool.members)
        world.start(newest)
    assert len(world.pool.ready()) == 2


# ------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    ("error", "everywhere", "starting", "verdict"),
    [
        (ConfigError("x"), False, False, Consequence.END),
        (EnvError("x"), False, False, Consequence.REPLACE),
        (EnvError("x"), True, False, Consequence.END),
        (NumericsMismatch("x"), True, True, Consequence.EXCLUDE),
        (PolicyUnavailable("x"), True, False, Consequence.REPLACE),
        (PolicyUnavailable("x"), False, True, Consequence.REPLACE),
        (PolicyUnavailable("x"), True, True, Consequence.END),
    ],
)
def test_verdicts(error: Exception, everywhere: bool, starting: bool, verdict: Consequence) -> None:
    """One error, one verdict."""
    assert judge(error, everywhere=everywhere, starting=starting) is verdict


def test_a_policy_that_no_runner_reaches_at_the_start_is_the_error() -> None:
    """Each runner has tried once. A policy that a runner has reached may come back."""
    away = PolicyUnavailable("no server", key="address")
    for reached in (False, True):
        world = World(runners=2)
        outcome = EvalOutcome(world.settings, layout_of(world.settings), EpisodePlan(2))
        world.post(Opening(outcome))
        world.start(0, error=None if reached else away)
        world.start(1, error=away)
        for call in [one for one in world.backend.calls if isinstance(one[1], Run)]:
            world.turn(Reply(Call(*call), error=away))
        assert outcome.handle.exception() is (None if reached else away)


# ------------------------------------------------------------------------------ the cluster is lost


def test_a_lost_cluster_fails_the_jobs_although_a_call_blocks_the_loop() -> None:
    """As calls of Ray do when the head does not answer; later requests get the error, too."""

    class Blocking(Backend):
        entered, free = Event(), Event()

        def wait(self, timeout_s: float) -> list[Reply]:
            self.entered.set()
            self.free.wait()
            return []

        def leave(self) -> None:
            """Nothing is to be released."""

    world = World()
    backend = Blocking()
    loop = ControlLoop(backend, world.pool)
    job = ApplyToReady(repr)
    loop.post(job)
    loop.start()
    backend.entered.wait()
    backend.on_death(ClusterDied("the head does not answer"))
    with pytest.raises(ClusterDied):
        job.future.result(timeout=0)
    with pytest.raises(EvalError) as caught:
        loop.post(ApplyToReady(repr))
    assert isinstance(caught.value.__cause__, ClusterDied)
    backend.free.set()

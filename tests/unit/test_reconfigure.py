"""Another configuration in the processes of a group: what a new group would do, without its start."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytest
import torch

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Run, Start
from rl_eval.errors import ConfigError, RunnerLost, WeightsError
from rl_eval.execution.jobs import Reconfigure
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import GroupWeights
from rl_eval.runners import layout_of
from rl_eval.runners.runner_processes import check_processes, shares_processes
from rl_eval.supervision.flight_recorder import STEP, FlightRecorder
from tests.refused import refused
from tests.unit.test_loop import World
from tests.unit.test_loop import evaluate as run

CARTPOLE = "configs/weights/cartpole_ppo_early.safetensors"
THREADED = pytest.mark.parametrize("threaded", [True, False])


class Watched(gym.Wrapper[Any, Any, Any, Any]):
    """Notes its constructors and its closes, and waits in its steps until it may go on."""

    opened: ClassVar[list[str]] = []
    entered, go = threading.Event(), threading.Event()

    def __init__(self, name: str) -> None:
        super().__init__(gym.make(name))
        self.name = name
        self.opened.append(name)

    def step(self, action: Any) -> Any:
        self.entered.set()
        assert self.go.wait(60)
        return self.env.step(action)

    def close(self) -> None:
        self.opened.remove(self.name)
        super().close()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Watched.opened.clear()
    Watched.entered.clear()
    Watched.go.set()


def config(name: str = "CartPole-v1", seed: int = 0) -> EvalConfig:
    """An environment with a network of random weights, which are the same in each copy of it."""
    sizes = {"CartPole-v1": (4, 2), "Acrobot-v1": (6, 3), "MountainCar-v0": (2, 3)}[name]
    torch.manual_seed(seed)
    evaluation = EvalConfig().environment(lambda context: Watched(name)).policy(torch.nn.Linear(*sizes))
    return evaluation.evaluation(num_episodes=6, max_episode_steps=30).runners(num_envs_per_runner=2)


@THREADED
def test_results_are_those_of_new_groups(threaded: bool) -> None:
    """Whatever ran before, and with weights that were sent to it."""
    configs = [config(), config("Acrobot-v1", 1), config("MountainCar-v0", 2), config().environment("CartPole-v1")]
    with EvalRunnerGroup(configs[0], threaded=threaded) as group:
        group.sync_weights(torch.nn.Linear(4, 2), version=7)
        results = [group.evaluate()]
        for one in configs[1:]:
            group.reconfigure(one)
            assert group.weights_version == 0
            results.append(group.evaluate(num_episodes=6))
            assert len(set(Watched.opened)) <= 1
    new = [evaluate(one) for one in configs]
    assert [one.fingerprint for one in results[1:]] == [one.fingerprint for one in new[1:]]
    for name in ("config", "identity", "code", "weights", "numerics"):
        assert [one.provenance[name] for one in results[1:]] == [one.provenance[name] for one in new[1:]]
    assert Watched.opened == []


def test_a_policy_object_replaces_the_configured_one() -> None:
    """As in the constructor; the first policy is then nowhere in this process."""
    networks = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    plain = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    with EvalRunnerGroup(plain, networks[0]) as group:
        (first,) = group.foreach_runner(lambda runner: weakref.ref(runner.policy))
        group.reconfigure(plain, networks[1])
        assert group.evaluate().fingerprint == evaluate(plain, networks[1]).fingerprint
        assert first() is None


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (config().policy("rl_eval.policies.mlp:missing"), ConfigError),
        (config("Acrobot-v1").policy("rl_eval.policies.mlp:make_mlp", weights=CARTPOLE), WeightsError),
    ],
)
@THREADED
def test_a_group_with_a_policy_that_does_not_fit_works_again(threaded: bool, bad: EvalConfig, error: type) -> None:
    """Its evaluations get the error until then, from the first configuration on."""
    with EvalRunnerGroup(bad, threaded=threaded) as group:
        for _ in range(2):
            with pytest.raises(error):
                group.evaluate()
            group.reconfigure(config("Acrobot-v1"))
            assert group.evaluate().fingerprint == evaluate(config("Acrobot-v1")).fingerprint
            group.reconfigure(bad)
        with refused(ConfigError, "policy.policy"):
            group.reconfigure(EvalConfig().environment("CartPole-v1"))
        group.reconfigure(config())
        assert group.evaluate().status == "complete"
    assert Watched.opened == []


def test_it_waits_for_the_evaluations_before_it() -> None:
    """Each evaluation runs wholly with the configuration of its turn."""
    Watched.go.clear()
    with EvalRunnerGroup(config()) as group:
        first = group.submit()
        assert Watched.entered.wait(60)
        change = threading.Thread(target=group.reconfigure, args=(config("Acrobot-v1"),))
        change.start()
        change.join(0.3)
        assert change.is_alive()
        assert set(Watched.opened) == {"CartPole-v1"}
        Watched.go.set()
        change.join(60)
        assert first.done()
        assert first.result().fingerprint == evaluate(config()).fingerprint
        assert group.evaluate().fingerprint == evaluate(config("Acrobot-v1")).fingerprint


def test_an_environment_starts_in_the_callers_folder(tmp_path: Path) -> None:
    """Though one before it left it."""
    begun: list[Path] = []

    def moving(context: Any) -> Any:
        import os

        begun.append(Path.cwd())
        os.chdir(tmp_path)
        return gym.make("CartPole-v1")

    one = config().environment(moving).runners(num_envs_per_runner=1)
    with EvalRunnerGroup(one, threaded=False) as group:
        group.evaluate()
        before = len(begun)
        group.reconfigure(one)
        group.evaluate()
    assert begun[before] == begun[0] == Path.cwd() != tmp_path


# ------------------------------------------------------------------------------ processes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("runners.num_runners", 3),
        ("runners.num_runners", 0),
        ("runners.num_envs_per_runner", 4),
        ("runners.num_cpus_per_runner", 0.5),
        ("runners.num_gpus_per_runner", 0.5),
        ("runners.custom_resources_per_runner", {"sim": 1.0}),
        ("runners.label_selector", {"kind": "a"}),
        ("runners.in_placement_group", True),
        ("runners.init_fn", "os:getpid"),
        ("runners.runtime_env", {"env_vars": {"A": "1"}}),
        ("runners.address", "auto"),
        ("fault_tolerance.step_timeout_s", 5.0),
        ("fault_tolerance.episode_timeout_s", 5.0),
    ],
)
def test_what_needs_other_processes_is_refused(key: str, value: Any) -> None:
    """Both ways, by its key."""
    present = config().runners(num_runners=2)
    other = present.copy().set(key, value)
    one, two = present.build(), other.build()
    assert not shares_processes(one, two)
    with refused(ConfigError, key):
        check_processes(one, two)
    with refused(ConfigError, key):
        check_processes(two, one)


def test_what_does_not_need_other_processes_is_accepted() -> None:
    """All that a runner is built from, and any layout in this process."""
    here = config()
    two = here.copy().runners(num_runners=2, num_envs_per_runner=None)
    other = config("Acrobot-v1").runners(num_runners=2, num_envs_per_runner=8, runner="batched", block=2)
    other.runners(runner_start_timeout_s=5).fault_tolerance(max_attempts_per_episode=1, max_runner_restarts=0)
    assert shares_processes(two.build(), other.build())
    assert shares_processes(here.build(), here.copy().runners(num_envs_per_runner=7).build())
    check_processes(two.build(), other.build())


# ------------------------------------------------------------------------------ the pool and the loop


def reconfigured(world: World) -> Any:
    """Post the change to equal settings."""
    return world.post(
        Reconfigure(lambda pool, now: pool.reconfigure(world.settings, "payload", GroupWeights(), now)),
    )


def starts(world: World) -> list[int]:
    return [runner for runner, request, _ in world.backend.calls if isinstance(request, Start)]


def test_a_runner_is_ready_when_its_last_start_is_answered() -> None:
    """A late answer, or a late error, of the start before it says nothing about the new settings."""
    world = World(runners=3)
    world.start(0)
    assert reconfigured(world).done
    assert world.backend.payload == "payload"
    assert world.pool.ready() == []
    assert starts(world).count(0) == 1
    world.start(1)
    world.start(2, error=ConfigError("the policy before does not fit"))
    assert world.pool.ready() == []
    world.start(0, 1, 2)
    assert [member.position for member in world.pool.ready()] == [0, 1, 2]
    assert run(world).status == "complete"


def test_late_reports_of_the_runner_before_are_not_those_of_the_new_one() -> None:
    """So that its first call, which probes the policy, keeps its longer limit."""
    world = World(runners=1)
    world.start(0)
    member = world.pool.members[0]
    world.pool.call(member, Run(), tag=99, now=world.now)
    reconfigured(world)
    world.turn(Reply(Call(0, Run(), 99), None))
    world.start(0)
    assert (world.pool.members[0].probed, list(world.pool.members[0].pending)) == (False, [])


def test_lost_positions_are_filled_again() -> None:
    """Those that were given up, excluded or wait for a replacement; one that is dying is replaced after its death."""
    world = World(runners=4, max_runner_restarts=0)
    world.start(0, 1, 2, 3)
    members = dict(world.pool.members)
    world.pool.lose(members[0], RunnerLost("lost"), world.now)
    world.pool.lose(members[1], RunnerLost("lost"), world.now, free=True)
    members[2].terminated = True
    world.backend.calls.clear()
    reconfigured(world)
    assert sorted(member.position for member in world.pool.members.values()) == [0, 1, 2, 3]
    assert 2 not in starts(world)
    assert len(starts(world)) == 3


def test_a_change_behind_an_evaluation_that_fails_is_made() -> None:
    """What comes before it fails with the error of its settings, what comes after it does not."""
    world = World(runners=1)
    outcome = EvalOutcome(world.settings, layout_of(world.settings), world.settings.plan())
    world.post(Opening(outcome))
    change = reconfigured(world)
    assert not change.done
    world.backend.calls.clear()
    world.turn(Reply(Call(0, Start(0, None), 0), error=ConfigError("bad")))
    assert isinstance(outcome.handle.exception(), ConfigError)
    assert change.future.result(timeout=0) is None
    world.start(0)
    assert run(world).status == "complete"


def test_a_cleared_recorder_names_nobody() -> None:
    """The same episode may run in the next evaluation, and must not be charged with what it did not do."""
    recorder = FlightRecorder(2)
    recorder.begin(1, 37, 1234, 2)
    recorder.enter(STEP, 1, 5)
    recorder.clear()
    assert recorder.cells.tobytes() == FlightRecorder(2).cells.tobytes()

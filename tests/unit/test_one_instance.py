"""A check never has two environments of one index: ports, licences and folders that belong to a slot."""

from __future__ import annotations

import fcntl
import shutil
import socket
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from rl_eval import EvalConfig, EvalRunnerGroup, VectorEvalRunner, compare
from rl_eval.cli.examination import check_environment
from rl_eval.config.settings import EnvironmentSection
from rl_eval.errors import ConfigError
from rl_eval.protocols import EnvContext
from rl_eval.runners import layout_of
from rl_eval.runners.environment import takes_context
from tests.refused import refused

EPISODES = 20


class Walk(gym.Env[Any, Any]):
    """Short random walk."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.left = float(self.np_random.normal()), int(self.np_random.integers(2, 6))
        return np.array([self.place], np.float32), {}

    def step(self, action: Any) -> Any:
        self.place, self.left = self.place + float(self.np_random.normal()), self.left - 1
        return np.array([self.place], np.float32), self.place, self.left == 0, False, {}


class Port(Walk):
    """Listens at a port. A second one at the same port raises."""

    def __init__(self, port: int) -> None:
        self.server = socket.create_server(("127.0.0.1", port), reuse_port=False)

    def close(self) -> None:
        self.server.close()


class Folder(Walk):
    """Keeps its state in a folder, which its ``close`` deletes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def reset(self, **kwargs: Any) -> Any:
        (self.folder / "state").write_text("0")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        assert (self.folder / "state").read_text() == "0"
        return super().step(action)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Licensed(Walk):
    """Holds the only licence until it is closed."""

    path: Path

    def __init__(self) -> None:
        self.lock = type(self).path.open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise

    def close(self) -> None:
        self.lock.close()


class Once(Walk):
    """Can be built once in a process."""

    built = closed = False

    def __init__(self) -> None:
        if type(self).built:
            raise RuntimeError("a second simulation")
        type(self).built = True

    def step(self, action: Any) -> Any:
        assert not type(self).closed
        return super().step(action)

    def close(self) -> None:
        type(self).closed = True


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def constant(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def of_slots(make: Any, resource: list[Any]) -> Any:
    """Return a factory whose environments use the resource of their slot."""

    def factory(context: EnvContext) -> Any:
        return make(resource[context.lane_index])

    return factory


def config(env: Any, lanes: int, **runners: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(constant).evaluation(num_episodes=EPISODES)
    return made.runners(num_envs_per_runner=lanes, **runners)


@pytest.mark.parametrize("kind", ["vector", "single_agent", pytest.param("subprocess", marks=pytest.mark.process)])
@pytest.mark.parametrize(("make", "lanes"), [(Port, 1), (Port, 4), (Folder, 1), (Folder, 4)])
def test_a_resource_of_a_slot_is_free_before_the_check_uses_it(
    kind: str, make: Any, lanes: int, tmp_path: Path
) -> None:
    """The check passes, and the next evaluation of the group has no faults."""
    lanes = 1 if kind == "single_agent" else lanes
    resource = free_ports(lanes) if make is Port else [tmp_path / str(lane) for lane in range(lanes)]
    with EvalRunnerGroup(config(of_slots(make, resource), lanes, runner=kind)) as group:
        for result in (group.evaluate(), group.evaluate()):
            assert result.status == "complete"
            assert result.faults == []
            assert result.determinism.passed


def test_a_runner_that_gives_ports_to_its_environments() -> None:
    """A user's ``make_env`` knows the lane as well as a factory with a context."""
    ports = free_ports(2)

    class PortRunner(VectorEvalRunner):
        def make_env(self, lane_index: int) -> Any:
            return Port(ports[lane_index])

    with EvalRunnerGroup(config("CartPole-v1", 2, runner=PortRunner)) as group:
        assert group.evaluate().determinism.passed
        assert group.evaluate().faults == []


def test_a_simulator_with_a_port() -> None:
    """Also where a simulator of many slots is built again."""
    (port,) = free_ports(1)

    class Simulator(SyncVectorEnv):
        def __init__(self, num_envs: int) -> None:
            self.server = socket.create_server(("127.0.0.1", port))
            super().__init__([Walk] * num_envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED)

        def close_extras(self, **kwargs: Any) -> None:
            self.server.close()

    def make(context: EnvContext) -> Any:
        return Simulator(context["num_envs"])

    with EvalRunnerGroup(config(make, 4, runner="batched")) as group:
        assert group.evaluate().determinism.passed
        assert group.evaluate().faults == []


def test_an_environment_that_cannot_be_built_twice_is_not_checked(tmp_path: Path) -> None:
    """It is no finding against the environment, and the group goes on with the environment that exists."""

    class Only(Licensed):
        path = tmp_path / "licence"

    with EvalRunnerGroup(config(Only, 1)) as group:
        first, second = group.evaluate(), group.evaluate()
    for result in (first, second):
        assert (result.determinism.passed, result.determinism.failed, result.faults) == (None, (), [])
        assert "BlockingIOError" in result.determinism.remark
    assert compare(first, second).difference.mean == 0.0


@pytest.mark.process
def test_a_process_that_cannot_build_a_second_environment_is_replaced() -> None:
    """The next evaluation begins with a new process."""

    class Single(Once):
        pass

    with EvalRunnerGroup(config(Single, 2, runner="subprocess")) as group:
        for result in (group.evaluate(), group.evaluate()):
            assert (result.status, result.determinism.passed, result.faults) == ("complete", None, [])


def test_an_exception_of_the_second_run_is_a_finding() -> None:
    """Only the construction is excused."""

    class Tired(Walk):
        resets = 0

        def reset(self, **kwargs: Any) -> Any:
            type(self).resets += 1
            assert type(self).resets <= EPISODES
            return super().reset(**kwargs)

    with EvalRunnerGroup(config(Tired, 1)) as group:
        found = group.evaluate().determinism
    assert found.passed is False
    assert len(found.failed) == 4


@pytest.mark.parametrize("leaks", [False, True])
def test_one_instance_is_checked_as_it_is(leaks: bool) -> None:
    """In its used environment, which is never closed; without observers, because these episodes are not new."""

    class Single(Once):
        episodes = 0

        def step(self, action: Any) -> Any:
            seen, reward, *flags = super().step(action)
            return seen, reward + leaks * self.episodes, *flags

        def reset(self, **kwargs: Any) -> Any:
            self.episodes += 1
            return super().reset(**kwargs)

    class Log:
        def __init__(self) -> None:
            self.ended = 0

        def watch(self, env: Any) -> Log:
            return self

        def on_episode_start(self, *given: Any) -> None:
            pass

        def on_step(self, *given: Any) -> None:
            pass

        def on_episode_end(self, record: Any) -> None:
            self.ended += 1

    log = Log()
    made = EvalConfig().environment(Single, instances="one").policy(constant)
    with EvalRunnerGroup(made.evaluation(num_episodes=EPISODES, observers=[log.watch])) as group:
        assert layout_of(group.settings).lanes == 1
        for number in (1, 2):
            result = group.evaluate()
            assert (result.status, result.determinism.passed, result.faults) == ("complete", not leaks, [])
            assert result.determinism.checked == 4
            assert log.ended == number * EPISODES


def test_one_instance_allows_one_slot_per_process() -> None:
    """Other values contradict it."""
    made = EvalConfig().environment("CartPole-v1", instances="one").policy("random")
    assert layout_of(made.build()).lanes == 1
    with refused(ConfigError, "runners.num_envs_per_runner", value=8):
        layout_of(made.copy().runners(num_envs_per_runner=8).build())
    with refused(ConfigError, "environment.env_reuse", value="episode"):
        layout_of(made.copy().environment(env_reuse="episode").build())
    for kind in ("subprocess", "batched"):
        assert layout_of(made.copy().runners(num_envs_per_runner=8, runner=kind).build()).lanes == 8
    assert layout_of(made.copy().runners(runner="batched").build()).lanes == 8


def annotated(size: int = 3, context: EnvContext | None = None) -> None:
    """Take a context that is not the first parameter."""


@pytest.mark.parametrize(
    ("env", "kwargs", "takes"),
    [
        ("CartPole-v1", {}, False),
        ("ale_py:ALE/Pong-v5", {}, False),
        ("parallel:classic/rps-v2", {}, False),
        ("rl_eval.testing:impure", {}, True),
        (Walk, {}, False),
        (Port, {"port": 1}, False),
        (lambda: None, {}, False),
        (lambda config: None, {}, True),
        (lambda size: None, {"size": 3}, False),
        (annotated, {}, True),
    ],
)
def test_which_factories_know_their_slot(env: Any, kwargs: dict[str, Any], takes: bool) -> None:
    """Those that :func:`build_env` calls with a context."""
    assert takes_context(EnvironmentSection(env=env, env_kwargs=kwargs)) is takes


@pytest.mark.parametrize("make", [Port, Folder])
def test_doctor_has_one_environment_of_a_slot_at_a_time(make: Any, tmp_path: Path) -> None:
    """It builds many, and closes each before the next."""
    resource = free_ports(2) if make is Port else [tmp_path / str(lane) for lane in range(2)]
    findings = list(check_environment(config(of_slots(make, resource), 2).build(), elsewhere=False))
    assert [finding.text for finding in findings if finding.level == "problem"] == []


@pytest.mark.process
def test_doctor_examines_one_instance_in_other_processes() -> None:
    """The comparison beside a second environment is left out."""

    class Single(Once):
        pass

    made = EvalConfig().environment(Single, instances="one").policy(constant).evaluation(num_episodes=4)
    findings = list(check_environment(made.build(), elsewhere=False))
    assert [finding.text for finding in findings if finding.level == "problem"] == []
    assert not Single.built

"""Another configuration in the processes of real actors: the same records as in new ones, whatever dies on the way."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy_world import config
from waiting import eventually
from workloads import cartpole

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("ray_cluster")


def dict_observation(**faults: Any) -> EvalConfig:
    """Other observations, and another policy of plain numpy."""
    environment = config(num_episodes=40).environment(
        "rl_eval.testing:dict_observation", env_kwargs={"env": "CartPole-v1", **faults}
    )
    return environment.policy("rl_eval.testing:make_dict_policy")


def faulty(**faults: Any) -> EvalConfig:
    return config(num_episodes=40).environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", **faults})


def here(one: EvalConfig) -> str:
    """Fingerprint of the same evaluation, without faults, in this process."""
    kwargs = {"env": "CartPole-v1"} if one.build().environment.env_kwargs else {}
    return evaluate(one.copy().environment(env_kwargs=kwargs).runners(num_runners=0)).fingerprint


def of_each(group: EvalRunnerGroup, function: Callable[[EvalRunner], Any]) -> list[Any]:
    """Call a function with both runners, when they are ready."""
    assert eventually(lambda: group.healthy_runner_ids == [0, 1])
    return group.foreach_runner(function)


def pids(group: EvalRunnerGroup) -> list[int]:
    return of_each(group, lambda runner: os.getpid())


@pytest.fixture(scope="module")
def warm(ray_cluster: None) -> Iterator[EvalRunnerGroup]:
    """A group that each test gives other settings."""
    with EvalRunnerGroup(config()) as group:
        yield group


def in_turn(group: EvalRunnerGroup, *configs: EvalConfig) -> list[EvalResult]:
    results = []
    for one in configs:
        group.reconfigure(one)
        results.append(group.evaluate())
    return results


def test_the_processes_stay_and_the_results_are_those_of_new_groups(warm: EvalRunnerGroup, tmp_path: Path) -> None:
    """Environments and policies of four configurations, of which the last has weights and sampled actions."""
    before = _processes(warm)
    moved = config().environment(lambda context: _moved(context, str(tmp_path)))
    sampled = cartpole().policy(deterministic=False).runners(num_runners=2, num_envs_per_runner=4)
    configs = [config(), dict_observation(), moved, dict_observation(), sampled, config()]
    results = in_turn(warm, *configs)
    assert [one.status for one in results] == ["complete"] * 6
    assert [one.fingerprint for one in results] == [here(one) for one in (*configs[:2], config(), *configs[3:])]
    assert [one.provenance["runners_lost"] for one in results] == [0] * 6
    assert _processes(warm) == before


def _processes(group: EvalRunnerGroup) -> list[tuple[int, str]]:
    """Return process and working directory of each runner."""
    return of_each(group, lambda runner: (os.getpid(), os.getcwd()))  # noqa: PTH109 - of another process


def _moved(context: Any, folder: str) -> Any:
    os.chdir(folder)
    return gym.make("CartPole-v1")


def test_nothing_of_the_former_runner_stays(warm: EvalRunnerGroup, tmp_path: Path) -> None:
    """Environments are closed, with their child processes, also those of a policy that cannot be built."""
    warm.reconfigure(faulty(kind="spawn", folder=str(tmp_path)))
    assert warm.evaluate().status == "complete"
    warm.reconfigure(faulty(kind="spawn", folder=str(tmp_path)).policy("numpy_world:missing"))
    with refused(ConfigError, "policy.policy"):
        warm.evaluate()
    warm.reconfigure(config())
    assert of_each(warm, _environments) == [1, 1]
    children = [int(one.name.removeprefix("spawn-")) for one in tmp_path.iterdir()]
    assert len(children) > 4
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert of_each(warm, lambda runner: any(runner._recorder.cells[4:])) == [False, False]
    assert warm.evaluate().fingerprint == here(config())


def _environments(runner: Any) -> int:
    from gymnasium.envs.classic_control import CartPoleEnv

    return sum(isinstance(one, CartPoleEnv) for one in gc.get_objects())


@pytest.mark.slow
def test_a_runner_that_dies_while_it_changes_is_replaced(warm: EvalRunnerGroup, tmp_path: Path) -> None:
    """Nobody is charged with the death of an environment of the former evaluation, and only one process is new."""
    warm.reconfigure(faulty(kind="sigkill", phase="close", episodes=None, folder=str(tmp_path)))
    assert warm.evaluate().status == "complete"
    before = pids(warm)
    (result,) = in_turn(warm, dict_observation())
    assert (result.status, result.fingerprint) == ("complete", here(dict_observation()))
    assert result.faults == []
    assert len({*pids(warm)} - {*before}) == 1


@pytest.mark.slow
def test_a_runner_that_dies_in_the_next_evaluation_is_replaced_with_its_settings(
    warm: EvalRunnerGroup, tmp_path: Path
) -> None:
    """The fault names the episode, and no other that ran in this process before."""
    one = dict_observation(kind="sigkill", phase="step", episodes=[7], step=3, folder=str(tmp_path))
    _, result = in_turn(warm, config(), one)
    assert (result.status, result.fingerprint) == ("complete", here(one))
    assert 7 in {fault.index for fault in result.faults}
    assert not [fault for fault in result.faults if fault.charged and fault.index != 7]
    (after,) = in_turn(warm, config())
    assert after.fingerprint == here(config())
    assert after.provenance["runners_lost"] == 0


class Table:
    """A large policy in a reference cycle."""

    def __init__(self) -> None:
        self.table, self.itself = np.zeros(2_500_000), self

    def __call__(self, observations: Any) -> Any:
        return (observations[:, 2] > 0).astype(np.int64)


def _tables(runner: Any) -> int:
    return sum(type(one).__name__ == "Table" for one in gc.get_objects())


@pytest.mark.slow
def test_large_policies_are_sent_and_dropped(warm: EvalRunnerGroup) -> None:
    """They travel through the object store; of several in a row, one is in the memory of a runner."""
    for _ in range(3):
        warm.reconfigure(config().policy(Table()))
        assert of_each(warm, _tables) == [1, 1]
    assert warm.evaluate().fingerprint == here(config())
    warm.reconfigure(config())
    assert of_each(warm, _tables) == [0, 0]

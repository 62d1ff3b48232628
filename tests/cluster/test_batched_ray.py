"""The batched runner on Ray actors: the same records for any number of runners, also when one of them is killed."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from waiting import eventually

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.scheduling.plan import EpisodePlan
from tests import struck_simulator
from tests.gpu_simulator import GpuAdapter
from tests.struck_simulator import Fault

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

EPISODES = 40
STRUCK = 11


class Struck(gym.Wrapper):  # type: ignore[type-arg]
    """Kills its process in the third step of one episode, once or always."""

    def __init__(self, env: Any, seed: int, mark: str, *, always: bool) -> None:
        super().__init__(env)
        self.strikes, self.mark, self.always = seed, Path(mark), always

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.steps = seed, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.episode == self.strikes and self.steps == 3 and (self.always or not self.mark.exists()):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def make(num_envs: int, seed: int = -1, mark: str = "", always: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Struck(gym.make("CartPole-v1"), seed, mark, always=always)] * num_envs)


def lean(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int64)


def config(runners: int, **kwargs: Any) -> EvalConfig:
    made = EvalConfig().environment(make, env_kwargs=kwargs).policy(lean).evaluation(num_episodes=EPISODES)
    return made.runners(runner="batched", num_runners=runners, num_envs_per_runner=8)


def test_a_killed_runner_costs_nothing(tmp_path: Path) -> None:
    undisturbed, seed = evaluate(config(0)), EpisodePlan(EPISODES, 0)[STRUCK].seed
    for runners in (1, 2):
        result = evaluate(config(runners, seed=seed, mark=str(tmp_path / str(runners))))
        assert (result.status, result.fingerprint) == ("complete", undisturbed.fingerprint)
        assert result.provenance["runners_lost"] == 1
        assert not [fault for fault in result.faults if fault.charged and fault.index != STRUCK]


def test_an_episode_that_always_kills_its_runner_fails_alone(tmp_path: Path) -> None:
    """All live episodes are suspected until it is alone on a runner."""
    undisturbed, seed = evaluate(config(0)), EpisodePlan(EPISODES, 0)[STRUCK].seed
    part = config(2, seed=seed, mark=str(tmp_path / "mark"), always=True)
    result = evaluate(part.fault_tolerance(max_runner_restarts=20))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [STRUCK]
    for ours, theirs in zip(result.episodes, undisturbed.episodes, strict=True):
        assert ours.index == STRUCK or (ours.episode_return, ours.attempts) == (theirs.episode_return, 1)


@pytest.mark.parametrize("trap", ["dies", "hangs"])
def test_a_simulator_that_dies_or_hangs_in_one_episode_fails_only_that(trap: str) -> None:
    plan = EvalConfig().policy(lambda observations: np.ones(len(observations), np.int64)).evaluation(num_episodes=6)
    plan.environment(GpuAdapter, env_kwargs={"trap": trap, "struck": EpisodePlan(6, 0)[4].seed})
    plan.runners(runner="batched", num_runners=1, num_envs_per_runner=3)
    result = evaluate(plan.fault_tolerance(max_attempts_per_episode=1, step_timeout_s=5))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [4]


def test_the_first_steps_of_a_block_run_again_in_another_process() -> None:
    with EvalRunnerGroup(config(2).runners(block=2)) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        found = group.evaluate().determinism
    assert (found.passed, found.checked, found.elsewhere, found.failed) == (True, 0, 1, ())
    assert found.steps > 0


@cache
def undisturbed(name: str) -> EvalResult:
    return evaluate(struck_simulator.config(name, 1))


@pytest.mark.parametrize(
    ("runners", "fault"), [(0, ""), (0, "raises"), *((count, fault) for count in (1, 2) for fault in get_args(Fault))]
)
@pytest.mark.parametrize("width", struck_simulator.WIDTHS)
@pytest.mark.parametrize("name", ["CartPole", "Pong"])
def test_no_width_and_no_fault_changes_a_record(
    name: str, width: int, runners: int, fault: Fault, tmp_path: Path
) -> None:
    """Half of the first attempts raise, or a runner is killed; the actions of Pong are sticky."""
    result = evaluate(struck_simulator.config(name, width, fault, tmp_path).runners(num_runners=runners))
    assert (result.status, result.guarantee) == ("complete", "exact")
    assert result.fingerprint == undisturbed(name).fingerprint
    assert len(list(tmp_path.iterdir())) == {"": 0, "raises": len(result.plan) // 2, "kills": 1}[fault]
    assert result.provenance["runners_lost"] == (fault == "kills")
    struck = {one.index for one in result.faults if one.charged}
    assert all(index == 5 if fault == "kills" else index % 2 == 0 for index in struck)

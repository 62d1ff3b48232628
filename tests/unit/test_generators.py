"""Environments that change a global random generator: found where they live, in any layout; others are not."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_eval import EvalConfig, evaluate
from rl_eval.records.episode import Lease
from rl_eval.records.generators import GeneratorSensor, changes, generator_states
from rl_eval.runners import class_of
from rl_eval.runners.vector import VectorEvalRunner
from rl_eval.scheduling.plan import EpisodePlan

STEPS = 20


class Counts(gym.Env[Any, Any]):
    """Pays 1 for each step. The subclasses draw from a global generator."""

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == STEPS, False, {}


class SeedsNumpy(Counts):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


class DrawsAlways(SeedsNumpy):
    def step(self, action: Any) -> Any:
        np.random.random()  # noqa: NPY002
        return super().step(action)


class DrawsInStep(Counts):
    def step(self, action: Any) -> Any:
        random.random()
        return super().step(action)


class DrawsTorch(Counts):
    def step(self, action: Any) -> Any:
        sys.modules["torch"].rand(1)
        return super().step(action)


class DrawsRarely(Counts):
    """Draws in one step of an episode, which is none of those that are compared at first."""

    def step(self, action: Any) -> Any:
        if self.steps == 4:
            np.random.random()  # noqa: NPY002
        return super().step(action)


class Imports(Counts):
    """Imports a module that seeds at import, in its first reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if "seeds_at_import" not in sys.modules:
            random.seed(1)
            sys.modules["seeds_at_import"] = ModuleType("seeds_at_import")
        return super().reset(seed=seed)


def config(env: Any, lanes: int = 2, **runners: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(lambda observations: np.zeros(len(observations), np.int64))
    return made.runners(num_envs_per_runner=lanes, **runners).evaluation(num_episodes=8, determinism_check=0)


def found(env: Any, lanes: int = 2, **runners: Any) -> list[str]:
    """Return the changes that the runner reports."""
    settings = config(env, lanes, **runners).build()
    runner = class_of(settings)(settings, 0)
    try:
        plan, reports = EpisodePlan(8, 0), []
        reports.append(runner.run((), 0.0))
        reports.append(runner.run([Lease(plan[index], 1) for index in range(8)], 0.0))
        while len(np.concatenate([report.rows for report in reports])) < 8:
            reports.append(runner.run((), 1.0))
        assert not any(report.faults for report in reports)
    finally:
        runner.stop()
    return list(reports[-1].generators)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    ("env", "changed"),
    [
        (SeedsNumpy, ["reset() changes numpy's global generator"]),
        (DrawsAlways, ["reset() changes numpy's global generator", "step() changes numpy's global generator"]),
        (DrawsInStep, ["step() changes Python's global generator"]),
        (DrawsTorch, ["step() changes torch's global generator"]),
        (DrawsRarely, ["step() changes numpy's global generator"]),
    ],
)
def test_an_environment_that_changes_a_global_generator_is_found(env: Any, changed: list[str], lanes: int) -> None:
    """In its first episodes, wherever it draws."""
    pytest.importorskip("torch")
    assert found(env, lanes) == changed


@pytest.mark.process
def test_the_process_of_a_slot_has_its_own_sensor() -> None:
    """What happens there does not show in the generators of the runner's process."""
    assert found(SeedsNumpy, runner="subprocess") == ["reset() changes numpy's global generator"]
    assert found(Counts, runner="subprocess") == []


def seeds_numpy(num_envs: int) -> gym.vector.SyncVectorEnv:
    mode = gym.vector.AutoresetMode.DISABLED
    return gym.vector.SyncVectorEnv([SeedsNumpy] * num_envs, autoreset_mode=mode)


def test_a_simulator_of_several_slots_is_watched_as_a_whole() -> None:
    """Its slots share the generators."""
    assert found(seeds_numpy, runner="batched") == ["reset() changes numpy's global generator"]


@pytest.mark.parametrize("env", [Counts, Imports, "CartPole-v1", "FrozenLake-v1"])
def test_other_environments_are_not_blamed(env: Any) -> None:
    """Neither for the draws of a module that they import."""
    try:
        assert found(env, lanes=1) == []
    finally:
        sys.modules.pop("seeds_at_import", None)


def test_the_draws_of_the_policy_are_its_own() -> None:
    """Only what happens inside of the environment's calls counts."""

    def draws(observations: Any) -> Any:
        random.random()
        return np.zeros(len(observations), np.int64)

    settings = config(Counts).policy(draws).build()
    runner = VectorEvalRunner(settings, 0)
    runner.run((), 0.0)
    report = runner.run([Lease(EpisodePlan(8, 0)[index], 1) for index in range(8)], 60.0)
    runner.stop()
    assert len(report.rows) == 8
    assert report.generators == ()


def test_a_result_says_it_in_every_layout() -> None:
    """With one environment in the process, other layouts would differ; the verdict of the check does not change."""
    notes = [evaluate(config(SeedsNumpy, lanes)).notes for lanes in (1, 2)]
    assert [len(one) for one in notes] == [1, 1]
    assert notes[0] != notes[1]
    assert evaluate(config(Counts)).notes == []


def test_a_sensor_costs_nothing_after_the_first_episode() -> None:
    """The runner then calls the environment itself."""
    settings = config(Counts, 1).build()
    runner = VectorEvalRunner(settings, 0)
    runner.run((), 0.0)
    runner.run([Lease(EpisodePlan(8, 0)[index], 1) for index in range(2)], 60.0)
    (lane,) = runner.slots
    assert lane.step == lane.env.step  # type: ignore[union-attr]
    runner.stop()


def test_a_generator_that_is_imported_between_two_looks_has_not_changed() -> None:
    """Its state was unknown before."""
    before = generator_states()
    before.pop("torch's global generator", None)
    assert changes(before, generator_states()) == []


def test_the_number_of_compared_calls_is_limited() -> None:
    """A policy that draws in every step does not slow a long episode down for ever."""
    compared = []
    sensor = GeneratorSensor(compared.append)
    sensor.call("reset", lambda: None)
    for _ in range(2_000):
        random.random()
        sensor.call("step", lambda: None)
    assert sensor.finished()
    assert compared == []

"""The batched runner: records equal those of single environments, for any width, mode of autoreset and fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ConfigError, EnvError
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit.vector_world import (
    IgnoresMask,
    LosesFinalObservations,
    OneSeed,
    OwnClass,
    Parts,
    Walk,
    as_class,
    follow,
    walks,
)

EPISODES = 64
WIDTHS = (1, 4, 7, 32, 100)


def batched(env: Callable[..., Any], width: int = 7, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(follow).runners(runner="batched", num_envs_per_runner=width)
    return made.evaluation(num_episodes=EPISODES, **({"info_keys": ["height"], "gamma": 0.9} | evaluation))


def single(env: Callable[..., Any], **evaluation: Any) -> EvalResult:
    return evaluate(batched(env, **evaluation).runners(runner="vector"))


def seed_of(index: int) -> int:
    return EpisodePlan(EPISODES, 0)[index].seed


@pytest.fixture(scope="module")
def reference() -> EvalResult:
    return single(Walk)


def same(result: EvalResult, reference: EvalResult) -> None:
    """Every column of every record, not only those of the fingerprint."""
    assert result.status == "complete"
    assert result.fingerprint == reference.fingerprint
    for ours, theirs in zip(result.episodes, reference.episodes, strict=True):
        assert ours.discounted_return == theirs.discounted_return
        assert (ours.info, ours.truncated_by) == (theirs.info, theirs.truncated_by)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_records_are_those_of_single_environments(reference: EvalResult, mode: str, width: int) -> None:
    result = evaluate(batched(partial(walks, mode=mode), width))
    same(result, reference)
    assert result.guarantee == "exact"
    assert result.determinism.passed


def test_observations_with_parts_and_a_step_limit() -> None:
    for limit in (None, 5):
        reference = single(lambda: Parts(Walk()), max_episode_steps=limit)
        same(evaluate(batched(partial(walks, wrap=Parts), max_episode_steps=limit)), reference)


def test_a_class_that_is_not_known_is_tried_first(reference: EvalResult) -> None:
    same(evaluate(batched(as_class(OwnClass))), reference)


@pytest.mark.parametrize("deterministic", [True, False])
def test_networks_and_sampling_are_the_same(deterministic: bool) -> None:
    """The noise of an episode follows from its seed, and rows share a forward pass as they do elsewhere."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    configs = [batched(walks, width) for width in (1, 5, 40)] + [batched(Walk).runners(runner="vector")]
    found = {evaluate(one.policy(None, deterministic=deterministic), module).fingerprint for one in configs}
    assert len(found) == 1


@pytest.mark.parametrize("width", [4, 64])
def test_a_poisoned_episode_fails_alone(reference: EvalResult, width: int) -> None:
    poison = seed_of(17)

    def raise_in(walk: Walk) -> None:
        if walk.seed == poison:
            raise RuntimeError("the simulator diverged")

    result = evaluate(batched(partial(walks, on_step=raise_in), width))
    assert result.status == "partial"
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [17]
    for ours, theirs in zip(result.episodes, reference.episodes, strict=True):
        assert ours.index == 17 or (ours.episode_return, ours.attempts) == (theirs.episode_return, 1)


def test_an_exception_that_does_not_come_again_costs_nothing(reference: EvalResult) -> None:
    left = [3]

    def raise_sometimes(walk: Walk) -> None:
        if left[0] and walk.steps == 4:
            left[0] -= 1
            raise RuntimeError("a glitch")

    result = evaluate(batched(partial(walks, on_step=raise_sometimes)))
    same(result, reference)
    assert result.faults
    assert left == [0]


@pytest.mark.parametrize("part", ["reward", "observation"])
def test_one_row_that_is_not_finite_is_the_fault_of_its_episode(part: str) -> None:
    class Bad(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            if self.seed == seed_of(10):
                observation, reward = (observation, np.nan) if part == "reward" else (observation * np.nan, reward)
            return observation, reward, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Bad] * num_envs)

    result = evaluate(batched(make))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [10]
    assert {fault.index for fault in result.faults} == {10}


def test_an_environment_with_a_memory_is_found_out() -> None:
    class Remembers(Walk):
        episodes = 0

        def reset(self, **kwargs: Any) -> Any:
            self.episodes += 1
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward + self.episodes, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Remembers] * num_envs)

    assert evaluate(batched(make)).determinism.passed is False


def test_a_group_is_reused_and_cancelled(reference: EvalResult) -> None:
    with EvalRunnerGroup(batched(walks)) as group:
        group.submit().cancel()
        same(group.evaluate(), reference)
        assert group.foreach_runner(lambda runner: runner.foreach_env(lambda env: env.num_envs)) == [[7]]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (as_class(OneSeed), ConfigError),
        (as_class(IgnoresMask), ConfigError),
        (Walk, ConfigError),
        (lambda num_envs: Walk(), ConfigError),
    ],
    ids=["one seed", "mask ignored", "no num_envs", "single"],
)
def test_a_simulator_that_cannot_keep_the_promise_is_rejected(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        evaluate(batched(make))


def test_final_observations_that_are_missing_are_no_observations_of_the_next_episode() -> None:
    result = evaluate(batched(as_class(LosesFinalObservations, "SameStep"), 1))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {EnvError.__name__}


@pytest.mark.parametrize(
    "config",
    [
        {"environment": {"wrappers": ["gymnasium.wrappers:RecordEpisodeStatistics"]}},
        {"environment": {"env_reuse": "episode"}},
        {"evaluation": {"observers": ["rl_eval.runners:EpisodeObserver"]}},
    ],
    ids=lambda config: next(iter(next(iter(config.values())))),
)
def test_settings_of_single_environments_are_rejected(config: dict[str, dict[str, Any]]) -> None:
    ((section, values),) = config.items()
    with refused(ConfigError, f"{section}.{next(iter(values))}"):
        evaluate(getattr(batched(walks), section)(**values))


def test_a_vector_environment_needs_the_batched_runner() -> None:
    with refused(ConfigError, "environment.env", value="SyncVectorEnv"):
        evaluate(batched(lambda: walks(3)).runners(runner="vector"))


class Leaky(Walk):
    """Its rewards depend on the steps of all walks."""

    steps_of_all = 0

    def step(self, action: Any) -> Any:
        Leaky.steps_of_all += 1
        observation, reward, *rest = super().step(action)
        return observation, reward + self.steps_of_all, *rest


class Fixed(Walk):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=0)


@pytest.mark.parametrize(
    ("walk", "levels"),
    [(Walk, ["ok", "ok"]), (Leaky, ["ok", "problem"]), (Fixed, ["ok", "ok", "note"])],
)
def test_doctor_compares_widths_and_slots(walk: type[Walk], levels: list[str]) -> None:
    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([walk] * num_envs)

    assert [finding.level for finding in check_simulator(batched(make).build())] == levels


def test_doctor_names_a_simulator_that_cannot_restart_its_slots() -> None:
    *_, last = check_simulator(batched(as_class(IgnoresMask)).build())
    assert last.level == "problem"

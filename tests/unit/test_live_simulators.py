"""A vector environment object instead of a factory: it fixes the width, is not closed, and cannot be built again."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError
from tests.refused import refused
from tests.unit.vector_world import Walk, follow, walks


def config(env: Any, **runners: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(follow).evaluation(num_episodes=40)
    return made.runners(**({"runner": "batched"} | runners))


def test_an_object_gives_the_records_of_its_factory() -> None:
    for make in (lambda: walks(5), lambda: walks(5, mode="Disabled")):
        env = make()
        results = [evaluate(config(env)) for _ in range(2)]
        assert {result.fingerprint for result in results} == {evaluate(config(walks)).fingerprint}
        assert all(result.determinism.passed for result in results)
        assert not env.closed


@pytest.mark.parametrize(
    ("runners", "key", "value"),
    [
        ({"runner": "vector"}, "environment.env", "SyncVectorEnv"),
        ({"num_envs_per_runner": 4}, "runners.num_envs_per_runner", 4),
        ({"num_runners": 1}, "environment.env", "SyncVectorEnv"),
    ],
    ids=["not batched", "another width", "in another process"],
)
def test_settings_that_an_object_cannot_have_are_rejected(runners: dict[str, Any], key: str, value: Any) -> None:
    with refused(ConfigError, key, value=value):
        evaluate(config(walks(5), **runners))


@pytest.mark.parametrize("always", [True, False])
def test_after_a_fault_the_object_is_reset(always: bool) -> None:
    """Nobody can build it again; an episode that always raises fails alone."""
    struck = config(walks(5)).build().plan()[17].seed
    left = [2]

    def raise_in(walk: Walk) -> None:
        if walk.seed == struck and (always or left[0]):
            left[0] -= 1
            raise RuntimeError("the simulator diverged")

    result, sound = evaluate(config(walks(5, on_step=raise_in))), evaluate(config(walks))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [17] * always
    for ours, theirs in zip(result.episodes, sound.episodes, strict=True):
        assert (always and ours.index == 17) or ours.episode_return == theirs.episode_return


def test_an_object_of_one_environment_is_rejected_as_before() -> None:
    with refused(ConfigError, "environment.env"):
        evaluate(config(gym.make("CartPole-v1"), runner="vector"))


def test_an_object_has_one_simulator_for_all_episodes() -> None:
    """In the mode Disabled, slots that ended in the determinism check must be reset before the next step."""
    made = config(walks(5, mode="Disabled")).evaluation(num_episodes=2, seed=5)  # The second episode is the longer one.
    with EvalRunnerGroup(made) as group:
        assert not any(group.evaluate().faults for _ in range(2))

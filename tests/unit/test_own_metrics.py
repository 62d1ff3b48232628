"""Metrics of the user, and the key of success: columns like any other, equal for every kind of runner."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate, load
from rl_eval.errors import ConfigError
from rl_eval.results.requirements import Answer, parse_metric
from tests.refused import refused


class Heater(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = int(self.np_random.integers(2, 6))
        self.power = 0.0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps -= 1
        self.power += 0.5
        info = {"power": self.power, "warm": self.power > 1, "is_success": False, "energy": "not a number"}
        return np.zeros(2, np.float32), 1.0, self.steps == 0, False, info


class Heaters(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__([Heater] * num_envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED)


def energy(record: Any, info: Any) -> float:
    return float(info["power"] * record.length)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


CONFIG = (
    EvalConfig()
    .environment(Heater)
    .evaluation(num_episodes=12, info_keys=["power"], success_key="warm", metrics={"energy": energy})
)


def test_a_metric_is_a_column_like_any_other(tmp_path: Any) -> None:
    """In records, in statistics, in gates, and in the log."""
    result = evaluate(CONFIG, zeros, output=tmp_path / "run")
    expected = [one.length * one.length * 0.5 for one in result.episodes]
    assert [one.info["energy"] for one in result.episodes] == expected
    assert result.metrics["info_mean/energy"] == pytest.approx(np.mean(expected))
    assert parse_metric("info_mean/energy >= 0").judge(result.metrics) is Answer.HOLDS
    assert [one.success_at_end for one in result.episodes] == [one.length > 2 for one in result.episodes]
    for saved in (load(tmp_path / "run"), EvalResult.load(tmp_path / "run")):
        assert saved.fingerprint == result.fingerprint


@pytest.mark.parametrize("kind", ["one lane", "single", "batched", "a name"])
def test_every_runner_computes_the_same(kind: str) -> None:
    config = CONFIG.copy()
    if kind == "one lane":
        config.runners(num_envs_per_runner=1)
    elif kind == "single":
        config.runners(runner="single_agent", num_envs_per_runner=1)
    elif kind == "batched":
        config.environment(Heaters).runners(runner="batched", num_envs_per_runner=3)
    else:
        config.evaluation(metrics={"energy": f"{__name__}:energy"})
    one, other = evaluate(config, zeros), evaluate(CONFIG, zeros)
    assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(one.table.infos, other.table.infos)


def test_a_metric_that_raises_is_nan_with_a_note() -> None:
    result = evaluate(CONFIG.copy().evaluation(metrics={"broken": lambda record, info: 1 / 0}), zeros)
    assert np.isnan(result.episodes[3].info["broken"])
    assert [note for note in result.notes if "broken" in note and "ZeroDivisionError" in note]


class OwnError(BaseException):
    pass


def refuses(record: Any, info: Any) -> float:
    raise OwnError("no value")


def test_an_exception_of_the_user_does_not_leave_a_metric() -> None:
    """Also one that is not an ``Exception``, as elsewhere in code of the user."""
    result = evaluate(CONFIG.copy().evaluation(metrics={"broken": refuses}), zeros)
    assert result.status == "complete"
    assert [note for note in result.notes if "broken" in note and "OwnError" in note]


class Reader:
    """Observer of an info with the name of a metric."""

    def __init__(self, env: Any) -> None:
        self.seen: set[Any] = set()

    def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
        self.seen = set()

    def on_step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        self.seen.add(rest[2].get("energy"))

    def on_episode_end(self, record: Any) -> Any:
        return self.seen


@pytest.mark.parametrize("batched", [False, True])
def test_an_observer_reads_an_info_with_the_name_of_a_metric(batched: bool) -> None:
    config = CONFIG.copy().evaluation(observers=[Reader])
    if batched:
        config.environment(Heaters).runners(runner="batched", num_envs_per_runner=3)
    result = evaluate(config, zeros)
    assert set(result.artifacts[0]["Reader"]) == {"not a number"}
    assert result.fingerprint == evaluate(CONFIG, zeros).fingerprint


@pytest.mark.parametrize(
    ("metrics", "key"),
    [
        ({"power": energy}, "evaluation.metrics.power"),
        ({"length": energy}, "evaluation.metrics.length"),
        ({"energy": 3}, "evaluation.metrics.energy"),
        ({"energy": "no_such_module:energy"}, "evaluation.metrics.energy"),
    ],
)
def test_a_metric_that_cannot_be_used_is_an_error(metrics: Any, key: str) -> None:
    with refused(ConfigError, key):
        evaluate(CONFIG.copy().evaluation(metrics=metrics), zeros)

"""Conditions: their rows, their order, their way into episodes, records and numbers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet

from rl_eval import EvalConfig, EvalResult, evaluate, load, replay
from rl_eval.errors import ConfigError, LogMismatch
from rl_eval.scheduling.conditions import Conditions, interleaved, make_conditions
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused

KEY = "evaluation.conditions"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_prefix_is_within_one_of_the_share(counts: list[int]) -> None:
    order = interleaved(counts)
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    seen = np.cumsum(np.eye(len(counts), dtype=int)[order], axis=0)
    shares = np.outer(np.arange(1, len(order) + 1), counts)
    assert (np.abs(seen * sum(counts) - shares) < sum(counts)).all()


def test_without_counts_the_conditions_take_turns() -> None:
    conditions = make_conditions(axes={"friction": [0.5, 1.0], "light": ["a", "b"]})
    names = ["friction=0.5,light=a", "friction=0.5,light=b", "friction=1.0,light=a", "friction=1.0,light=b"]
    assert [conditions.condition(position).id for position in range(9)] == [*names, *names, names[0]]
    assert conditions.condition(6) == (names[2], {"friction": 1.0, "light": "a"})
    assert conditions.axes == {"friction": [0.5, 1.0], "light": ["a", "b"]}


def test_described_conditions_come_back() -> None:
    values = {"id": np.int64(3), "start": np.array([0.5, 1.0]), "light": "a", "near": np.bool_(True)}
    conditions = make_conditions(rows=[values, {"id": 4, "start": [1, 2], "light": "b", "near": False}], counts={3: 2})
    assert conditions.condition(0) == ("3", {"start": [0.5, 1.0], "light": "a", "near": True})
    assert Conditions.from_dict(conditions.to_dict()) == conditions
    assert conditions.axes == {}
    assert make_conditions(rows=conditions.rows, counts=conditions.counts).digest == conditions.digest


@pytest.mark.parametrize(
    "asked",
    [
        {"rows": []},
        {"rows": [3]},
        {"rows": [{"light": "a"}]},
        {"rows": [{"id": 1}, {"id": "1"}]},
        {"rows": [{"id": 1, "light": "a"}, {"id": 2}]},
        {"rows": [{"id": 1, "light": None}]},
        {"rows": [{"id": 1, "light": float("nan")}]},
        {"rows": [{"id": 1, "light": [1.0, object()]}]},
        {"axes": {"friction": 0.5}},
        {"axes": {"friction": []}},
        {"axes": {"friction": [1, 1]}},
        {"axes": {name: list(range(100)) for name in "abcdefgh"}},
        {"axes": {"friction": [0.5]}, "counts": {"friction=1": 2}},
        {"axes": {"friction": [0.5]}, "counts": {"friction=0.5": 0}},
        {"axes": {"friction": [0.5]}, "counts": {"friction=0.5": 10**9}},
    ],
)
def test_invalid_conditions_are_refused(asked: dict[str, Any]) -> None:
    with refused(ConfigError, key=KEY):
        make_conditions(**asked)


class Sled(gym.Env[Any, Any]):
    """Slides for a few steps; light pays, friction costs."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float64), gym.spaces.Discrete(2)
    condition_keys = ("friction", "light")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.options, self.left = options or {}, 2
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        reward = self.options["light"] - self.options["friction"] + action * self.np_random.random()
        return self._seen(), reward, self.left == 0, False, {"is_success": self.options["light"] > 2}

    def _seen(self) -> Any:
        return np.array([self.left + self.np_random.random()])


def still(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def fast(observations: Any) -> Any:
    return (observations[:, 0] % 1 > 0.5).astype(np.int64)


FRICTION, LIGHT = [0.0, 0.25, 0.5, 0.75], [1, 2, 3, 4, 5]
COUNTS = {"friction=0.0,light=1": 3, "friction=0.75,light=5": 2}
GRID = {"axes": {"friction": FRICTION, "light": LIGHT}, "counts": COUNTS}


def sleds(**evaluation: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment(Sled)
        .policy(still)
        .evaluation(num_episodes=46, conditions=GRID)
        .evaluation(**evaluation)
    )


def vec(num_envs: int) -> Any:
    return gym.vector.SyncVectorEnv([Sled] * num_envs)


@pytest.mark.parametrize(
    ("env", "runners"),
    [
        (Sled, {"num_envs_per_runner": 3}),
        (Sled, {"runner": "single_agent"}),
        pytest.param(Sled, {"runner": "subprocess", "num_envs_per_runner": 2}, marks=pytest.mark.process),
        pytest.param(Sled, {"num_runners": 2, "num_envs_per_runner": 2}, marks=[pytest.mark.ray, pytest.mark.slow]),
        (vec, {"runner": "batched", "num_envs_per_runner": 5}),
    ],
)
def test_every_layout_gives_the_same_episodes(env: Any, runners: dict[str, Any], whole: EvalResult) -> None:
    result = evaluate(sleds().environment(env).runners(**runners))
    assert result.fingerprint == whole.fingerprint


@pytest.fixture(scope="module")
def whole() -> EvalResult:
    return evaluate(sleds())


def test_an_episode_meets_its_condition(whole: EvalResult) -> None:
    order = [episode.condition for episode in whole.episodes]
    assert order[:23] == order[23:]
    assert {name: order[:23].count(name) for name in COUNTS} == COUNTS
    for episode in whole.episodes:
        friction, light = (float(part.partition("=")[2]) for part in str(episode.condition).split(","))
        assert episode.episode_return == 2 * (light - friction)


def test_results_keep_the_conditions(whole: EvalResult, tmp_path: Path) -> None:
    logged = evaluate(sleds(), log_dir=str(tmp_path / "log"))
    whole.save(tmp_path / "saved")
    for result in (logged, load(tmp_path / "log"), load(tmp_path / "saved")):
        assert result.fingerprint == whole.fingerprint
        assert result.plan_fingerprint == whole.plan_fingerprint
        assert list(result.to_frame()["condition"]) == [episode.condition for episode in whole.episodes]
    again = replay(tmp_path / "log", 5, policy=still, config=sleds())
    assert again.identical


def test_a_log_of_other_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"id": name, "friction": 0.5, "light": 1} for name in "ab"]
    for fields, refusal in (({}, False), ({"light": 2}, True), ({}, False)):
        file.write_text(json.dumps([rows[0], {**rows[1], **fields}]))
        with refused(LogMismatch) if refusal else nullcontext():
            evaluate(sleds(conditions=str(file)), log_dir=str(tmp_path / "log"))


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_a_file_is_relative_to_the_config(suffix: str, tmp_path: Path) -> None:
    rows = [{"id": "a", "friction": 0.5, "light": 1}, {"id": "b", "friction": 0.25, "light": 2}]
    table = pa.Table.from_pylist(rows)
    write = {".csv": csv.write_csv, ".parquet": parquet.write_table}
    if suffix == ".json":
        Path(tmp_path, "rows.json").write_text(json.dumps(rows))
    else:
        write[suffix](table, tmp_path / f"rows{suffix}")
    config = tmp_path / "eval.yaml"
    config.write_text(f"environment: {{env: CartPole-v1}}\nevaluation: {{conditions: rows{suffix}}}\n")
    found = EvalConfig.from_yaml(config).build().evaluation.conditions
    assert found == make_conditions(rows=rows)


@pytest.mark.parametrize("given", ["missing.json", "rows.txt", {"axis": {"light": [1]}}, {"file": "a.csv", "rows": []}])
def test_an_invalid_source_is_refused(given: Any) -> None:
    with refused(ConfigError, key=KEY):
        sleds(conditions=given).build()


@pytest.mark.parametrize(
    "config",
    [
        sleds().environment("CartPole-v1"),
        sleds(conditions={"axes": {"friktion": [0.5], "light": [1]}}),
        sleds().environment(lambda num_envs: gym.make_vec("CartPole-v1", num_envs, "sync")).runners(runner="batched"),
        sleds().environment("CartPole-v1").runners(runner="batched", block=4),
        sleds().runners(runner="multi_agent"),
    ],
)
def test_conditions_that_nothing_honours_are_refused(config: EvalConfig) -> None:
    with refused(ConfigError, key=KEY):
        evaluate(config)


def test_without_conditions_a_plan_keeps_its_bytes() -> None:
    plain, varied = EpisodePlan(46), sleds().build().plan()
    assert plain.to_dict() == {"num_episodes": 46, "seed": 0, "first_index": 0}
    assert plain.fingerprint != varied.fingerprint
    assert (plain.seeds == varied.seeds).all()
    assert EpisodePlan.from_dict(varied.to_dict()).fingerprint == varied.fingerprint

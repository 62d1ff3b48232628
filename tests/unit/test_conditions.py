"""Conditions: their rows, their order, their way into episodes, records and numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from typing_extensions import override

from rl_eval import EvalConfig, EvalResult, compare, evaluate, load, replay
from rl_eval.config.conditions import load_conditions
from rl_eval.errors import ComparisonError, ConfigError, LogMismatch
from rl_eval.records.episode import EpisodeSpec
from rl_eval.results.stats.interval import mean_interval
from rl_eval.results.stats.rows import Rows
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.runners.batched.vector_env import VectorEnvSimulator
from rl_eval.scheduling.conditions import Conditions, interleaved, make_conditions
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing import SimulatorContract
from tests.refused import refused
from tests.unit.cli_world import call, printed
from tests.unit.test_doctor import examine

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
        {"rows": {"a": 3}},
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


class Sleds(BatchSimulator):
    """Several sleds of one simulator."""

    observation_space, action_space = Sled.observation_space, Sled.action_space
    condition_keys = Sled.condition_keys

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.sleds = num_envs, [Sled() for _ in range(num_envs)]
        for sled in self.sleds:
            sled.reset(seed=0, options={"friction": 0.0, "light": 0})

    @override
    def restart(self, slots: Any, specs: Sequence[EpisodeSpec]) -> Any:
        starts = [self.sleds[slot].reset(**spec.reset_arguments)[0] for slot, spec in zip(slots, specs, strict=True)]
        return np.array(starts)

    @override
    def step(self, actions: Any) -> BatchStep:
        seen, rewards, ends, cuts, infos = zip(*map(Sled.step, self.sleds, actions), strict=True)
        success = np.array([info["is_success"] for info in infos]), np.ones(self.num_envs, bool)
        values = {"is_success": success}.get
        return BatchStep(np.array(seen), np.array(rewards), np.array(ends), np.array(cuts), values)

    @override
    def close(self) -> None:
        pass


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
        (Sleds, {"runner": "batched", "num_envs_per_runner": 7}),
    ],
)
def test_every_layout_gives_the_same_episodes(env: Any, runners: dict[str, Any], whole: EvalResult) -> None:
    result = evaluate(sleds().environment(env).runners(**runners))
    assert result.fingerprint == whole.fingerprint


class OnlyReset(gym.vector.SyncVectorEnv):
    """Returns zeros for the slots that it did not reset."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed=seed, options=dict(options))
        observations[~options["reset_mask"]] = 0
        return observations, infos


def test_slots_that_start_one_after_another_keep_their_first_observations() -> None:
    plan = list(sleds().build().plan())
    specs = [spec for spec in plan if spec.condition == plan[0].condition][:2]
    slots = np.array([0, 2])
    starts = [
        VectorEnvSimulator(make([Sled] * 4)).restart(slots, specs) for make in (OnlyReset, gym.vector.SyncVectorEnv)
    ]
    np.testing.assert_array_equal(*starts)


@pytest.fixture(scope="module")
def whole() -> EvalResult:
    return evaluate(sleds())


def test_an_episode_meets_its_condition(whole: EvalResult) -> None:
    order = [episode.condition for episode in whole.episodes]
    assert order[:23] == order[23:]
    assert {name: order[:23].count(name) for name in COUNTS} == COUNTS
    for episode in whole.episodes:
        parts = parts_of(str(episode.condition))
        assert episode.episode_return == 2 * (parts["light"] - parts["friction"])


def test_results_keep_the_conditions(whole: EvalResult, tmp_path: Path) -> None:
    logged = evaluate(sleds(), output=str(tmp_path / "log"))
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
            evaluate(sleds(conditions=str(file)), output=str(tmp_path / "log"))


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


def test_many_and_long_conditions_are_read(tmp_path: Path) -> None:
    """A column of text may have more than 64 MB, and JSON 240,000 lists and mappings."""
    letters, ids = np.random.default_rng(0).bytes(40_000_000).hex(), [str(number) for number in range(100_000)]
    texts = [letters[start : start + 800] for start in range(0, len(letters), 800)]
    parquet.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "rows.parquet")
    nested = [{"id": one, "a": [[0, 1], [2, 3]]} for one in ids[:60_000]]
    (tmp_path / "rows.json").write_text(json.dumps(nested))
    for suffix, count in ((".parquet", 100_000), (".json", 60_000)):
        found = load_conditions(tmp_path / f"rows{suffix}")
        assert found is not None
        assert len(found.rows) == count


def test_an_id_in_csv_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,light\n01,1\n1,2\n")
    loaded = load_conditions(path)
    assert loaded is not None
    assert dict(loaded.rows) == {"01": {"light": 1}, "1": {"light": 2}}
    path.write_text("id,light\n,1\n1,2\n")
    with refused(ConfigError, key="evaluation.conditions"):
        load_conditions(path)


def test_an_id_is_no_formula_in_an_exported_csv(tmp_path: Path) -> None:
    """It has an apostrophe before it, unless it is a number; numbers stay numbers."""
    rows = [{"id": name, "friction": 0.5, "light": 1} for name in ("=1+1", "-1", "@x", "plain", "\r=1")]
    evaluate(sleds(num_episodes=5, conditions={"rows": rows})).save(tmp_path / "run")
    assert call("export", tmp_path / "run", "-o", tmp_path / "rows.csv").exit_code == 0
    table = csv.read_csv(tmp_path / "rows.csv", parse_options=csv.ParseOptions(newlines_in_values=True))
    assert table["condition"].to_pylist() == ["'=1+1", "-1", "'@x", "plain", "'\r=1"]
    assert pa.types.is_integer(table["episode_return"].type)
    assert call("export", tmp_path / "run", "-o", tmp_path / "rows.parquet").exit_code == 0
    assert parquet.read_table(tmp_path / "rows.parquet")["condition"].to_pylist() == [row["id"] for row in rows]


def test_a_digest_is_that_of_the_rows() -> None:
    loaded = load_conditions([{"id": "a", "light": 1}])
    assert loaded is not None
    assert load_conditions(loaded.to_dict()) == loaded
    with refused(ConfigError, key="evaluation.conditions.sha256"):
        load_conditions({**loaded.to_dict(), "rows": {"a": {"light": 2}}})


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


def test_a_later_plan_continues_the_sequence() -> None:
    conditions = sleds().build().evaluation.conditions
    whole, later = (EpisodePlan(count, 0, first, None, conditions) for count, first in ((46, 0), (20, 26)))
    assert later.condition_ids == whole.condition_ids[26:]
    assert later[3].condition == whole[29].condition
    assert later.fingerprint != EpisodePlan(20, 0, 26, None, make_conditions(axes=GRID["axes"])).fingerprint


def test_true_and_one_are_different_values() -> None:
    """Python's dicts take them for one key."""
    config = EvalConfig().environment(Sled).policy(still).evaluation(num_episodes=8, determinism_check=0)
    result = evaluate(config.evaluation(conditions={"axes": {"friction": [0.5, 1.0], "light": [1, True]}}))
    assert [(repr(one.value), one.num_episodes) for one in result.by_condition["light"]] == [("1", 4), ("True", 4)]


def test_numbers_by_condition_are_those_of_its_episodes(whole: EvalResult) -> None:
    returns = whole.table.rows["episode_return"]
    of = {
        key: np.array([part[key] for part in map(parts_of, whole.plan.condition_ids)]) for key in ("friction", "light")
    }
    of["id"] = np.array(whole.plan.condition_ids)
    assert [len(found) for found in whole.by_condition.values()] == [4, 5, 20]
    for column, found in whole.by_condition.items():
        for one in found:
            mine = of[column] == one.value
            assert (one.num_episodes, one.num_missing) == (mine.sum(), 0)
            assert one.mean_return == pytest.approx(returns[mine].mean())
            rows = None if column == "id" else whole.condition_rows.take(np.flatnonzero(mine))
            expected = mean_interval(returns[mine], rows=rows, of="returns")
            np.testing.assert_equal(one.interval.to_dict(), expected.to_dict())
            assert one.success_rate == np.mean(whole.table.rows["success_at_end"][mine])
    described = printed("run", whole.to_json())
    assert described["by_condition"]["light"][0]["mean_return"] == whole.by_condition["light"][0].mean_return
    for words in ("by friction", "by light", "by condition"):
        assert words in whole.details


def test_the_interval_of_the_whole_has_the_target_that_the_config_names(tmp_path: Path) -> None:
    """The target changes no record, so a log continues with another one; a result keeps its target."""
    config = sleds(num_episodes=92).policy(fast)
    whole = evaluate(config, output=tmp_path / "log")
    returns, rows = whole.table.rows["episode_return"], whole.condition_rows
    assert rows is not None
    ordinary = mean_interval(returns)
    assert whole.interval == mean_interval(returns, rows=rows)
    assert whole.interval.high - whole.interval.low < (ordinary.high - ordinary.low) / 2
    other = evaluate(config.copy().evaluation(condition_target="population"), output=tmp_path / "log")
    assert other.fingerprint == whole.fingerprint
    expected = mean_interval(returns, rows=Rows(rows.of, "population"))
    assert other.interval == expected
    assert other.success_interval != whole.success_interval
    other.save(tmp_path / "saved")
    assert load(tmp_path / "saved").interval == expected
    for column, same in (("friction", False), ("light", False), ("id", True)):
        pairs = zip(whole.by_condition[column], other.by_condition[column], strict=True)
        assert {repr(one.interval) == repr(part.interval) for one, part in pairs} == {same}
    found = compare(whole, evaluate(config.copy().evaluation(condition_target="population").policy(still)))
    assert found.difference.num_signs == 20, "the target of one result is that of the comparison"


def test_a_failed_episode_belongs_to_its_condition() -> None:
    class Broken(Sled):
        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self.options["light"] == 3:
                raise RuntimeError
            return super().step(action)

    result = evaluate(sleds().environment(Broken).fault_tolerance(max_attempts_per_episode=1))
    lost = {one.value: (one.num_episodes, one.num_missing) for one in result.by_condition["light"]}
    assert lost == {1: (12, 0), 2: (8, 0), 3: (0, 8), 4: (8, 0), 5: (10, 0)}


def test_policies_are_compared_by_condition(whole: EvalResult) -> None:
    other = evaluate(sleds().policy(fast))
    found = compare(whole, other)
    differences = other.table.rows["episode_return"] - whole.table.rows["episode_return"]
    for one in found.by_condition["id"]:
        mine = np.array(whole.plan.condition_ids) == one.value
        assert (one.num_pairs, one.mean) == (mine.sum(), pytest.approx(differences[mine].mean()))
        assert one.mean == pytest.approx(one.mean_b - one.mean_a)
    assert sum(one.num_pairs for one in found.by_condition["friction"]) == found.num_pairs
    num_intervals = sum(map(len, found.by_condition.values()))
    assert any(str(num_intervals) in note.split() for note in found.notes), "a note counts the intervals"
    assert "by condition" in str(found)
    printed("compare", json.dumps(found.to_dict()))
    with refused(ComparisonError, key="plan.conditions.sha256"):
        compare(whole, evaluate(sleds(conditions={"axes": GRID["axes"]})))


def test_the_doctor_notes_conditions_that_change_no_first_observation() -> None:
    class Seen(Sled):
        def _seen(self) -> Any:
            return np.array([self.options.get("friction", 0.0)])

    for env, level in ((Sled, "note"), (Seen, "ok")):
        levels = {one.level for one in examine(env, evaluation={"conditions": GRID}) if "conditions" in one.text}
        assert levels == {level}


def parts_of(name: str) -> dict[str, float]:
    return {key: float(value) for key, _, value in (part.partition("=") for part in name.split(","))}


def test_a_table_of_many_conditions_has_the_lowest() -> None:
    shown = evaluate(sleds(num_episodes=60, conditions={"axes": {"friction": [*range(60)], "light": [0]}})).details
    shown = shown[shown.index("by condition") :]
    assert "friction=59,light=0" in shown
    assert "friction=0,light=0" not in shown


class TestContractOfSleds(SimulatorContract):
    config = EvalConfig().environment(Sleds).evaluation(conditions=GRID)

"""The numbers of suites: their definitions, their laws, and what cannot be computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_eval.errors import ConfigError, UsageError
from rl_eval.results.stats.interval import mean_interval
from rl_eval.suites.aggregates import (
    METRICS,
    aggregate_scores,
    learning_curves,
    performance_profiles,
    task_means,
)
from rl_eval.suites.atari import HUMAN_SCALES, human_scale
from rl_eval.suites.improvement import probabilities_of_improvement
from rl_eval.suites.normalization import Scale, normalized
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Table
from rl_eval.suites.units import Unit
from tests.refused import refused

UNITS: tuple[Unit, ...] = ("run", "episode")
THRESHOLDS = (0.0, 0.25, 0.5, 1.0)
TABLES: dict[str, Callable[[Scores, Unit], Table]] = {
    "aggregates": aggregate_scores,
    "profiles": lambda scores, unit: performance_profiles(scores, unit, THRESHOLDS),
    "mean profiles": lambda scores, unit: performance_profiles(scores, unit, THRESHOLDS, distribution="average score"),
    "improvement": probabilities_of_improvement,
    "tasks": task_means,
}


def drawn(
    rng: np.random.Generator, policies: int = 2, tasks: int = 3, seeds: int = 4, episodes: int = 5, spread: float = 0.3
) -> Scores:
    """Return scores of policies of which each is better than the one before it."""
    names = itertools.product(range(policies), range(tasks), range(seeds))
    return Scores(
        {
            Run(f"policy {policy}", f"task {task}", seed): rng.normal(0.3 + 0.2 * policy, spread, episodes)
            for policy, task, seed in names
        }
    )


def of(rows: Mapping[tuple[str, str, int], Any]) -> Scores:
    return Scores({Run(*run): np.asarray(values, np.float64) for run, values in rows.items()})


@pytest.fixture(scope="module")
def scores() -> Scores:
    return drawn(np.random.default_rng(3))


# ------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", TABLES)
def test_the_order_of_runs_changes_nothing(scores: Scores, name: str, unit: Unit) -> None:
    """Tables are bit-identical in any order of policies, tasks, seeds and episodes, and each time."""
    runs = list(scores.runs.items())
    np.random.default_rng(0).shuffle(runs)
    shuffled = Scores({run: values[::-1] for run, values in runs})
    assert dict(TABLES[name](shuffled, unit).cells) == dict(TABLES[name](scores, unit).cells)


def test_the_names_of_seeds_change_nothing(scores: Scores) -> None:
    renamed = Scores({run._replace(seed=100 - run.seed): values for run, values in scores.runs.items()})
    assert aggregate_scores(renamed, "run").cells == aggregate_scores(scores, "run").cells


@pytest.mark.parametrize("unit", UNITS)
def test_another_policy_changes_no_number(scores: Scores, unit: Unit) -> None:
    more = drawn(np.random.default_rng(4), policies=3, seeds=7)
    both = Scores({**more.of("policy 2"), **scores.runs})
    assert aggregate_scores(scores, unit).cells.items() <= aggregate_scores(both, unit).cells.items()


@pytest.mark.parametrize("unit", UNITS)
@given(seed=st.integers(0, 2**32), bonus=st.floats(0.01, 2.0))
@settings(max_examples=10, deadline=None)
def test_higher_scores_have_higher_numbers(unit: Unit, seed: int, bonus: float) -> None:
    """Each number and each end of its interval rises with the scores; only the optimality gap falls."""
    low = drawn(np.random.default_rng(seed), policies=1)
    high = Scores({run: values + bonus for run, values in low.runs.items()})
    for name in ("aggregates", "profiles", "mean profiles"):
        before, after = TABLES[name](low, unit).cells, TABLES[name](high, unit).cells
        for (row, column), (value, interval) in before.items():
            way = -1 if column == "optimality gap" else 1
            other, ends = after[row, column]
            for one, two in ((value, other), (interval.low, ends.low), (interval.high, ends.high)):
                assert way * one <= way * two + 1e-12


@pytest.mark.parametrize("unit", UNITS)
@given(seed=st.integers(0, 2**32), shape=st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(2, 4)))
@settings(max_examples=10, deadline=None)
def test_numbers_are_within_the_scores(unit: Unit, seed: int, shape: tuple[int, int, int]) -> None:
    scores = drawn(np.random.default_rng(seed), 2, *shape)
    values = np.concatenate(list(scores.runs.values()))
    cells = aggregate_scores(scores, unit, ["IQM", "mean", "median"]).cells.values()
    ends = [end for value, interval in cells for end in (value, interval.low, interval.high)]
    assert values.min() - 1e-12 <= min(ends) <= max(ends) <= values.max() + 1e-12
    improvement = probabilities_of_improvement(scores, unit).cells
    assert all(0 <= interval.low <= interval.high <= 1 for _, interval in improvement.values())
    one, other = improvement["policy 0", "policy 1"], improvement["policy 1", "policy 0"]
    assert (one.value + other.value, one.interval.low + other.interval.high) == pytest.approx((1, 1))


def test_intervals_contain_the_truth_as_often_as_they_claim() -> None:
    """The mean over 8 tasks of 10 runs: within what the bootstrap loses with so few runs."""
    rng, hits = np.random.default_rng(5), 0
    for _ in range(100):
        cells = aggregate_scores(drawn(rng, 1, 8, 10, 1), "run", ["mean"]).cells
        hits += 0.3 in cells["policy 0", "mean"].interval
    assert 88 <= hits <= 99


# ------------------------------------------------------------------------------ definitions


def test_definitions_by_hand() -> None:
    """Two tasks, two runs of two episodes: 1 and 3, 5 and 7 as means of the runs."""
    scores = of({
        ("a", "x", 0): [0.0, 2.0], ("a", "x", 1): [2.0, 4.0], ("a", "y", 0): [4.0, 6.0], ("a", "y", 1): [0.0, 1.0],
    })  # fmt: skip
    values = {metric: estimate.value for (_, metric), estimate in aggregate_scores(scores, "run").cells.items()}
    assert values == {"IQM": 2.0, "mean": 2.375, "median": 2.375, "optimality gap": 1 - (1 + 1 + 1 + 0.5) / 4}
    by_episode = aggregate_scores(scores, "episode", ["IQM"]).cells["a", "IQM"].value
    assert by_episode == stats.trim_mean([0, 2, 2, 4, 4, 6, 0, 1], 0.25)


def test_runs_are_resampled_within_their_task_and_episodes_within_their_run() -> None:
    """Without spread in the strata there is none in the intervals, however much tasks and runs differ."""
    tasks = of({("a", f"t{task}", seed): [task] for task in range(4) for seed in range(5)})
    assert aggregate_scores(tasks, "run", ["mean"]).cells["a", "mean"].interval.low == 1.5
    runs = of({("a", f"t{task}", seed): [seed, seed] for task in range(2) for seed in range(5)})
    assert aggregate_scores(runs, "episode", ["mean"]).cells["a", "mean"].interval.low == 2
    assert aggregate_scores(runs, "run", ["mean"]).cells["a", "mean"].interval.low < 2


def test_the_resamples_of_a_batch_do_not_depend_on_its_size(monkeypatch: pytest.MonkeyPatch, scores: Scores) -> None:
    before = {name: table(scores, "run").cells for name, table in TABLES.items()}
    monkeypatch.setattr("rl_eval.suites.units._BATCH_ELEMENTS", 500)
    assert {name: table(scores, "run").cells for name, table in TABLES.items()} == before


@pytest.mark.parametrize("unit", UNITS)
def test_strata_are_resampled_independently(unit: Unit) -> None:
    """A mean of 16 strata has an interval of a quarter of the width; it would be as wide if they drew alike."""

    def width(count: int) -> float:
        runs = {("a", f"t{task}", seed): [seed] for task in range(count) for seed in range(20)}
        episodes = {("a", "t", seed): list(range(20)) for seed in range(count)}
        spread = runs if unit == "run" else episodes
        interval = aggregate_scores(of(spread), unit, ["mean"]).cells["a", "mean"].interval
        return interval.high - interval.low

    assert width(16) == pytest.approx(width(1) / 4, rel=0.1)


def test_policies_are_resampled_independently() -> None:
    """Equal scores draw differently, or the two sides of a difference would move together."""
    values = np.arange(5.0)
    scores = of({(policy, task, seed): [values[seed]] for policy in "ab" for task in "xy" for seed in range(5)})
    cells = aggregate_scores(scores, "run", ["mean"]).cells
    assert cells["a", "mean"].interval != cells["b", "mean"].interval
    assert probabilities_of_improvement(scores, "run").cells["a", "b"].value == 0.5


def test_a_curve_has_the_aggregate_of_each_step(scores: Scores) -> None:
    late = Scores({run: values + 1 for run, values in scores.runs.items()})
    curve = learning_curves({20: late, 10: scores}, "run")
    assert curve.columns == (10, 20)
    assert curve.cells["policy 1", 10] == aggregate_scores(scores, "run").cells["policy 1", "IQM"]


def test_a_curve_needs_a_step() -> None:
    with refused(UsageError, key="scores_by_step"):
        learning_curves({}, "run")


def test_means_of_tasks_have_the_interval_of_a_mean(scores: Scores) -> None:
    cells = task_means(scores, "run").cells
    runs = [scores.runs[Run("policy 0", "task 1", seed)].mean() for seed in range(4)]
    assert cells["task 1", "policy 0"].interval == pytest.approx(mean_interval(np.sort(runs)))
    assert len(cells) == 6


# ------------------------------------------------------------------------------ what is missing


def test_a_missing_run_is_named_and_the_others_count(scores: Scores) -> None:
    absent = Run("policy 0", "task 1", 2)
    partial = Scores({run: values for run, values in scores.runs.items() if run != absent})
    assert partial.missing("policy 0") == (absent,)
    assert partial.missing("policy 1") == ()
    cells = aggregate_scores(partial, "run").cells
    assert all(word in cells["policy 0", "IQM"].interval.note for word in ("policy 0", "task 1", "2"))
    assert cells["policy 0", "IQM"].interval.exists
    assert cells["policy 1", "IQM"] == aggregate_scores(scores, "run").cells["policy 1", "IQM"]


def test_a_task_that_a_policy_lacks_has_no_cell_and_no_part_in_improvement(scores: Scores) -> None:
    partial = Scores({run: values for run, values in scores.runs.items() if run[:2] != ("policy 0", "task 1")})
    assert ("task 1", "policy 0") not in task_means(partial, "run").cells
    shared = scores.on(["task 0", "task 2"])
    pair = "policy 1", "policy 0"
    found, expected = (probabilities_of_improvement(each, "run").cells[pair] for each in (partial, shared))
    assert found.value == expected.value
    assert "task 1" in found.interval.note
    apart = of({("a", "x", 0): [1, 2], ("a", "x", 1): [1, 2], ("b", "y", 0): [1, 2]})
    alone = probabilities_of_improvement(apart, "run").cells["a", "b"]
    assert math.isnan(alone.value)
    assert not alone.interval.exists


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_one_training_seed_says_nothing_about_others(table: Callable[[Scores, Unit], Table]) -> None:
    alone = drawn(np.random.default_rng(0), seeds=1)
    with refused(ConfigError, key="aggregate.unit", value="run"):
        table(alone, "run")
    assert table(alone, "episode").cells
    with refused(ConfigError, key="aggregate.unit", value="episode"):
        table(drawn(np.random.default_rng(0), episodes=1), "episode")


def test_a_policy_with_one_seed_among_others_has_numbers_without_intervals(scores: Scores) -> None:
    published = of({("paper", task, 0): [0.5] for task in scores.tasks})
    value, interval = aggregate_scores(scores.with_baselines(published), "run").cells["paper", "IQM"]
    assert value == 0.5
    assert not interval.exists
    assert "paper" in interval.note


def test_equal_scores_have_the_interval_of_equal_returns() -> None:
    """Few equal values have none; many have their own value, with a note."""
    few, many = (of({("a", f"t{task}", seed): [0.7] for task in range(tasks) for seed in range(4)}) for tasks in (2, 5))
    assert not aggregate_scores(few, "run", ["IQM"]).cells["a", "IQM"].interval.exists
    interval = aggregate_scores(many, "run", ["IQM"]).cells["a", "IQM"].interval
    assert (interval.low, interval.high) == pytest.approx((0.7, 0.7))
    assert interval.note


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_refused(value: float) -> None:
    with refused(UsageError, key="scores", episode=1) as caught:
        of({("a", "x", 7): [0.0, value]})
    assert all(word in str(caught.value) for word in ("'a'", "'x'", "7"))


def test_no_scores_are_refused() -> None:
    with refused(UsageError, key="runs"):
        Scores({})
    with refused(UsageError, key="scores"):
        of({("a", "x", 0): []})


def test_a_confidence_outside_of_0_and_1_is_refused(scores: Scores) -> None:
    with refused(UsageError, key="confidence"):
        aggregate_scores(scores, "run", confidence=95)


# ------------------------------------------------------------------------------ scales and baselines


def test_scores_are_normalized_by_task() -> None:
    scores = of({("a", "x", 0): [10, 20], ("a", "cost", 0): [10, 20]})
    result = normalized(scores, {"x": Scale(0, 10), "cost": Scale(20, 10)})
    assert [values.tolist() for values in result.runs.values()] == [[1, 2], [1, 0]]
    with refused(ConfigError, key="low", value="cost"):
        normalized(scores, {"x": Scale(0, 10)})
    for high in (0.0, math.inf):
        with refused(ConfigError, key="high", value=high):
            normalized(scores, {"x": Scale(0, high), "cost": Scale(20, 10)})


def test_human_scales_go_by_any_name_of_a_game() -> None:
    names = ("RoadRunner", "ALE/RoadRunner-v5", "RoadRunnerNoFrameskip-v4", "road_runner")
    assert {human_scale(name) for name in names} == {Scale(11.5, 7845.0)}
    assert len(HUMAN_SCALES) == 57
    assert all(scale.low < scale.high for scale in HUMAN_SCALES.values())
    with refused(ConfigError, key="game", value="Pnog") as caught:
        human_scale("Pnog")
    assert "Pong" in str(caught.value)


def test_human_scales_are_of_games_that_exist() -> None:
    pytest.importorskip("ale_py")
    from ale_py.roms import get_all_rom_ids

    assert {name.casefold() for name in HUMAN_SCALES} <= {name.replace("_", "") for name in get_all_rom_ids()}


def test_baselines_join_on_the_tasks_of_the_suite(scores: Scores) -> None:
    published = of({("paper", task, 0): [0.5] for task in ("task 0", "elsewhere")})
    both = scores.with_baselines(published)
    assert (both.tasks, both.policies[-1]) == (scores.tasks, "paper")
    assert [run.task for run in both.missing("paper")] == ["task 1", "task 2"]
    with refused(UsageError, key="policy", value="policy 1"):
        scores.with_baselines(of({("policy 1", "task 0", 0): [0.5]}))
    with refused(UsageError, key="task", value="elsewhere"):
        scores.with_baselines(of({("paper", "elsewhere", 0): [0.5]}))


def test_every_aggregate_says_what_it_is(scores: Scores) -> None:
    for unit in UNITS:
        caption = aggregate_scores(scores, unit).caption
        assert all(meaning.format(unit=unit) in caption for meaning, _ in METRICS.values())


# ------------------------------------------------------------------------------ steps at which runs are missing


def curve(*steps: dict[tuple[str, str, int], list[float]]) -> Table:
    return learning_curves({10 * (place + 1): of(runs) for place, runs in enumerate(steps)}, "run")


BOTH = {("p", task, seed): [float(task == "easy") + seed / 10] for task in ("easy", "hard") for seed in (0, 1)}
EASY = {run: values for run, values in BOTH.items() if run[1] == "easy"}
ONE = {run: values for run, values in BOTH.items() if run[2] == 0}
LESS = {run: values for run, values in BOTH.items() if run != ("p", "easy", 1)}


def test_a_curve_has_no_value_where_a_task_is_missing() -> None:
    """The value would be about other tasks: here it would rise because the harder task has ended."""
    table = curve(BOTH, EASY)
    assert table.columns == (10,)
    assert any("hard" in note and "20" in note for note in table.own_notes)
    assert curve(BOTH, BOTH).own_notes == ()


def test_a_curve_says_where_a_seed_is_missing() -> None:
    table = curve(BOTH, LESS)
    assert table.columns == (10, 20)
    assert any("20" in note for note in table.own_notes)


def test_a_step_of_one_seed_leaves_the_other_steps() -> None:
    table = curve(BOTH, ONE)
    assert table.columns == (10,)
    assert any("20" in note for note in table.own_notes)
    with refused(ConfigError, key="aggregate.unit"):
        curve(ONE, ONE)
    with refused(ConfigError, key="scores_by_step"):
        curve(EASY, {run: values for run, values in BOTH.items() if run[1] == "hard"})


@pytest.mark.parametrize(
    ("key", "call"),
    {
        "unit": lambda scores: aggregate_scores(scores, "runs"),
        "metric": lambda scores: aggregate_scores(scores, "run", ["iqm"]),
        "metrics": lambda scores: aggregate_scores(scores, "run", []),
        "distribution": lambda scores: performance_profiles(scores, "run", [0.5], distribution="scores"),
    }.items(),
)
def test_an_unknown_word_is_named(scores: Scores, key: str, call: Callable[[Scores], Table]) -> None:
    with refused(UsageError, key=key):
        call(scores)


@pytest.mark.parametrize("values", [[1.0, 2.0], np.ones((2, 2))])
def test_scores_are_arrays_of_one_dimension(values: Any) -> None:
    with refused(UsageError, key="scores"):
        Scores({Run("a", "x", 0): values})

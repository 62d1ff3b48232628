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
from tests.refused import refused, untold

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
    low = drawn(np.random.default_rng(seed), policies=1, seeds=10)
    high = Scores({run: values + bonus for run, values in low.runs.items()})
    for name in ("aggregates", "profiles", "mean profiles"):
        before, after = TABLES[name](low, unit).cells, TABLES[name](high, unit).cells
        for (row, column), (value, interval) in before.items():
            way = -1 if column == "optimality gap" else 1
            other, ends = after[row, column]
            assert way * value <= way * other + 1e-12
            if interval.exists and ends.exists:
                assert way * interval.low <= way * ends.low + 1e-12
                assert way * interval.high <= way * ends.high + 1e-12


@pytest.mark.parametrize("unit", UNITS)
@given(seed=st.integers(0, 2**32), shape=st.tuples(st.integers(1, 3), st.integers(2, 12), st.integers(2, 4)))
@settings(max_examples=10, deadline=None)
def test_numbers_and_intervals_are_within_the_bounds_of_the_scores(
    unit: Unit, seed: int, shape: tuple[int, int, int]
) -> None:
    """Success rates are in [0, 1], and so are all numbers about them, also as text; probabilities always are."""
    rng, (tasks, seeds, episodes) = np.random.default_rng(seed), shape
    of_success = Scores(
        {run: (values > 0.3).astype(float) for run, values in drawn(rng, 2, tasks, seeds, episodes).runs.items()},
        {f"task {task}": (0.0, 1.0) for task in range(tasks)},
    )
    for name, table in TABLES.items():
        found = table(of_success, unit)
        for value, interval in found.cells.values():
            assert 0 <= value <= 1, name
            assert not interval.exists or 0 <= interval.low <= value <= interval.high <= 1, name
        assert not any(f"[{sign}" in text for sign in ("-", "$-$") for text in (found.latex(), found.markdown()))
    scores = drawn(np.random.default_rng(seed), 2, *shape)
    improvement = probabilities_of_improvement(scores, unit).cells
    assert all(0 <= one.low <= one.high <= 1 for _, one in improvement.values() if one.exists)
    one, other = improvement["policy 0", "policy 1"], improvement["policy 1", "policy 0"]
    assert one.value + other.value == pytest.approx(1)
    assert one.interval.exists == other.interval.exists
    assert not one.interval.exists or one.interval.low + other.interval.high == pytest.approx(1)
    gaps = aggregate_scores(Scores({run: values + 0.5 for run, values in scores.runs.items()}), unit).cells
    assert all(not gaps[name, "optimality gap"].interval.low < 0 for name in scores.policies)


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
    tasks = of({("a", f"t{task}", seed): [task] for task in range(4) for seed in range(10)})
    assert not aggregate_scores(tasks, "run", ["mean"]).cells["a", "mean"].interval.exists
    runs = of({("a", f"t{task}", seed): [seed, seed] for task in range(2) for seed in range(10)})
    assert not aggregate_scores(runs, "episode", ["mean"]).cells["a", "mean"].interval.exists
    assert aggregate_scores(runs, "run", ["mean"]).cells["a", "mean"].interval.low < 4.5


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
    scores = of({(policy, task, seed): [seed] for policy in "ab" for task in "xy" for seed in range(10)})
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


def test_a_number_outside_of_those_of_its_two_seeds_has_a_note() -> None:
    """It looks like a fault: one seed is good at one task, and the other seed at another task."""
    outside = of({("p", "x", 0): [0.0], ("p", "x", 1): [0.1], ("p", "y", 0): [0.1], ("p", "y", 1): [0.0],
                  ("p", "z", 0): [0.0], ("p", "z", 1): [0.0]})  # fmt: skip
    table = aggregate_scores(outside, "run", ["median"])
    one = table.cells["p", "median"]
    assert not min(one.both) <= one.value <= max(one.both)
    assert any(untold(note, "median", "seeds", "outside") == [] for note in table.own_notes)
    equal = of({("p", task, seed): [0.1 * (seed + 1)] for task in "xyz" for seed in (0, 1)})
    assert aggregate_scores(equal, "run").own_notes == ()


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


@pytest.mark.parametrize("seeds", [4, 12])
def test_a_number_that_is_equal_in_all_resamples_has_no_interval(seeds: int) -> None:
    """Equal scores, and a policy that always wins: neither shows what other seeds would do."""
    runs = {(name, f"t{task}", seed): [score] for name, score in (("a", 0.7), ("b", 0.6)) for task in range(5)
            for seed in range(seeds)}  # fmt: skip
    estimates = [aggregate_scores(of(runs), "run", ["IQM"]).cells["a", "IQM"]]
    estimates.append(probabilities_of_improvement(of(runs), "run").cells["a", "b"])
    assert [one.value for one in estimates] == pytest.approx([0.7, 1.0])
    assert all(not one.interval.exists and one.interval.note for one in estimates)


# ------------------------------------------------------------------------------ few training seeds


@pytest.mark.parametrize("seeds", [3, 9])
def test_few_seeds_have_student_t_over_the_means_of_seeds(seeds: int) -> None:
    """Also if one network plays all tasks, so that the runs of a seed are alike."""
    scores = drawn(np.random.default_rng(2), 1, 4, seeds)
    columns = np.array([[scores.runs[Run("policy 0", f"task {task}", seed)].mean() for task in range(4)]
                        for seed in range(seeds)])  # fmt: skip
    cells = aggregate_scores(scores, "run").cells
    for metric, means in (("mean", columns.mean(1)), ("optimality gap", 1 - np.minimum(columns, 1).mean(1))):
        low, high = stats.t.interval(0.95, seeds - 1, means.mean(), stats.sem(means))
        interval = cells["policy 0", metric].interval
        assert interval.method == "student_t"
        assert (interval.low, interval.high) == pytest.approx((low, high))


def test_intervals_of_few_seeds_contain_the_truth() -> None:
    """The interquartile mean over 5 tasks of 3 runs, which a bootstrap covers in 80 %."""
    rng, levels, hits = np.random.default_rng(1), np.array([0.1, 0.4, 0.6, 0.8, 1.2]), 0
    truth = stats.trim_mean(levels + rng.normal(0, 0.15, (200_000, 5)), 0.25, axis=None)
    for _ in range(200):
        values = levels + rng.normal(0, 0.15, (3, 5))
        scores = of({("a", f"t{task}", seed): [values[seed, task]] for seed in range(3) for task in range(5)})
        hits += truth in aggregate_scores(scores, "run", ["IQM"]).cells["a", "IQM"].interval
    assert hits >= 182


def test_two_seeds_have_both_values_in_their_order_and_no_interval() -> None:
    scores = of({("a", task, seed): [value] for task, both in (("x", (0.6, 0.2)), ("y", (0.9, 0.5)))
                 for seed, value in enumerate(both)})  # fmt: skip
    aggregates, means = aggregate_scores(scores, "run", ["mean"]), task_means(scores, "run")
    for table, row, column, both in (
        (aggregates, "a", "mean", (0.75, 0.35)),
        (means, "x", "a", (0.6, 0.2)),
        (means, "y", "a", (0.9, 0.5)),
    ):
        one = table.cells[row, column]
        assert one.both == pytest.approx(both)
        assert not one.interval.exists
        assert f"({' and '.join(f'{end:.2f}' for end in both)})" in table.markdown()
    assert all(not one.interval.exists for one in TABLES["profiles"](scores, "run").cells.values())


def test_a_profile_has_a_band_from_five_seeds_on() -> None:
    few, enough = (drawn(np.random.default_rng(0), 1, 5, seeds, spread=1.0) for seeds in (4, 5))
    assert not any(one.interval.exists for one in TABLES["profiles"](few, "run").cells.values())
    for value, interval in TABLES["profiles"](enough, "run").cells.values():
        assert (interval.low, interval.high) == pytest.approx(
            tuple(stats.binomtest(round(25 * value), 25).proportion_ci(method="wilson"))
        )


def test_missing_runs_leave_each_task_its_weight() -> None:
    """Four of five seeds of the hardest task are missing: the gap to 1 is that of the mean, and all runs weigh less."""
    levels = dict(zip("vwxyz", (1.0, 0.9, 0.8, 0.7, 0.6), strict=True))
    full = {("a", task, seed): [level] for task, level in levels.items() for seed in range(5)}
    partial = {run: scores for run, scores in full.items() if run[1] != "z" or run[2] == 0}
    values = [
        {metric: one.value for (_, metric), one in aggregate_scores(of(runs), "run").cells.items()}
        for runs in (full, partial)
    ]
    assert values[1] == pytest.approx(values[0], abs=0.01)
    assert values[1]["optimality gap"] == pytest.approx(1 - values[1]["mean"], abs=1e-12)
    profiles = [TABLES["profiles"](of(runs), "run").cells for runs in (full, partial)]
    assert [one.value for one in profiles[1].values()] == pytest.approx([one.value for one in profiles[0].values()])


@pytest.mark.parametrize("unit", UNITS)
def test_complete_tables_have_the_usual_definitions(unit: Unit) -> None:
    """To 1e-12: means and trimmed means of all units, each as often as any other."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tasks, seeds, episodes = (int(rng.integers(2, 8)) for _ in range(3))
        scores = drawn(rng, 1, tasks, seeds, episodes)
        each = np.array(
            [scores.runs[Run("policy 0", f"task {task}", run)] for task in range(tasks) for run in range(seeds)]
        )
        values = (each.mean(1) if unit == "run" else each).reshape(tasks, -1)
        means = values.mean(1)
        found = [one.value for one in aggregate_scores(scores, unit).cells.values()]
        trimmed = stats.trim_mean(values, 0.25, axis=None)
        assert found == pytest.approx(
            [trimmed, means.mean(), np.median(means), 1 - np.minimum(values, 1).mean()], abs=1e-12
        )


def test_bounds_are_normalized_and_checked() -> None:
    scores = Scores({Run("a", "x", seed): np.array([10.0 * seed]) for seed in range(3)}, {"x": (0.0, 20.0)})
    assert normalized(scores, {"x": Scale(20, 10)}).bounds == {"x": (0.0, 2.0)}
    interval = aggregate_scores(scores, "run", ["mean"]).cells["a", "mean"].interval
    assert (interval.low, interval.high) == (0.0, 20.0)
    with refused(UsageError, key="bounds"):
        Scores(scores.runs, {"x": (0.0, 19.0)})


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
        details = aggregate_scores(scores, unit).details
        assert all(meaning.format(unit=unit) in details for meaning, _ in METRICS.values())


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

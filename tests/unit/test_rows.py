"""Intervals and tests with rows of initial conditions: their level for these rows, and for a population of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from rl_eval.results.stats.interval import mean_interval
from rl_eval.results.stats.paired import paired_difference, sign_flip_test
from rl_eval.results.stats.rows import Rows, Target

REPEATS = 400
BOUNDS = (0.0, 500.0)


def rows_of(counts: npt.ArrayLike, target: Target = "rows") -> Rows:
    """Return rows with these numbers of values, one row after the other."""
    sizes = np.asarray(counts)
    return Rows(np.repeat(np.arange(len(sizes)), sizes), target)


def test_these_rows_have_the_error_within_rows() -> None:
    """With two rows, the interval of their equally weighted mean is that of Welch's test, up to degrees of freedom."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 1, 30), rng.normal(100, 3, 30)
    found = mean_interval(np.concatenate([first, second]), rows=rows_of([30, 30]))
    welch = stats.ttest_ind(first, -second, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((welch.low / 2, welch.high / 2), rel=1e-3)
    single = mean_interval(first, rows=rows_of([30]))
    half = stats.t.ppf(0.975, 29) * stats.sem(first)
    assert (single.low, single.high) == pytest.approx((first.mean() - half, first.mean() + half))


def test_a_population_has_the_interval_of_the_means_of_rows() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(7, 5)) + rng.normal(size=(7, 1))
    found = mean_interval(values.ravel(), rows=rows_of([5] * 7, "population"))
    expected = stats.t.interval(0.95, 6, values.mean(), stats.sem(values.mean(axis=1)))
    assert (found.low, found.high) == pytest.approx(expected)
    assert not mean_interval(values[:2].ravel(), rows=rows_of([5] * 2, "population")).exists
    few = mean_interval(values[:3, 0]).note
    assert few in found.note, "seven rows are few values, although there are 35 episodes"
    assert few not in mean_interval(values.ravel(), rows=rows_of([5] * 7)).note


@pytest.mark.parametrize("target", ["rows", "population"])
def test_the_interval_is_one_of_the_printed_mean(target: Target) -> None:
    """The mean is over episodes, so a row with more of them counts for more."""
    counts = [2, 9, 4]
    values = np.repeat([0.0, 10.0, 100.0], counts) + np.random.default_rng(2).normal(size=15)
    found = mean_interval(values, rows=rows_of(counts, target))
    assert (found.low + found.high) / 2 == pytest.approx(values.mean())


@pytest.mark.parametrize(("count", "each"), [(10, 20), (50, 4), (25, 2)])
def test_both_targets_are_covered(count: int, each: int) -> None:
    """Rows differ more than the episodes of one row."""
    rng, rows, missed = np.random.default_rng(count), [rows_of([each] * count, t) for t in ("rows", "population")], 0
    missed = np.zeros(2)
    for _ in range(REPEATS):
        middles = rng.normal(size=(count, 1))
        values = (middles + rng.normal(0, 0.3, (count, each))).ravel()
        truths = (middles.mean(), 0.0)
        missed += [truth not in mean_interval(values, rows=of) for truth, of in zip(truths, rows, strict=True)]
    assert (missed > 0.02 * REPEATS).all()
    assert (missed < 0.09 * REPEATS).all()


def test_one_episode_per_row_has_the_ordinary_interval() -> None:
    values = np.random.default_rng(3).normal(size=40)
    ordinary, found = mean_interval(values), mean_interval(values, rows=rows_of([1] * 40))
    assert (found.low, found.high, found.method) == (ordinary.low, ordinary.high, ordinary.method)
    assert found.note != ordinary.note


def test_rows_without_spread_have_no_point_as_interval() -> None:
    """Ten rows of equal episodes: another episode of a row can still differ."""
    values, rows = np.repeat(np.arange(100.0, 200.0, 10.0), 20), rows_of([20] * 10)
    assert not mean_interval(values, rows=rows).exists
    found = mean_interval(values, bounds=BOUNDS, rows=rows)
    worst = 1 - 0.025 ** (1 / 200)
    assert (found.low, found.high) == pytest.approx((145 - 190 * worst, 145 + 400 * worst))
    fallen = values.copy()
    fallen[:3] = 0
    assert not mean_interval(fallen, rows=rows).exists
    assert mean_interval(fallen, bounds=BOUNDS, rows=rows).low < found.low
    assert mean_interval(np.arange(10.0), rows=rows_of([2] * 5)).exists, "values without repetitions have a spread"


@pytest.mark.parametrize("target", ["rows", "population"])
def test_equal_values_of_all_rows_need_bounds(target: Target) -> None:
    """As without rows: of a population, each row is only one observation."""
    values, rows = np.full(200, 500.0), rows_of([10] * 20, target)
    assert not mean_interval(values, rows=rows).exists
    count = 200 if target == "rows" else 20
    assert mean_interval(values, bounds=BOUNDS, rows=rows).low == pytest.approx(500 * 0.025 ** (1 / count))


def test_missing_values_belong_to_rows() -> None:
    values, rows = np.random.default_rng(4).uniform(100, 200, 38), rows_of([10] * 4)
    found = mean_interval(values, num_missing=2, bounds=BOUNDS, rows=rows)
    alone = [mean_interval(np.append(values, [bound] * 2), rows=rows) for bound in BOUNDS]
    assert (found.low, found.high) == (alone[0].low, alone[1].high)
    assert not mean_interval(values, num_missing=2, rows=rows).exists


def test_the_test_sees_a_difference_that_the_spread_of_rows_hides() -> None:
    """Half of the rows are better by 1, the other half are worse by 0.8."""
    rows = rows_of([20] * 10)
    shift = np.where(rows.of % 2, 1.0, -0.8)
    differences = shift + np.random.default_rng(5).normal(0, 0.3, 200)
    found = paired_difference(np.zeros(200), differences, rows=rows)
    assert found.p_value < 0.01
    assert 0 not in found.interval
    assert found.rejects(0.0)
    assert not found.rejects(0.1)
    ordinary = paired_difference(np.zeros(200), differences)
    assert ordinary.p_value > 0.05
    population = paired_difference(np.zeros(200), differences, rows=Rows(rows.of, "population"))
    assert (population.num_signs, population.p_value > 0.05) == (10, True)


WORLDS: dict[str, Callable[[np.random.Generator], npt.NDArray[np.float64]]] = {
    "normal": lambda rng: rng.normal(size=12),
    "exponential": lambda rng: rng.exponential(size=12) * rng.choice([-1, 1], 12),
    "many zeros": lambda rng: rng.choice([-1.0, 0.0, 0.0, 0.0, 1.0], 12),
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_test_keeps_its_level_if_the_sides_are_exchangeable(world: str) -> None:
    """All sign patterns are tested, so the level is exact."""
    rng, rows = np.random.default_rng(6), rows_of([2] * 6)
    p_values = np.array([sign_flip_test(WORLDS[world](rng), rows)[0] for _ in range(REPEATS)])
    assert (p_values > 0).all()
    assert (p_values <= 0.05).mean() < 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / REPEATS)


def test_sampled_patterns_agree_with_all_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    differences, rows = np.random.default_rng(7).normal(0.3, 1, 14), rows_of([7, 7])
    exact, kind = sign_flip_test(differences, rows)
    monkeypatch.setattr("rl_eval.results.stats.paired.EXACT_MAX", 10)
    sampled, other = sign_flip_test(differences, rows)
    assert (kind, other) == ("exact", "sampled")
    assert sampled == pytest.approx(exact, abs=0.02)
    assert sign_flip_test(np.zeros(14), rows)[0] == 1.0

"""Intervals near a ceiling: most values are equal, and the sample does not show how far the others are."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_eval.results.stats import interval
from rl_eval.results.stats.interval import mean_interval

LOW, HIGH = -3.0, 5.0
BOUNDS = (LOW, HIGH)
FEW_VALUES = st.sampled_from([LOW, -1.0, 0.5, 2.0, HIGH])
SAMPLES = st.lists(FEW_VALUES, min_size=1, max_size=40) | st.builds(
    lambda value, count, others: [value] * count + others,
    FEW_VALUES,
    st.integers(1, 40),
    st.lists(st.floats(LOW, HIGH), max_size=12),
)


def ends(values: npt.ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    found = mean_interval(values, confidence, bounds=BOUNDS)
    return found.low, found.high


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse bootstrap: the samples with many different values are not the subject here."""
    monkeypatch.setattr(interval, "_RESAMPLES", 999)


# Literal numbers


@pytest.mark.parametrize(
    ("count", "confidence", "excluded"), [(20, 0.95, 84.21673549154265), (50, 0.95, 35.561), (100, 0.9, 14.756)]
)
def test_equal_values_at_a_bound_exclude_the_losses_that_they_would_have_shown(
    count: int, confidence: float, excluded: float
) -> None:
    """With a fraction p of values at 0, all of n miss them with probability (1 - p)^n."""
    top = mean_interval([500.0] * count, confidence, bounds=(0, 500))
    assert (top.low, top.high) == (pytest.approx(500 - excluded, abs=1e-3), 500)
    bottom = mean_interval([0.0] * count, confidence, bounds=(0, 500))
    assert (bottom.low, bottom.high) == (0, pytest.approx(excluded, abs=1e-3))
    equal = mean_interval([0.0] * count, confidence, bounds=(-500, 500))
    assert [equal.low, equal.high] == pytest.approx([-excluded, excluded], abs=1e-3)
    assert excluded == pytest.approx(500 * (1 - ((1 - confidence) / 2) ** (1 / count)), abs=1e-3)


@pytest.mark.parametrize(("above", "count"), [(0, 1), (1, 1), (18, 20), (3, 6), (40, 400), (0, 6_000)])
def test_values_at_both_bounds_have_clopper_and_pearsons_interval(above: int, count: int) -> None:
    """The mean is a rate, of any number of values."""
    found = mean_interval([LOW] * (count - above) + [HIGH] * above, bounds=BOUNDS)
    rate = stats.binomtest(above, count).proportion_ci(method="exact")
    assert found.method == "clopper_pearson"
    assert [found.low, found.high] == pytest.approx([LOW + 8 * rate.low, LOW + 8 * rate.high], abs=1e-9)


def test_others_widen_the_interval_by_the_distance_of_their_bound() -> None:
    """18 of 20 at 4 in [-3, 5]; one below, one above: each fraction is at most 0.2487."""
    [fraction] = [stats.beta.ppf(0.975, 2, 19)]
    assert fraction == pytest.approx(0.24873, abs=1e-5)
    found = mean_interval([4.0] * 18 + [1.0, 4.5], bounds=BOUNDS)
    assert found.method == "clopper_pearson"
    assert [found.low, found.high] == pytest.approx([4 - 7 * fraction, 4 + 1 * fraction])


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ([1.0, 2.0], "student_t"),
        ([1.0, 1.0], "clopper_pearson"),
        ([1.0, 1.0, 2.0], "clopper_pearson"),
        ([1.0, 1.0, 2.0, 2.5, 3.0], "student_t"),
        ([1.0] * 9 + [*np.linspace(0, 0.9, 9)], "clopper_pearson"),
        ([1.0] * 10 + [*np.linspace(0, 0.9, 10)], "bca"),
        ([1.0] * 400 + [*np.linspace(0, 0.9, 9)], "clopper_pearson"),
        ([1.0] * 400 + [*np.linspace(0, 0.9, 10)], "bca"),
        ([1.0] * 6_000 + [0.5], "clopper_pearson"),
    ],
)
def test_nearly_all_equal_is_half_of_the_values_and_fewer_than_ten_others(values: list[float], method: str) -> None:
    assert mean_interval(values, bounds=BOUNDS).method == method
    without = mean_interval(values)
    assert without.method == (method if method != "clopper_pearson" else "none")
    assert without.exists or without.note


# Properties


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_has_no_effect_on_the_ends(values: list[float], random: object) -> None:
    """Of a bootstrap, it has: these samples get none."""
    if (found := mean_interval(values, bounds=BOUNDS)).method == "bca":
        return
    shuffled = [*values]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mean_interval(shuffled, bounds=BOUNDS) == found or not found.exists


@settings(max_examples=60, deadline=None)
@given(SAMPLES, st.floats(0.5, 0.999), st.floats(0.5, 0.999))
def test_ends_are_within_the_bounds_hold_the_mean_and_grow_with_the_confidence(
    values: list[float], first: float, second: float
) -> None:
    narrow, wide = (ends(values, confidence) for confidence in sorted((first, second)))
    if math.isnan(narrow[0]):
        assert len(values) == 1
        return
    mean = float(np.mean(values))
    assert LOW <= wide[0] <= narrow[0] <= mean + 1e-9
    assert mean - 1e-9 <= narrow[1] <= wide[1] <= HIGH


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_the_interval_of_the_negative_values_is_the_negative_interval(values: list[float]) -> None:
    """Two values that are half of the sample each have equal rights."""
    low, high = ends(values)
    if mean_interval(values, bounds=BOUNDS).method != "bca":
        mirrored = mean_interval(np.negative(values), bounds=(-HIGH, -LOW))
        assert [mirrored.low, mirrored.high] == pytest.approx([-high, -low], nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(FEW_VALUES, st.integers(2, 60), st.integers(1, 40))
def test_fewer_equal_values_give_a_wider_interval(value: float, count: int, more: int) -> None:
    (low, high), (inner_low, inner_high) = ends([value] * count), ends([value] * (count + more))
    assert low <= inner_low <= value <= inner_high <= high
    assert (high - low) > (inner_high - inner_low)


# Levels


def falls(rate: float) -> tuple[Callable[[np.random.Generator, int], npt.NDArray[np.float64]], float]:
    return lambda rng, size: np.where(rng.random(size) < rate, rng.uniform(-2, 1, size), HIGH), HIGH - 5.5 * rate


@pytest.mark.parametrize("rate", [0.02, 0.1])
@pytest.mark.parametrize("size", [6, 20, 50])
def test_a_rare_fall_is_not_excluded_by_samples_without_it(rate: float, size: int) -> None:
    """An end is wrong in at most 25 of 1 000 samples; a bootstrap's lower end was in up to 700."""
    draw, mean = falls(rate)
    rng = np.random.default_rng(size)
    samples = [draw(rng, size) for _ in range(400)]
    found = [mean_interval(sample, bounds=BOUNDS) for sample in samples]
    assert sum(one.low > mean for one in found) <= 16
    assert sum(one.high < mean for one in found) <= 16
    assert sum(mean_interval(sample).low > mean for sample in samples) <= 16


# Bounds that are wrong, and ends that leave them


def test_ends_of_student_t_are_cut_to_the_bounds() -> None:
    found = mean_interval([500.0, 84.0, 300.0], bounds=(0, 500))
    assert (found.low, found.high, found.method) == (0, 500, "student_t")
    assert mean_interval([500.0, 84.0, 300.0]).high > 500


def test_values_outside_of_the_bounds_leave_no_interval() -> None:
    """The bounds are wrong, and so would be an interval that they cut."""
    assert not mean_interval([1.0, 2.0, 7.0], bounds=BOUNDS).exists
    assert not mean_interval([7.0] * 30, bounds=BOUNDS).exists
    rounded = mean_interval([0.1 + 0.1 + 0.1] * 20 + [0.1], bounds=(0, 0.3))
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert rounded.exists
    assert rounded.high <= 0.3


def test_missing_values_are_completed_at_both_bounds_by_the_same_rule() -> None:
    found = mean_interval([HIGH] * 18, num_missing=2, bounds=BOUNDS)
    assert found.low == ends([HIGH] * 18 + [LOW] * 2)[0]
    assert found.high == HIGH
    assert found.note
    assert not mean_interval([HIGH] * 18, num_missing=2).exists

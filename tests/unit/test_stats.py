"""Numbers and intervals against known truth: closed forms, independent definitions, coverage."""

from __future__ import annotations

import math
from dataclasses import astuple
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from rl_eval.errors import UsageError
from rl_eval.results.stats import interval
from rl_eval.results.stats.aggregate import aggregate, exact_mean, histogram_edges
from rl_eval.results.stats.interval import mean_interval, success_interval
from rl_eval.results.stats.paired import _every_sum, mcnemar, paired_difference, sign_flip_test
from tests.refused import refused, untold

if TYPE_CHECKING:
    from collections.abc import Callable

SKEWED = np.random.default_rng(1).exponential(10.0, size=83)


# Aggregates


@pytest.mark.parametrize("size", [2, 3, 4, 5, 19, 83])
def test_aggregates_agree_with_numpy_and_scipy(size: int) -> None:
    """Every number has the textbook value."""
    sample = SKEWED[:size]
    found = aggregate(sample)
    assert found.count == size
    assert found.mean == pytest.approx(np.mean(sample), rel=1e-15)
    assert found.std == pytest.approx(np.std(sample, ddof=1), rel=1e-13)
    assert found.sem == pytest.approx(stats.sem(sample), rel=1e-13)
    assert found.median == np.median(sample)
    assert found.iqm == pytest.approx(stats.trim_mean(sample, 0.25), rel=1e-15)
    assert (found.minimum, found.maximum) == (sample.min(), sample.max())
    assert [found.q05, found.q25, found.q75, found.q95] == np.quantile(sample, [0.05, 0.25, 0.75, 0.95]).tolist()


def test_mean_is_exact_and_does_not_depend_on_order() -> None:
    """A naive sum of these values is 0 or 2, depending on the order."""
    values = [1e16, 1.0, -1e16, 1.0]
    assert exact_mean(values) == exact_mean(values[::-1]) == exact_mean(sorted(values)) == 0.5


def test_equal_values_have_themselves_as_every_average() -> None:
    """No average of equal values is off by a last bit."""
    for value, size in product([0.1, 1 / 3, -7.7, 1e-300], [3, 7, 10, 25, 49]):
        found = aggregate([value] * size)
        assert {found.mean, found.median, found.iqm, found.cvar10, found.q05, found.q95} == {value}
        assert found.std == 0


@pytest.mark.parametrize("size", [1, 7, 10, 11, 20, 25, 83])
def test_worst_tenth_of_a_sample_is_that_of_the_sample_repeated_ten_times(size: int) -> None:
    """Repeating each value ten times makes the tenth whole and changes no quantile."""
    sample = SKEWED[:size]
    repeated = np.sort(np.repeat(sample, 10))
    assert aggregate(sample).cvar10 == pytest.approx(repeated[:size].mean(), rel=1e-14)


def test_what_is_undefined_is_nan() -> None:
    """All numbers of an empty sample and of one with a NaN, which is not dropped; the spread of a single value."""
    for sample in ([], [1.0, math.nan, 2.0]):
        count, *numbers = astuple(aggregate(sample))
        assert (count, all(math.isnan(number) for number in numbers)) == (len(sample), True)
    found = aggregate([4.5])
    assert {found.mean, found.median, found.iqm, found.minimum, found.cvar10} == {4.5}
    assert math.isnan(found.std)
    assert math.isnan(found.sem)


def test_infinite_sums_do_not_raise() -> None:
    """Infinity and overflow come out as infinity, opposite infinities as undefined."""
    assert aggregate([1.0, math.inf]).mean == aggregate([1e308, 1e308]).mean == math.inf
    assert math.isnan(aggregate([math.inf, -math.inf] * 20).mean)


# Intervals for means


def test_bca_interval_leans_towards_the_tail() -> None:
    """A symmetric interval would miss the skew of the sample."""
    found = mean_interval(SKEWED)
    assert found.high - SKEWED.mean() > 1.05 * (SKEWED.mean() - found.low)


def test_equal_records_give_equal_intervals() -> None:
    """Resampling is seeded by the package: it neither depends on the global generator nor moves it."""
    first = mean_interval(SKEWED)
    np.random.random(3)  # noqa: NPY002
    before = np.random.get_state(legacy=False)  # noqa: NPY002
    assert mean_interval(SKEWED.copy()) == first
    paired_difference(SKEWED, SKEWED[::-1])
    after = np.random.get_state(legacy=False)  # noqa: NPY002
    np.testing.assert_equal(before, after)


def test_batches_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory limit is invisible in the result."""
    whole = mean_interval(SKEWED)
    monkeypatch.setattr(interval, "_BATCH_ELEMENTS", 100 * len(SKEWED))
    assert mean_interval(SKEWED) == whole


@pytest.mark.parametrize(("size", "note"), [(5_001, ""), (19, "fewer than 20")])
def test_long_and_few_samples_get_student_t(size: int, note: str) -> None:
    """Above 5 000 values, and below 20, of which a bootstrap is too narrow; the ends are the textbook ones."""
    sample = np.random.default_rng(2).exponential(10.0, size)
    found = mean_interval(sample, 0.9)
    ends = stats.t.interval(0.9, df=size - 1, loc=sample.mean(), scale=stats.sem(sample))
    assert found.method == "student_t"
    assert [found.low, found.high] == pytest.approx(list(ends), rel=1e-12)
    assert note in found.note
    for length in (20, 5_000):
        inside = mean_interval(np.resize(sample, length) + np.arange(length), 0.9)
        assert (inside.method, inside.note) == ("bca", "")


def _coverage(draw: Callable[[], npt.NDArray[np.float64]], truth: float, repeats: int, confidence: float) -> float:
    return float(np.mean([truth in mean_interval(draw(), confidence) for _ in range(repeats)]))


@pytest.mark.parametrize("bounds", [(0.0, 1e308), (-1e308, 0.0)])
def test_a_bound_that_is_too_large_leaves_no_interval(bounds: tuple[float, float]) -> None:
    """The interval of the other bound alone would be much too narrow."""
    assert not mean_interval(np.arange(20.0) % 3, num_missing=10, bounds=bounds).exists


def test_a_note_on_few_values_stays_beside_failed_episodes() -> None:
    alone, failed = (mean_interval(np.array([1.0, 2.0, 4.0]), num_missing=n, bounds=(0.0, 5.0)).note for n in (0, 1))
    assert alone
    assert alone in failed


def test_bca_interval_covers_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known mean, skewed values: about 95 % (and about 80 %) of intervals hold it, coarse as they are here."""
    monkeypatch.setattr(interval, "_RESAMPLES", 1_999)
    rng = np.random.default_rng(3)
    assert 0.91 <= _coverage(lambda: rng.exponential(1.0, 60), 1.0, 300, 0.95) <= 0.98
    assert 0.74 <= _coverage(lambda: rng.exponential(1.0, 60), 1.0, 300, 0.80) <= 0.86


def test_student_t_interval_covers_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """For normal values it is exact at any size, so the tolerance is that of the simulation alone."""
    monkeypatch.setattr(interval, "BCA_MAX", 1)
    rng = np.random.default_rng(4)
    assert 0.935 <= _coverage(lambda: rng.normal(5.0, 2.0, 30), 5.0, 2_000, 0.95) <= 0.965


@pytest.mark.parametrize("size", [2, 3, 5, 10, 19])
def test_of_few_values_an_interval_covers_the_truth_as_often_as_it_says(size: int) -> None:
    """Also of two, by which nobody would be led to pass a requirement."""
    rng = np.random.default_rng(size)
    assert 0.935 <= _coverage(lambda: rng.normal(5.0, 2.0, size), 5.0, 2_000, 0.95) <= 0.965


def test_no_interval_says_why() -> None:
    """Where there is none, the method is "none", the ends are NaN and the note has the reason."""
    for values, note in (
        ([], "no values"),
        ([3.0], "one value has no spread"),
        ([1.0, math.nan, 2.0], "1 of 3 values are not finite"),
        ([1.0, math.inf, math.nan], "2 of 3 values are not finite"),
    ):
        found = mean_interval(values)
        assert (found.method, found.exists, found.note) == ("none", False, note)
        assert math.isnan(found.low)
        assert math.isnan(found.high)


@pytest.mark.parametrize(("size", "confidence"), [(20, 0.95), (21, 0.8), (30, 0.99), (57, 0.95), (400, 0.8)])
def test_the_bootstrap_agrees_with_scipy(size: int, confidence: float) -> None:
    """Same resamples, same interval as scipy's BCa."""
    sample = np.random.default_rng(size).exponential(size=size)
    found = mean_interval(sample, confidence)
    generator = np.random.default_rng(0x5EED)
    batch = max(1, 2**18 // size)
    with np.errstate(all="ignore"):
        result = stats.bootstrap(
            (sample,), np.mean, confidence_level=confidence, n_resamples=9_999, batch=batch, method="BCa", rng=generator
        )
    expected = result.confidence_interval
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], rel=1e-12)


def test_nan_from_the_bootstrap_falls_back_to_student_t(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed bootstrap is never returned in silence."""
    monkeypatch.setattr(interval, "_resampled_means", lambda sample: np.full(9_999, sample.max()))
    found = mean_interval(SKEWED)
    expected = stats.t.interval(0.95, df=82, loc=SKEWED.mean(), scale=stats.sem(SKEWED))
    assert found.method == "student_t"
    assert "BCa" in found.note
    assert [found.low, found.high] == pytest.approx(list(expected), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e150, 1e300])
def test_extreme_scales_give_an_interval_or_a_reason(scale: float) -> None:
    """Overflow inside the bootstrap is answered, not passed on."""
    found = mean_interval(SKEWED * scale)
    assert found.note if not found.exists else found.low < SKEWED.mean() * scale < found.high


def test_confidence_must_be_a_probability() -> None:
    """95 is a slip for 0.95, and is named."""
    for confidence in (0.0, 1.0, 95, -0.5, math.nan):
        with refused(UsageError, "confidence"):
            mean_interval(SKEWED, confidence)
        with refused(UsageError, "confidence"):
            success_interval(1, 2, confidence)


def test_missing_values_span_from_all_worst_to_all_best() -> None:
    """Each end is that of the sample with the missing values at one bound; without bounds there is no interval."""
    assert mean_interval(SKEWED, num_missing=2).method == "none"
    found = mean_interval(SKEWED, num_missing=2, bounds=(-5.0, 200.0))
    assert found.low == mean_interval([*SKEWED, -5.0, -5.0]).low
    assert found.high == mean_interval([*SKEWED, 200.0, 200.0]).high
    assert "2 of 85" in found.note
    assert mean_interval(SKEWED, bounds=(-5.0, 200.0)) == mean_interval(SKEWED), "bounds alone are no measurement"
    assert mean_interval([], num_missing=5, bounds=(0.0, 1.0)).method == "none"


# Intervals for success rates


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 20), (81, 263)])
def test_success_interval_is_wilsons(successes: int, trials: int) -> None:
    """The closed form of the score interval (Wilson 1927)."""
    z, p = stats.norm.ppf(0.975), successes / trials
    centre = (p + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    found = success_interval(successes, trials)
    assert found.method == "wilson"
    assert found.low == pytest.approx(centre - half, abs=1e-12)
    assert found.high == pytest.approx(centre + half, abs=1e-12)


def test_success_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Exact coverage, summed over every outcome, averages 95 % over true rates."""
    trials = 30
    ends = [success_interval(successes, trials) for successes in range(trials + 1)]
    rates = np.linspace(0.05, 0.95, 91)
    covered = [sum(stats.binom.pmf(k, trials, rate) for k in range(trials + 1) if rate in ends[k]) for rate in rates]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)
    assert min(covered) > 0.9


def test_unknown_success_spans_from_none_to_all() -> None:
    """Failed episodes widen the interval at both ends."""
    found = success_interval(8, 10, num_unknown=2)
    assert found.low == success_interval(8, 12).low
    assert found.high == success_interval(10, 12).high
    assert untold(found.note, 2) == []
    assert not success_interval(8, 10).note


# Pairs


def _pairs(size: int, shift: float, seed: int = 5) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    start = rng.normal(0, 3, size)
    return start + rng.normal(0, 1, size), start + shift + rng.normal(0, 1, size)


def test_difference_is_b_minus_a() -> None:
    """Mean and interval are those of the differences themselves."""
    a, b = _pairs(50, 0.5)
    found = paired_difference(a, b, 0.9)
    assert found.count == 50
    assert found.mean == exact_mean(b - a)
    assert found.interval == mean_interval(b - a, 0.9)


@pytest.mark.parametrize("size", [2, 5, 11])
def test_exact_sign_flips_agree_with_scipy(size: int) -> None:
    """Same p-value as scipy's exact paired permutation test."""
    a, b = _pairs(size, 0.8)
    reference = stats.permutation_test(
        [b, a],
        lambda x, y, axis: np.mean(x - y, axis=axis),
        vectorized=True,
        permutation_type="samples",
        n_resamples=10_000,
    )
    found = paired_difference(a, b)
    assert found.test == "exact"
    assert found.p_value == pytest.approx(reference.pvalue, abs=1e-12)


def test_exact_sign_flips_count_ties() -> None:
    """Eight equal wins: only the two one-sided patterns are as far out, whatever the rounding of 0.1."""
    assert sign_flip_test(np.full(8, 0.1)) == (2 / 256, "exact")
    assert sign_flip_test(np.array([0.1, 0.2, -0.3])) == (1.0, "exact")


def test_zero_differences_do_not_count() -> None:
    """They have no sign, so a thousand of them leave an exact test exact."""
    wins = np.array([1.0, 2.0, 3.0, 1.5, 2.5])
    assert sign_flip_test(np.concatenate((wins, np.zeros(1_000)))) == sign_flip_test(wins) == (2 / 32, "exact")
    assert sign_flip_test(np.zeros(20)) == (1.0, "exact")


def test_sampled_sign_flips_agree_with_enumeration() -> None:
    """Above 16 differences signs are drawn; the p-value stays within sampling error of the exact one."""
    a, b = _pairs(18, 0.6, seed=9)
    exact = np.mean(np.abs(_every_sum(np.abs(b - a))) >= abs((b - a).sum()) * (1 - 1e-12))
    p_value, test = sign_flip_test(b - a)
    assert test == "sampled"
    assert 0.02 < exact < 0.5
    assert p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))


def test_sampled_p_value_is_never_zero() -> None:
    """The observed pattern is one of the possible ones."""
    assert sign_flip_test(np.full(200, 5.0))[0] == 1 / 10_001


def test_batches_of_signs_are_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pattern to a batch every pattern still counts: half of 10 000 coins land each way."""
    monkeypatch.setattr("rl_eval.results.stats.paired._BATCH_ELEMENTS", 64)
    a, b = _pairs(40, 0.1, seed=9)
    small = sign_flip_test(b - a)[0]
    monkeypatch.undo()
    assert small == pytest.approx(sign_flip_test(b - a)[0], abs=0.03)


def test_sign_flip_test_rejects_a_true_null_as_rarely_as_it_says() -> None:
    """No difference, 12 pairs: at most about 5 % of p-values are 5 % or less."""
    rng = np.random.default_rng(10)
    rejected = np.mean([sign_flip_test(rng.normal(size=12))[0] <= 0.05 for _ in range(1_000)])
    assert 0.03 <= rejected <= 0.07


def test_differences_that_are_not_finite_have_no_p_value() -> None:
    """NaN compares as false, which would look like the smallest p-value."""
    found = paired_difference([1.0, 2.0, math.inf], [2.0, 3.0, math.inf])
    assert math.isnan(found.p_value)
    assert not found.interval.exists
    assert found.correlation is None
    assert found.episodes_saved is None


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (0, 1), (3, 3), (2, 9), (40, 700), (5000, 5200)])
def test_the_p_value_of_mcnemar_is_that_of_scipy(only_a: int, only_b: int) -> None:
    a = np.repeat([True, False, True], [only_a, only_b, 5])
    b = np.repeat([False, True, True], [only_a, only_b, 5])
    expected = stats.binomtest(only_b, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar(a, b).p_value == pytest.approx(expected, rel=1e-10)


def test_the_comparison_with_the_other_side_resamples_nothing() -> None:
    """Its numbers are the same with the opposite sign. Equal values on both sides make no difference."""
    rng = np.random.default_rng(9)
    a, b = (np.where(rng.random(300) < 0.3, 500.0, rng.normal(400, 9, 300)) for _ in range(2))
    there, drawn = paired_difference(a, b), interval._means_of_resamples.cache_info().misses
    back = paired_difference(b, a)
    assert interval._means_of_resamples.cache_info().misses == drawn
    assert back.p_value == there.p_value
    assert (-back.interval.high, -back.interval.low) == pytest.approx((there.interval.low, there.interval.high))
    expected = stats.bootstrap((b - a,), np.mean, n_resamples=9_999, rng=np.random.default_rng(interval._SEED))
    assert (there.interval.low, there.interval.high) == pytest.approx(tuple(expected.confidence_interval))


def test_an_interval_with_missing_values_names_the_bounds_that_it_uses() -> None:
    values = np.random.default_rng(3).normal(50, 9, 100)
    one = mean_interval(values, num_missing=2, bounds=(-1_000, 2_000), of="returns")
    difference = paired_difference(values, values[::-1], num_missing=2, bounds=((0, 100), (0, 300)))
    assert untold(one.note, "-1,000", "2,000") == []
    assert untold(difference.interval.note, "-100", "300") == []


def test_mcnemar_looks_at_pairs_that_disagree() -> None:
    """One against nine: the probability of at most one head in ten coins, twice; without any, no coin was tossed."""
    assert mcnemar(np.array([True, False]), np.array([True, False])).p_value == 1.0
    a = np.array([True] * 20 + [True] * 1 + [False] * 9 + [False] * 5)
    b = np.array([True] * 20 + [False] * 1 + [True] * 9 + [False] * 5)
    found = mcnemar(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither, found.count) == (20, 1, 9, 5, 35)
    assert found.p_value == pytest.approx(2 * (1 + 10) / 2**10)


def test_correlation_and_episodes_saved_are_measured() -> None:
    """The factor is the ratio of variances, which for equal spreads is 1 / (1 - correlation)."""
    a, b = _pairs(400, 0.2)
    found = paired_difference(a, b)
    assert found.correlation == pytest.approx(stats.pearsonr(a, b).statistic)
    assert found.episodes_saved == pytest.approx((np.var(a, ddof=1) + np.var(b, ddof=1)) / np.var(b - a, ddof=1))
    assert found.episodes_saved == pytest.approx(1 / (1 - 0.9), rel=0.2)


def test_correlation_and_episodes_saved_need_what_varies() -> None:
    """Of both sides, and of the difference, also when rounding leaves a spread in its last bits."""
    found = paired_difference([500.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert found.correlation is None
    assert found.episodes_saved == pytest.approx(1.0)
    for shift in (0.0, 0.1):
        assert paired_difference(SKEWED[:30], SKEWED[:30] + shift).episodes_saved is None


# Histograms

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (np.round(RNG.normal(200, 30, 4000)), 1),
        (np.round(RNG.normal(-80, 9, 60)), 1),
        (RNG.integers(0, 1000, 500).astype(float), 1),
        (10.0 * np.round(RNG.normal(90, 25, 800)), 10),
        (RNG.integers(-(2**40), 2**40, 300).astype(float), 1),
    ],
)
def test_bins_of_whole_numbers_hold_equally_many_of_them(values: npt.NDArray[np.float64], unit: int) -> None:
    """A width of 2.2 would hold two values in most bins and three in some: modes that do not exist."""
    edges = histogram_edges(values)
    widths = np.diff(edges)
    assert (widths == widths[0]).all()
    assert widths[0] == round(widths[0])
    assert widths[0] % unit == 0 or widths[0] < unit
    assert ((edges * 2) % 2 == 1).all()
    assert edges[0] < values.min() <= edges[1]
    assert edges[-2] < values.max() < edges[-1]
    assert len(widths) <= 61


def test_two_values_have_bins_around_them_and_none_between() -> None:
    values = np.array([0.0, 1.0, 1.0])
    edges = histogram_edges(values)
    assert np.histogram(values, edges)[0].tolist() == [1, 0, 2]
    assert edges[0] < 0 < edges[1] < edges[2] < 1 < edges[3]


@pytest.mark.parametrize("values", [[1.5, 2.0, 7.0], [2.0**60, 2.0**62], [-1e300, 0.0, 1e300], [7.0], [3.25, 3.25]])
def test_bins_of_any_numbers_hold_all_of_them(values: list[float]) -> None:
    """Fractions, numbers beyond the whole ones of a float, and a single value."""
    counts, _ = np.histogram(values, histogram_edges(np.array(values)))
    assert counts.sum() == len(values)

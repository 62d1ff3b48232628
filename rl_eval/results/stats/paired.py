"""Paired comparison of two policies by their returns on the same episodes.

A pair is the same index, and so the same seed, with both policies. A common effect (an easy or a hard start) cancels in
the difference, so fewer episodes are needed. The saving is measured and reported as a factor. The same pairs give an
interval for the mean difference, a sign-flip permutation test of "no difference", and McNemar's exact test on success.

A pair is incomplete if an episode failed. If the bounds of the returns are known, interval and test assume the worst
for incomplete pairs: the interval covers the lowest and the highest possible differences, and the p-value is the higher
of both cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.aggregate import aggregate
from rl_eval.results.stats.interval import (
    CACHED,
    Bounds,
    Interval,
    completions,
    mean_interval,
    no_interval,
    wrong_bounds,
)
from rl_eval.results.stats.rows import Rows, sign_flips

EXACT_MAX: Final = 16
"""Maximum number of non-zero differences for which all ``2**n`` sign patterns are enumerated."""

RESAMPLES: Final = 10_000
_SEED: Final = 0x5EED
_BATCH_ELEMENTS: Final = 2**20
_TIE: Final = 1e-12
"""Sums whose difference, relative to the sum of magnitudes, is below this count as equal."""

_ROUNDING: Final = 1e-5
"""Largest difference, relative to the largest return, that counts as float32 rounding between two evaluations of one
policy. If the episodes amplify rounding beyond this, the returns count as different."""

TestKind = Literal["exact", "sampled"]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Statistics of the differences ``b - a``, in the unit of the values."""

    count: int
    """Number of complete pairs."""
    mean: float
    interval: Interval
    """Interval for the mean difference, computed from the differences."""
    p_value: float
    """Two-sided p-value of the sign-flip permutation test; NaN if a difference or the sum of all differences is not
    finite."""
    test: TestKind
    """Whether the p-value is computed from all sign patterns or from a sample of them."""
    correlation: float | None
    """Pearson correlation of the two sides; None if a side does not vary."""
    episodes_saved: float | None
    """Factor by which an unpaired comparison needs more episodes for the same precision: ``(var a + var b) / var(b -
    a)``.

    Below 1, pairing reduced the precision. None in three cases: the differences do not vary, both sides are one policy,
    or all differences are as small as those of rounding.
    """
    rounding: bool
    """Whether both sides are the same policy, and all differences are small enough to be rounding."""
    samples: tuple[npt.NDArray[np.float64], ...] = field(repr=False, compare=False)
    """Differences that are tested, shape (n,). If pairs are incomplete and the bounds are known, there are two samples:
    with the lowest, and with the highest possible difference for these pairs."""
    rows: Rows | None = field(default=None, repr=False, compare=False)
    """Rows of initial conditions of the differences in each sample."""

    @property
    def p_text(self) -> str:
        """The p-value with its relation, such as ``= 0.012``. The lowest value of a sampled test is an upper limit."""
        lowest = self.test == "sampled" and self.p_value <= 1 / (1 + RESAMPLES)
        return f"{'<=' if lowest else '='} {self.p_value:.2g}"

    @property
    def num_signs(self) -> int:
        """Number of signs in the test: that of the differences, or of the rows for a population of rows."""
        return len(self.rows) if self.rows and self.rows.target == "population" else len(self.samples[0])

    def rejects(self, mean: float) -> bool:
        """Whether the sign-flip test rejects a mean difference, at the level of the interval."""
        with np.errstate(all="ignore"):
            p_value, _ = _highest_p([sample - mean for sample in self.samples], self.rows)
        return p_value <= 1 - self.interval.confidence


@dataclass(frozen=True, slots=True)
class McNemar:
    """Success of both sides in the same episodes, with the exact test of equal success rates."""

    both: int
    only_a: int
    only_b: int
    neither: int
    p_value: float
    """Two-sided p-value; 1 if no pair disagrees."""

    @property
    def count(self) -> int:
        """Number of pairs."""
        return self.both + self.only_a + self.only_b + self.neither


def paired_difference(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    confidence: float = 0.95,
    *,
    one_policy: bool = False,
    num_missing: int = 0,
    bounds: tuple[Bounds, Bounds] | None = None,
    rows: Rows | None = None,
) -> PairedDifference:
    """Compare two sides pair by pair.

    Args:
        a: Values of the first side, shape (n,).
        b: Values of the second side on the same episodes, shape (n,).
        confidence: Nominal coverage of the interval.
        one_policy: Whether both sides are values of the same policy, computed in two ways.
        num_missing: Number of incomplete pairs.
        bounds: Lowest and highest possible values of ``a``, and those of ``b``.
        rows: Rows of initial conditions of the pairs, and then of the incomplete pairs, shape (n + num_missing,).
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(all="ignore"):
        differences = second - first
    numbers = aggregate(differences)
    samples: tuple[npt.NDArray[np.float64], ...] = (differences,)
    if num_missing and bounds is not None:
        samples = completions(differences, num_missing, _difference_bounds(*bounds))
    elif num_missing and rows is not None:
        rows = rows.take(np.arange(len(differences)))
    p_value, test = _highest_p(samples, rows)
    as_rounding = _is_rounding(first, second, differences)
    return PairedDifference(
        count=len(differences),
        mean=numbers.mean,
        interval=difference_interval(first, second, confidence, num_missing=num_missing, bounds=bounds, rows=rows),
        p_value=p_value,
        test=test,
        correlation=_correlation(first, second),
        episodes_saved=None if one_policy or as_rounding else _episodes_saved(first, second, numbers.std),
        rounding=one_policy and as_rounding,
        samples=samples,
        rows=rows,
    )


def difference_interval(
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    confidence: float,
    *,
    num_missing: int = 0,
    bounds: tuple[Bounds, Bounds] | None = None,
    rows: Rows | None = None,
) -> Interval:
    """Return the interval for the mean of ``b - a``; see :func:`paired_difference` for the arguments."""
    if bounds is not None and (why := wrong_bounds(a, bounds[0]) or wrong_bounds(b, bounds[1])):
        return no_interval(confidence, why)
    with np.errstate(all="ignore"):
        differences = b - a
    possible = None if bounds is None else _difference_bounds(*bounds)
    return mean_interval(differences, confidence, num_missing=num_missing, bounds=possible, rows=rows, of="differences")


def _difference_bounds(a: Bounds, b: Bounds) -> Bounds:
    return b[0] - a[1], b[1] - a[0]


def sign_flip_test(differences: npt.NDArray[np.float64], rows: Rows | None = None) -> tuple[float, TestKind]:
    """Return the two-sided p-value of the mean under random signs, and the kind of test.

    With rows of initial conditions, the test has the target of the rows. For these rows, the mean is studentized with
    the spread within rows (:func:`rl_eval.results.stats.rows.sign_flips`), if each row has two differences. For the
    population of rows, all differences of a row have one sign.

    If the sides are exchangeable, each difference is as likely with the opposite sign. The p-value is the fraction of
    sign patterns whose sum is at least as far from 0 as the observed sum. Sampled patterns include the observed one, so
    the p-value is never 0 (Phipson & Smyth 2010).

    Args:
        differences: Shape (n,). Zeros have no sign and are dropped.
        rows: Rows of the differences.
    """
    if rows is not None and rows.target == "population":
        return sign_flip_test(rows.means(differences) * rows.counts)
    if rows is not None and rows.repeated:
        return _test_within_rows(differences, rows)
    magnitudes = np.abs(differences[differences != 0])
    with np.errstate(all="ignore"):
        if not np.isfinite(2 * magnitudes.sum()):  # The test needs twice the sum of a pattern's positive signs.
            return math.nan, "exact"
    threshold = abs(math.fsum(differences.tolist())) - _TIE * math.fsum(magnitudes.tolist())
    if len(magnitudes) <= EXACT_MAX:
        return float(np.mean(np.abs(_every_sum(magnitudes)) >= threshold)), "exact"
    return (1 + _count_sampled(magnitudes.tobytes(), threshold)) / (1 + RESAMPLES), "sampled"


def _test_within_rows(differences: npt.NDArray[np.float64], rows: Rows) -> tuple[float, TestKind]:
    size = len(differences)
    with np.errstate(all="ignore"):
        if not np.isfinite((np.abs(differences).sum() * 2) ** 2):
            return math.nan, "exact"

    def statistics(signs: Iterable[npt.NDArray[np.int8]]) -> npt.NDArray[np.float64]:
        return np.concatenate(list(sign_flips(differences, rows, signs)))

    [observed] = statistics([np.ones((1, size), np.int8)])
    threshold = observed * (1 - _TIE) if np.isfinite(observed) else observed
    if math.isnan(observed):  # All differences are 0.
        return 1.0, "exact"
    if size <= EXACT_MAX:
        patterns = 1 - 2 * (np.arange(2**size)[:, None] >> np.arange(size) & 1).astype(np.int8)
        return float((np.nan_to_num(statistics([patterns]), nan=0.0, posinf=math.inf) >= threshold).mean()), "exact"
    rng, batch = np.random.default_rng(_SEED), max(1, _BATCH_ELEMENTS // size)
    counts = [min(batch, RESAMPLES - start) for start in range(0, RESAMPLES, batch)]
    drawn = statistics(1 - 2 * rng.integers(0, 2, (count, size), np.int8) for count in counts)
    return (1 + int((drawn >= threshold).sum())) / (1 + RESAMPLES), "sampled"


def _highest_p(samples: Sequence[npt.NDArray[np.float64]], rows: Rows | None = None) -> tuple[float, TestKind]:
    """Return the test with the highest p-value; NaN if any of them is NaN."""
    tests = [sign_flip_test(sample, rows) for sample in samples]
    return next((test for test in tests if math.isnan(test[0])), max(tests))


def mcnemar(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> McNemar:
    """Test whether two sides succeed equally often on the same episodes.

    Only pairs that disagree affect the test. If the rates are equal, each such pair is a fair coin toss.

    Args:
        a: Success of the first side, shape (n,).
        b: Success of the second side, shape (n,).
    """
    from scipy.special import bdtr  # The import of scipy.stats takes half a second.

    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    discordant = only_a + only_b
    p_value = min(1.0, 2 * float(bdtr(min(only_a, only_b), discordant, 0.5)))
    return McNemar(int((a & b).sum()), only_a, only_b, int((~a & ~b).sum()), p_value)


def _every_sum(magnitudes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sum under each of the ``2**n`` sign patterns."""
    sums = np.zeros(1)
    for magnitude in magnitudes:
        sums = np.concatenate((sums + magnitude, sums - magnitude))
    return sums


@functools.lru_cache(maxsize=CACHED)
def _count_sampled(content: bytes, threshold: float) -> int:
    """Count the random sign patterns whose sum is at least ``threshold`` away from 0.

    The comparison of ``b`` with ``a`` needs the same count as that of ``a`` with ``b``.
    """
    rng, magnitudes = np.random.default_rng(_SEED), np.frombuffer(content)
    total, count, left = magnitudes.sum(), 0, RESAMPLES
    while left:
        batch = min(left, max(1, _BATCH_ELEMENTS // len(magnitudes)))
        positive = rng.integers(0, 2, size=(batch, len(magnitudes)), dtype=np.int8)
        sums = np.einsum("ij,j->i", positive, magnitudes)  # Faster than @, which first copies all signs as floats.
        count += int((np.abs(2 * sums - total) >= threshold).sum())
        left -= batch
    return count


def _is_rounding(*sides_and_differences: npt.NDArray[np.float64]) -> bool:
    largest_a, largest_b, largest = (float(np.abs(values).max(initial=0.0)) for values in sides_and_differences)
    return 0 < largest <= _ROUNDING * max(largest_a, largest_b) < math.inf


def _correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float | None:
    if len(a) < 2 or any((side == side[0]).all() or not np.isfinite(side).all() for side in (a, b)):
        return None
    with np.errstate(all="ignore"):
        correlation = float(np.corrcoef(a, b)[0, 1])
    return correlation if math.isfinite(correlation) else None  # The squares may overflow.


def _episodes_saved(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], difference_std: float) -> float | None:
    spread = math.hypot(aggregate(a).std, aggregate(b).std)
    # The spread of differences that are equal up to rounding has no meaning.
    if not math.isfinite(spread) or not 1e-9 * spread < difference_std < math.inf:
        return None
    return (spread / difference_std) ** 2

"""Confidence intervals of aggregates, and the conditions for them.

Mean returns get a BCa bootstrap interval (Efron 1987). A bootstrap is too narrow for few values, and slow for very
many values, so both cases get a Student t interval. Both are far too narrow if nearly all values are equal, because
such a sample does not show how far the rare other values are. Then the interval is computed from the bounds of the
values and from Clopper and Pearson's (1934) bounds of the fractions of other values; without bounds, there is no
interval. Success rates get Wilson's score interval (Wilson 1927). Failed episodes have no value. If bounds are known,
the lower end assumes the lowest value for all failed episodes, and the upper end assumes the highest value. Without
bounds, there is no interval. A missing interval always has a note with the reason.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.results.stats.aggregate import aggregate
from rl_eval.results.stats.rows import MeanError, Rows, error_between_rows, error_within_rows

Method = Literal["bca", "percentile", "student_t", "clopper_pearson", "wilson", "newcombe", "none"]
Bounds = tuple[float, float]
"""Lowest and highest possible value."""
Of = Literal["", "returns", "differences"]
"""Kind of values whose bounds ``evaluation.return_bounds`` declares; empty for other values."""

BCA_MAX: Final = 5_000
"""Maximum size of a sample for the bootstrap. With a larger sample, the bootstrap takes longer, and differs less from
Student t."""

FEW: Final = 20
"""Minimum size of a sample for the bootstrap. For fewer values, Student t covers the mean more often than the
bootstrap. If the values are skewed, this is still not often enough; the note of the interval says so."""

LEAST_ROWS: Final = 3
"""Minimum number of rows of conditions for an interval over their population."""

FEW_OTHERS: Final = 10
"""Number of values unlike the most frequent value from which on a bootstrap shows how far the mean may be from it."""

_ADVICE: Final = "; set evaluation.return_bounds for an interval"
_TOO_WIDE: Final = "the spread of the values is too large or too small for a float"

_ROUNDING: Final = 1e-9
"""Distance from a bound, relative to the largest value, that counts as rounding of a sum of rewards."""

CACHED: Final = 32
"""Number of resampled statistics that are kept, each of at most 120 kB: those of a page with six results."""
_RESAMPLES: Final = 9_999
_SEED: Final = 0x5EED
"""Seed of every bootstrap, so that equal records give equal intervals."""
_BATCH_ELEMENTS: Final = 2**16
"""Number of values to draw at a time, so that they fit into the cache of a core. It does not change the result."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval and its method."""

    low: float
    """Lower end; NaN if there is no interval."""
    high: float
    confidence: float
    """Nominal coverage, e.g. 0.95."""
    method: Method
    """Method of the interval; ``"none"`` if there is no interval. Then ``note`` has the reason."""
    note: str = ""

    @property
    def exists(self) -> bool:
        """Whether there is an interval."""
        return self.method != "none"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def noted(self, note: str) -> Interval:
        """Return the interval with a further note. An interval without ends is returned unchanged."""
        return replace(self, note="; ".join(filter(None, (self.note, note)))) if self.exists else self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def no_interval(confidence: float, why: str) -> Interval:
    """Return an interval without ends, whose note has the reason."""
    return Interval(math.nan, math.nan, confidence, "none", why)


def check_confidence(confidence: float) -> None:
    """Raise an error if a confidence is not strictly between 0 and 1."""
    if not 0 < confidence < 1:
        problem, fix = f"confidence is {confidence}", "Pass a number between 0 and 1, such as 0.95."
        raise UsageError(problem, key="confidence", value=confidence, fix=fix)


def mean_interval(
    values: npt.ArrayLike,
    confidence: float = 0.95,
    *,
    num_missing: int = 0,
    bounds: Bounds | None = None,
    rows: Rows | None = None,
    of: Of = "",
) -> Interval:
    """Return an interval for the mean of the distribution of the values.

    Values are *nearly all equal* if at least two and at least half of them are the same value, and fewer than
    :data:`FEW_OTHERS` are not. Then the interval is computed from the bounds; see :func:`_from_bounds`.

    Args:
        values: One value per completed episode, shape (n,).
        confidence: Nominal coverage.
        num_missing: Number of values that are missing because episodes failed.
        bounds: Lowest and highest possible value. The interval is cut to the bounds. If values are missing, the lower
            end assumes the lowest value for all of them, and the upper end assumes the highest value for all of them.
        rows: Rows of initial conditions of the values, and then of the missing values, shape (n + num_missing,). The
            interval is then for the target of the rows, and its note names this target.
        of: Kind of the values, if ``evaluation.return_bounds`` declares their bounds. Then notes advise to set it.

    Returns:
        A Clopper-Pearson interval if bounds are known, and all values are one of the two bounds, or nearly all are
        equal. Otherwise, a BCa interval for :data:`FEW` to :data:`BCA_MAX` values, a Student t interval for fewer or
        more values, or an interval without ends, whose note has the reason. With rows, Student t replaces BCa if every
        row has two values, or if the target is the population of rows.
    """
    check_confidence(confidence)
    sample = np.asarray(values, dtype=np.float64)

    def interval_of(sample: npt.NDArray[np.float64]) -> Interval:
        if rows is None or not len(sample) or not np.isfinite(sample).all():
            return _sample_interval(sample, confidence, bounds, _spread_interval, of=of)
        return _rows_interval(sample, rows, confidence, bounds, of=of)

    if num_missing == 0:
        return interval_of(sample)
    why = "is missing, because its episode" if num_missing == 1 else "are missing, because their episodes"
    failed = f"{num_missing} of {len(sample) + num_missing} values {why} failed"
    if not sample.size:
        return no_interval(confidence, "no episode completed")
    if bounds is None:
        return no_interval(confidence, f"{failed}{_ADVICE if of else ''}")
    worst, best = map(interval_of, completions(sample, num_missing, bounds))
    if not (worst.exists and best.exists):
        return best if worst.exists else worst
    notes = [f"{failed}: the interval assumes the bounds {bounds[0]:,g} and {bounds[1]:,g} for them", worst.note]
    return Interval(worst.low, best.high, confidence, worst.method, "; ".join(filter(None, notes)))


def completions(
    sample: npt.NDArray[np.float64], num_missing: int, bounds: Bounds
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the sample with the lowest possible value for all missing values, and with the highest possible value."""
    lowest, highest = bounds
    return np.append(sample, [lowest] * num_missing), np.append(sample, [highest] * num_missing)


def outside(values: npt.NDArray[np.float64], bounds: Bounds) -> npt.NDArray[np.bool_]:
    """Return a mask of the values outside of the bounds. A sum of rewards may exceed a bound by rounding."""
    slack = _ROUNDING * np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return np.asarray((values < bounds[0] - slack) | (values > bounds[1] + slack))


def wrong_bounds(values: npt.NDArray[np.float64], bounds: Bounds) -> str:
    """Return the reason why bounds are wrong: a value outside of them; empty if there is none."""
    beyond = values[outside(values, bounds)]
    return f"the value {beyond[0]:g} is outside of the bounds [{bounds[0]:g}, {bounds[1]:g}]" if beyond.size else ""


def success_interval(successes: float, trials: float, confidence: float = 0.95, *, num_unknown: int = 0) -> Interval:
    """Return Wilson's score interval for a success rate.

    Args:
        successes: Number of successful episodes.
        trials: Number of episodes whose success is known.
        confidence: Nominal coverage.
        num_unknown: Number of episodes whose success is unknown. The lower end assumes that none of them succeeded, and
            the upper end assumes that all of them succeeded.
    """
    check_confidence(confidence)
    if trials < 1:
        return no_interval(confidence, "no episode reports success")
    low, _ = _wilson(successes, trials + num_unknown, confidence)
    _, high = _wilson(successes + num_unknown, trials + num_unknown, confidence)
    note = (
        f"episodes with unknown success: {num_unknown}; the interval covers 0 to {num_unknown} successes among them"
        if num_unknown
        else ""
    )
    return Interval(low, high, confidence, "wilson", note)


def _rows_interval(
    sample: npt.NDArray[np.float64], rows: Rows, confidence: float, bounds: Bounds | None, *, of: Of
) -> Interval:
    if rows.target == "rows":
        if not rows.repeated:
            ordinary = _sample_interval(sample, confidence, bounds, _spread_interval, of=of)
            return ordinary.noted("over rows like these, since some have only one episode")

        def within(sample: npt.NDArray[np.float64], confidence: float) -> Interval:
            return _interval_within_rows(sample, rows, confidence, bounds)

        found = _sample_interval(sample, confidence, bounds, within, of=of)
        return found.noted(f"for these {len(rows)} rows")
    if len(rows) < LEAST_ROWS:
        return no_interval(confidence, f"{len(rows)} rows of conditions do not show how other rows differ")

    def between(_: npt.NDArray[np.float64], confidence: float) -> Interval:
        return _t_interval(error_between_rows(sample, rows), confidence, _note_of_few(len(rows)))

    # Of rows with different numbers of values, the mean does not follow from the means of the rows.
    known = bounds if rows.balanced else None
    advised: Of = of if bounds is None else ""
    found = _sample_interval(rows.means(sample), confidence, known, between, of=advised)
    found = _cut(found, bounds) if bounds else found
    return found.noted(f"for the population of which these {len(rows)} rows are a sample")


def _interval_within_rows(
    sample: npt.NDArray[np.float64], rows: Rows, confidence: float, bounds: Bounds | None
) -> Interval:
    """Return an interval for the mean over rows with at least two values each.

    If nearly all values equal another value of their row, the interval is computed from the bounds, with the deviations
    from this value. Their bounds are those of the row that is farthest from the bound.
    """
    centers = rows.centers(sample)
    deviations = sample - centers[rows.codes]
    equal = np.bincount(rows.codes, deviations == 0)
    count = int(equal[equal > 1].sum())
    if count < len(sample) / 2 or len(sample) - count >= FEW_OTHERS:
        return _t_interval(error_within_rows(sample, rows), confidence, _note_of_few(len(sample)))
    if bounds is None:
        why = f"{count} of {len(sample)} values are equal to another value of their row"
        return no_interval(confidence, f"{why}{_ADVICE}, or set condition_target to population")
    found = _from_bounds(deviations, confidence, (bounds[0] - float(centers.max()), bounds[1] - float(centers.min())))
    middle = float(centers[rows.codes].mean())
    return replace(found, low=middle + found.low, high=middle + found.high)


def _sample_interval(
    sample: npt.NDArray[np.float64],
    confidence: float,
    bounds: Bounds | None,
    by_spread: Callable[[npt.NDArray[np.float64], float], Interval],
    *,
    of: Of,
) -> Interval:
    """Return an interval from the bounds if nearly all values are equal, otherwise the interval ``by_spread``."""
    not_finite = int(len(sample) - np.isfinite(sample).sum())
    if not_finite:
        return no_interval(confidence, f"{not_finite} of {len(sample)} values are not finite")
    if not len(sample):
        return no_interval(confidence, "no values")
    if bounds is not None:
        return _bounded_interval(sample, confidence, bounds, by_spread)
    if _atoms(sample):
        return no_interval(confidence, _equal_values(sample, confidence, of=of))
    return by_spread(sample, confidence)


def _bounded_interval(
    sample: npt.NDArray[np.float64],
    confidence: float,
    bounds: Bounds,
    by_spread: Callable[[npt.NDArray[np.float64], float], Interval],
) -> Interval:
    if why := wrong_bounds(sample, bounds):
        return no_interval(confidence, why)
    low, high = map(float, bounds)
    sample = np.clip(sample, low, high)
    if np.isin(sample, bounds).all() or _atoms(sample):
        return _from_bounds(sample, confidence, (low, high))
    return _cut(by_spread(sample, confidence), (low, high))


def _cut(found: Interval, bounds: Bounds) -> Interval:
    low, high = bounds
    return replace(found, low=max(found.low, low), high=min(found.high, high)) if found.exists else found


def _atoms(sample: npt.NDArray[np.float64]) -> list[float]:
    """Return the value that nearly all of a sample equals; two values if each is half of the sample, else none."""
    size = len(sample)
    places = [(size - 1) // 2, size // 2]  # Half of the sorted values cover one of these places.
    counts = {value: int((sample == value).sum()) for value in np.partition(sample, places)[places].tolist()}
    return [value for value, count in counts.items() if count >= max(2, size / 2) and size - count < FEW_OTHERS]


def _equal_values(sample: npt.NDArray[np.float64], confidence: float, *, of: Of) -> str:
    """Return the reason why nearly equal values have no interval. For returns, add advice and an example."""
    size, value = len(sample), _atoms(sample)[0]
    why = f"{(sample == value).sum()} of {size} values are equal"
    if not of:
        return why
    why += _ADVICE
    if of == "differences" or not value:
        return why
    bounds, end = sorted([0.0, value]), value * (1 - _largest_fraction(0, size, confidence))
    low, high = sorted([end, value])
    example = f"with {bounds[0]:g} and {bounds[1]:g}, {size} values of {value:g} would have {low:.3g} to {high:.3g}"
    return f"{why}; {example}"


def _from_bounds(sample: npt.NDArray[np.float64], confidence: float, bounds: Bounds) -> Interval:
    """Return an interval for the mean of values within bounds, of which nearly all are equal.

    For any value v, the mean is at least ``v - (v - low) * P(value < v)`` and at most
    ``v + (high - v) * P(value > v)``. Each probability has the upper bound of Clopper and Pearson (1934) at half of the
    error. If all values are one of the two bounds, the mean is a rate. For the lower end, v is the upper bound. For the
    upper end, v is the lower bound. So each end is that of Clopper and Pearson's interval of the rate.
    """
    size, (lowest, highest) = len(sample), bounds
    if np.isin(sample, bounds).all():
        above, below, note = [highest], [lowest], ""
    else:
        above = below = _atoms(sample)
        note = f"{(sample == above[0]).sum()} of {size} values are equal, so the ends depend on the bounds"

    def fraction(mask: npt.NDArray[np.bool_]) -> float:
        return _largest_fraction(int(mask.sum()), size, confidence)

    low = min(value - (value - lowest) * fraction(sample < value) for value in above)
    high = max(value + (highest - value) * fraction(sample > value) for value in below)
    if not math.isfinite(high - low):
        return no_interval(confidence, _TOO_WIDE)
    return Interval(low, high, confidence, "clopper_pearson", note)


def _largest_fraction(count: int, size: int, confidence: float) -> float:
    """Return the upper end of Clopper and Pearson's interval of a fraction, of which ``count / size`` was observed."""
    from scipy.special import betaincinv

    return 1.0 if count >= size else float(betaincinv(count + 1, size - count, (1 + confidence) / 2))


def _spread_interval(sample: npt.NDArray[np.float64], confidence: float) -> Interval:
    if len(sample) < 2:
        return no_interval(confidence, "one value has no spread")
    if not FEW <= len(sample) <= BCA_MAX:
        return _student_t(sample, confidence, _note_of_few(len(sample)))
    return _bca(sample, confidence)


def _bca(sample: npt.NDArray[np.float64], confidence: float) -> Interval:
    """Return the bias-corrected and accelerated interval of the mean (Efron 1987, with Efron & Tibshirani 1993, 14.3).

    The result is that of ``scipy.stats.bootstrap(method="BCa")`` with the same generator. That function is not used,
    because the import of ``scipy.stats`` takes half a second.
    """
    from scipy.special import ndtr, ndtri

    with np.errstate(over="ignore"):
        if not np.isfinite(len(sample) * np.abs(sample).max()):
            return no_interval(confidence, _TOO_WIDE)
    resampled = _resampled_means(sample)
    mean = float(np.mean(sample))
    below, not_above = (resampled < mean).mean(), (resampled <= mean).mean()
    with np.errstate(all="ignore"):
        bias = ndtri((below + not_above) / 2)
        # The jackknife means of a mean deviate from their own mean by deviations / (n - 1).
        deviations = sample - mean
        acceleration = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
        shifted = bias + ndtri([(1 - confidence) / 2, (1 + confidence) / 2])
        levels = ndtr(bias + shifted / (1 - acceleration * shifted))
    if not np.isfinite(levels).all():
        return _student_t(sample, confidence, "the BCa bootstrap has no value here")
    low, high = map(float, np.quantile(resampled, levels))
    return Interval(low, high, confidence, "bca")


def _resampled_means(sample: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the means of resamples. For opposite values, as in a comparison of ``b`` with ``a``, they are opposite."""
    sign = math.copysign(1.0, sample.sum())
    return sign * _means_of_resamples((sign * sample + 0.0).tobytes())  # Minus zero becomes zero.


@functools.lru_cache(maxsize=CACHED)
def _means_of_resamples(content: bytes) -> npt.NDArray[np.float64]:
    sample = np.frombuffer(content)
    rng, size = np.random.default_rng(_SEED), len(sample)
    batch = max(1, _BATCH_ELEMENTS // size)
    counts = [min(batch, _RESAMPLES - start) for start in range(0, _RESAMPLES, batch)]
    return np.concatenate([sample[rng.integers(0, size, (count, size))].mean(axis=1) for count in counts])


def _note_of_few(count: int) -> str:
    return f"interval of fewer than {FEW} values: too narrow if they are skewed" if count < FEW else ""


def _student_t(sample: npt.NDArray[np.float64], confidence: float, note: str) -> Interval:
    numbers = aggregate(sample)
    return _t_interval(MeanError(numbers.mean, numbers.sem, len(sample) - 1), confidence, note)


def _t_interval(error: MeanError, confidence: float, note: str = "") -> Interval:
    from scipy.special import stdtrit

    half = float(stdtrit(error.df, (1 + confidence) / 2)) * error.sem
    if not 0 < half < math.inf:
        return no_interval(confidence, _TOO_WIDE)
    return Interval(error.mean - half, error.mean + half, confidence, "student_t", note)


def _wilson(successes: float, trials: float, confidence: float) -> tuple[float, float]:
    """Return the ends of Wilson's score interval (Wilson 1927)."""
    from scipy.special import ndtri

    z = float(ndtri((1 + confidence) / 2))
    rate, weight = successes / trials, z**2 / trials
    middle = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials))
    # Without rounding, the formula gives exactly 0 or 1 at the ends of the scale.
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == trials else middle + half)

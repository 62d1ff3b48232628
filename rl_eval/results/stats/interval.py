"""Confidence intervals of aggregates, and the conditions for them.

Mean returns get a BCa bootstrap interval (Efron 1987). A bootstrap is too narrow for few values, and slow for very
many values, so both cases get a Student t interval. Success rates get Wilson's score interval (Wilson 1927). Failed
episodes have no value. If bounds are known, the lower end assumes the lowest value for all failed episodes, and the
upper end assumes the highest value. Without bounds, there is no interval. A missing interval always has a note with the
reason.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.results.stats.aggregate import aggregate

Method = Literal["bca", "percentile", "student_t", "wilson", "newcombe", "none"]

BCA_MAX: Final = 5_000
"""Maximum size of a sample for the bootstrap. With a larger sample, the bootstrap takes longer, and differs less from
Student t."""

FEW: Final = 20
"""Minimum size of a sample for the bootstrap. For fewer values, Student t covers the mean more often than the
bootstrap. If the values are skewed, this is still not often enough; the note of the interval says so."""

FEW_EQUAL: Final = f"fewer than {FEW} values, all equal: other values may differ"
"""Note for a few equal returns, which have no interval."""

ALL_EQUAL: Final = "all equal"
"""Note of the interval of equal values, which is a single value."""

_TOO_WIDE: Final = "the spread of the values is too large or too small for a float"

_RESAMPLES: Final = 9_999
_SEED: Final = 0x5EED
"""Seed of every bootstrap, so that equal records give equal intervals."""
_BATCH_ELEMENTS: Final = 2**18
"""Number of values to draw at a time. It bounds the memory to a few MiB, and does not change the result."""


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
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Return an interval for the mean of the distribution of the values.

    Args:
        values: One value per completed episode, shape (n,).
        confidence: Nominal coverage.
        num_missing: Number of episodes that have no value because they failed.
        bounds: Lowest and highest possible value. If episodes are missing, the lower end assumes the lowest value for
            all of them, and the upper end assumes the highest value for all of them.

    Returns:
        A BCa interval for :data:`FEW` to :data:`BCA_MAX` values, a Student t interval for fewer or more values, or an
        interval without ends, whose note has the reason.
    """
    check_confidence(confidence)
    sample = np.asarray(values, dtype=np.float64)
    if num_missing == 0:
        return _sample_interval(sample, confidence)
    failed = f"{num_missing} of {len(sample) + num_missing} episodes failed"
    if not sample.size:
        return no_interval(confidence, "no episode completed")
    if bounds is None:
        return no_interval(confidence, f"{failed} and their return is unknown: set return_bounds to get an interval")
    worst, best = (_sample_interval(np.append(sample, [bound] * num_missing), confidence) for bound in bounds)
    if not (worst.exists and best.exists):
        return best if worst.exists else worst
    notes = [f"{failed}: the interval covers their lowest and highest possible returns", worst.note]
    return Interval(worst.low, best.high, confidence, worst.method, "; ".join(filter(None, notes)))


def return_interval(
    returns: npt.NDArray[np.float64],
    confidence: float = 0.95,
    *,
    num_missing: int = 0,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Return the :func:`mean_interval` of returns, or of differences. A few equal values have no interval.

    Otherwise, two episodes that both reach a step limit would have an interval of width 0, and could meet any
    requirement.
    """
    if not num_missing and 1 < len(returns) < FEW and np.isfinite(returns[0]) and (returns == returns[0]).all():
        check_confidence(confidence)
        return no_interval(confidence, FEW_EQUAL)
    return mean_interval(returns, confidence, num_missing=num_missing, bounds=bounds)


def success_interval(successes: int, trials: int, confidence: float = 0.95, *, num_unknown: int = 0) -> Interval:
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


def _sample_interval(sample: npt.NDArray[np.float64], confidence: float) -> Interval:
    not_finite = int(len(sample) - np.isfinite(sample).sum())
    if not_finite:
        return no_interval(confidence, f"{not_finite} of {len(sample)} values are not finite")
    if len(sample) < 2:
        return no_interval(confidence, "no values" if not len(sample) else "one value has no spread")
    if (sample == sample[0]).all():
        method: Method = "bca" if FEW <= len(sample) <= BCA_MAX else "student_t"
        return Interval(float(sample[0]), float(sample[0]), confidence, method, ALL_EQUAL)
    if len(sample) < FEW:
        return _student_t(sample, confidence, f"interval of fewer than {FEW} values: too narrow if they are skewed")
    if len(sample) > BCA_MAX:
        return _student_t(sample, confidence, "")
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
    rng, size = np.random.default_rng(_SEED), len(sample)
    batch = max(1, _BATCH_ELEMENTS // size)
    counts = [min(batch, _RESAMPLES - start) for start in range(0, _RESAMPLES, batch)]
    return np.concatenate([sample[rng.integers(0, size, (count, size))].mean(axis=1) for count in counts])


def _student_t(sample: npt.NDArray[np.float64], confidence: float, note: str) -> Interval:
    from scipy.special import stdtrit

    numbers = aggregate(sample)
    half = float(stdtrit(len(sample) - 1, (1 + confidence) / 2)) * numbers.sem
    if not 0 < half < math.inf:
        return no_interval(confidence, _TOO_WIDE)
    return Interval(numbers.mean - half, numbers.mean + half, confidence, "student_t", note)


def _wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return the ends of Wilson's score interval (Wilson 1927)."""
    from scipy.special import ndtri

    z = float(ndtri((1 + confidence) / 2))
    rate, weight = successes / trials, z**2 / trials
    middle = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials))
    # Without rounding, the formula gives exactly 0 or 1 at the ends of the scale.
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == trials else middle + half)

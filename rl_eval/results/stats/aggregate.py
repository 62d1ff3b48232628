"""Aggregates of a sample of episodes, and their exact definitions.

Every number is computed once, directly from the values: there is no mean of means, no window and no moving average.
Sums are correctly rounded (:func:`math.fsum`), so they do not depend on the order of the values. Undefined numbers are
NaN: every number of an empty sample, the spread of a single value, and every number that depends on a NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_BINS: Final = 60
_LEAST_BINS: Final = 8
_EXACT: Final = 2.0**53
"""Highest number up to which floats represent every whole number."""


@dataclass(frozen=True, slots=True)
class Aggregates:
    """Numbers that describe one sample, in the unit of the sample's values."""

    count: int
    """Number of values."""
    mean: float
    std: float
    """Sample standard deviation (divides by count - 1); NaN for a single value."""
    sem: float
    """Standard error of the mean, ``std / sqrt(count)``; NaN for a single value."""
    median: float
    iqm: float
    """Mean of the middle half, without the ``count // 4`` lowest and highest values."""
    minimum: float
    maximum: float
    q05: float
    """The 5 % quantile. Quantiles are interpolated linearly between neighbouring values (NumPy's default)."""
    q25: float
    q75: float
    q95: float
    cvar10: float
    """Mean of the worst tenth; see :func:`worst_tenth`."""


def exact_mean(values: npt.ArrayLike) -> float:
    """Return the mean of values, shape (n,): the correctly rounded sum, divided by n; NaN if n is 0.

    The sum and the division are both rounded, so the result is clipped to the range of the values. So the mean of equal
    values is exactly this value.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        return math.nan
    with np.errstate(all="ignore"):
        if not np.isfinite(np.abs(sample).sum()):
            return float(sample.mean())
    mean = math.fsum(sample.tolist()) / len(sample)
    return float(min(max(mean, sample.min()), sample.max()))


def standard_deviation(values: npt.NDArray[np.float64], mean: float) -> float:
    """Return the sample standard deviation of values, shape (n,); NaN if n < 2."""
    if len(values) < 2:
        return math.nan
    with np.errstate(all="ignore"):
        squares = (values - mean) ** 2
    return math.sqrt(exact_mean(squares) * len(values) / (len(values) - 1))


def interquartile_mean(ordered: npt.NDArray[np.float64]) -> float:
    """Return the mean of sorted values, shape (n,), without the ``n // 4`` lowest and the ``n // 4`` highest values."""
    cut = len(ordered) // 4
    return exact_mean(ordered[cut : len(ordered) - cut])


def worst_tenth(ordered: npt.NDArray[np.float64]) -> float:
    """Return the conditional value at risk at 10 % of sorted values, shape (n,).

    The worst tenth has ``n / 10`` values, which may be a fraction. The lowest ``n // 10`` values count fully, and the
    next value counts with the rest of the fraction. For 25 values, the result is ``(x0 + x1 + x2 / 2) / 2.5``. For ten
    or fewer values, it is the minimum.
    """
    whole, tenths = divmod(len(ordered), 10)
    if not whole:
        return float(ordered[0])
    head = exact_mean(ordered[:whole])
    if not tenths:
        return head
    following = float(ordered[whole])
    mixed = (10 * whole * head + tenths * following) / len(ordered)
    return min(max(mixed, head), following)


def aggregate(values: npt.ArrayLike) -> Aggregates:
    """Describe a sample.

    Args:
        values: One value per episode, shape (n,). NaN and infinities are kept, not dropped.

    Returns:
        The numbers of the sample; all are NaN for an empty sample.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size or np.isnan(sample).any():
        return Aggregates(len(sample), *[math.nan] * 12)
    ordered = np.sort(sample)
    mean = exact_mean(sample)
    std = standard_deviation(sample, mean)
    with np.errstate(all="ignore"):
        q05, q25, median, q75, q95 = (float(q) for q in np.quantile(ordered, _QUANTILES))
    return Aggregates(
        count=len(sample),
        mean=mean,
        std=std,
        sem=std / math.sqrt(len(sample)),
        median=median,
        iqm=interquartile_mean(ordered),
        minimum=float(ordered[0]),
        maximum=float(ordered[-1]),
        q05=q05,
        q25=q25,
        q75=q75,
        q95=q95,
        cvar10=worst_tenth(ordered),
    )


def histogram_edges(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ends of bins, about 60 at most, in ascending order, by the rule of Freedman & Diaconis (1981).

    If the values are whole numbers, the width of a bin is a whole number. If the greatest common divisor of the
    differences between values is smaller than the width, the width is a multiple of this divisor. So all bins contain
    the same number of possible values. Unequal numbers would show false modes in a smooth distribution.

    Args:
        values: Finite, shape (n,), n at least 1.
    """
    low, high = float(values.min()), float(values.max())
    if np.isin(values, (low, high)).all():  # A narrow bin around each of the two values.
        half = (high - low) / 10 or max(0.5, abs(low) * 1e-6)
        return np.unique([low - half, low + half, high - half, high + half])
    q25, q75 = np.quantile(values, [0.25, 0.75])
    width = 2 * (q75 - q25) / len(values) ** (1 / 3)
    bins = _MOST_BINS if width <= (high - low) / _MOST_BINS else max(_LEAST_BINS, math.ceil((high - low) / width))
    if high - low >= _EXACT or (values != np.round(values)).any():
        return np.linspace(low, high, bins + 1)
    step = 1 if high - low < _MOST_BINS else _whole_width((high - low) / bins, values - low)
    return np.arange(low - 0.5, high + step, step)


def _whole_width(width: float, differences: npt.NDArray[np.float64]) -> int:
    divisor = int(np.gcd.reduce(differences.astype(np.int64)))
    return math.ceil(width / divisor) * divisor if width > divisor else math.ceil(width)

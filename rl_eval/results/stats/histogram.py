"""Bins of a histogram of returns."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["histogram_edges"]

_MOST: Final = 60
_LEAST: Final = 8
_EXACT: Final = 2.0**53
"""Range beyond which floats do not hold every whole number."""


def histogram_edges(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ends of bins, about 60 at most, in ascending order, by the rule of Freedman & Diaconis (1981).

    Bins of whole numbers have equally many possible values, or a smooth distribution would show modes: their width is
    whole, and a multiple of the greatest common divisor of the differences if that is smaller.

    Args:
        values: Finite, shape (n,), n at least 1.
    """
    low, high = float(values.min()), float(values.max())
    if low == high:
        half = max(0.5, abs(low) * 1e-6)
        return np.array([low - half, high + half])
    q25, q75 = np.quantile(values, [0.25, 0.75])
    width = 2 * (q75 - q25) / len(values) ** (1 / 3)
    bins = _MOST if width <= (high - low) / _MOST else max(_LEAST, math.ceil((high - low) / width))
    if high - low >= _EXACT or (values != np.round(values)).any():
        return np.linspace(low, high, bins + 1)
    step = 1 if high - low < _MOST else _whole_width((high - low) / bins, values - low)
    return np.arange(low - 0.5, high + step, step)


def _whole_width(width: float, differences: npt.NDArray[np.float64]) -> int:
    divisor = int(np.gcd.reduce(differences.astype(np.int64)))
    return math.ceil(width / divisor) * divisor if width > divisor else math.ceil(width)

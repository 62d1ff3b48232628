"""Sample sizes: how many episodes show a difference, and which difference so many episodes show.

A difference is shown with power 0.8 if 80 % of such experiments reject "no difference" at the level of 5 %, two-sided.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

from rl_eval.errors import UsageError

__all__ = ["CONFIDENCE", "POWER", "Spread", "episodes_for_rates"]

POWER: Final = 0.8
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of returns, as a pilot found it."""

    std: float
    """Sample standard deviation (divides by count - 1), above 0."""
    count: int
    """Episodes of the pilot, at least 2."""

    def episodes(self, difference: float, correlation: float | None = None) -> int:
        """Return how many episodes of either policy show a difference of mean returns.

        ``n = v (q / d)^2 + c``, with the variance ``v`` of one difference and a quantile ``q`` of the noncentral t
        distribution, which allows for what a pilot does not know of the standard deviation (Julious & Owen 2006); ``c``
        is what the t test needs more than a normal one (Guenther 1981).

        Args:
            difference: True difference of the means, not 0.
            correlation: Of the returns of both policies on equal seeds, for a paired comparison; None for an unpaired
                one.
        """
        wanted = self._variance(correlation) * (self._quantile() / difference) ** 2 + _correction(correlation)
        return max(2, math.ceil(wanted))

    def difference(self, episodes: int, correlation: float | None = None) -> float:
        """Return the smallest difference of mean returns that so many episodes of either policy show.

        NaN if there are too few for any.
        """
        left = episodes - _correction(correlation)
        return self._quantile() * math.sqrt(self._variance(correlation) / left) if left > 0 else math.nan

    def half_width(self, episodes: int) -> float:
        """Return how far an interval for the mean of so many episodes reaches to either side; NaN for one."""
        from scipy.special import stdtrit

        if episodes < 2:
            return math.nan
        return float(stdtrit(episodes - 1, (1 + CONFIDENCE) / 2)) * self.std / math.sqrt(episodes)

    def episodes_of_half_width(self, half_width: float) -> int:
        """Return the smallest number of episodes whose :meth:`half_width` is at most so large.

        Args:
            half_width: Above 0.
        """
        least = (_normal((1 + CONFIDENCE) / 2) * self.std / half_width) ** 2  # Student's t is wider by a few episodes.
        return next(n for n in itertools.count(max(2, math.ceil(least))) if self.half_width(n) <= half_width)

    def _variance(self, correlation: float | None) -> float:
        return 2 * self.std**2 * (1 - (correlation or 0.0))

    def _quantile(self) -> float:
        from scipy.special import nctdtrit

        return float(nctdtrit(self.count - 1, _normal((1 + CONFIDENCE) / 2), POWER))


def episodes_for_rates(a: float, b: float) -> int:
    """Return how many episodes of either policy show that two success rates differ, by Fisher's exact test.

    The normal approximation with the correction for exact tests of Fleiss, Tytun & Ury (1980).

    Args:
        a: True rate of one policy, within [0, 1].
        b: Of the other one.

    Raises:
        UsageError: They are equal.
    """
    if a == b:
        raise UsageError(f"both rates are {a:g}: no number of episodes tells them apart")
    gap, middle = abs(a - b), (a + b) / 2
    spread = _normal((1 + CONFIDENCE) / 2) * math.sqrt(2 * middle * (1 - middle))
    spread += _normal(POWER) * math.sqrt(a * (1 - a) + b * (1 - b))
    plain = (spread / gap) ** 2
    return math.ceil(plain / 4 * (1 + math.sqrt(1 + 4 / (plain * gap))) ** 2)


def _correction(correlation: float | None) -> float:
    return _normal((1 + CONFIDENCE) / 2) ** 2 / (4 if correlation is None else 2)


def _normal(level: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(level))

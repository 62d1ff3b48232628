"""Power: number of episodes for a difference, smallest difference for a number of episodes, comparison of two rates.

A number of episodes shows a difference if 80 % of experiments with this number and this true difference reject "no
difference" in a two-sided test at the level of 5 % (power 0.8).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.results.stats.interval import FEW_OTHERS, Interval, success_interval

POWER: Final = 0.8
CONFIDENCE: Final = 0.95
_MOST: Final = 2**31
"""Maximum number of episodes to compute."""
_SEED: Final = 0x5EED
_EXPERIMENTS: Final = 1_000
"""Number of experiments that are resampled from a pilot."""
_MOST_RESAMPLED: Final = 1_000
"""Number of pairs above which the power is that of normal differences."""
_MOST_SCALED: Final = 100.0
"""Largest difference to compute, in standard deviations of the returns."""
_PRECISION: Final = 1e-3
"""Relative precision of a difference."""
_LEAST_PAIRS: Final = 6
"""Smallest number of pairs with which the sign-flip test can reject at 5 %."""
_NORMAL: Final = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""
_KNOWN: Final = _NORMAL + 0.8416212335729143
"""Difference in standard errors that is shown with a power of 80 % if the variance is known."""
_RATE: Final = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")


@final
@dataclass(frozen=True, eq=False)
class Pilot:
    """Returns of a pilot, and the numbers of episodes that follow from them.

    A comparison pairs the episodes of two policies by index, so its differences are planned. The shape of the returns
    is that of the pilot: the returns of both policies in a pair are drawn from it, and their difference is scaled to
    the assumed correlation.
    """

    returns: npt.NDArray[np.float64]
    """Returns, shape (episodes,), at least three, at least two of which differ."""

    @property
    def count(self) -> int:
        """Number of episodes of the pilot."""
        return len(self.returns)

    @cached_property
    def std(self) -> float:
        """Sample standard deviation (divides by count - 1)."""
        return float(np.std(self.returns, ddof=1))

    @cached_property
    def degrees(self) -> float:
        """Degrees of freedom of the variance: ``count - 1`` for symmetric returns, down to a third for skewed ones.

        The variance of a sample variance is ``2 s^4 / degrees``, and follows from the excess kurtosis (Cramer 1946,
        27.4). A pilot is too short to estimate the kurtosis. So it is assumed to be 1.5 times the squared skewness, as
        for gamma distributions. A short pilot also has an uncertain skewness, hence the limit.
        """
        if self.count < 3:
            return (self.count - 1) / 3
        deviations = (self.returns - self.returns.mean()) / self.std
        skewness = self.count / ((self.count - 1) * (self.count - 2)) * float((deviations**3).sum())
        degrees = 2 / (1.5 * skewness**2 / self.count + 2 / (self.count - 1))
        return max(degrees, (self.count - 1) / 3)

    def pairs(self, difference: float, correlation: float = 0.0) -> int:
        """Return the number of pairs with which ``compare`` shows a difference of mean returns.

        This is the number at which 80 % of the experiments that are resampled from the pilot show the difference. The
        difference is divided by ``q / q0``, because the pilot only estimates the standard deviation: ``q`` is a
        quantile of the noncentral t distribution with :attr:`degrees`, and ``q0`` that of a known variance (Julious &
        Owen 2006).

        Args:
            difference: True difference of the means, not 0.
            correlation: Correlation of the returns of two policies in a pair; 0 for unrelated returns.

        Raises:
            UsageError: More than 2**31 episodes are needed.
        """
        unit = self._unit(correlation)
        ratio, scaled = _KNOWN * unit / abs(difference), abs(difference) / unit
        if (guess := _whole(2 * ratio * ratio + _NORMAL**2 / 2)) > _MOST_RESAMPLED:
            return guess
        low, high = 1, _MOST_RESAMPLED
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._power(scaled, middle) >= POWER else (middle, high)
        return high

    def difference(self, pairs: int, correlation: float = 0.0) -> float:
        """Return the smallest difference of mean returns that a number of pairs shows; NaN for too few pairs.

        Args:
            pairs: Number of pairs.
            correlation: Correlation of the returns of two policies in a pair.
        """
        if pairs > _MOST_RESAMPLED:
            return self._unit(correlation) * _KNOWN * math.sqrt(2 / (pairs - _NORMAL**2 / 2))
        low, high = 0.0, _MOST_SCALED
        if self._power(high, pairs) < POWER:
            return math.nan
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._power(middle, pairs) >= POWER else (middle, high)
        return self._unit(correlation) * high

    def half_width(self, episodes: int) -> float:
        """Return half of the expected width of the interval for a mean over ``episodes``; NaN for one episode."""
        from scipy.special import stdtrit

        if episodes < 2:
            return math.nan
        return float(stdtrit(episodes - 1, (1 + CONFIDENCE) / 2)) * self.std / math.sqrt(episodes)

    def episodes_of_half_width(self, half_width: float) -> int:
        """Return the number of episodes whose interval has at most a half width, for 80 % of all pilots.

        The pilot only estimates the standard deviation. So its upper confidence bound at 80 % is used, from the
        chi-squared distribution with :attr:`degrees`.

        Args:
            half_width: Half width of the interval, above 0.

        Raises:
            UsageError: More than 2**31 episodes are needed.
        """
        from scipy.special import chdtri

        bound = math.sqrt(self.degrees / float(chdtri(self.degrees, POWER)))
        ratio = _NORMAL * self.std * bound / half_width
        least = _whole(ratio * ratio)  # Student's t is wider by a few episodes.
        return next(n for n in itertools.count(max(2, least)) if bound * self.half_width(n) <= half_width)

    def _unit(self, correlation: float) -> float:
        """Return the standard deviation of a difference divided by the root of 2, with the allowance for the pilot."""
        from scipy.special import nctdtrit

        allowance = float(nctdtrit(self.degrees, _NORMAL, POWER)) / _KNOWN
        return self.std * allowance * math.sqrt(1 - correlation)

    def _power(self, scaled: float, size: int) -> float:
        """Return the fraction of resampled experiments that show a difference.

        An experiment has a verdict as in :func:`~rl_eval.results.comparison.compare`, with a t test for the interval
        and for the sign-flip test, which nearly always agree.

        Args:
            scaled: Difference, in units of :meth:`_unit`.
            size: Number of pairs.
        """
        from scipy.special import stdtrit

        if size < _LEAST_PAIRS:
            return 0.0
        rng = np.random.default_rng(_SEED)
        a, b = rng.integers(0, self.count, (2, _EXPERIMENTS, size))
        noise = (self.returns[b] - self.returns[a]) / self.std
        differing = (noise != 0).sum(axis=1)
        means, spread = noise.mean(axis=1) + scaled, noise.std(axis=1, ddof=1)
        reached = means > float(stdtrit(size - 1, (1 + CONFIDENCE) / 2)) * spread / math.sqrt(size)
        nearly_equal = (2 * differing <= size) & (differing < FEW_OTHERS)  # Without an interval, there is no verdict.
        return float(np.mean(reached & ~nearly_equal))


def episodes_for_rates(a: float, b: float) -> int:
    """Return the number of episodes per policy with which Fisher's exact test shows that two success rates differ.

    The number is the normal approximation, with the correction by Fleiss, Tytun & Ury (1980) for exact tests.

    Args:
        a: True rate of one policy, within [0, 1].
        b: True rate of the other policy.

    Raises:
        UsageError: The rates are equal.
    """
    if a == b:
        raise UsageError(f"both rates are {a:g}: no number of episodes can show a difference", key="rates", value=a)
    gap, middle = abs(a - b), (a + b) / 2
    spread = _normal((1 + CONFIDENCE) / 2) * math.sqrt(2 * middle * (1 - middle))
    spread += _normal(POWER) * math.sqrt(a * (1 - a) + b * (1 - b))
    plain = (spread / gap) ** 2
    return math.ceil(plain / 4 * (1 + math.sqrt(1 + 4 / (plain * gap))) ** 2)


def _whole(wanted: float) -> int:
    """Return a number of episodes, rounded up.

    Raises:
        UsageError: The number is too large for an evaluation.
    """
    if not wanted <= _MOST:
        problem = f"more than {_MOST:,} episodes are needed"
        raise UsageError(problem, key="difference", value=wanted, fix="Pass a larger difference or half width.")
    return math.ceil(wanted)


def _normal(level: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(level))


# Rates of different episodes


@dataclass(frozen=True, slots=True)
class Rate:
    """Success rate of one policy."""

    successes: int
    episodes: int
    value: float
    interval: Interval
    """Wilson's score interval."""


@dataclass(frozen=True, slots=True)
class RateComparison:
    """Difference of two success rates, ``b`` minus ``a``."""

    a: Rate
    b: Rate
    difference: float
    interval: Interval
    """Newcombe's interval (1998, method 10) for the difference."""
    p_value: float
    """Two-sided p-value of Fisher's exact test: the probability of a difference of at least this size if the rates are
    equal."""
    episodes_needed: int | None
    """Number of episodes per policy that shows this difference in 80 % of experiments; None for equal rates."""

    @property
    def is_shown(self) -> bool:
        """Whether the test rejects equal rates."""
        return self.p_value <= 1 - CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def parse_rate(text: str) -> Rate:
    """Read ``17/20``.

    Raises:
        UsageError: The text has another form, or is not a rate.
    """
    found = _RATE.fullmatch(text)
    if found is None:
        fix = "Pass successes/episodes, as in 17/20."
        raise UsageError(f"{text!r} is not a success rate", key="rate", value=text, fix=fix)
    successes, episodes = int(found[1]), int(found[2])
    if not 0 <= successes <= episodes or not episodes:
        most = "at least one episode is needed" if not episodes else f"at most {episodes} can be successful"
        raise UsageError(f"{text!r} is not a success rate: {most}", key="rate", value=text)
    return Rate(successes, episodes, successes / episodes, success_interval(successes, episodes, CONFIDENCE))


def compare_rates(a: Rate, b: Rate) -> RateComparison:
    """Compare two success rates of different episodes."""
    from scipy.stats import fisher_exact

    table = [[rate.successes, rate.episodes - rate.successes] for rate in (a, b)]
    return RateComparison(
        a=a,
        b=b,
        difference=b.value - a.value,
        interval=_newcombe(a, b),
        p_value=min(1.0, float(fisher_exact(table)[1])),
        episodes_needed=None if a.value == b.value else episodes_for_rates(a.value, b.value),
    )


def _newcombe(a: Rate, b: Rate) -> Interval:
    """Return the interval of ``b - a`` that follows from the two score intervals (Newcombe 1998, method 10)."""
    difference = b.value - a.value
    down = math.hypot(b.value - b.interval.low, a.interval.high - a.value)
    up = math.hypot(b.interval.high - b.value, a.value - a.interval.low)
    return Interval(difference - down, difference + up, CONFIDENCE, "newcombe")

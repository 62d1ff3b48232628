"""Power: number of episodes for a difference, smallest difference for a number of episodes, comparison of two rates.

A number of episodes shows a difference if 80 % of experiments with this number and this true difference reject "no
difference" in a two-sided test at the level of 5 % (power 0.8).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from rl_eval.errors import UsageError
from rl_eval.results.stats.interval import Interval, success_interval

POWER: Final = 0.8
CONFIDENCE: Final = 0.95
_MOST: Final = 2**31
"""Maximum number of episodes to compute."""
_RATE: Final = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of returns in a pilot."""

    std: float
    """Sample standard deviation (divides by count - 1), above 0."""
    count: int
    """Number of episodes of the pilot, at least 2."""

    def episodes(self, difference: float, correlation: float | None = None) -> int:
        """Return the number of episodes per policy that show a difference of mean returns.

        ``n = v (q / d)^2 + c``, with the variance ``v`` of one difference, the ``difference`` ``d``, and a quantile
        ``q`` of the noncentral t distribution, which allows for the uncertainty of the standard deviation in a pilot
        (Julious & Owen 2006). ``c`` is the number of episodes that the t test needs in addition to a normal test
        (Guenther 1981).

        Args:
            difference: True difference of the means, not 0.
            correlation: Correlation of the returns of the two policies on equal seeds, for a paired comparison; None
                for an unpaired comparison.

        Raises:
            UsageError: More than 2**31 episodes are needed.
        """
        ratio = self._quantile() / difference
        return max(2, _whole(self._variance(correlation) * ratio * ratio + _correction(correlation)))

    def difference(self, episodes: int, correlation: float | None = None) -> float:
        """Return the smallest difference of mean returns that a number of episodes per policy shows.

        NaN if there are too few episodes for any difference.
        """
        left = episodes - _correction(correlation)
        return self._quantile() * math.sqrt(self._variance(correlation) / left) if left > 0 else math.nan

    def half_width(self, episodes: int) -> float:
        """Return half of the expected width of the interval for a mean over ``episodes``; NaN for one episode."""
        from scipy.special import stdtrit

        if episodes < 2:
            return math.nan
        return float(stdtrit(episodes - 1, (1 + CONFIDENCE) / 2)) * self.std / math.sqrt(episodes)

    def episodes_of_half_width(self, half_width: float) -> int:
        """Return the smallest number of episodes whose :meth:`half_width` is at most the given one.

        Args:
            half_width: Half width of the interval, above 0.

        Raises:
            UsageError: More than 2**31 episodes are needed.
        """
        ratio = _normal((1 + CONFIDENCE) / 2) * self.std / half_width
        least = _whole(ratio * ratio)  # Student's t is wider by a few episodes.
        return next(n for n in itertools.count(max(2, least)) if self.half_width(n) <= half_width)

    def _variance(self, correlation: float | None) -> float:
        return 2 * self.std**2 * (1 - (correlation or 0.0))

    def _quantile(self) -> float:
        from scipy.special import nctdtrit

        return float(nctdtrit(self.count - 1, _normal((1 + CONFIDENCE) / 2), POWER))


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


def _correction(correlation: float | None) -> float:
    return _normal((1 + CONFIDENCE) / 2) ** 2 / (4 if correlation is None else 2)


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

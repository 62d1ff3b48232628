"""Comparison of two success rates that were measured on different episodes: intervals and an exact test."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from rl_eval.errors import UsageError
from rl_eval.results.stats.interval import Interval, success_interval
from rl_eval.results.stats.sample_size import CONFIDENCE, episodes_for_rates

__all__ = ["Rate", "RateComparison", "compare_rates", "parse_rate"]

_RATE: Final = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")


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
    """Two-sided p-value of Fisher's exact test: how often equal rates differ at least so much."""
    episodes_needed: int | None
    """Episodes of either policy that show such a difference in 80 % of experiments; None for equal rates."""

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
        UsageError: It is something else, or no rate.
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no success rate: write successes/episodes, as in 17/20")
    successes, episodes = int(found[1]), int(found[2])
    if not 0 <= successes <= episodes or not episodes:
        most = "at least one episode is needed" if not episodes else f"at most {episodes} can be successful"
        raise UsageError(f"{text!r} is no success rate: {most}")
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
    """Return the interval of ``b - a`` that the two score intervals make (Newcombe 1998, method 10)."""
    difference = b.value - a.value
    down = math.hypot(b.value - b.interval.low, a.interval.high - a.value)
    up = math.hypot(b.interval.high - b.value, a.value - a.interval.low)
    return Interval(difference - down, difference + up, CONFIDENCE, "newcombe")

"""Requirements on results, in a small grammar for scripts. A requirement is parsed, and never run as code.

- ``NAME OP NUMBER`` concerns one result: ``episode_return_ci_low >= 475``;
- ``b OP a [± NUMBER]`` concerns a comparison: ``b >= a - 5`` means that b's mean return is at most 5 below a's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import ge, gt, le, lt
from typing import Final

from rl_eval.errors import ConfigError, nearest
from rl_eval.results.stats.paired import PairedDifference

_NUMBER: Final = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_METRIC: Final = re.compile(rf"\s*([A-Za-z_][^<>=]*?)\s*(>=|<=|>|<)\s*({_NUMBER})\s*")
_METRICS: Final = {"mean_return": "episode_return_mean"}
"""Metrics by the name of the attribute of a result."""
_OPERATORS: Final = {">=": ge, "<=": le, ">": gt, "<": lt}
_DIFFERENCE: Final = re.compile(rf"\s*([ab])\s*(>=|<=)\s*([ab])\s*(?:([+-])\s*({_NUMBER}))?\s*")


class Answer(Enum):
    """Answer to a requirement."""

    HOLDS = "is met"
    FAILS = "is not met"
    OPEN = "cannot be answered"


@dataclass(frozen=True, slots=True)
class MetricRequirement:
    """Bound on one metric of a result."""

    metric: str
    operator: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.bound:g}"

    def check(self, metrics: Iterable[str]) -> None:
        """Check that the metric exists.

        Raises:
            ConfigError: The metric does not exist.
        """
        if self.metric not in (known := set(metrics)):
            meant = nearest(self.metric, known | _METRICS.keys())
            problem = f"{self} (--require) has an unknown metric {self.metric!r}: {meant}"
            raise ConfigError(problem, key="--require", value=self.metric)

    def judge(self, metrics: Mapping[str, float]) -> Answer:
        """Return whether a result meets the requirement; :attr:`Answer.OPEN` if the metric is NaN.

        Raises:
            ConfigError: The metric does not exist.
        """
        self.check(metrics)
        value = metrics[self.metric]
        if math.isnan(value):
            return Answer.OPEN
        return Answer.HOLDS if _OPERATORS[self.operator](value, self.bound) else Answer.FAILS


@dataclass(frozen=True, slots=True)
class DifferenceRequirement:
    """Bound on the true mean difference, b minus a."""

    text: str
    lower: bool
    """Whether the difference must be at least the bound. Otherwise, it must be at most the bound."""
    bound: float

    def __str__(self) -> str:
        return self.text

    def judge(self, difference: PairedDifference) -> Answer:
        """Return ``HOLDS`` if the interval of the mean difference and the test show that the bound is met.

        Return ``FAILS`` if both show that it is not met, and ``OPEN`` otherwise. Both show it if all values in the
        interval are on one side of the bound, and the sign-flip test rejects the bound as the mean difference.
        """
        interval = difference.interval
        if not (interval.exists and difference.rejects(self.bound)):
            return Answer.OPEN
        low, high = (interval.low, interval.high) if self.lower else (-interval.high, -interval.low)
        bound = self.bound if self.lower else -self.bound
        if low >= bound:
            return Answer.HOLDS
        return Answer.FAILS if high < bound else Answer.OPEN

    def undecided(self, difference: PairedDifference) -> str:
        """Return the reason why a difference cannot decide the requirement."""
        low, high = difference.interval.low, difference.interval.high
        if not difference.interval.exists:
            return difference.interval.note
        ends, bound = f"the interval of b - a, {low:.4g} to {high:.4g},", f"{self.bound:g}"
        if low < self.bound <= high or low <= self.bound < high:
            return f"{ends} contains values on both sides of {bound}: more episodes narrow the interval"
        return f"{ends} is on one side of {bound}, but the sign-flip test does not reject: more episodes may show it"


def parse_metric(text: str) -> MetricRequirement:
    """Read ``NAME OP NUMBER``.

    Raises:
        ConfigError: The text has another form.
    """
    found = _METRIC.fullmatch(text)
    if found is None:
        fix = "Write METRIC >= NUMBER (or <=, >, <), such as 'episode_return_ci_low >= 475'."
        raise ConfigError(f"{text!r} is not a requirement (--require)", key="--require", value=text, fix=fix)
    return MetricRequirement(_METRICS.get(found[1], found[1]), found[2], float(found[3]))


def parse_difference(text: str) -> DifferenceRequirement:
    """Read a requirement such as ``b >= a``, ``b >= a - 5`` or ``a <= b + 5``.

    Raises:
        ConfigError: The text has another form.
    """
    found = _DIFFERENCE.fullmatch(text)
    if found is None or found[1] == found[3]:
        problem = f"{text!r} is not a requirement on a difference (--require)"
        fix = "Write b >= a, or b >= a - 5 with a margin. You can also use <=, and exchange a and b."
        raise ConfigError(problem, key="--require", value=text, fix=fix)
    left, operator, margin = found[1], found[2], float(found[5] or 0) * (-1 if found[4] == "-" else 1)
    # left OP right + margin, as a bound on b - a.
    return DifferenceRequirement(text.strip(), (left == "b") == (operator == ">="), margin if left == "b" else -margin)

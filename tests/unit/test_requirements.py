"""Requirements: what a script may ask of a result or of a comparison, and how often the answer is wrong."""

import math

import numpy as np
import pytest

from rl_eval.errors import ConfigError
from rl_eval.results.comparison import is_shown
from rl_eval.results.requirements import Answer, parse_difference, parse_metric
from rl_eval.results.stats.interval import Interval, no_interval
from rl_eval.results.stats.paired import paired_difference
from tests.refused import refused, untold


def interval(low, high):
    return Interval(low, high, 0.95, "bca")


@pytest.mark.parametrize("text", ["b >= a - 5", "a <= b + 5", "  b>=a-5.0 ", "b >= a + -5", "a <= b - -5"])
def test_the_same_requirement_in_other_words(text):
    requirement = parse_difference(text)
    assert requirement.judge(interval(-5.0, 2.0)) is Answer.HOLDS
    assert requirement.judge(interval(-5.1, 2.0)) is Answer.OPEN
    assert untold(requirement.undecided(interval(-5.1, 2.0)), -5.1, 2, -5) == []
    assert requirement.judge(interval(-9.0, -5.1)) is Answer.FAILS


@pytest.mark.parametrize("text", ["b <= a + 5", "a >= b - 5"])
def test_an_upper_bound(text):
    requirement = parse_difference(text)
    assert requirement.judge(interval(-9.0, 5.0)) is Answer.HOLDS
    assert requirement.judge(interval(4.0, 5.1)) is Answer.OPEN
    assert requirement.judge(interval(5.1, 6.0)) is Answer.FAILS
    assert requirement.judge(no_interval(0.95, "one pair")) is Answer.OPEN


@pytest.mark.parametrize(
    "text", ["b >= b", "b > a", "a - b >= 3", "b >= a - x", "b >= 3", "__import__('os')", "", "b >= a - 5; b"]
)
def test_what_is_no_requirement_is_refused(text):
    with refused(ConfigError, "--require"):
        parse_difference(text)


@pytest.mark.parametrize(
    ("operator", "holds"), [(">=", [False, True, True]), ("<=", [True, True, False]), (">", [False, False, True])]
)
def test_a_metric_and_its_bound(operator, holds):
    requirement = parse_metric(f"mean {operator} 4.5e2")
    assert [requirement.judge({"mean": value}) is Answer.HOLDS for value in (449, 450, 451)] == holds
    assert requirement.judge({"mean": math.nan}) is Answer.OPEN


@pytest.mark.parametrize("text", ["mean == 3", "mean >= x", ">= 3", "mean >= 3 or 1"])
def test_what_asks_no_metric_is_refused(text):
    with refused(ConfigError, "--require"):
        parse_metric(text)


def test_a_metric_of_a_policy_with_any_name():
    """A name may have hyphens and spaces."""
    requirement = parse_metric("win_rate/my ppo-v2>= 0.5")
    assert requirement.judge({"win_rate/my ppo-v2": 0.6}) is Answer.HOLDS


def test_an_unknown_metric_is_named():
    with refused(ConfigError, "--require", value="mena"):
        parse_metric("mena >= 3").judge({"mean": 1.0})


def regressions(shift, rounds, episodes=100):
    """Share of pairs in which b is shown to have a lower return than a, as ``--fail-on regression`` judges."""
    draws = np.random.default_rng(7)
    found = 0
    for _ in range(rounds):
        a, b = draws.normal(size=(2, episodes))
        difference = paired_difference(a, b + shift)
        found += is_shown(difference, 0.95) and difference.mean < 0
    return found / rounds


@pytest.mark.parametrize("rounds", [50, pytest.param(1_000, marks=pytest.mark.slow)])
def test_equal_policies_are_seldom_a_regression_and_one_that_is_worse_by_a_standard_deviation_always_is(rounds):
    assert regressions(0.0, rounds) <= 0.05
    assert regressions(-1.0, rounds) >= 0.99

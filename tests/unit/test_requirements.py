"""Requirements: what a script may ask of a result or of a comparison, and how often the answer is wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rl_eval.errors import ConfigError
from rl_eval.results.comparison import is_shown
from rl_eval.results.requirements import Answer, parse_difference, parse_metric
from rl_eval.results.stats.interval import Interval
from rl_eval.results.stats.paired import paired_difference
from tests.refused import refused, untold


def judged(requirement, low, high, middle=None):
    """Answer for differences whose sign-flip test rejects every mean but one in the middle."""
    middle = (low + high) / 2 if middle is None else middle
    spread = np.linspace(-1, 1, 30) * (high - low) / 4
    difference = replace(paired_difference(np.zeros(30), middle + spread), interval=Interval(low, high, 0.95, "bca"))
    return requirement.judge(difference), difference


@pytest.mark.parametrize("text", ["b >= a - 5", "a <= b + 5", "  b>=a-5.0 ", "b >= a + -5", "a <= b - -5"])
def test_the_same_requirement_in_other_words(text):
    requirement = parse_difference(text)
    assert judged(requirement, -5.0, 2.0)[0] is Answer.HOLDS
    answer, difference = judged(requirement, -5.1, 2.0)
    assert answer is Answer.OPEN
    assert untold(requirement.undecided(difference), -5.1, 2, -5) == []
    assert judged(requirement, -9.0, -5.1)[0] is Answer.FAILS


@pytest.mark.parametrize("text", ["b <= a + 5", "a >= b - 5"])
def test_an_upper_bound(text):
    requirement = parse_difference(text)
    assert judged(requirement, -9.0, 5.0)[0] is Answer.HOLDS
    assert judged(requirement, 4.0, 5.1)[0] is Answer.OPEN
    assert judged(requirement, 5.1, 6.0)[0] is Answer.FAILS
    assert requirement.judge(paired_difference([1.0], [2.0])) is Answer.OPEN


@pytest.mark.parametrize(("low", "high"), [(-4, 4), (-14, -6)])
def test_an_interval_alone_answers_no_requirement(low, high):
    """The sign-flip test has to reject the bound, as it has to reject 0 for a verdict."""
    requirement = parse_difference("b >= a - 5")
    answer, difference = judged(requirement, low, high, middle=-5.0)
    assert answer is Answer.OPEN
    assert untold(requirement.undecided(difference), low, high, -5) == []


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

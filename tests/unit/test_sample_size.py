"""Sample sizes keep what they promise: power in simulations, published figures, and the commands that print them."""

import json

import numpy as np
import pytest
from scipy import stats

from rl_eval.cli.exits import ExitCode
from rl_eval.errors import UsageError
from rl_eval.results.comparison import is_shown
from rl_eval.results.loading import load
from rl_eval.results.stats.paired import paired_difference
from rl_eval.results.stats.power import Pilot, compare_rates, episodes_for_rates, parse_rate
from tests.refused import refused
from tests.unit.cli_world import call, make_folder

# Success rates


def test_the_interval_of_a_difference_is_newcombes():
    """His example: 56 of 70 against 48 of 80, 5.24 % to 33.39 %."""
    found = compare_rates(parse_rate("48/80"), parse_rate("56/70"))
    assert found.difference == pytest.approx(0.2)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_test_is_fishers():
    """His tea: three of four cups told right on either side, p = 0.486."""
    found = compare_rates(parse_rate("3/4"), parse_rate("1/4"))
    assert found.p_value == pytest.approx(34 / 70)
    assert not found.is_shown
    assert compare_rates(parse_rate("18/20"), parse_rate("4 / 20")).is_shown


@pytest.mark.parametrize("text", ["17", "17/", "21/20", "0/0", "-1/20", "1.5/3", "17/20; x", "9999999999/1"])
def test_what_is_no_rate_is_refused(text):
    with refused(UsageError, "rate", value=text):
        parse_rate(text)


def power_of_fisher(a, b, episodes):
    """Probability that the test rejects at 5 %, summed over all outcomes."""
    counts = np.arange(episodes + 1)
    likely = np.outer(stats.binom.pmf(counts, episodes, a), stats.binom.pmf(counts, episodes, b))
    found = 0.0
    for total in range(2 * episodes + 1):
        mine = np.arange(max(0, total - episodes), min(episodes, total) + 1)
        weights = stats.hypergeom.pmf(mine, 2 * episodes, episodes, total)
        p_values = (weights * (weights <= weights[:, None] * (1 + 1e-7))).sum(axis=1)
        found += likely[mine, total - mine][p_values <= 0.05].sum()
    return found


@pytest.mark.parametrize(("a", "b"), [(0.85, 0.7), (0.5, 0.2), (0.1, 0.6)])
def test_so_many_episodes_tell_rates_apart(a, b):
    """The exact power of the test is 80 % and a little more, and a tenth fewer episodes have less."""
    needed = episodes_for_rates(a, b)
    assert episodes_for_rates(b, a) == needed
    assert 0.8 <= power_of_fisher(a, b, needed) <= 0.84
    assert power_of_fisher(a, b, int(0.9 * needed)) < 0.8


def test_equal_rates_are_told_apart_by_no_number():
    assert compare_rates(parse_rate("1/2"), parse_rate("2/4")).episodes_needed is None
    with refused(UsageError, "rates", value=0.5):
        episodes_for_rates(0.5, 0.5)


def test_rates_are_compared_without_a_pilot():
    outcome = call("plan", "--rates", "17/20", "14/20")
    assert outcome.exit_code == 0, outcome.output
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    shown = json.loads(call("plan", "--rates", "17/20", "14/20", "--json").stdout)
    assert (shown["p_value"], shown["episodes_needed"]) == (pytest.approx(0.4506, abs=1e-4), 134)

    for more in (["--rates", "17/20", "21/20"], ["toy.yaml", "--rates", "1/2", "1/3"]):
        assert call("plan", *more).exit_code == ExitCode.USAGE


# Returns


def normal_pilot(episodes, std=30.0):
    """Return a pilot with the quantiles of a normal distribution, and exactly this standard deviation."""
    quantiles = stats.norm.ppf((np.arange(episodes) + 0.5) / episodes)
    return Pilot(quantiles / quantiles.std(ddof=1) * std)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.parametrize("difference", [1.0, 20.0])
def test_pairs_and_differences_are_each_others_inverse(difference, correlation):
    pilot = normal_pilot(20)
    pairs = pilot.pairs(difference, correlation)
    assert pilot.difference(pairs, correlation) == pytest.approx(difference, rel=0.06)
    assert pilot.pairs(difference, 0.9) < pairs


@pytest.mark.parametrize("half_width", [0.05, 1.0, 7.0, 30.0, 1e4])
def test_episodes_of_a_half_width_allow_for_the_pilot(half_width):
    """For normal returns, with the upper bound of the standard deviation at 80 %."""
    pilot = normal_pilot(20)
    episodes, bound = pilot.episodes_of_half_width(half_width), (19 / stats.chi2.ppf(0.2, 19)) ** 0.5
    assert bound * pilot.half_width(episodes) <= half_width * (1 + 1e-9)
    assert episodes == 2 or bound * pilot.half_width(episodes - 1) > half_width


@pytest.mark.parametrize("small", [1e-6, 1e-200, 5e-324])
def test_more_episodes_than_a_plan_can_have_are_refused(small):
    for compute in (normal_pilot(20).pairs, normal_pilot(20).episodes_of_half_width):
        with refused(UsageError, key="difference"):
            compute(small)


def test_a_long_pilot_gives_the_textbook_figure():
    """``2 (1.96 + 0.84)^2`` pairs show one standard deviation of unrelated returns, and two more for the t test."""
    assert normal_pilot(10_000).pairs(30.0) == pytest.approx(17.6, abs=1.5)
    assert normal_pilot(5).pairs(30.0) > 20
    assert np.isnan(normal_pilot(20).difference(5))


DISTRIBUTIONS = {
    "normal": lambda draws, size: draws.normal(0, 1, size),
    "exponential": lambda draws, size: draws.exponential(1, size),
    "falls": lambda draws, size: np.where(draws.random(size) < 0.1, draws.uniform(-4, 0, size), 0.0) / 0.84,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_so_many_pairs_show_a_difference(name):
    """About 80 % of experiments, each with its own pilot, show the difference as ``rl-eval compare`` judges it."""
    draws, draw, shown, planned = np.random.default_rng(4), DISTRIBUTIONS[name], 0, 0
    for _ in range(400):
        returns = draw(draws, 20)
        if returns.std() > 0:
            pairs, planned = Pilot(returns).pairs(0.7), planned + 1
            shown += is_shown(paired_difference(draw(draws, pairs), draw(draws, pairs) + 0.7), 0.95)
    assert 0.74 <= shown / planned <= 0.9


def test_a_skewed_pilot_needs_more_pairs():
    """Rare returns far away make the spread uncertain, and few differing pairs have no verdict."""
    falls = np.zeros(20)
    falls[:2] = -3.0
    assert Pilot(falls).degrees < 10
    assert Pilot(falls).pairs(0.7 * falls.std(ddof=1)) > 1.2 * normal_pilot(20, 1.0).pairs(0.7)


def test_a_pilot_of_two_episodes_is_enough_for_a_plan():
    """The other episodes of the pilot may have failed."""
    assert Pilot(np.array([0.0, 1.0])).pairs(0.5) > normal_pilot(20, 1.0).pairs(0.7)


# rl-eval plan


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


VARIED = ["--set", "policy.policy=cli_toys:alternate"]


def test_a_plan_rests_on_the_first_episodes_of_the_run(folder):
    """Mean and spread of the pilot are those of the run's beginning, and all figures follow from them."""
    call("run", "toy.yaml", *VARIED, "-q", "-n", 12, "--output", "first")
    asked = ("--detect", 0.5, "--half-width", 0.3)
    outcome = call("plan", "toy.yaml", *VARIED, "--pilot", 12, *asked, "-n", 200, "--json")
    assert outcome.exit_code == 0, outcome.output
    numbers, shown = load("first").aggregates, json.loads(outcome.stdout)
    assert shown["pilot"] == {"episodes": 12, "mean": numbers.mean, "std": numbers.std}
    pilot = Pilot(load("first").counted_rows["episode_return"])
    assert shown["planned"]["episodes"] == 200
    assert shown["planned"]["paired_difference"] == pilot.difference(200)
    assert shown["detect"]["paired"] == pilot.pairs(0.5)
    per_episode = shown["planned"]["minutes"] / 200
    assert shown["detect"]["paired_minutes"] == pytest.approx(per_episode * shown["detect"]["paired"])
    precise = pilot.episodes_of_half_width(0.3)
    assert shown["mean"] == {"half_width": 0.3, "episodes": precise, "minutes": pytest.approx(per_episode * precise)}


def test_returns_that_do_not_vary_plan_nothing(folder):
    """Without a spread there is no difference to speak of, and --detect has no answer."""
    args = ["plan", "toy.yaml", "--set", "evaluation.max_episode_steps=3"]
    assert call(*args).exit_code == 0
    for asked in ("--detect", "--half-width"):
        assert call(*args, asked, 1).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_difference_is_above_0(folder, value):
    for asked in ("--detect", "--half-width"):
        assert call("plan", "toy.yaml", asked, value).exit_code == ExitCode.USAGE


def test_a_pilot_that_fails_plans_nothing(folder):
    outcome = call("plan", "toy.yaml", "--set", "environment.env_kwargs={fail: true}")
    assert outcome.exit_code == ExitCode.FAILED
    assert "RuntimeError: the simulator broke" in outcome.stderr

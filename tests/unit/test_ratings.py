"""The laws of ratings: planted strengths come back, the order of games is nothing, and what is not known is said."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl_eval.errors import UsageError
from rl_eval.results.stats.ratings import ELO, Rating, _resampled, rate, strengths
from tests.refused import refused

Points = npt.NDArray[np.float64]

PLANTED = np.array([0.9, 0.3, -0.2, -1.0])
NAMES = ("a", "b", "c", "d")


def played(rng: np.random.Generator, planted: Points, seeds: int, *, draws: float = 0.0, seat: float = 0.0) -> Points:
    """Play every pairing on its own seeds from both seats, the first of which is worth ``seat``."""
    size, units = len(planted), []
    for i, j in itertools.combinations(range(size), 2):
        unit = np.zeros((seeds, size, size))
        for first, second in ((i, j), (j, i)):
            chance = 1 / (1 + np.exp(planted[second] - planted[first] - seat))
            drawn, won = rng.random(seeds) < draws, rng.random(seeds) < chance
            result = np.where(drawn, 0.5, won)
            unit[:, first, second] += result
            unit[:, second, first] += 1 - result
        units.append(unit)
    return np.concatenate(units)


def by_minorization(points: Points) -> Points:
    """Return strengths by Hunter's MM algorithm (2004, equation 3), which shares nothing with Newton's method."""
    met = points + points.T > 0
    points = points + 0.5 * met
    games, skills = points + points.T, np.ones(len(points))
    for _ in range(2_000):
        skills = points.sum(axis=1) / (games / (skills[:, None] + skills[None, :])).sum(axis=1)
        skills /= np.exp(np.log(skills).mean())
    return np.asarray(np.log(skills))


def values(ratings: tuple[Rating, ...]) -> list[float]:
    return [rating.value for rating in ratings]


# ------------------------------------------------------------------------------ truth


@pytest.mark.parametrize("draws", [0.0, 0.4])
def test_planted_strengths_come_back(draws: float) -> None:
    """With many games the ratings are the strengths; draws pull towards each other, and so keep the order only."""
    ratings = rate(NAMES, played(np.random.default_rng(1), PLANTED, 5_000, draws=draws))
    if not draws:
        assert np.array(values(ratings)) / ELO == pytest.approx(PLANTED, abs=0.05)
    assert values(ratings) == sorted(values(ratings), reverse=True)
    assert sum(values(ratings)) == pytest.approx(0, abs=1e-9)


def test_the_intervals_hold_the_planted_strengths_as_often_as_they_say() -> None:
    """Of 95 % intervals over 100 worlds about 95 % hold the truth, seeds being what is resampled."""
    rng, planted, held = np.random.default_rng(2), np.array([0.8, 0.1, -0.9]), []
    for _ in range(100):
        for rating, truth in zip(rate(NAMES[:3], played(rng, planted, 60)), ELO * planted, strict=True):
            held.append(truth in rating.interval)
    assert 0.92 <= np.mean(held) <= 0.98


def test_pairing_cancels_what_a_seat_is_worth() -> None:
    """Equal policies have equal ratings although the first seat wins four games of five; unpaired they would not."""
    rng = np.random.default_rng(3)
    ratings = rate(("a", "b"), played(rng, np.zeros(2), 2_000, seat=math.log(4)))
    assert abs(ratings[0].value) < 15
    assert 0.0 in ratings[0].interval


def test_seeds_that_are_played_alike_from_both_seats_are_one_observation() -> None:
    """The interval is as wide as that of the seeds, not of the games."""
    rng = np.random.default_rng(4)
    single = np.zeros((400, 2, 2))
    single[:, 0, 1] = rng.random(400) < 0.6
    single[:, 1, 0] = 1 - single[:, 0, 1]
    once, twice = rate(("a", "b"), single)[0].interval, rate(("a", "b"), 2 * single)[0].interval
    assert twice.high - twice.low == pytest.approx(once.high - once.low, rel=0.1)


# ------------------------------------------------------------------------------ the estimate


@settings(max_examples=15, deadline=None)
@given(data=st.data(), size=st.integers(2, 5))
def test_another_algorithm_finds_the_same(data: st.DataObject, size: int) -> None:
    """Newton's method and minorization agree."""
    points = data.draw(hnp.arrays(np.float64, (size, size), elements=st.sampled_from([0.5, 1.0, 7.5, 30.0])))
    np.fill_diagonal(points, 0)
    assert strengths(points) == pytest.approx(by_minorization(points), abs=1e-6)


@given(
    points=hnp.arrays(np.float64, (6, 6), elements=st.sampled_from([0.0, 0.5, 1.0, 7.0, 1e3, 1e6])),
)
def test_the_points_are_those_expected(points: Points) -> None:
    """At the estimate every policy has as many points as the model expects of it, however one-sided the games."""
    points[np.arange(5), np.arange(1, 6)] += 1.0
    np.fill_diagonal(points, 0)
    found = strengths(points)
    smoothed = points + 0.5 * (points + points.T > 0)
    games = smoothed + smoothed.T
    expected = games / (1 + np.exp(found[None, :] - found[:, None]))
    assert expected.sum(axis=1) == pytest.approx(smoothed.sum(axis=1), rel=1e-6)


def test_two_policies_have_the_log_odds() -> None:
    """75 points of 100, and half a point more for either: 400 Elo points are ten to one."""
    units = np.zeros((100, 2, 2))
    units[:75, 0, 1] = units[75:, 1, 0] = 1
    assert rate(("a", "b"), units)[0].value == pytest.approx(400 * math.log10(75.5 / 25.5) / 2)


def test_resampling_keeps_the_number_of_games_of_a_matchup() -> None:
    """How often who met whom was decided beforehand, so it does not vary."""
    units = played(np.random.default_rng(5), PLANTED, 15, draws=0.2)[:70]
    fewest, resampled = _resampled(units)
    assert fewest == 10
    assert (resampled + np.swapaxes(resampled, 1, 2) == units.sum(axis=0) + units.sum(axis=0).T).all()
    assert len(np.unique(resampled[:, 0, 1])) > 3


# ------------------------------------------------------------------------------ order


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_games_does_not_matter(seed: int) -> None:
    """Not one bit of a rating or an interval moves when the seeds are played in another order."""
    rng = np.random.default_rng(seed)
    units = played(rng, PLANTED[:3], 12, draws=0.3)
    assert rate(NAMES[:3], units) == rate(NAMES[:3], units[rng.permutation(len(units))])


def test_the_order_of_policies_does_not_matter() -> None:
    """A policy has its rating wherever it stands."""
    units, order = played(np.random.default_rng(6), PLANTED, 50), np.array([2, 0, 3, 1])
    ours = dict(zip(NAMES, values(rate(NAMES, units)), strict=True))
    others = [NAMES[i] for i in order]
    assert values(rate(others, units[:, order][:, :, order])) == pytest.approx([ours[name] for name in others])


# ------------------------------------------------------------------------------ what is not known


def test_policies_that_no_games_connect_have_no_rating() -> None:
    """No number compares two islands, and the reason names them."""
    units = np.zeros((30, 4, 4))
    units[:, 0, 1] = units[:, 1, 0] = units[:, 2, 3] = units[:, 3, 2] = 1
    for rating in rate(NAMES, units):
        assert math.isnan(rating.value)
        assert rating.interval.note == (
            "'a' and 'b' never played 'c' and 'd', directly or through other policies. Their ratings cannot be compared"
        )


def test_who_won_everything_has_a_finite_rating_without_an_interval() -> None:
    """The order is known, the gap is not: resampling games that all went alike would feign certainty."""
    units = np.zeros((90, 3, 3))
    units[:30, 2, 0] = units[30:60, 2, 1] = 1
    units[60:80, 0, 1] = units[80:, 1, 0] = 1
    ratings = rate(NAMES[:3], units)
    assert ratings[2].value > ratings[0].value > ratings[1].value
    assert all(math.isfinite(rating.value) and not rating.interval.exists for rating in ratings)
    assert re.findall("'[abc]'", ratings[0].interval.note) == ["'c'", "'a'", "'b'"]


def test_a_policy_that_lost_everything_is_named_through_the_others() -> None:
    """The strongest group is the one that the rest has no point against."""
    units = np.zeros((60, 3, 3))
    units[:20, 0, 1], units[20:40, 1, 0] = 1, 1
    units[40:, 0, 2] = 1
    assert re.findall("'[abc]'", rate(NAMES[:3], units)[1].interval.note) == ["'a'", "'b'", "'c'"]


def test_one_seed_has_no_interval_and_few_are_said_to_be_few() -> None:
    """What cannot be resampled has no spread."""
    units = np.full((1, 2, 2), 0.5)
    alone = rate(("a", "b"), units)[0].interval
    assert alone.note
    assert not alone.exists
    units = played(np.random.default_rng(8), PLANTED[:2], 20)
    few = rate(("a", "b"), units[:19])[0].interval
    assert few.note
    assert few.exists
    assert not rate(("a", "b"), units)[0].interval.note
    assert not rate(("a", "b"), np.full((30, 2, 2), 1.0))[0].interval.exists, "equal seeds do not show how others vary"


def test_games_against_oneself_say_nothing() -> None:
    """The diagonal does not enter."""
    units = played(np.random.default_rng(7), PLANTED, 20)
    alone = np.zeros((10, 4, 4))
    alone[:, 1, 1] = 3.0
    assert values(rate(NAMES, np.concatenate([units, alone]))) == values(rate(NAMES, units))


def test_a_confidence_above_1_is_refused() -> None:
    with refused(UsageError, "confidence", value=95):
        rate(("a", "b"), np.ones((3, 2, 2)), 95)

"""Bradley-Terry ratings, which predict wins: one number per policy, independent of the order of the games.

The model gives each policy a strength, and ``P(i beats j) = 1 / (1 + exp(s_j - s_i))`` (Bradley & Terry 1952); a draw
is half a win for both. The strengths maximize the likelihood of the games. So the order of the games does not matter,
unlike with ratings that are updated game by game (Elo, TrueSkill). One drawn game is added for each pair of policies
that played each other. It keeps strengths finite if one side won all games, and hardly matters otherwise.

Intervals come from a percentile bootstrap, which resamples whole seeds within each matchup. All games with the same
seed, in all orders of the seats, are one observation. The frequency of draws need not fit a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.interval import FEW, Interval, check_confidence, no_interval

ELO: Final = 400 / math.log(10)
"""Number of Elo points of one unit of strength. A difference of 400 points means odds of ten to one."""

_ADDED: Final = 0.5
"""Points of each policy in the drawn game that is added for two policies."""

_RESAMPLES: Final = 2_000
_SEED: Final = 0x5EED
_MAX_STEPS: Final = 500
_LONGEST_STEP: Final = 1.0
"""Maximum length of a step of Newton's method, which may overshoot if one policy won nearly all games."""
_TOLERANCE: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Rating:
    """Rating of one policy, in Elo points; the mean over all policies is 0."""

    policy: str
    value: float
    """Rating in Elo points; NaN if games do not connect all policies, directly or through other policies."""
    interval: Interval


def rate(policies: Sequence[str], points: npt.NDArray[np.float64], confidence: float = 0.95) -> tuple[Rating, ...]:
    """Rate policies by their games against each other.

    Args:
        policies: Names of the policies; k is their number.
        points: Points of policy i against policy j in the games of each seed, shape (seeds, k, k): 1 for each win, 1/2
            for each draw. The diagonal is ignored. The order of the seeds does not matter.
        confidence: Nominal coverage of the intervals.

    Returns:
        One rating for each policy, in the order of the names.
    """
    check_confidence(confidence)
    points = points * ~np.eye(len(policies), dtype=bool)
    total = points.sum(axis=0)
    if apart := _unconnected(policies, total):
        return tuple(Rating(name, math.nan, no_interval(confidence, apart)) for name in policies)
    values = ELO * strengths(total)
    intervals = _intervals(policies, points, total, confidence)
    return tuple(Rating(*each) for each in zip(policies, values.tolist(), intervals, strict=True))


def strengths(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the strengths that make the games most likely, by Newton's method.

    The log-likelihood is concave (Hunter 2004). With the added games, its maximum is unique except for a constant. The
    constant is chosen so that the mean strength is 0.

    Args:
        points: Points of policy i against policy j over all games, shape (..., k, k). Games must connect every policy
            with every other policy, directly or through other policies.

    Returns:
        Strengths, shape (..., k).
    """
    met = (points + np.swapaxes(points, -1, -2)) > 0
    points = points + _ADDED * met
    games = points + np.swapaxes(points, -1, -2)
    found = np.zeros(points.shape[:-1])
    for _ in range(_MAX_STEPS):
        step = _newton_step(points, games, found)
        longest = np.abs(step).max(axis=-1, keepdims=True)
        found += step * np.minimum(1.0, _LONGEST_STEP / np.maximum(longest, _TOLERANCE))
        if longest.max() <= _TOLERANCE:
            break
    return np.asarray(found - found.mean(axis=-1, keepdims=True))


def _newton_step(
    points: npt.NDArray[np.float64], games: npt.NDArray[np.float64], at: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    expected = 1 / (1 + np.exp(at[..., None, :] - at[..., :, None]))
    gradient = (points - games * expected).sum(axis=-1)
    weights = games * expected * (1 - expected)
    degrees = weights.sum(axis=-1)
    curvature = degrees[..., None] * np.eye(at.shape[-1]) - weights
    # Strengths that all grow alike change nothing; this makes the matrix regular and leaves the step as it is.
    curvature += degrees.mean(axis=-1)[..., None, None] / at.shape[-1]
    return np.asarray(np.linalg.solve(curvature, gradient[..., None])[..., 0])


def _unconnected(policies: Sequence[str], total: npt.NDArray[np.float64]) -> str:
    """Return a note on the policies that no games connect with the other policies; empty if there are none."""
    connected = _closure(total + total.T > 0)[0]
    if connected.all():
        return ""
    ours, theirs = (_listed(policies, side) for side in (connected, ~connected))
    return f"{ours} never played {theirs}, directly or through other policies. Their ratings cannot be compared"


def _one_sided(policies: Sequence[str], total: npt.NDArray[np.float64]) -> str:
    """Return a note on policies that won every game against all others; empty if there are none.

    No finite strength fits the games of such policies (Ford 1957).
    """
    beats = _closure(total > 0)
    # No outsider has a point against these policies: they reach the most others.
    top = int(np.argmax(beats.sum(axis=1)))
    if beats[:, top].all():
        return ""
    above = beats[top] & beats[:, top]
    return (
        f"{_listed(policies, above)} won every game against {_listed(policies, ~above)}, so the gap between them has "
        "no upper limit; the ratings assume one more drawn game for each pairing"
    )


def _closure(edges: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the pairs that edges connect in any number of steps, as a mask. Each element is connected with itself."""
    reached = edges | np.eye(len(edges), dtype=bool)
    for _ in range(len(edges).bit_length()):
        reached = reached @ reached
    return reached


def _listed(policies: Sequence[str], chosen: npt.NDArray[np.bool_]) -> str:
    return " and ".join(repr(name) for name, is_chosen in zip(policies, chosen, strict=True) if is_chosen)


def _intervals(
    policies: Sequence[str], points: npt.NDArray[np.float64], total: npt.NDArray[np.float64], confidence: float
) -> list[Interval]:
    if why := _one_sided(policies, total):
        return [no_interval(confidence, why)] * len(policies)
    fewest, resampled = _resampled(points)
    if fewest < 2:
        return [no_interval(confidence, "a matchup was played on only one seed")] * len(policies)
    ends = np.quantile(ELO * strengths(resampled), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    if (ends[0] == ends[1]).all():
        return [no_interval(confidence, "all seeds have the same points, so they do not show how others vary")] * len(
            policies
        )
    note = f"fewer than {FEW} seeds for a matchup, so this interval is likely too narrow" if fewest < FEW else ""
    return [Interval(float(low), float(high), confidence, "percentile", note) for low, high in ends.T]


def _resampled(points: npt.NDArray[np.float64]) -> tuple[int, npt.NDArray[np.float64]]:
    """Draw seeds with replacement. For each matchup, draw as many seeds as the matchup has.

    Seeds with equal points are drawn together, so the result does not depend on their order.

    Returns:
        The smallest number of seeds of a matchup, and the points of policy i against policy j, shape (resamples, k, k).
    """
    rng, size = np.random.default_rng(_SEED), points.shape[-1]
    games = (points + np.swapaxes(points, -1, -2)).reshape(len(points), -1)
    _, matchups, seeds = np.unique(games, axis=0, return_inverse=True, return_counts=True)
    totals = np.zeros((_RESAMPLES, size * size))
    for matchup, count in enumerate(seeds):
        ways, times = np.unique(points.reshape(len(points), -1)[matchups == matchup], axis=0, return_counts=True)
        totals += rng.multinomial(count, times / count, _RESAMPLES) @ ways
    return int(seeds.min()), totals.reshape(-1, size, size)

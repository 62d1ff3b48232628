"""Probability of improvement: how often one policy has a higher score than another."""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np

from rl_eval.results.stats.interval import Interval, no_interval
from rl_eval.suites.bootstrap import Cells, Floats, check_units, intervals, level, method
from rl_eval.suites.scores import Scores
from rl_eval.suites.tables import Estimate, Table
from rl_eval.suites.units import Counts, Unit, Units, units_of

_POSSIBLE: Final = np.array([[0.0], [1.0]])
"""Lowest and highest possible probability."""


def probabilities_of_improvement(scores: Scores, unit: Unit, *, confidence: float = 0.95) -> Table:
    """Return the probability that the policy of a row has a higher score than the policy of a column.

    The probability is the Mann-Whitney statistic of each task, averaged over the tasks on which both policies have
    scores. Equal scores count half.

    Args:
        scores: Scores of all policies; their scale has no effect.
        unit: Unit of the intervals, ``"run"`` or ``"episode"``. The units of two policies are independent.
        confidence: Nominal coverage of the intervals.

    Raises:
        ConfigError: No policy has two units to resample.
        UsageError: The confidence is not between 0 and 1.
    """
    check_units(scores, unit, confidence)
    units, found = {policy: units_of(scores, policy, unit) for policy in scores.policies}, Cells()
    for row, column in itertools.combinations(sorted(scores.policies), 2):
        found[row, column] = estimate = _improvement(units[row], units[column], confidence)
        found[column, row] = _reversed(estimate)
    cells: Cells = {pair: found[pair] for pair in itertools.permutations(scores.policies, 2)}
    what = f"Probability that one {unit} of the row has a higher score than one of the column, averaged over tasks."
    return Table(f"{what} {level(cells, confidence)}", "policy", "other policy", cells, details=method(cells, unit))


def _improvement(ours: Units, theirs: Units, confidence: float) -> Estimate:
    shared = {*ours.tasks} & {*theirs.tasks}
    if not shared:
        return Estimate(math.nan, no_interval(confidence, "the two policies share no task"))
    ours, theirs = ours.on(shared), theirs.on(shared)
    wins = _wins(ours, theirs)

    def probability(one: Counts, other: Counts) -> Floats:
        return _probability(wins, one, other)[:, None]

    [[value]] = probability(ours.once, theirs.once).tolist()
    [interval] = intervals([ours, theirs], probability, confidence, _POSSIBLE)
    return Estimate(value, interval)


def _wins(ours: Units, theirs: Units) -> list[tuple[slice, slice, Floats]]:
    """Return, for each task, the slices of both policies' units, and the result of ``ours`` for each pair of units.

    The result is 1 for a higher score, 1/2 for an equal score, and 0 for a lower score.
    """
    return [
        (one, other, (1 + np.sign(ours.values[one][:, None] - theirs.values[other])) / 2)
        for one, other in zip(ours.slices, theirs.slices, strict=True)
    ]


def _probability(wins: list[tuple[slice, slice, Floats]], ours: Counts, theirs: Counts) -> Floats:
    """Return the fraction of pairs that ``ours`` wins, averaged over tasks, for each resample, shape (batch,)."""
    won = [((ours[:, one] @ beaten) * theirs[:, other]).sum(axis=1) / beaten.size for one, other, beaten in wins]
    return np.asarray(np.mean(won, axis=0))


def _reversed(estimate: Estimate) -> Estimate:
    value, interval = estimate
    ends = (1 - interval.high, 1 - interval.low)
    return Estimate(1 - value, Interval(*ends, interval.confidence, interval.method, interval.note))

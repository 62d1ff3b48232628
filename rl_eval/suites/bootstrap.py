"""Estimates for each policy, with percentile intervals of the stratified bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, UsageError, check_known
from rl_eval.results.stats.interval import ALL_EQUAL, FEW, FEW_EQUAL, Interval, check_confidence, no_interval
from rl_eval.suites.scores import Scores
from rl_eval.suites.tables import Estimate
from rl_eval.suites.units import RESAMPLES, WITHIN, Counts, Unit, Units, units_of

Floats: TypeAlias = npt.NDArray[np.float64]
Statistic: TypeAlias = Callable[[Counts, Units], Floats]
"""Function that takes the counts of resamples, and the units. It returns the statistics of each resample, shape
(batch, ...)."""
Cells: TypeAlias = dict[tuple[str, "str | float"], Estimate]

_ALONE: Final = {
    "run": (
        "aggregate.unit is run, but no policy has two training seeds on a task, so nothing is known about other seeds",
        "Add training seeds, or set unit: episode for numbers about only these trained policies.",
    ),
    "episode": ("aggregate.unit is episode, but no run has two episodes", "Run more episodes of each cell."),
}
"""Problem and fix of the error for scores without two units, by the unit of the bootstrap."""


def method(unit: Unit, confidence: float) -> str:
    """Return a sentence for a caption, which explains how the intervals are computed."""
    resampled = f"{RESAMPLES:,} resamples of the {unit}s within each {WITHIN[unit]}"
    return f"Intervals are {100 * confidence:g} % percentile intervals of {resampled}."


def check_units(scores: Scores, unit: Unit, confidence: float) -> None:
    """Raise an error if there is nothing to resample.

    Raises:
        ConfigError: No policy has two units in any stratum.
        UsageError: The confidence is not between 0 and 1.
    """
    check_confidence(confidence)
    check_known("unit", unit, WITHIN, UsageError)
    if all(max(units_of(scores, policy, unit).sizes) == 1 for policy in scores.policies):
        problem, fix = _ALONE[unit]
        raise ConfigError(problem, key="aggregate.unit", value=unit, fix=fix)


def estimates(
    scores: Scores, unit: Unit, statistic: Statistic, columns: Sequence[str | float], confidence: float
) -> Cells:
    """Return the estimates of several statistics, by policy and column.

    Args:
        scores: Scores of all policies.
        unit: Unit that is resampled.
        statistic: Function that returns one number per column for each resample, shape (batch, columns).
        columns: Names of the columns.
        confidence: Nominal coverage of the intervals.

    Raises:
        ConfigError: No policy has two units in any stratum.
        UsageError: The confidence is not between 0 and 1.
    """
    check_units(scores, unit, confidence)
    cells: Cells = {}
    for policy in scores.policies:
        units = units_of(scores, policy, unit)
        drawn = np.concatenate([statistic(counts, units) for counts in units.resamples(len(units.values))])
        values = statistic(units.once, units)[0].tolist()
        for column, value, resampled in zip(columns, values, drawn.T, strict=True):
            cells[policy, column] = Estimate(value, percentiles([units], resampled, confidence))
    return cells


def percentiles(several: Sequence[Units], resampled: Floats, confidence: float) -> Interval:
    """Return the percentile interval of a statistic.

    If the units are too few for an interval, return an interval without ends, with the reason as its note.

    Args:
        several: Units of the policies on which the statistic depends.
        resampled: Statistic of each resample, shape (resamples,).
        confidence: Nominal coverage.
    """
    notes = list(dict.fromkeys(note for units in several for note in units.notes))
    if all(max(units.sizes) == 1 for units in several):
        return no_interval(confidence, "; ".join(notes))
    if not any(units.vary for units in several):
        if sum(len(units.values) for units in several) < FEW:
            return no_interval(confidence, "; ".join([FEW_EQUAL, *notes]))
        notes = [ALL_EQUAL, *notes]
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return Interval(low, high, confidence, "percentile", "; ".join(notes))

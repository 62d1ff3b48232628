"""Intervals of statistics over tasks and training runs.

With fewer than ten training seeds, a stratified bootstrap is too narrow. So for three to nine seeds, the interval is
that of Student's t over training seeds: the seeds are left out one at a time (grouped jackknife, Efron & Stein 1981;
Tukey 1958). For a statistic that is a mean over tasks, this is the t interval of the seeds' means. It remains right if
one network plays all tasks, because all runs of a seed are left out together. From ten runs of each task on, the
interval is a percentile interval of the stratified bootstrap. Two seeds have no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, UsageError, check_known
from rl_eval.results.stats.interval import Bounds, Interval, Method, check_confidence, no_interval
from rl_eval.suites.scores import Scores
from rl_eval.suites.tables import Estimate
from rl_eval.suites.units import MANY, RESAMPLES, WITHIN, Counts, Unit, Units, units_of

Floats: TypeAlias = npt.NDArray[np.float64]
Statistic: TypeAlias = Callable[[Counts, Units], Floats]
"""Function that takes the counts of resamples, and the units. It returns the statistics of each resample, shape
(batch, ...)."""
Cells: TypeAlias = dict[tuple[str, "str | float"], Estimate]

FEWEST: Final = 3
"""Minimum number of runs of each task for an interval over training seeds."""

_UNBOUNDED: Final = 1e300
"""Score in place of a missing bound. Sums of several may be infinite, but are not NaN."""

_ROUNDING: Final = 1e-12
"""Relative width that counts as rounding."""

_EQUAL: Final = "the number is the same in all resamples: other seeds or episodes may differ"
"""Note of a number whose interval would have the width 0."""

_ALONE: Final = {
    "run": (
        "aggregate.unit is run, but no policy has two training seeds on a task, so nothing is known about other seeds",
        "Add training seeds, or set unit: episode for numbers about only these trained policies.",
    ),
    "episode": ("aggregate.unit is episode, but no run has two episodes", "Run more episodes of each cell."),
}
"""Problem and fix of the error for scores without two units, by the unit of the bootstrap."""


def level(cells: Cells, confidence: float) -> str:
    """Return the end of a caption: what stands beside the numbers of a table."""
    exist = any(one.interval.exists for one in cells.values())
    both = " In parentheses: both seeds, in order." if any(one.both for one in cells.values()) else ""
    return (f"{100 * confidence:g} % intervals." if exist else "No intervals.") + both


def method(cells: Cells, unit: Unit) -> str:
    """Return a sentence on how the intervals of a table are computed; empty if there are none."""
    kinds = {
        "student_t": f"Student t over training seeds (fewer than {MANY})",
        "percentile": f"percentiles of {RESAMPLES:,} resamples of the {unit}s within each {WITHIN[unit]}",
        "wilson": f"Wilson's score intervals over all {unit}s",
    }
    used = {cell.interval.method for cell in cells.values()}
    named = "; ".join(text for kind, text in kinds.items() if kind in used)
    return f"Intervals: {named}." if named else ""


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
    scores: Scores,
    unit: Unit,
    statistic: Statistic,
    columns: Sequence[str | float],
    confidence: float,
    least: int = FEWEST,
) -> Cells:
    """Return the estimates of several statistics, by policy and column.

    Args:
        scores: Scores of all policies.
        unit: Unit of the intervals.
        statistic: Function that returns one number per column for each resample, shape (batch, columns). Each number
            rises or falls with all scores.
        columns: Names of the columns.
        confidence: Nominal coverage of the intervals.
        least: Minimum number of runs of each task for an interval over training seeds.

    Raises:
        ConfigError: No policy has two units in any stratum.
        UsageError: The confidence is not between 0 and 1.
    """
    check_units(scores, unit, confidence)
    cells: Cells = {}
    for policy in scores.policies:
        units = units_of(scores, policy, unit)

        def of(counts: Counts, units: Units = units) -> Floats:
            return statistic(counts, units)

        values, both = of(units.once)[0].tolist(), both_seeds(statistic, units)
        limits = limits_of(statistic, units, scores.bounds)
        found = intervals([units], of, confidence, limits, least)
        for place, (column, value, interval) in enumerate(zip(columns, values, found, strict=True)):
            cells[policy, column] = Estimate(value, interval, tuple(each[place] for each in both))
    return cells


def limits_of(statistic: Statistic, units: Units, bounds: Mapping[str, Bounds]) -> Floats:
    """Return the lowest and the highest possible value of each statistic, shape (2, columns).

    Args:
        statistic: Statistics that rise or fall with all scores.
        units: Units of a policy.
        bounds: Lowest and highest possible score of each task, if known.
    """
    lowest = units.with_scores({task: low for task, (low, _) in bounds.items()}, -_UNBOUNDED)
    highest = units.with_scores({task: high for task, (_, high) in bounds.items()}, _UNBOUNDED)
    with np.errstate(over="ignore"):
        return np.sort(np.concatenate([statistic(each.once, each) for each in (lowest, highest)]), axis=0)


def both_seeds(statistic: Statistic, units: Units) -> list[list[float]]:
    """Return the statistics of each training seed if each task has the same two seeds; otherwise an empty list."""
    if units.unit != "run" or len(units.seeds) != 2 or {*units.sizes} != {2}:
        return []
    each = (units.with_seed(seed) for seed in units.seeds.tolist())
    return [statistic(one.once, one)[0].tolist() for one in each]


def intervals(
    several: Sequence[Units],
    statistic: Callable[..., Floats],
    confidence: float,
    limits: Floats,
    least: int = FEWEST,
) -> list[Interval]:
    """Return the interval of each statistic. If the units are too few, it has no ends, and its note has the reason.

    Args:
        several: Units of the policies on which the statistics depend. A policy with one run of each task is a constant.
        statistic: Function that takes the counts of each policy's units, and returns shape (batch, columns).
        confidence: Nominal coverage.
        limits: Lowest and highest possible value of each statistic, shape (2, columns). Intervals are cut to them.
        least: Minimum number of runs of each task.
    """
    notes = list(dict.fromkeys(note for units in several for note in units.notes))
    varied = [units for units in several if max(units.sizes) > 1]
    by_seed = [units for units in varied if units.unit == "run"]
    few = [units.policy for units in by_seed if min(units.sizes) < least]
    if few or not varied:
        lacking = [f"{name} has fewer than {least} runs of a task, too few for an interval" for name in few]
        return [no_interval(confidence, "; ".join([*lacking, *notes]))] * limits.shape[1]
    if any(min(units.sizes) < MANY for units in by_seed):
        kind: Method = "student_t"
        ends = _student_t(several, statistic, confidence)
    else:
        largest = max(len(units.values) for units in several)
        drawn = zip(*(units.resamples(largest) for units in several), strict=True)
        resampled = np.concatenate([statistic(*counts) for counts in drawn])
        kind, ends = "percentile", np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    equal = no_interval(confidence, "; ".join([_EQUAL, *notes]))
    return [
        equal
        if high - low <= _ROUNDING * abs(high)
        else Interval(max(low, lowest), min(high, highest), confidence, kind, "; ".join(notes))
        for (low, high), (lowest, highest) in zip(ends.T.tolist(), limits.T.tolist(), strict=True)
    ]


def _student_t(several: Sequence[Units], statistic: Callable[..., Floats], confidence: float) -> Floats:
    """Return the ends of t intervals, shape (2, columns), whose variances come from leaving out training seeds.

    The variances of several policies add up, with the degrees of freedom by Satterthwaite (1946).
    """
    from scipy.special import stdtrit

    once = [units.once for units in several]
    variance = squares = np.zeros(1)
    for place, units in enumerate(several):
        if (degrees := min(units.sizes) - 1) > 0:
            without = statistic(*[*once[:place], units.leave_outs(), *once[place + 1 :]])
            own = np.sort(without, axis=0).var(axis=0) * (len(without) - 1)  # Sorted, so that names have no effect.
            variance, squares = variance + own, squares + own**2 / degrees
    with np.errstate(invalid="ignore"):
        half = stdtrit(variance**2 / squares, (1 + confidence) / 2) * np.sqrt(variance)
    half = np.where(variance > 0, half, 0.0)
    return np.stack([statistic(*once)[0] + way * half for way in (-1, 1)])

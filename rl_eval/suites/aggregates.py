"""Aggregates over tasks and training runs, as papers report them, with stratified bootstrap intervals.

The definitions are those of Agarwal et al., "Deep RL at the edge of the statistical precipice" (2021), and of their
library rliable. If runs are missing, each task has the same weight in every aggregate. The intervals are those of
:mod:`rl_eval.suites.bootstrap`, except for most intervals of :func:`task_means`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from rl_eval.errors import ConfigError, UsageError, check_known, listed
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import FEW, Bounds, Interval, mean_interval, no_interval, success_interval
from rl_eval.suites.bootstrap import (
    Cells,
    Floats,
    Statistic,
    both_seeds,
    check_units,
    estimates,
    intervals,
    level,
    limits_of,
    method,
)
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Estimate, Table
from rl_eval.suites.units import Counts, Unit, Units, units_of

Metric = Literal["IQM", "mean", "median", "optimality gap"]
Distribution = Literal["score", "average score"]

_FEWEST_FOR_BAND: Final = 5
"""Minimum number of runs of each task for the band of a performance profile."""


def _interquartile_mean(counts: Counts, units: Units) -> Floats:
    total = len(units.values)
    cut = total // 4
    kept = np.clip((counts * units.weights)[:, units.order].cumsum(axis=1), cut, total - cut)
    return _mean(np.diff(kept, prepend=cut), units.values[units.order])


def _task_means(counts: Counts, units: Units) -> Floats:
    sizes = np.diff(units.starts, append=len(units.values))
    return np.asarray(np.add.reduceat(counts * units.values, units.starts, axis=1) / sizes)


def _optimality_gap(counts: Counts, units: Units) -> Floats:
    return 1 - _mean(counts * units.weights, np.minimum(units.values, 1))


def _mean(counts: Counts, values: Floats) -> Floats:
    return np.asarray((counts * values).sum(axis=1) / counts.sum(axis=1))


METRICS: Final[Mapping[Metric, tuple[str, Statistic]]] = {
    "IQM": ("mean of the middle half of the {unit}s, over all tasks", _interquartile_mean),
    "mean": ("mean of the task means", lambda counts, units: _task_means(counts, units).mean(axis=1)),
    "median": ("median of the task means", lambda counts, units: np.median(_task_means(counts, units), axis=1)),
    "optimality gap": ("mean amount by which the {unit}s stay below 1", _optimality_gap),
}
"""Aggregates by name, each with its definition and its function."""


_OUTSIDE: Final = (
    "an IQM or a median of both training seeds can be outside of the seeds' own: other scores are in the middle"
)
"""Note on numbers that look like a fault."""

_PROFILES: Final[Mapping[Distribution, str]] = {"score": "{unit}s", "average score": "task means"}
"""Performance profiles by name, each with a noun for the scores that it counts."""


def aggregate_scores(
    scores: Scores, unit: Unit, metrics: Sequence[Metric] = tuple(METRICS), *, confidence: float = 0.95
) -> Table:
    """Return aggregates of each policy over its tasks and runs.

    A policy with missing runs is aggregated over its other runs, and the table has a note.

    Args:
        scores: Normalized scores, or scores that have the same unit on all tasks. The optimality gap needs normalized
            scores.
        unit: ``"run"``: a score is the mean of a run, and the intervals are about other training seeds. ``"episode"``:
            episodes are resampled within each run.
        metrics: Names of the aggregates, which become the columns.
        confidence: Nominal coverage of the intervals.

    Raises:
        ConfigError: No policy has two units to resample, for example if there is one training seed and ``unit="run"``.
        UsageError: The confidence is not between 0 and 1.
    """

    def statistic(counts: Counts, units: Units) -> Floats:
        return np.stack([METRICS[metric][1](counts, units) for metric in metrics], axis=1)

    if not metrics:
        raise UsageError("there are no metrics", key="metrics", fix=f"Pass some of {', '.join(METRICS)}.")
    for metric in metrics:
        check_known("metric", metric, METRICS, UsageError)
    cells = estimates(scores, unit, statistic, metrics, confidence)
    caption = f"Aggregates of each policy over tasks. {level(cells, confidence)}"
    notes = (_OUTSIDE,) if any(map(_is_outside, cells.values())) else ()
    return Table(caption, "policy", "aggregate", cells, notes, details=_meanings(metrics, cells, unit))


def _is_outside(one: Estimate) -> bool:
    """Return whether the number of both training seeds together is outside of the numbers of each seed."""
    return bool(one.both) and not (min(one.both) <= one.value <= max(one.both) or np.isclose(one.value, one.both).any())


def _meanings(metrics: Sequence[Metric], cells: Cells, unit: Unit) -> str:
    meanings = "; ".join(f"{metric}: {METRICS[metric][0].format(unit=unit)}" for metric in metrics)
    return f"{meanings}. {method(cells, unit)}".rstrip()


def performance_profiles(
    scores: Scores,
    unit: Unit,
    thresholds: Sequence[float],
    *,
    distribution: Distribution = "score",
    confidence: float = 0.95,
) -> Table:
    """Return the fraction of scores above each threshold, for each policy.

    A fraction of runs or episodes has Wilson's score interval (Wilson 1927). If tasks differ, the variance of the
    fraction is at most that of a single binomial (Hoeffding 1956), so the interval is wider than needed. There is no
    interval over fewer than five runs of a task.

    Args:
        scores: Normalized scores.
        unit: Unit of the intervals; see :func:`aggregate_scores`.
        thresholds: Scores above which runs, episodes or task means are counted.
        distribution: ``"score"`` for the fraction of runs or episodes, ``"average score"`` for the fraction of task
            means.
        confidence: Nominal coverage of the interval at each single threshold.

    Raises:
        ConfigError: No policy has two units to resample.
        UsageError: The confidence is not between 0 and 1.
    """
    check_known("distribution", distribution, _PROFILES, UsageError)
    columns = sorted(thresholds)

    def means_above(counts: Counts, units: Units) -> Floats:
        means = _task_means(counts, units)
        return np.stack([(means > threshold).mean(axis=1) for threshold in columns], axis=1)

    if distribution == "score":
        cells = _fractions_above(scores, unit, columns, confidence)
    else:
        cells = estimates(scores, unit, means_above, columns, confidence, _FEWEST_FOR_BAND)
    what = f"Fraction of {_PROFILES[distribution].format(unit=unit)} with a score above the threshold."
    return Table(f"{what} {level(cells, confidence)}", "policy", "threshold", cells, details=method(cells, unit))


def _fractions_above(scores: Scores, unit: Unit, thresholds: Sequence[float], confidence: float) -> Cells:
    check_units(scores, unit, confidence)
    cells: Cells = {}
    for policy in scores.policies:
        units = units_of(scores, policy, unit)
        # Number of runs that would give the same precision if all had the same weight.
        size = len(units.values) ** 2 / float((units.weights**2).sum())
        for threshold in thresholds:
            fraction = float(units.weights[units.values > threshold].sum() / len(units.values))
            cells[policy, threshold] = Estimate(fraction, _band(units, fraction, size, confidence))
    return cells


def _band(units: Units, fraction: float, size: float, confidence: float) -> Interval:
    if units.unit == "run" and min(units.sizes) < _FEWEST_FOR_BAND:
        why = f"{units.policy} has fewer than {_FEWEST_FOR_BAND} runs of a task, too few for a band"
        return no_interval(confidence, "; ".join([why, *units.notes]))
    interval = success_interval(fraction * size, size, confidence)
    return replace(interval, note="; ".join(units.notes))


def learning_curves(
    scores_by_step: Mapping[int, Scores], unit: Unit, metric: Metric = "IQM", *, confidence: float = 0.95
) -> Table:
    """Return an aggregate of each policy at each step.

    A policy has a value only at steps at which it has runs on all its tasks, so that all its values are about the same
    tasks. The table has notes on steps at which a policy has runs on only some of its tasks, and on steps at which it
    lacks some of its training seeds.

    Args:
        scores_by_step: Scores of the checkpoints of each training step.
        unit: Unit that is resampled; see :func:`aggregate_scores`.
        metric: Name of the aggregate.
        confidence: Nominal coverage of the interval at each single step.

    Raises:
        ConfigError: No policy has, at any step, runs on all its tasks and two units to resample.
        UsageError: There is no step, the metric is unknown, or the confidence is not between 0 and 1.
    """
    if not scores_by_step:
        raise UsageError("there are no scores", key="scores_by_step", fix="Pass the scores of at least one step.")
    gaps = _Gaps(scores_by_step)
    tables: dict[int, Table] = {}
    refused: dict[int, ConfigError] = {}
    for step in sorted(scores_by_step):
        if (scores := gaps.without(step)) is not None:
            try:
                tables[step] = aggregate_scores(scores, unit, [metric], confidence=confidence)
            except ConfigError as error:
                refused[step] = error
    if not tables:
        problem, fix = "no policy has runs on all its tasks at any step", "Finish the suite."
        raise next(iter(refused.values()), ConfigError(problem, key="scores_by_step", fix=fix))
    cells: Cells = {(row, step): cell for step, table in tables.items() for (row, _), cell in table.cells.items()}
    alone = [f"steps without a policy that has two {unit}s on a task: {listed([*refused], 3)}"] if refused else []
    caption = f"{metric} of each policy at each step. {level(cells, confidence)}"
    notes = (*gaps.notes(), *alone)
    return Table(caption, "policy", "step", cells, notes, details=_meanings([metric], cells, unit))


class _Gaps:
    """Runs that a policy lacks at some steps, and has at others."""

    def __init__(self, scores_by_step: Mapping[int, Scores]) -> None:
        self._scores = scores_by_step
        self._runs: dict[str, set[Run]] = {}
        for scores in scores_by_step.values():
            for run in scores.runs:
                self._runs.setdefault(run.policy, set()).add(run)

    def without(self, step: int) -> Scores | None:
        """Return the scores of a step, for policies with runs on all their tasks; None if there is no such policy."""
        lacking = {policy for policy in self._runs if self._tasks(policy, step)}
        kept = {run: values for run, values in self._scores[step].runs.items() if run.policy not in lacking}
        return Scores(kept) if kept else None

    def notes(self) -> Iterator[str]:
        """Yield a note on each policy that lacks tasks or seeds at some steps."""
        for policy in self._runs:
            steps = [step for step in sorted(self._scores) if policy in self._scores[step].policies]
            tasks = {step: lacking for step in steps if (lacking := self._tasks(policy, step))}
            if tasks:
                names = sorted(set().union(*tasks.values()))
                yield f"{policy} has no value at steps without runs on {listed(names, 3)}: {listed([*tasks], 3)}"
            if seeds := [step for step in steps if step not in tasks and self._lacking(policy, step)]:
                yield f"{policy} lacks training seeds at steps {listed(seeds, 3)}"

    def _lacking(self, policy: str, step: int) -> set[Run]:
        return self._runs[policy] - self._scores[step].runs.keys()

    def _tasks(self, policy: str, step: int) -> set[str]:
        """Return the tasks on which a policy lacks all runs at a step."""
        there = {run.task for run in self._scores[step].of(policy)}
        return {run.task for run in self._runs[policy]} - there


def task_means(scores: Scores, unit: Unit, *, confidence: float = 0.95) -> Table:
    """Return the mean score of each policy on each task.

    The interval over the runs of a task, or over the episodes of a single run, is computed as in ``rl-eval run``, but
    two runs have no interval. The episodes of several runs are resampled within each run.

    Args:
        scores: Scores in any unit.
        unit: Unit of the interval; see :func:`aggregate_scores`.
        confidence: Nominal coverage of the intervals.

    Raises:
        ConfigError: No policy has two units to resample.
        UsageError: The confidence is not between 0 and 1.
    """
    check_units(scores, unit, confidence)
    found: Cells = {}
    for policy in scores.policies:
        units = units_of(scores, policy, unit)
        for task in units.tasks:
            found[task, policy] = _task_mean(units.on([task]), confidence, scores.bounds.get(task))
    cells: Cells = {pair: found[pair] for pair in itertools.product(scores.tasks, scores.policies) if pair in found}
    few = f", Student t for fewer than {FEW}" if unit == "run" else ""
    caption = f"Mean score on each task. {level(cells, confidence)}"
    return Table(caption, "task", "policy", cells, details=f"Intervals over {unit}s{few}.")


def _task_mean(units: Units, confidence: float, bounds: Bounds | None) -> Estimate:
    value, both = exact_mean(units.values), both_seeds(_task_means, units)
    if both or len(units.strata) > 1:
        limits = limits_of(_task_means, units, {} if bounds is None else {units.tasks[0]: bounds})
        [interval] = intervals([units], lambda counts: _task_means(counts, units), confidence, limits)
        return Estimate(value, interval, tuple(mean for [mean] in both))
    return Estimate(value, mean_interval(units.values, confidence, bounds=bounds))

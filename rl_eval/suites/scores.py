"""Scores of a suite: one array for each training run of each policy on each task.

Cells may have different numbers of runs and episodes. A run without scores is absent, and is listed as missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.results.stats.interval import Bounds, wrong_bounds


class Run(NamedTuple):
    """Name of a training run of a policy on a task."""

    policy: str
    task: str
    seed: int
    """Training seed, which only distinguishes the runs."""


@final
@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of all runs.

    Args:
        runs: Scores of the episodes of each run, shape (episodes,), dtype float64. A published run may have a single
            score, which is the mean of its episodes.
        bounds: Lowest and highest possible score of each task for which they are known. Intervals are cut to them.

    Raises:
        UsageError: There are no runs, a run has no score, or a score is NaN, infinite or outside of the bounds.
    """

    runs: Mapping[Run, npt.NDArray[np.float64]]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.runs:
            fix = "Run at least one cell of the suite."
            raise UsageError("no run has scores, so there is nothing to aggregate", key="runs", value=0, fix=fix)
        for run, scores in self.runs.items():
            _check(run, scores, self.bounds.get(run.task))

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the order of their first runs."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of their first runs."""
        return tuple(dict.fromkeys(run.task for run in self.runs))

    def of(self, policy: str) -> dict[Run, npt.NDArray[np.float64]]:
        """Return the runs of a policy, sorted by task and seed."""
        return {run: self.runs[run] for run in sorted(self.runs) if run.policy == policy}

    def missing(self, policy: str) -> tuple[Run, ...]:
        """Return the absent runs of a policy. Each of its training seeds should have a run on each of :attr:`tasks`."""
        seeds = sorted({run.seed for run in self.runs if run.policy == policy})
        expected = (Run(policy, task, seed) for task in self.tasks for seed in seeds)
        return tuple(run for run in expected if run not in self.runs)

    def on(self, tasks: Collection[str]) -> Scores:
        """Return the scores on some tasks.

        Raises:
            UsageError: No run has scores on these tasks.
        """
        return replace(self, runs={run: scores for run, scores in self.runs.items() if run.task in tasks})

    def with_baselines(self, published: Scores) -> Scores:
        """Return these scores together with published scores. Published scores on other tasks are left out.

        Raises:
            UsageError: A policy has scores of the suite and published scores, or no published task is in the suite.
        """
        if both := sorted({*self.policies} & {*published.policies}):
            fix = "Rename the policy in the suite or in the file."
            raise UsageError(
                f"policy {both[0]!r} is in the suite and in the published scores", key="policy", value=both[0], fix=fix
            )
        if not {*self.tasks} & {*published.tasks}:
            fix = f"Use the names of the suite: {', '.join(self.tasks)}."
            name = published.tasks[0]
            raise UsageError("no published score is on a task of the suite", key="task", value=name, fix=fix)
        return replace(self, runs={**self.runs, **published.on(self.tasks).runs})


def _check(run: Run, scores: npt.NDArray[np.float64], bounds: Bounds | None) -> None:
    where = f"policy {run.policy!r} on task {run.task!r}, seed {run.seed}"
    if not isinstance(scores, np.ndarray) or scores.ndim != 1:
        found = f"an array with {scores.ndim} dimensions" if isinstance(scores, np.ndarray) else type(scores).__name__
        raise UsageError(f"{where}: the scores are {found}", key="scores", value=found, fix="Pass a 1-D array.")
    if not scores.size:
        raise UsageError(f"{where}: the run has no score", key="scores", value=0, fix="Leave out the run.")
    if unusable := np.flatnonzero(~np.isfinite(scores)).tolist():
        value = float(scores[unusable[0]])
        fix = "Correct the score of the environment, or leave out the run."
        problem = f"{where}: the score of episode {unusable[0]} is {value}"
        raise UsageError(problem, key="scores", value=value, episode=unusable[0], fix=fix)
    if bounds is not None and (wrong := wrong_bounds(scores, bounds)):
        fix = "Correct the bounds (evaluation.return_bounds of the task) or the score."
        raise UsageError(f"{where}: {wrong}", key="bounds", value=bounds, fix=fix)

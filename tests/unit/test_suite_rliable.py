"""The numbers of suites are those of rliable.

``rliable.json`` has what rliable computed; ``python -m tests.unit.test_suite_rliable`` writes it anew. Where rliable is
installed, its numbers are computed again: rliable 1.2.0 needs arch 7.2 and pandas 2.3, so it has a folder of its own.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_eval.suites.aggregates import aggregate_scores, performance_profiles
from rl_eval.suites.exports import matrices
from rl_eval.suites.improvement import probabilities_of_improvement
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Table

STORED = Path(__file__).with_name("rliable.json")
THRESHOLDS = np.linspace(0, 1.5, 31)
RUNS = {"dqn": 10, "ppo": 10, "sac": 12}
"""From ten runs on, the intervals are those of rliable's bootstrap."""
TASKS = 6
RESAMPLES = 4_000

STEPS = {"aggregates": 0, "improvement": 0, "score": None, "average score": 1 / TASKS}
"""Smallest difference between two values of a number that is a fraction of tasks; None if the intervals are not those
of rliable."""

Matrices = dict[str, npt.NDArray[np.float64]]


def scores() -> Scores:
    """Return rounded scores, some of which are equal, of policies with different numbers of runs."""
    rng = np.random.default_rng(13)
    return Scores(
        {
            Run(policy, f"task {task}", seed): np.round(rng.normal(0.4 + 0.2 * place + 0.1 * task, 0.25, 1), 1)
            for place, policy in enumerate(RUNS)
            for task in range(TASKS)
            for seed in range(RUNS[policy])
        }
    )


def by_rliable(of: Matrices, reps: int) -> dict[str, Any]:
    """Return values and intervals as rliable computes them, by table, policies and number."""
    from rliable import library, metrics

    def four(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        names = ("iqm", "mean", "median", "optimality_gap")
        return np.array([getattr(metrics, f"aggregate_{name}")(matrix) for name in names])

    np.random.seed(0)  # noqa: NPY002  # rliable draws from here.
    pairs = {f"{one},{two}": (of[one], of[two]) for one, two in itertools.combinations(of, 2)}
    intervals = library.get_interval_estimates
    found = {
        "aggregates": intervals(of, four, reps=reps),
        "improvement": intervals(pairs, metrics.probability_of_improvement, reps=reps // 4),
        "score": library.create_performance_profile(of, THRESHOLDS, reps=reps // 4),
        "average score": library.create_performance_profile(
            of, THRESHOLDS, use_score_distribution=False, reps=reps // 4
        ),
    }
    return {
        name: {key: [np.atleast_1d(values[key]).tolist(), ends[key].tolist()] for key in values}
        for name, (values, ends) in found.items()
    }


def table_of(name: str, given: Scores) -> Table:
    if name == "aggregates":
        return aggregate_scores(given, "run")
    if name == "improvement":
        return probabilities_of_improvement(given, "run")
    return performance_profiles(given, "run", THRESHOLDS.tolist(), distribution=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_those_of_rliable(name: str) -> None:
    """Values to 1e-12; the ends of intervals within the error of 2,000 resamples, and within a step of the number."""
    table = table_of(name, scores())
    for key, (values, ends) in json.loads(STORED.read_text())[name].items():
        row, _, other = key.partition(",")
        cells = [table.cells[row, column] for column in ([other] if other else table.columns)]
        assert [value for value, _ in cells] == pytest.approx(values, abs=1e-12)
        if (step := STEPS[name]) is None:
            continue
        low, high = np.array(ends)
        allowed = 0.1 * (high - low) + step + 1e-9
        for place, (_, interval) in enumerate(cells):
            if interval.exists:
                found, expected = np.array([interval.low, interval.high]), np.array([low[place], high[place]])
                assert (np.abs(found - expected) <= allowed[place]).all()
            else:
                assert high[place] - low[place] <= step


def test_the_stored_numbers_are_what_rliable_computes() -> None:
    pytest.importorskip("rliable")
    again, stored = by_rliable(matrices(scores(), "run"), 40), json.loads(STORED.read_text())
    for name, found in again.items():
        for key, (values, _) in found.items():
            assert values == pytest.approx(stored[name][key][0], abs=1e-12)


def test_episodes_of_one_run_are_as_the_runs_of_rliable() -> None:
    """With the unit episode, the episodes of one training seed take the place of the runs."""
    by_run = aggregate_scores(scores(), "run").cells
    names = itertools.product(RUNS, (f"task {task}" for task in range(TASKS)))
    of = scores()
    pooled = Scores(
        {
            Run(policy, task, 0): np.concatenate([v for run, v in of.of(policy).items() if run.task == task])
            for policy, task in names
        }
    )
    for pair, (value, interval) in aggregate_scores(pooled, "episode").cells.items():
        assert value == pytest.approx(by_run[pair].value, abs=1e-12)
        expected = by_run[pair].interval
        assert [interval.low, interval.high] == pytest.approx(
            [expected.low, expected.high], abs=0.1 * (expected.high - expected.low)
        )


if __name__ == "__main__":
    STORED.write_text(json.dumps(by_rliable(matrices(scores(), "run"), RESAMPLES)) + "\n")

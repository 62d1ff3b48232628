"""Files of scores for other programs, and published scores from a CSV file.

The CSV file has one line for each run. rliable reads the matrices, and marl-eval reads the JSON file. Both need the
same runs on every task.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.bounded_read import LARGE, read_named
from rl_eval.errors import ConfigError, UsageError
from rl_eval.results.csv_text import read_csv, write_csv
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.units import Unit

_COLUMNS: Final = ["policy", "task", "seed", "score"]


def scores_csv(scores: Scores) -> str:
    """Return CSV with the columns ``policy``, ``task``, ``seed`` and ``score``: the mean score of each run."""
    return write_csv([_COLUMNS, *((*run, exact_mean(values)) for run, values in scores.runs.items())])


def read_scores(path: str | os.PathLike[str]) -> Scores:
    """Read scores, such as published scores, from a CSV file with the columns of :func:`scores_csv`.

    Args:
        path: The file, in UTF-8, with a heading line and exactly these columns, in this order. A run must not occur
            twice.

    Raises:
        ConfigError: The file cannot be read, has other columns, or a line is wrong; the message names the line.
        UsageError: The file has no scores, or a score is NaN or infinite.
    """
    try:
        lines = read_csv(read_named(Path(path), LARGE).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="baselines", value=str(path)) from error
    if not lines or lines[0] != _COLUMNS:
        found = ",".join(lines[0]) if lines else ""
        fix = f"Make the first line {','.join(_COLUMNS)}."
        raise ConfigError(f"{path}:1: the columns are {found!r}", key="baselines", value=found, fix=fix)
    runs: dict[Run, npt.NDArray[np.float64]] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line:  # A blank line, such as the last one.
            continue
        run, score = _parsed(f"{path}:{number}", line)
        if run in runs:
            problem = f"{path}:{number}: policy {run.policy!r} has two scores on task {run.task!r} with seed {run.seed}"
            raise ConfigError(problem, key="seed", value=run.seed, fix="Give each run one line.")
        runs[run] = np.array([score])
    return Scores(runs)


def _parsed(where: str, line: list[str]) -> tuple[Run, float]:
    try:
        policy, task, seed, score = line
        return Run(policy, task, int(seed)), float(score)
    except ValueError:
        text, fix = ",".join(line), "Write a policy, a task, a whole number and a score."
        raise ConfigError(f"{where}: {text!r} is not a score", key="baselines", value=text, fix=fix) from None


def matrices(scores: Scores, unit: Unit) -> dict[str, npt.NDArray[np.float64]]:
    """Return the scores of each policy as the matrices that rliable reads.

    Args:
        scores: Scores with the same runs on every task.
        unit: Meaning of a row: ``"run"`` (sorted by seed), or ``"episode"`` (sorted by seed and position).

    Returns:
        Array of each policy, shape (units, tasks), dtype float64, with the tasks in the order of ``scores.tasks``.

    Raises:
        UsageError: A run of a policy is missing. Or the unit is ``"episode"``, and the runs of a policy have different
            numbers of episodes.
    """
    return {policy: np.stack(list(_columns(scores, policy, unit)), axis=1) for policy in scores.policies}


def rliable_json(scores: Scores, unit: Unit) -> str:
    """Return :func:`matrices` as JSON: ``{"tasks": [...], "scores": {policy: rows}}``.

    Raises:
        UsageError: The scores do not fit into matrices; see :func:`matrices`.
    """
    rows = {policy: matrix.tolist() for policy, matrix in matrices(scores, unit).items()}
    return json.dumps({"tasks": scores.tasks, "scores": rows})


def marl_eval_json(scores_by_step: Mapping[int, Scores], environment: str, metrics: Mapping[str, str]) -> str:
    """Return scores in the form that marl-eval reads: by environment, task, policy, run and step.

    Args:
        scores_by_step: Scores of the checkpoints of each training step. The mean scores of the last step are the
            ``absolute_metrics``. The runs of a policy have numbers from 1 on, in the order of their training seeds.
        environment: Name for all tasks together, such as the name of the suite.
        metrics: Name of the score of each task, such as ``"return"``.

    Raises:
        UsageError: A run of a policy is missing at one of the policy's steps.
    """
    ever = Scores({run: values for scores in scores_by_step.values() for run, values in scores.runs.items()})
    tasks: dict[str, Any] = {}
    for policy in ever.policies:
        _check_complete(policy, ever.missing(policy))
        runs = ever.of(policy)
        seeds = sorted({run.seed for run in runs})
        steps = [step for step in sorted(scores_by_step) if policy in scores_by_step[step].policies]
        for number, step in enumerate(steps, 1):
            found = scores_by_step[step].runs
            _check_complete(policy, [run for run in runs if run not in found])
            for run in runs:
                of_run = tasks.setdefault(run.task, {}).setdefault(policy, {})
                content = of_run.setdefault(f"run_{seeds.index(run.seed) + 1}", {})
                metric, values = metrics[run.task], found[run]
                content[f"step_{number}"] = {"step_count": step, metric: values.tolist()}
                content["absolute_metrics"] = {metric: [exact_mean(values)]}
    return json.dumps({environment: tasks})


def _columns(scores: Scores, policy: str, unit: Unit) -> Iterator[npt.NDArray[np.float64]]:
    _check_complete(policy, scores.missing(policy))
    lengths = {len(values) for values in scores.of(policy).values()}
    if unit == "episode" and len(lengths) > 1:
        problem = f"the runs of policy {policy!r} have from {min(lengths)} to {max(lengths)} episodes"
        fix = "Use unit 'run', or run the same number of episodes in each cell."
        raise UsageError(problem, key="unit", value=unit, fix=fix)
    for task in scores.tasks:
        runs = _on(scores, policy, task)
        yield np.concatenate(runs) if unit == "episode" else np.array([exact_mean(values) for values in runs])


def _on(scores: Scores, policy: str, task: str) -> list[npt.NDArray[np.float64]]:
    return [values for run, values in scores.of(policy).items() if run.task == task]


def _check_complete(policy: str, missing: Sequence[Run]) -> None:
    if missing:
        run = missing[0]
        problem = f"policy {policy!r} has no scores on task {run.task!r} with seed {run.seed}"
        fix = "Finish the suite, or leave out the task or the policy."
        raise UsageError(problem, key="runs", value=len(missing), fix=fix)

"""Normalization of scores: a low reference score of the task becomes 0, and a high reference score becomes 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.suites.scores import Scores


class Scale(NamedTuple):
    """Reference scores of a task, in the unit of its scores."""

    low: float
    """Score that becomes 0, such as the score of a random policy."""
    high: float
    """Score that becomes 1, such as the score of a human. It is the smaller number if small scores are good."""

    @property
    def width(self) -> float:
        """Difference ``high - low``, which may be negative."""
        return self.high - self.low


def normalized(scores: Scores, scales: Mapping[str, Scale]) -> Scores:
    """Return normalized scores: ``(score - low) / (high - low)``, with the scale of the task.

    Args:
        scores: Scores in the unit of their tasks.
        scales: Scale of each task.

    Raises:
        ConfigError: A task has no scale, or ``low`` and ``high`` of a scale are equal or not finite.
    """
    for task in scores.tasks:
        _check(task, scales)

    def scaled(task: str, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return (np.asarray(values, np.float64) - scales[task].low) / scales[task].width

    bounds = {task: np.sort(scaled(task, ends)).tolist() for task, ends in scores.bounds.items() if task in scales}
    runs = {run: scaled(run.task, values) for run, values in scores.runs.items()}
    return Scores(runs, {task: (low, high) for task, (low, high) in bounds.items()})


def _check(task: str, scales: Mapping[str, Scale]) -> None:
    if task not in scales:
        fix = "Set low and high of every task, or of none."
        raise ConfigError(f"task {task!r} has no scale, but other tasks have", key="low", value=task, fix=fix)
    scale = scales[task]
    if scale.width == 0 or not math.isfinite(scale.width):
        problem = f"task {task!r}: low is {scale.low} and high is {scale.high}"
        raise ConfigError(problem, key="high", value=scale.high, fix="Set two different numbers.")

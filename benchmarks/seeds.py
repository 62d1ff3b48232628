"""How often 95 % intervals of a suite hold the true number: by aggregate, distribution and number of training seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.runner import Row
from rl_eval.suites.aggregates import METRICS, aggregate_scores, performance_profiles
from rl_eval.suites.improvement import probabilities_of_improvement
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Estimate

__all__ = ["measure"]

Floats = npt.NDArray[np.float64]

_SEEDS: Final = (3, 5, 9, 10)
_LEVELS: Final = np.array([0.1, 0.4, 0.6, 0.8, 1.2])
"""Level of each task."""
_THRESHOLD: Final = 0.7
_MANY: Final = 200_000
"""Training seeds from which the true numbers are computed."""
_WORLDS: Final[Mapping[str, Callable[[np.random.Generator, int], Floats]]] = {
    "normal": lambda rng, seeds: _LEVELS + rng.normal(0, 0.15, (seeds, 5)),
    "30 % of trainings fail": lambda rng, seeds: _LEVELS * np.where(rng.random((seeds, 5)) < 0.3, 0.05, 1.2),
    "lognormal": lambda rng, seeds: _LEVELS * rng.lognormal(-0.18, 0.6, (seeds, 5)),
    "normal, one network for all tasks": lambda rng, seeds: (
        _LEVELS + rng.normal(0, 0.12, (seeds, 1)) + rng.normal(0, 0.09, (seeds, 5))
    ),
}
"""Functions that draw the scores of training seeds on five tasks, shape (seeds, 5)."""


def measure(suites: int, progress: Callable[[str], None]) -> list[Row]:
    """One row per distribution and number of seeds: the share of suites whose interval holds the true number.

    Args:
        suites: Simulated suites of each kind, each of two equal policies.
        progress: Told what runs.
    """
    rows: list[Row] = []
    for name, draw in _WORLDS.items():
        truth = _truth(draw(np.random.default_rng(0), _MANY))
        for seeds in _SEEDS:
            progress(f"{name}, {seeds} seeds")
            rng = np.random.default_rng(seeds)
            held = [_held(_scores(draw(rng, seeds), draw(rng, seeds)), truth) for _ in range(suites)]
            shares = {number: _share([one[number] for one in held]) for number in held[0]}
            rows.append({"distribution": name, "seeds": seeds, "suites": suites, "shares": shares})
    return rows


def _share(held: Sequence[bool | None]) -> float | None:
    """Return the share of the intervals that hold the number; None if there are no intervals."""
    found = [one for one in held if one is not None]
    return float(np.mean(found)) if found else None


def _truth(scores: Floats) -> dict[str, float]:
    """Return the numbers of very many seeds."""
    ordered, means = np.sort(scores, axis=None), scores.mean(axis=0)
    cut = len(ordered) // 4
    return {
        "IQM": float(ordered[cut : len(ordered) - cut].mean()),
        "mean": float(means.mean()),
        "median": float(np.median(means)),
        "optimality gap": float(1 - np.minimum(scores, 1).mean()),
        "profile": float((scores > _THRESHOLD).mean()),
        "improvement": 0.5,
    }


def _scores(*policies: Floats) -> Scores:
    return Scores(
        {
            Run(policy, f"task {task}", seed): scores[seed, task : task + 1]
            for policy, scores in zip("ab", policies, strict=True)
            for seed in range(len(scores))
            for task in range(len(_LEVELS))
        }
    )


def _held(scores: Scores, truth: Mapping[str, float]) -> dict[str, bool | None]:
    """Whether each interval holds the true number; None if there is no interval."""
    aggregates = aggregate_scores(scores, "run").cells
    found: dict[str, Estimate] = {metric: aggregates["a", metric] for metric in METRICS}
    found["profile"] = performance_profiles(scores, "run", [_THRESHOLD]).cells["a", _THRESHOLD]
    found["improvement"] = probabilities_of_improvement(scores, "run").cells["a", "b"]
    return {name: truth[name] in one.interval if one.interval.exists else None for name, one in found.items()}

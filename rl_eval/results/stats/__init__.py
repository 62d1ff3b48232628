"""Statistics of a sample of episodes, with intervals; numpy and scipy only."""

from __future__ import annotations

from rl_eval.results.stats.aggregate import Aggregates, aggregate, exact_mean
from rl_eval.results.stats.interval import Interval, mean_interval, success_interval
from rl_eval.results.stats.paired import McNemar, PairedDifference, mcnemar, paired_difference

__all__ = [
    "Aggregates",
    "Interval",
    "McNemar",
    "PairedDifference",
    "aggregate",
    "exact_mean",
    "mcnemar",
    "mean_interval",
    "paired_difference",
    "success_interval",
]

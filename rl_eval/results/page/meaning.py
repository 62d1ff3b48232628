"""Meaning of the headline of a result, in one sentence that claims no more than the numbers show."""

from __future__ import annotations

import math

from rl_eval.results.report.table import decimals, number
from rl_eval.results.result import EvalResult

__all__ = ["meaning"]


def meaning(result: EvalResult) -> str:
    """Return what the mean return and its interval say about the policy."""
    if math.isnan(result.mean_return):
        return "No episode that counts has completed, so nothing is known about the policy's return."
    if not result.interval.exists:
        return (
            "This is the mean of the episodes that completed; how far the policy's true mean return may be from it is "
            f"not known: {result.interval.note}."
        )
    if result.interval.note == "all equal":
        return (
            f"All {result.aggregates.count:,} episodes returned the same, which shows no spread and proves none "
            "absent in other episodes."
        )
    subject = "it is about this policy with these weights, not about others trained alike"
    return f"{_coverage(result)}; {subject}{_doubt(result)}."


def _coverage(result: EvalResult) -> str:
    interval, places = result.interval, decimals(result.aggregates.sem, result.mean_return)
    ends = f"{number(interval.low, places)} to {number(interval.high, places)}"
    often = f"in {100 * interval.confidence:g} of 100 evaluations on other seeds"
    return (
        f"The policy's true mean return in this environment is plausibly {ends}: an interval made like this holds it "
        f"{often}"
    )


def _doubt(result: EvalResult) -> str:
    if result.determinism.passed is False:
        return ", and it depends on the layout of the run, since episodes are not a function of their seeds"
    if result.stopped_early:
        return ", and the evaluation was stopped before its plan was done"
    return ""

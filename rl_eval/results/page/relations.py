"""Relations of several results in one report: all means side by side, checkpoints of one run, paired comparisons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from rl_eval.errors import ComparisonError
from rl_eval.results.comparison import Comparison, compare, verdict_of
from rl_eval.results.page.breakdowns import Table
from rl_eval.results.page.plots import Plot, curve, forest, histogram, scatter
from rl_eval.results.page.sections import Run
from rl_eval.results.report.table import difference_places, interval_text, lookup, number, percent, side_places
from rl_eval.results.result import EvalResult

__all__ = ["Overview", "Pair", "overview", "pairs"]

_MOST_PAIRS: Final = 8
_MOST_SETTINGS: Final = 12
_PATH: Final = "path"
"""Argument of the factories of other libraries' policies that names the file of a model."""
_NUMBER: Final = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Overview:
    """All results of a report side by side."""

    table: Table
    forest: Plot | None
    curve: Plot | None
    """Learning curve, where the results are checkpoints of one run."""


@dataclass(frozen=True)
class Pair:
    """One result compared with the first one, or why it cannot be."""

    a: str
    b: str
    refusal: str = ""
    verdict: str = ""
    numbers: Table | None = None
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scatter: Plot | None = None
    differences: Plot | None = None


def overview(runs: Sequence[Run], results: Sequence[EvalResult]) -> Overview | None:
    """Return all results side by side; None for a single one."""
    if len(results) < 2:
        return None
    rows = [
        (run.name, run.headline.value, _ends(run, result), run.status, f"{result.aggregates.count:,}", _success(result))
        for run, result in zip(runs, results, strict=True)
    ]
    means, ends = [each.mean_return for each in results], [(r.interval.low, r.interval.high) for r in results]
    columns = ("result", "mean return", "interval", "status", "episodes", "success")
    shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    table = Table(columns[:shown], [row[:shown] for row in rows])
    of_one = len({run.title for run in runs}) == 1  # Returns in different environments have no axis in common.
    return Overview(table, forest([run.name for run in runs], means, ends) if of_one else None, _curve(results))


def pairs(runs: Sequence[Run], results: Sequence[EvalResult]) -> list[Pair]:
    """Compare each result with the first one, as ``rl-eval compare`` does."""
    first, *others = zip(runs, results, strict=True)
    compared = [_pair(first[0].name, run.name, first[1], result) for run, result in others[:_MOST_PAIRS]]
    left_out = f"a page compares {_MOST_PAIRS} results with the first one; rl-eval compare compares any two"
    return compared + [Pair(first[0].name, run.name, refusal=left_out) for run, _ in others[_MOST_PAIRS:]]


def _ends(run: Run, result: EvalResult) -> str:
    return run.headline.detail.removeprefix(f"{100 * result.interval.confidence:g} % interval ")


def _success(result: EvalResult) -> str:
    return "" if result.success_rate is None else percent(result.success_rate)


def _curve(results: Sequence[EvalResult]) -> Plot | None:
    """Draw the results that differ from the first one in their weights and in nothing else that was asked for."""
    alike = [result for result in results if _setting(result) == _setting(results[0])]
    for what, step_of in (("version of the weights", _version), ("number in the checkpoint's name", _checkpoint)):
        points = {step: result for result in alike if (step := step_of(result)) is not None}
        if len(points) == len(alike) > 1:
            steps = sorted(points)
            ends = [(points[step].interval.low, points[step].interval.high) for step in steps]
            return curve(steps, [points[step].mean_return for step in steps], ends, what)
    return None


def _setting(result: EvalResult) -> Any:
    """Return what was evaluated but for the weights: the plan, and what the result depends on."""
    identity = result.provenance.get("identity")
    if not isinstance(identity, Mapping):
        return result.plan_fingerprint, None
    kwargs = identity.get("policy_kwargs")
    others = {key: value for key, value in kwargs.items() if key != _PATH} if isinstance(kwargs, Mapping) else kwargs
    return result.plan_fingerprint, {**identity, "policy_kwargs": others}


def _version(result: EvalResult) -> int | None:
    return int(result.counted_rows["weights_version"][0]) if len(result.counted_rows) else None


def _checkpoint(result: EvalResult) -> int | None:
    """Return the last number in the name of the file of weights or of the model."""
    file = lookup(result.provenance, "config", "policy", "weights")
    file = file or lookup(result.provenance, "identity", "policy_kwargs", _PATH)
    numbers = _NUMBER.findall(PurePath(file).stem)
    return int(numbers[-1]) if numbers else None


def _pair(name_a: str, name_b: str, a: EvalResult, b: EvalResult) -> Pair:
    try:
        found = compare(a, b, a.confidence)
    except ComparisonError as error:
        return Pair(name_a, name_b, refusal=str(error))
    both = a.counted & b.counted
    returns = a.table.rows["episode_return"][both], b.table.rows["episode_return"][both]
    difference = found.difference
    marks = [("mean", "mean", difference.mean), ("equal", "no difference", 0.0)]
    return Pair(
        name_a,
        name_b,
        verdict=verdict_of(difference, found.confidence, name_a, name_b, found.different_settings),
        numbers=_numbers(found),
        settings=tuple(str(one) for one in found.different_settings[:_MOST_SETTINGS]),
        notes=tuple(found.notes),
        scatter=scatter(*returns, (f"return of a: {name_a}", f"return of b: {name_b}")),
        differences=histogram(returns[1] - returns[0], "difference of returns, b minus a", lines=marks),
    )


def _numbers(found: Comparison) -> Table:
    difference, success = found.difference, found.success
    places, places_of_sides = difference_places(difference), side_places(found)

    def write(value: float) -> str:
        return number(value, places)

    rows = [
        ("mean return of a, over the pairs", number(found.a.mean_return, places_of_sides)),
        ("mean return of b", number(found.b.mean_return, places_of_sides)),
        ("b minus a", write(difference.mean)),
        ("its interval", interval_text(difference.interval, write)),
        ("sign-flip test", f"p = {difference.p_value:.2g}"),
        ("pairs", f"{found.num_pairs:,} of {found.num_planned:,} planned"),
    ]
    if difference.correlation is not None:
        rows.append(("correlation of the sides", f"{difference.correlation:.2f}"))
    if difference.episodes_saved is not None:
        rows.append(("equal seeds", f"{difference.episodes_saved:,.2f} x as many episodes would be needed without"))
    if success is not None:
        counts = f"both {success.both:,}, only a {success.only_a:,}, only b {success.only_b:,}"
        rows.append(("success", f"{counts}, neither {success.neither:,}; McNemar p = {success.p_value:.2g}"))
    return Table(("", ""), rows)

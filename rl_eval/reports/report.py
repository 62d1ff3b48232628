"""Contents of a report: pages of results with plots, faults and provenance, and comparisons of results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ComparisonError
from rl_eval.errors.redaction import redact, redact_text
from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.records.episode import Fault
from rl_eval.records.plain import leaves
from rl_eval.reports.charts import Plot, Row, estimates, histogram, lines
from rl_eval.reports.page import Line, Page, Table
from rl_eval.reports.pages import Write, mean_returns, page_of, result_page, with_ends, writer
from rl_eval.results.comparison import compare
from rl_eval.results.metrics import success_counts
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import FEW, Bounds, Interval, mean_interval, success_interval
from rl_eval.results.text import (
    BIASED_BEST,
    counted,
    decimals,
    environment_name,
    interval_places,
    merged_notes,
    number,
    of_planned,
    percent,
    policy_name,
    rounded,
    several,
    weights_file,
    weights_name,
)

_MOST_AGENTS: Final = 50
_MOST_GROUPS: Final = 50
"""Maximum number of groups of an info scalar. A scalar with more values is a measurement, and not the number of a
task."""
_MOST_TABLES: Final = 8
_MOST_KINDS: Final = 20
_MOST_LEAVES: Final = 400
_LONGEST: Final = 300
"""Maximum number of shown characters of a value in the provenance."""
_MOST_PAIRS: Final = 8
_MOST_BASELINES: Final = 6
"""Maximum number of results of which each can be the baseline. All comparisons are computed in advance."""
_HIDDEN: Final = ("signature", "notes")
"""Parts of the provenance that are not useful for a reader, or are shown elsewhere."""
_MOST_INDICES: Final = 12
_PATH: Final = "path"
"""Name of the argument with the model file, in the policy factories of libraries."""
_NUMBER: Final = re.compile(r"[0-9]{1,15}")


# One result


def run_page(result: EvalResult) -> Page:
    """Return the page of a result for a browser, with plots and more tables, but without the episodes."""
    rows, page = result.counted_rows, result_page(result)
    mean = _row(f"Returns of {counted(len(rows), 'episode')}", result.aggregates.mean, result.interval)
    marks = [("median", "median", result.aggregates.median)]
    figure = histogram(rows["episode_return"], "return", mean, marks=marks)
    metrics = [(name, rounded(value)) for name, value in result.metrics.items()]
    head = [page.sections[0], [Line("meaning", "", _meaning(result))]]
    return replace(
        page,
        sections=[
            *(head[::-1] if result.is_zero_sum else head),  # A browser enlarges the number in the first line.
            *page.sections[1:],
            *([figure] if figure and not result.is_zero_sum else []),
            *_agent_tables(result),
            *group_tables(result),
            Table("Numbers", ("metric", "value"), metrics, folded=True),
            _fault_table(result),
            _provenance(result.provenance),
        ],
        notes=list(dict.fromkeys(page.notes)),
    )


def _meaning(result: EvalResult) -> str:
    """Return a sentence on the meaning of the mean return and its interval."""
    interval, places = result.interval, decimals(result.aggregates.sem, result.aggregates.mean)
    if not result.aggregates.count:
        return "No counted episode has completed, so the policy's return is unknown."
    if result.is_zero_sum:
        return "The returns of the agents sum to 0 in every episode, so each policy or agent has its own mean return."
    if not interval.exists:
        return "Mean of the completed episodes. The true mean return may differ by any amount."
    doubt = (
        " The evaluation was stopped early, when long episodes are less likely to be finished. So a return that grows "
        "with the length of an episode is too low."
        if result.stopped_early
        else ""
    )
    if result.determinism.passed is False:
        doubt = " The mean depends on the number of runners and environments: seeds do not determine the episodes."
    return (
        f"The policy's true mean return in this environment is plausibly {_ends(interval, places)}. An interval built "
        f"like this contains the true mean in {100 * interval.confidence:g} of 100 evaluations on other seeds. It "
        f"applies to this policy with these weights, not to other training runs.{doubt}"
    )


def _ends(interval: Interval, places: int = 2) -> str:
    return f"{number(interval.low, places)} to {number(interval.high, places)}" if interval.exists else interval.note


def _agent_tables(result: EvalResult) -> list[Table]:
    """Return a table of the agents; empty for a single agent."""
    rows, shown = result.counted_agents, []
    for agent in agents_in(result.table.info_keys)[:_MOST_AGENTS]:
        own = rows[rows["agent"] == agent]
        won, *others = (percent(exact_mean(own["outcome"] == code)) for code in (1, 0, -1))
        wins = result.win_interval(own)
        won = f"{won}\n{percent(wins.low)} to {percent(wins.high)}" if wins.exists else won
        shown.append((agent, *_numbers(own["return"], own["length"], _confidence(result)), won, *others))
    headings = ("agent", "episodes", "mean return", _level(result), "mean length", "won", "drawn", "lost")
    return [Table("By agent", headings, shown, _without_intervals(result))] if shown else []


def group_tables(result: EvalResult) -> list[Table]:
    """Return a table for each info scalar with a few different whole numbers, which divide the episodes into groups."""
    rows, keys, tables = result.counted_rows, result.table.info_keys, []
    of_agents = {*agent_columns(agents_in(keys))}
    for key, column in zip(keys, result.table.infos[result.counted].T, strict=True):
        groups = {value: rows[column == value] for value in ([] if key in of_agents else _groups(column))}
        shown = [
            (f"{value:.0f}", *_group_row(own, _confidence(result), result.return_bounds))
            for value, own in groups.items()
        ]
        few = any(len(own) < FEW for own in groups.values())
        narrow = f"With fewer than {FEW} episodes and skewed returns, an interval is too narrow." if few else ""
        caption = _without_intervals(result) or narrow
        headings = (key, "episodes", "mean return", _level(result), "mean length", "success", _level(result))
        tables += [Table(f"By {key}", headings, shown, caption)] if shown else []
    return tables[:_MOST_TABLES]


def _groups(column: npt.NDArray[np.float64]) -> list[float]:
    """Return the different values of a column, in ascending order; empty if they are not a few whole numbers."""
    values = np.unique(column[~np.isnan(column)])
    whole = (np.abs(values) < 1e6) & (values == np.rint(values))
    return values.tolist() if 2 <= len(values) <= _MOST_GROUPS and whole.all() else []


def _without_intervals(result: EvalResult) -> str:
    """Return the reason why parts of a result have no intervals; empty if they have intervals."""
    if result.num_missing:
        return "n/a instead of an interval: episodes failed, and it is unknown to which rows they belong."
    return "" if result.seed_groups is None else "n/a instead of an interval: several episodes share each seed."


def _confidence(result: EvalResult) -> float | None:
    """Return the coverage of the intervals of parts of a result; None if they have no intervals."""
    return None if _without_intervals(result) else result.confidence


def _group_row(own: npt.NDArray[np.void], confidence: float | None, bounds: Bounds | None) -> list[str]:
    successes, reporting = success_counts(own["success_at_end"])
    rate, ends = percent(successes / len(own)) if reporting else "n/a", "n/a"
    if reporting and confidence is not None:
        success = success_interval(successes, reporting, confidence, num_unknown=len(own) - reporting)
        ends = f"{percent(success.low)} to {percent(success.high)}"
    return [*_numbers(own["episode_return"], own["length"], confidence, bounds), rate, ends]


def _numbers(
    returns: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64],
    confidence: float | None,
    bounds: Bounds | None = None,
) -> list[str]:
    ends = "n/a" if confidence is None else _ends(mean_interval(returns, confidence, bounds=bounds))
    return [f"{len(returns):,}", number(exact_mean(returns)), ends, number(exact_mean(lengths), 1)]


def _level(result: EvalResult) -> str:
    return f"{100 * result.confidence:g} % interval"


def _fault_table(result: EvalResult) -> Table:
    """Return a table of the faults by type and phase, the most frequent first, each with one complete example."""
    if not result.faults:
        return Table("Faults", (), [], "No environment, policy or runner failed.")
    kinds: dict[str, list[Fault]] = {}
    for fault in result.faults:
        kinds.setdefault(f"{fault.error_type}: {fault.cause} failed in {fault.phase}", []).append(fault)
    rows = []
    for name, own in sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[0]))[:_MOST_KINDS]:
        indices = sorted({fault.index for fault in own})
        episodes = ", ".join(map(str, indices[:_MOST_INDICES])) + (", ..." if len(indices) > _MOST_INDICES else "")
        rows.append((name, f"{len(own):,}", episodes, f"{own[0]}, on {own[0].node}\n{own[0].traceback}"))
    caption = f"The {_MOST_KINDS} most frequent of {len(kinds):,} kinds of faults." if len(kinds) > len(rows) else ""
    return Table("Faults", ("fault", "count", "episodes", "one of them"), rows, caption)


def _provenance(provenance: Mapping[str, Any]) -> Table:
    """Return a table of the leaves of a provenance, without secrets. The items of a list share one row."""
    found: dict[str, list[str]] = {}
    for part in sorted(set(provenance) - set(_HIDDEN)):
        for key, value in leaves(redact(provenance[part], part), part):
            found.setdefault(key, []).append("none" if value is None else str(value))
    texts = ((key, redact_text(" ".join(values))) for key, values in list(found.items())[:_MOST_LEAVES])
    rows = [(key, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…") for key, text in texts]
    more = f"{len(found) - _MOST_LEAVES:,} more entries are in result.json" if len(found) > _MOST_LEAVES else ""
    return Table("Provenance", ("entry", "value"), rows, more, folded=True)


# Several results


def overview(results: Mapping[str, EvalResult]) -> Page:
    """Return the page of all results, by name: charts, and a table with all metrics as columns to choose."""
    curve, first = _curve(list(results.values())), next(iter(results.values()))
    level = _level(first)
    rates = {name: row for name, result in results.items() if (row := _success(name, result))}
    returns = {name: _mean_returns(result) for name, result in results.items()}
    plain = [name for name, result in results.items() if not result.is_zero_sum]
    figures = [estimates(f"Success rates with {level}s", "success rate in %", [*rates.values()], within=(0, 100))]
    if len({environment_name(result.provenance) for result in results.values()}) == 1:  # Others have no common scale.
        title = "Returns of the episodes, with mean and interval"
        rows = [row._replace(name=_joined(", ", name, row.name)) for name, own in returns.items() for row in own]
        if curve is None or any(_setting(one) != _setting(first) for one in results.values()):
            figures.append(estimates(f"Mean returns with {level}s", "mean return", rows))
        samples = [results[name].counted_rows["episode_return"] for name in plain]
        rows = [returns[name][0]._replace(name=name) for name in plain]
        figures.append(estimates(title, "return", rows, samples=samples))
    figures.append(curve)
    metrics = list(dict.fromkeys(key for result in results.values() for key in result.metrics))
    cells = []
    for name, result in results.items():
        success = [rates[name].text if name in rates else ""] if rates else []
        completed = of_planned(result.aggregates.count, len(result.plan))
        means = ", ".join(_joined(" ", row.name, row.text) for row in returns[name])
        shown = (means, completed, result.status, policy_name(result.provenance))
        weights = weights_file(result.provenance) or weights_name(result.provenance, result.metrics["weights_version"])
        chosen = (rounded(result.metrics.get(key, math.nan)) for key in metrics)
        cells.append((name, *success, *shown, weights, *chosen))
    headings = ["result", *(["success"] if rates else []), "mean return", "episodes", "status", "policy", "weights"]
    table = Table("All results", (*headings, *metrics), cells, f"In parentheses: {level}s.", num_hidden=len(metrics))
    intervals = {name: result.interval for name, result in results.items() if not result.interval.exists}
    notes = merged_notes((name, f"no interval of the mean return: {one.note}") for name, one in intervals.items())
    return Page("All results", "", "", [*filter(None, figures if rates else figures[1:]), table], notes)


def _success(name: str, result: EvalResult) -> Row | None:
    rate, interval = result.success_rate, result.success_interval
    return None if rate is None or interval is None else _row(name, rate, interval, percent, 100)


def _mean_returns(result: EvalResult) -> list[Row]:
    return [_row(*part) for part in mean_returns(result)]


def _joined(gap: str, *texts: str) -> str:
    return gap.join(filter(None, texts))


def _row(name: str, value: float, interval: Interval, write: Write = number, scale: float = 1.0) -> Row:
    low, high = interval.low, interval.high
    text = with_ends(value, low, high, write) if interval.exists else f"{write(value)} (no interval)"
    return Row(name, scale * value, scale * low, scale * high, text)


def _curve(results: Sequence[EvalResult]) -> Plot | None:
    """Return a plot of the results that differ from the first result only in their weights; None if there are none."""
    alike = [result for result in results if _setting(result) == _setting(results[0])]
    for what, step_of in (("version of the weights", _version), ("number in the checkpoint's name", _checkpoint)):
        points = {step: result for result in alike if (step := step_of(result)) is not None}
        if len(points) == len(alike) > 1:
            series: dict[str, list[tuple[float, Row]]] = {}
            for step in sorted(points):
                for row in _mean_returns(points[step]):
                    series.setdefault(row.name or "mean return", []).append((step, row))
            plot = lines("Mean return over checkpoints", what, "mean return", series)
            count = sum(not math.isnan(row.low) for points_ in series.values() for _, row in points_)
            note = several(count, "intervals", results[0].confidence)
            return plot and replace(plot, caption=_joined(" ", note and f"{note}.", BIASED_BEST, plot.caption))
    return None


def _setting(result: EvalResult) -> Any:
    """Return the plan and all settings that determine the result, except the weights."""
    identity = result.provenance.get("identity")
    if not isinstance(identity, Mapping):
        return result.plan_fingerprint, None
    kwargs = identity.get("policy_kwargs")
    others = {key: value for key, value in kwargs.items() if key != _PATH} if isinstance(kwargs, Mapping) else kwargs
    return result.plan_fingerprint, {**identity, "policy_kwargs": others}


def _version(result: EvalResult) -> int | None:
    return int(result.counted_rows["weights_version"][0]) if len(result.counted_rows) else None


def _checkpoint(result: EvalResult) -> int | None:
    """Return the last number in the name of the weights file or model file."""
    numbers = _NUMBER.findall(PurePath(weights_file(result.provenance)).stem)
    return int(numbers[-1]) if numbers else None


class Against(NamedTuple):
    """Comparisons of all other results with one of them."""

    baseline: str
    figure: Plot | None
    """Chart of the paired differences; None if no result can be compared with the baseline."""
    pages: Sequence[Page]
    notes: Sequence[str]


def comparisons(results: Mapping[str, EvalResult]) -> list[Against]:
    """Return the comparisons with each result, or with only the first one if there are many results."""
    return [_against(results, name) for name in list(results)[: len(results) if len(results) <= _MOST_BASELINES else 1]]


def _against(results: Mapping[str, EvalResult], base: str) -> Against:
    """Compare results with a baseline, like ``rl-eval compare``.

    If two results cannot be compared, their page has the reason.
    """
    pages, rows, first = [], [], results[base]
    others = [name for name in results if name != base]
    for name in others[:_MOST_PAIRS]:
        title, sides = f"{name} against {base}", f"a is {base}, b is {name}"
        try:
            found = compare(first, results[name], first.confidence)
        except ComparisonError as error:
            pages.append(Page(title, sides, "", [], notes=[f"Not compared: {error}"]))
            continue
        mean, interval, compared = found.difference.mean, found.difference.interval, page_of(found)
        rows.append(_row(name, mean, interval, writer(interval_places(interval, mean))))
        sections = [*compared.sections, *filter(None, [_differences(first, results[name], rows[-1])])]
        verdict = found.verdict_on(base, name)
        pages.append(replace(compared, title=title, subtitle=sides, state="", sections=sections, verdict=verdict))
    title, what = f"Paired differences from {base}, with {_level(first)}s", f"difference of the mean return from {base}"
    few = f"For another baseline, name it first, or select at most {_MOST_BASELINES} results."
    beyond = f"Only {_MOST_PAIRS} results are compared with {base}. Use rl-eval compare for others."
    notes = [few] * (len(results) > _MOST_BASELINES) + [beyond] * (len(others) > _MOST_PAIRS)
    notes += filter(None, [several(len(rows), "comparisons", first.confidence)])
    return Against(base, estimates(title, what, rows, within=(0,)) if rows else None, pages, notes)


def _differences(a: EvalResult, b: EvalResult, mean: Row) -> Plot | None:
    """Return the histogram of the paired differences."""
    first, second = (side.table.rows["episode_return"][a.counted & b.counted] for side in (a, b))
    title = f"Difference of the returns in {counted(len(first), 'pair')}, with {_level(a)} of the mean"
    marks = [("equal", "no difference", 0.0)]
    return histogram(second - first, "difference of returns, b minus a", mean._replace(name=title), marks=marks)

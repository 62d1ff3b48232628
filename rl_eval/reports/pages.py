"""Pages of a result, a comparison and cross-play: the selection, the order and the precision of their numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final

from rl_eval.adapters import RANDOM
from rl_eval.records.guarantee import MEANINGS
from rl_eval.reports.page import WIDTH, Line, Page, Table
from rl_eval.results.comparison import Comparison, ConditionDifference
from rl_eval.results.conditions import ConditionNumbers
from rl_eval.results.crossplay import CrossPlay, Estimate, Outcomes
from rl_eval.results.metrics import policy_names, scope_notes, value_notes
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.paired import RESAMPLES
from rl_eval.results.text import (
    counted,
    decimals,
    environment_name,
    first_clause,
    interval_places,
    interval_text,
    lookup,
    number,
    percent,
    policy_name,
    several,
    weights_name,
)
from rl_eval.scheduling.conditions import ID

if TYPE_CHECKING:
    from rl_eval.results.stats.interval import Interval


Write = Callable[[float], str]
Part = ConditionNumbers | ConditionDifference

_GAP: Final = "   "
_SETTINGS: Final = 8
"""Maximum number of different settings that a comparison shows."""
_NAMED: Final = ("policy", "policy_kwargs.path")
"""Settings that the name of a policy already shows."""
_MEANS: Final = ("module_episode_returns", "policy_team_return", "policy_per_capita_return")
_CONDITIONS: Final = 50
"""Maximum number of conditions in a table."""
_LEAST_SHOWN: Final = 0.0005
"""Smallest shown fraction; smaller fractions would be rounded to 0.0 %."""
_MOST_PARTS: Final = 8
"""Maximum number of policies or agents at the head of the page of a zero-sum game."""
_MOST_HEADLINES, _MOST_NOTES, _LONGEST = 3, 2, 130
"""Maximum numbers of means and of notes on the short page of a result, and of characters of a note."""
_WITH_INTERVALS: Final = 4
"""Maximum number of policies for matrices with intervals, so that they fit into 80 columns."""


@singledispatch
def page_of(shown: Any) -> Page:
    """Return the page of a result, a comparison or cross-play."""
    raise TypeError(f"no page for type {type(shown).__name__}")


# A result


@page_of.register
def _(result: EvalResult) -> Page:
    """Return the short page of a result: success, mean, lengths, episodes, fingerprint, and what is unusual."""
    page = result_page(result)
    name = ", ".join(filter(None, (page.title, page.subtitle)))
    fits = len(name) + len(page.state) < WIDTH
    counted = result.aggregates.count > 0
    lines = [*means(result), *_length_lines(result)[:1]] if counted or not page.failure else []
    lines += _episode_lines(result)[:1]
    if result.faults and not page.failure:
        first, kinds = result.faults[0], _episode_lines(result)[1]
        lines.append(kinds._replace(rest=_cut(f"{kinds.rest}, the first in episode {first.index}: {first.message}")))
    lines += [*_fingerprint_lines(result), *_brief_notes(result)] if counted or not page.failure else []
    title, subtitle = (name, "") if fits else (page.title, page.subtitle)
    return replace(page, title=title, subtitle=subtitle, sections=[lines], notes=[])


def means(result: EvalResult) -> list[Line]:
    """Return the most important numbers of a result, the success rate first, with brief intervals."""
    return [*_success_lines(result, brief=True), *headlines(result, brief=True)[:_MOST_HEADLINES]]


def _fingerprint_lines(result: EvalResult) -> list[Line]:
    """Return lines with the fingerprint and the determinism check, and a line with a guarantee that is not exact."""
    if not result.aggregates.count:
        return []
    found, guarantee = result.determinism, result.guarantee
    checked = "determinism not checked" if found.passed is None else str(found).partition(" (")[0]
    if found.passed is False:
        checked = "; ".join(filter(None, (str(found), found.advice)))
    weaker = f"{guarantee}: {first_clause(MEANINGS[guarantee])}"
    lines = [Line("fingerprint", "", f"{result.fingerprint[:16]}; {checked}")]
    return lines if guarantee == "exact" else [*lines, Line("guarantee", "", weaker)]


def _brief_notes(result: EvalResult) -> list[Line]:
    """Return the notes that no other line of the short page contains, shortened."""
    reason = "" if result.status == "failed" or result.table.filled.all() else result.reason
    notes = [*filter(None, [reason]), *scope_notes(result), *value_notes(result)]
    told = [_cut(first_clause(note)) for note in notes]
    if len(told) > _MOST_NOTES:
        told[_MOST_NOTES - 1 :] = [f"{told[_MOST_NOTES - 1]} ({len(told) - _MOST_NOTES} more: -v)"]
    return [Line("note", "", note) for note in told]


def _cut(text: str) -> str:
    return textwrap.shorten(text, _LONGEST, placeholder=" ...")


def result_page(result: EvalResult) -> Page:
    """Return the page of a result with all its numbers."""
    sections: list[list[Line] | Table] = [
        [*_success_lines(result), *_return_lines(result), *_length_lines(result)],
        *_policy_tables(result),
        *_condition_tables(result),
        [*_episode_lines(result), *_time_lines(result)],
        _identity_lines(result),
    ]
    return Page(
        title=environment_name(result.provenance) or "evaluation",
        subtitle=", ".join(filter(None, [policy_name(result.provenance), _sampled(result.provenance)])),
        state=result.status,
        sections=sections,
        notes=([result.reason] if result.reason and result.status != "failed" else []) + result.notes,
        failure=result.reason if result.status == "failed" else "",
    )


def _sampled(provenance: Mapping[str, Any]) -> str:
    """Return ``sampled actions`` if the actions of all policies were sampled, otherwise an empty text."""
    identity = provenance.get("identity")
    several = identity.get("policies") if isinstance(identity, Mapping) else None
    asked = list(several.values()) if isinstance(several, Mapping) and several else [identity]
    sampled = all(lookup(one, "deterministic") == "False" for one in asked)
    return "sampled actions" if sampled and lookup(identity, "policy") != RANDOM else ""


def headlines(result: EvalResult, *, brief: bool = False) -> list[Line]:
    """Return a line for each of :func:`mean_returns`, ``brief`` without the method of the interval."""
    lines = []
    for name, mean, interval, write in mean_returns(result):
        ends = interval_text(interval, write, brief=brief)
        if brief and result.num_missing and not interval.exists and not name:
            ends = "no interval without return_bounds"
            ends = f"mean over the {counted(result.aggregates.count, 'completed episode')}; {ends}"
        lines.append(Line(f"return of {name}" if name else "mean return", write(mean), ends))
    return lines


def mean_returns(result: EvalResult) -> list[tuple[str, float, Interval, Write]]:
    """Return the mean return with an empty name, its interval, and the function that formats them.

    In a zero-sum game, return the name and the mean return of each policy, or of each agent if there is only one
    policy, the highest first.
    """
    numbers = result.aggregates
    if not result.is_zero_sum:
        return [("", numbers.mean, result.interval, writer(decimals(numbers.sem, numbers.mean)))]
    by_policy = result.returns_by("policy")
    parts = by_policy if len(by_policy) > 1 else result.returns_by("agent")
    best = sorted(parts.items(), key=lambda part: -part[1][0])[:_MOST_PARTS]
    return [(name, mean, interval, writer(interval_places(interval, mean))) for name, (mean, interval) in best]


def _return_lines(result: EvalResult) -> list[Line]:
    numbers, lines = result.aggregates, headlines(result)
    write = writer(decimals(numbers.sem, numbers.mean))
    if result.num_missing and (bounds := result.mean_return_bounds):
        worst, best = map(write, bounds)
        text = f"mean if all failed episodes had the lowest possible return: {worst}; if they had the highest: {best}"
        lines.append(Line("", "", text))
    if numbers.minimum == numbers.maximum or not numbers.count or result.is_zero_sum:
        return lines
    middle = {"median": write(numbers.median), "IQM": write(numbers.iqm), "std": write(numbers.std)}
    ends = {"min": write(numbers.minimum), "max": write(numbers.maximum), "worst 10 %": write(numbers.cvar10)}
    return [*lines, Line("", "", _named(middle)), Line("", "", _named(ends))]


def _length_lines(result: EvalResult) -> list[Line]:
    shown = result.metrics
    if not result.aggregates.count:
        return []
    terminated, truncated = shown["terminated_rate"], shown["truncated_rate"]
    ended = {"terminated": percent(terminated), "truncated": percent(truncated)}
    if (both := terminated + truncated - 1) >= _LEAST_SHOWN:
        ended["both"] = percent(both)
    ends = {"min": number(shown["episode_len_min"], 0), "max": number(shown["episode_len_max"], 0)}
    return [
        Line("mean length", number(shown["episode_len_mean"], 1), f"steps{_GAP}{_named(ended)}"),
        Line("", "", _named(ends)),
    ]


def _success_lines(result: EvalResult, *, brief: bool = False) -> list[Line]:
    interval = result.success_interval
    if interval is None or result.success_rate is None:
        return []
    lines = [Line("success", percent(result.success_rate), interval_text(interval, brief=brief))]
    once = result.metrics["success_once_rate"]
    return lines if brief or once == result.success_rate else [*lines, Line("", "", f"at any step {percent(once)}")]


def _policy_tables(result: EvalResult) -> list[Table]:
    """Return a table of the policies, with numbers per agent and episode; empty for a single agent."""
    if not len(result.agents):
        return []
    names, shown = policy_names(result.provenance), result.metrics
    means = [shown[f"module_episode_returns_mean/{name}"] for name in names]
    places = max(decimals(abs(mean) / 10, mean) for mean in means)
    rows = [
        (
            name,
            *(number(shown[f"{mean}_mean/{name}"], places) for mean in _MEANS),
            f"{percent(shown[f'win_rate/{name}'])}\n{_win_ends(result, name)}",
            *(percent(shown[f"{word}_rate/{name}"]) for word in ("draw", "loss")),
        )
        for name in names
    ]
    return [Table("by policy", ("policy", "return", "team", "per capita", "won", "drawn", "lost"), rows)]


def _win_ends(result: EvalResult, policy: str) -> str:
    low, high = (result.metrics[f"win_rate_ci_{end}/{policy}"] for end in ("low", "high"))
    return "" if math.isnan(low) else f"{percent(low)} to {percent(high)}"


def _condition_tables(result: EvalResult) -> list[Table]:
    """Return a table for each axis and a table of the conditions; empty without conditions."""
    tables: list[Table] = []
    headings: tuple[str, ...] = ("episodes", "mean return", "interval")
    if result.success_interval is not None:
        headings = (*headings, "success", "interval")
    for column, parts in result.by_condition.items():
        write = _means(parts)
        rows = [
            (
                one.mean_return,
                (str(one.value), number(one.num_episodes, 0), write(one.mean_return),
                 interval_ends(one.interval, write), *_success_cells(one))[: 1 + len(headings)],
            )
            for one in parts
        ]  # fmt: skip
        table = _lowest(column, (column, *headings), rows)
        note = several(sum(one.interval.exists for one in parts), "intervals of the mean", result.confidence)
        tables.append(replace(table, caption=" ".join(filter(None, (table.caption, note)))))
    return tables


def _success_cells(part: ConditionNumbers) -> tuple[str, str]:
    if part.success_rate is None or part.success_interval is None:
        return "n/a", "n/a"
    return percent(part.success_rate), interval_ends(part.success_interval, percent)


def _lowest(column: str, headings: Sequence[str], rows: Sequence[tuple[float, Sequence[str]]]) -> Table:
    """Return a table of all rows. If there are many rows, return a table of the rows with the lowest numbers."""
    title, caption = f"by {'condition' if column == ID else column}", ""
    if len(rows) > _CONDITIONS:
        caption = f"The {_CONDITIONS} lowest of {len(rows):,}; to_dict() has all (--json)."
        rows = sorted(rows, key=lambda row: math.inf if math.isnan(row[0]) else row[0])[:_CONDITIONS]
    return Table(title, headings, [row for _, row in rows], caption)


def _episode_lines(result: EvalResult) -> list[Line]:
    faults = counted(len(result.faults), "fault")
    trouble = f"{result.num_failed:,} failed{_GAP}{result.num_retried:,} retried{_GAP}{faults}"
    lines = [Line("episodes", f"{result.aggregates.count:,}", f"of {len(result.plan):,}{_GAP}{trouble}")]
    if result.fault_counts:
        kinds = [f"{count:,} {kind}" for kind, count in list(result.fault_counts.items())[:4]]
        more = len(result.fault_counts) - len(kinds)
        lines.append(Line("faults", "", _GAP.join(kinds) + (f"{_GAP}and {counted(more, 'more kind')}" if more else "")))
    return lines


def _time_lines(result: EvalResult) -> list[Line]:
    timing, shares = result.timing, result.timing.shares
    where = f"on {counted(timing.num_runners, 'runner')}"
    steps = f"{counted(timing.env_steps, 'step')} in {number(timing.wall_seconds)} s "
    steps += where if timing.num_runners else "in this process"
    lines = [Line("speed", number(result.metrics["env_steps_per_second"], 0), f"env steps/s{_GAP}{steps}")]
    spent = _GAP.join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if name != "other")
    lines += [Line("time", "", spent)] if shares else []
    return [*lines, Line("server", "", timing.waiting)] if timing.waiting else lines


def _identity_lines(result: EvalResult) -> list[Line]:
    weights = weights_name(result.provenance, result.metrics["weights_version"])
    named = {
        "fingerprint": result.fingerprint[:16],
        "weights": weights,
        "guarantee": f"{result.guarantee}: {MEANINGS[result.guarantee]}",
        # A note describes a failed check.
        "determinism": "" if result.determinism.passed is False else str(result.determinism),
    }
    return [Line(label, "", text) for label, text in named.items() if text]


# A comparison


@page_of.register
def _(shown: Comparison) -> Page:
    sections: list[list[Line] | Table] = [
        _side_lines(shown),
        _setting_lines(shown),
        _difference_lines(shown),
        _mcnemar_lines(shown),
    ]
    sections += _difference_tables(shown)
    title = shown.environment or "comparison"
    return Page(title, "", "b against a", sections, notes=shown.notes, verdict=shown.verdict)


def _side_lines(comparison: Comparison) -> list[Line]:
    sides = {"a": comparison.a, "b": comparison.b}
    places = max(decimals(0.0, side.mean_return) for side in sides.values())
    lines = []
    for name, side in sides.items():
        lines.append(Line(name, number(side.mean_return, places), side.policy or "mean return"))
        lines.append(Line("", "", _GAP.join(filter(None, (side.weights, side.status)))))
    fewer = "" if comparison.num_pairs == comparison.num_planned else "; all numbers are computed from these pairs"
    return [*lines, Line("pairs", f"{comparison.num_pairs:,}", f"of {comparison.num_planned:,} planned{fewer}")]


def _setting_lines(comparison: Comparison) -> list[Line]:
    """Return lines with the settings that differ, except those that the lines of the two sides already show."""
    a, b = comparison.a, comparison.b
    names, weights = a.policy != b.policy, a.weights != b.weights
    different = [
        one
        for one in comparison.different_settings
        if not (names and one.key in _NAMED) and not (weights and one.key.startswith("weights."))
    ]
    if not different:
        return [Line("settings", "", "no other recorded setting differs")]
    lines = [Line("" if position else "settings", "", str(one)) for position, one in enumerate(different[:_SETTINGS])]
    more = len(different) - len(lines)
    return lines + (
        [Line("", "", f"and {counted(more, 'more difference')}; to_dict() has all (--json)")] if more else []
    )


def _difference_lines(comparison: Comparison) -> list[Line]:
    difference = comparison.difference
    write = writer(interval_places(difference.interval, difference.mean))
    if difference.rounding:
        return [Line("b - a", write(difference.mean), "rounding")]
    how = "all sign patterns" if difference.test == "exact" else f"{RESAMPLES:,} random sign patterns"
    lines = [
        Line("b - a", write(difference.mean), interval_text(difference.interval, write)),
        Line("p-value", difference.p_text.removeprefix("= "), f"of no difference: sign-flip test over {how}"),
    ]
    if difference.correlation is not None:
        lines.append(Line("correlation", f"{difference.correlation:.2f}", "between the returns of the two sides"))
    if difference.episodes_saved is not None:
        saved = f"{difference.episodes_saved:,.2f} x"
        lines.append(Line("equal seeds", saved, "as many episodes would be needed with different seeds"))
    return lines


def _difference_tables(shown: Comparison) -> list[Table]:
    """Return tables of the differences by the values of each axis, and by condition; empty without conditions."""
    tables = []
    for column, parts in shown.by_condition.items():
        write = _means(parts)
        rows = [
            (
                one.mean,
                (str(one.value), number(one.num_pairs, 0), *map(write, (one.mean_a, one.mean_b, one.mean)),
                 interval_ends(one.interval, write)),
            )
            for one in parts
        ]  # fmt: skip
        tables.append(_lowest(column, (column, "pairs", "a", "b", "b - a", "interval"), rows))
    return tables


def _mcnemar_lines(comparison: Comparison) -> list[Line]:
    found = comparison.success
    if found is None:
        return []
    counts = {"both": found.both, "only a": found.only_a, "only b": found.only_b, "neither": found.neither}
    return [
        Line("success", "", _named({name: f"{count:,}" for name, count in counts.items()})),
        Line("p-value", f"{found.p_value:.2g}", "of equal success rates: McNemar's exact test"),
    ]


# Cross-play


@page_of.register
def _(shown: CrossPlay) -> Page:
    """Return the page of cross-play: tables of the policies, sorted by rating."""
    missing = f"; {counted(shown.num_missing, 'planned game')} not counted" if shown.num_missing else ""
    head = f"{counted(shown.num_games, 'game')} on {counted(shown.num_seeds, 'seed')}{missing}"
    head += f"; {100 * shown.confidence:g} % intervals"
    best = sorted(shown.standings, key=lambda each: 0.0 if math.isnan(each.rating.value) else -each.rating.value)
    names = [standing.policy for standing in best]
    rated, seated = _means(each.mean_return for each in best), _means(each.mean_return for each in shown.seats)
    teams, points = _means(each.team for each in shown.line_ups), "{:,.0f}".format
    ratings = [
        (one.policy, number(one.rating.value, 0), interval_ends(one.rating.interval, points), *_shares(one.outcomes),
         rated(one.mean_return.mean))
        for one in best
    ]  # fmt: skip
    seats = [(one.seat, *_shares(one.outcomes), *_both(one.mean_return, seated)) for one in shown.seats]
    line_ups = [
        (" + ".join(one.policies), f"{one.num_games:,}", *_both(one.team, teams),
         ", ".join(f"{name} {teams(own.mean)}" for name, own in one.per_capita.items()))
        for one in shown.line_ups
    ]  # fmt: skip
    won, returns = ("won", "drawn", "lost", "mean return"), _means(cell.mean_return for cell in shown.cells)
    sections = [
        Table("score of the row against the column (wins plus half of the draws)", ("", *names),
              _matrix(shown, names, "score", percent)),
        Table("mean return of the policy in the row, against the policy in the column", ("", *names),
              _matrix(shown, names, "mean_return", returns)),
        Table("Bradley-Terry ratings, in Elo points", ("policy", "rating", "interval", *won), ratings),
        Table("seats, over all policies", ("seat", *won, "interval"), seats),
        Table("line-ups", ("policies", "games", "team return", "interval", "per capita"), line_ups),
    ]  # fmt: skip
    intervals = [each.rating.interval for each in shown.standings] + [each.score.interval for each in shown.cells]
    intervals += [each.mean_return.interval for each in shown.seats]
    notes = [f"{name} is not in the tables, because none of its games counts" for name in shown.absent]
    notes += dict.fromkeys(one.note for one in intervals if one.note)
    known = [cell for cell in shown.cells if cell.row != cell.column and cell.score.interval.exists]
    pairs = {frozenset((cell.row, cell.column)) for cell in known}
    notes += filter(None, [several(len(pairs), "comparisons of two policies", shown.confidence)])
    return Page(f"cross-play of {len(shown.policies)} policies", head, "", sections, notes=notes)


def _matrix(played: CrossPlay, names: list[str], what: str, write: Write) -> list[list[str]]:
    """Return one row of estimates per policy. If there is space, the intervals are below the estimates."""
    shown = 2 if len(names) <= _WITH_INTERVALS else 1
    cells = {(cell.row, cell.column): _both(getattr(cell, what), write)[:shown] for cell in played.cells}
    return [[row, *("\n".join(cells.get((row, column), "-")) for column in names)] for row in names]


# Numbers as text


def writer(places: int) -> Write:
    """Return a function that formats numbers with a number of decimals."""
    return lambda value: number(value, places)


def _means(estimates: Iterable[Estimate | Part]) -> Write:
    """Return a function that formats means with the number of decimals of the narrowest interval."""
    spreads = [(each.interval.high - each.interval.low) / 4 for each in estimates]
    return writer(max((decimals(spread) for spread in spreads if spread > 0), default=2))


def _both(estimate: Estimate, write: Write) -> tuple[str, str]:
    return write(estimate.mean), interval_ends(estimate.interval, write)


def interval_ends(interval: Interval, write: Write) -> str:
    """Return the ends of an interval as text; ``none`` if there is no interval."""
    return f"{write(interval.low)} to {write(interval.high)}" if interval.exists else "none"


def with_ends(value: float, low: float, high: float, write: Write) -> str:
    """Return a number with the ends of its interval, if there is one."""
    return f"{write(value)} ({write(low).removesuffix(' %')} to {write(high)})" if low < high else write(value)


def _shares(outcomes: Outcomes) -> tuple[str, str, str]:
    """Return the fractions of games won, with its interval in a second line, drawn and lost."""
    won = f"{percent(outcomes.wins)}\n{interval_ends(outcomes.win_interval, percent)}"
    return won, percent(outcomes.draws), percent(outcomes.losses)


def _named(values: Mapping[str, str]) -> str:
    return _GAP.join(f"{name} {value}" for name, value in values.items())

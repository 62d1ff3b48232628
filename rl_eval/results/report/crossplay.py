"""Page of a cross-play: matrices of scores and returns, ratings, seats and line-ups, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from rl_eval.results.report.table import decimals, number, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rl_eval.results.crossplay import CrossPlay, Estimate, Outcomes
    from rl_eval.results.stats.interval import Interval

__all__ = ["crossplay_report"]

_WITH_INTERVALS: Final = 4
"""Most policies whose matrices show intervals, so that they fit into 80 columns."""

Write = Callable[[float], str]


def crossplay_report(played: CrossPlay) -> RenderableType:
    """Return the tables of cross-play for :mod:`rich`; the best rated policy comes first."""
    from rich.console import Group
    from rich.text import Text

    missing = f"; {played.num_missing:,} games of the plan do not count" if played.num_missing else ""
    head = f"{played.num_games:,} games on {played.num_seeds:,} seeds{missing}; {100 * played.confidence:g} % intervals"
    tables = {
        "score of the row against the column: wins and half the draws": _matrix(played, "score", percent),
        "mean return of the row's seat": _matrix(played, "mean_return", _writer(c.mean_return for c in played.cells)),
        "Bradley-Terry ratings, in Elo points": _ratings(played),
        "seats, whoever sits there": _seats(played),
        "line-ups": _line_ups(played),
    }
    parts: list[RenderableType] = [Text(f"cross-play of {len(played.policies)} policies", style="bold"), Text(head)]
    for title, table in tables.items():
        parts += [Text(f"\n{title}", style="dim"), table]
    return Group(*parts, *(Text(f"\nnote: {note}", style="yellow") for note in _notes(played)))


def _matrix(played: CrossPlay, name: str, write: Write) -> Table:
    names = _ranked(played)
    table = _table("", *names)
    for row in names:
        cells = (played.cell(row, column) for column in names)
        table.add_row(row, *("-" if cell is None else _stacked(played, getattr(cell, name), write) for cell in cells))
    return table


def _stacked(played: CrossPlay, estimate: Estimate, write: Write) -> str:
    """Write a number, with its interval below where there is room."""
    if len(played.policies) > _WITH_INTERVALS:
        return write(estimate.mean)
    return f"{write(estimate.mean)}\n{_ends(estimate.interval, write)}"


def _ratings(played: CrossPlay) -> Table:
    write = _writer(standing.mean_return for standing in played.standings)
    table = _table("policy", "rating", "interval", "won", "drawn", "lost", "mean return")
    by_name = {standing.policy: standing for standing in played.standings}
    for standing in map(by_name.__getitem__, _ranked(played)):
        rating, points = standing.rating, "{:,.0f}".format
        shown = number(rating.value, 0), _ends(rating.interval, points), *_shares(standing.outcomes)
        table.add_row(standing.policy, *shown, write(standing.mean_return.mean))
    return table


def _seats(played: CrossPlay) -> Table:
    write = _writer(seat.mean_return for seat in played.seats)
    table = _table("seat", "won", "drawn", "lost", "mean return", "interval")
    for seat in played.seats:
        table.add_row(seat.seat, *_shares(seat.outcomes), *_both(seat.mean_return, write))
    return table


def _line_ups(played: CrossPlay) -> Table:
    write = _writer(line_up.team for line_up in played.line_ups)
    table = _table("policies", "games", "team return", "interval", "per capita")
    for line_up in played.line_ups:
        each = ", ".join(f"{name} {write(estimate.mean)}" for name, estimate in line_up.per_capita.items())
        table.add_row(" + ".join(line_up.policies), f"{line_up.num_games:,}", *_both(line_up.team, write), each)
    return table


def _notes(played: CrossPlay) -> Iterable[str]:
    """Return who is missing, and what is special about the intervals, each thing once."""
    intervals = [standing.rating.interval for standing in played.standings]
    intervals += [cell.score.interval for cell in played.cells] + [seat.mean_return.interval for seat in played.seats]
    absent = [f"no game of {name} counts, so it is in no table" for name in played.absent]
    return [*absent, *dict.fromkeys(one.note for one in intervals if one.note not in {"", "all equal"})]


def _ranked(played: CrossPlay) -> list[str]:
    def key(at: int) -> tuple[float, int]:
        value = played.standings[at].rating.value
        return (0.0 if math.isnan(value) else -value, at)

    return [played.policies[at] for at in sorted(range(len(played.policies)), key=key)]


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=True)
    return table


def _writer(estimates: Iterable[Estimate]) -> Write:
    """Return what writes numbers with as many decimals as the most certain of them is worth."""
    spreads = [(each.interval.high - each.interval.low) / 4 for each in estimates]
    places = max((decimals(spread) for spread in spreads if spread > 0), default=2)
    return lambda value: number(value, places)


def _both(estimate: Estimate, write: Write) -> tuple[str, str]:
    return write(estimate.mean), _ends(estimate.interval, write)


def _ends(interval: Interval, write: Write) -> str:
    if not interval.exists:
        return "none"
    return f"{write(interval.low)} to {write(interval.high)}"


def _shares(outcomes: Outcomes) -> tuple[str, str, str]:
    return percent(outcomes.wins), percent(outcomes.draws), percent(outcomes.losses)

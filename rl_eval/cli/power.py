"""``rl-eval power``: what two success rates say about their difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, print_json, print_page
from rl_eval.cli.shared import argument
from rl_eval.reports.page import Line, Page
from rl_eval.results.text import interval_text, percent

if TYPE_CHECKING:
    from rl_eval.results.stats.power import Rate, RateComparison

__all__ = ["power"]


def power(
    a: Annotated[str, argument("A", "Successes and episodes of one policy, as in 17/20.")],
    b: Annotated[str, argument("B", "Those of the other one, as in 14/20.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two success rates of different episodes: b minus a, and how many episodes would tell them apart."""
    with reported(debug):
        from rl_eval.results.stats.power import compare_rates, parse_rate

        found = compare_rates(parse_rate(a), parse_rate(b))
        if as_json:
            print_json(found.to_dict())
        else:
            print_page(_page(found))


def _page(found: RateComparison) -> Page:
    differing = f"p-value, exact: so often do equal rates differ by {percent(abs(found.difference))} or more"
    return Page(
        title="two success rates",
        subtitle="",
        state="b against a",
        sections=[
            [_rate_line("a", found.a), _rate_line("b", found.b)],
            [
                Line("b - a", percent(found.difference), interval_text(found.interval)),
                Line("Fisher", f"{found.p_value:.2g}", differing),
            ],
            _needed_lines(found),
        ],
        verdict=_verdict(found),
    )


def _rate_line(name: str, rate: Rate) -> Line:
    return Line(name, percent(rate.value), f"{rate.successes:,} of {rate.episodes:,}   {interval_text(rate.interval)}")


def _needed_lines(found: RateComparison) -> list[Line]:
    if found.episodes_needed is None:
        return []
    return [
        Line(
            "episodes",
            f"{found.episodes_needed:,}",
            "of either policy tell rates like these apart in 80 % of experiments; fewer do on the same seeds, with "
            "rl-eval compare",
        )
    ]


def _verdict(found: RateComparison) -> str:
    if found.is_shown:
        return f"b succeeds {'more' if found.difference > 0 else 'less'} often than a at 95 %"
    return "no difference shown at 95 %"

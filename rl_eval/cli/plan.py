"""``rl-eval plan``: estimate the time and the power of an evaluation from a pilot, or compare two success rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, with_evaluated
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, print_either, print_note
from rl_eval.cli.settings import Assignments, OptionalConfigPath, Section, read_settings
from rl_eval.cli.shared import advanced, option
from rl_eval.errors import EvalError, UsageError
from rl_eval.reports.page import Line, Page
from rl_eval.results.text import decimals, environment_name, interval_text, number, percent, policy_name

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult
    from rl_eval.results.stats.power import Rate, RateComparison


_FEWEST: Final = 5
"""Smallest number of pilot episodes for a standard deviation."""
_NO_SPREAD: Final = (
    "all pilot episodes have the same return, so the smallest detectable difference cannot be computed. Try a longer "
    "--pilot. A longer pilot will not help if the policy always reaches the highest possible return"
)


@with_evaluated
def plan(
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    section: Section = None,
    trust: TrustPolicy = False,
    detect: Annotated[
        float | None,
        option("D", "Compute the number of episodes with which `compare` shows a difference of D in mean return."),
    ] = None,
    half_width: Annotated[
        float | None, option("W", "Compute the number of episodes for an interval of ± W around the mean return.")
    ] = None,
    rates: Annotated[
        tuple[str, str] | None, option("A B", "Compare two success rates, such as 17/20 14/20, and run nothing.")
    ] = None,
    pilot: Annotated[int, advanced("N", "Number of pilot episodes. [default: 20]", min=_FEWEST)] = 20,
    correlation: Annotated[
        float,
        advanced("R", "Assumed correlation of the two policies' returns. [default: 0]", min=-1.0, max=0.99),
    ] = 0.0,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Run a short pilot, and estimate the time of the evaluation and the difference that it can detect."""
    if rates is not None:
        if config is not None or evaluated != Evaluated():
            fix = "Omit CONFIG and its options."
            raise UsageError("--rates runs no evaluation", key="--rates", value=" ".join(rates), fix=fix)
        from rl_eval.results.stats.power import compare_rates, parse_rate

        compared = compare_rates(*map(parse_rate, rates))
        print_either(as_json, compared.to_dict(), _rates_page(compared))
        return
    for name, value in (("--detect", detect), ("--half-width", half_width)):
        if value is not None and not 0 < value < math.inf:
            fix = "Pass a finite number above 0."
            raise UsageError(f"{name} {value:g} is out of range", key=name, value=value, fix=fix)
    if config is None:
        evaluated.check("plan", assignments)
    settings = read_settings(config, section, assignments, evaluated.keys(print_note, assignments, trust=trust))
    if settings.evaluation.num_episodes == 1:
        problem, fix = "evaluation.num_episodes is 1: one episode has no spread", "Plan 2 or more episodes."
        raise UsageError(problem, key="evaluation.num_episodes", value=1, fix=fix)
    figures, page = _planned(settings, run_pilot(settings, pilot), correlation, detect, half_width)
    print_either(as_json, figures, page)
    if page.notes and (detect or half_width):
        raise typer.Exit(ExitCode.USAGE)


def run_pilot(settings: EvalSettings, episodes: int) -> EvalResult:
    """Run the first episodes of the plan, in this process if possible, and return their result.

    Raises:
        EvalError: The pilot failed.
        UsageError: Some episodes of the pilot failed or did not run.
    """
    from rl_eval.config.settings import SECTIONS, needs_interruption, needs_processes, with_values
    from rl_eval.execution.group import EvalRunnerGroup
    from rl_eval.runners import class_of

    needs = class_of(settings).facts.processes or any(
        getattr(getattr(settings, section), key)
        for section in SECTIONS
        for key in (*needs_processes(section), *needs_interruption(section))
    )
    in_process = not (settings.runners.num_runners and needs)
    settings = with_values(
        settings,
        evaluation={"num_episodes": episodes, "determinism_check": 0.0},
        runners={"num_runners": int(not in_process)},
    )
    with EvalRunnerGroup(settings, threaded=not in_process) as group:
        result = group.evaluate()
    if result.status == "failed":
        raise EvalError(f"the pilot failed: {result.reason}", value=result.status)
    if result.status != "complete":
        raise UsageError(
            f"the pilot is not complete, so it cannot be used for a plan: {result.reason}", value=result.status
        )
    return result


def _planned(
    settings: EvalSettings, result: EvalResult, correlation: float, detect: float | None, half_width: float | None
) -> tuple[dict[str, Any], Page]:
    """Return all numbers as plain JSON values and as a page.

    If all pilot episodes have the same return, the interval and the detectable differences are missing.
    """
    from rl_eval.records.plain import plain
    from rl_eval.results.stats.power import Pilot

    numbers, episodes, runners = result.aggregates, settings.evaluation.num_episodes, settings.runners.num_runners
    minutes = result.timing.wall_seconds / len(result.plan) / max(1, runners) / 60
    planned: dict[str, Any] = {"episodes": episodes, "minutes": minutes * episodes}
    pilot = {"episodes": numbers.count, "mean": numbers.mean, "std": numbers.std}
    figures: dict[str, Any] = {"pilot": pilot, "planned": planned, "correlation": correlation}
    figures |= {"detect": None, "mean": None}
    places = decimals(numbers.sem, numbers.mean)
    returns = f"mean return {number(numbers.mean, places)}, std {number(numbers.std, places)}"
    where = f"on {runners} runners as fast as this process" if runners > 1 else "on one runner"
    sections = [
        [
            Line("pilot", f"{numbers.count:,}", f"episodes: {returns}, {number(result.timing.wall_seconds)} s"),
            Line("plan", f"{episodes:,}", f"episodes: about {span(minutes * episodes)} {where}"),
        ]
    ]
    page = Page(environment_name(result.provenance) or "plan", policy_name(result.provenance), "plan", sections)
    if not 0 < numbers.std < math.inf:
        return plain(figures), replace(page, notes=[_NO_SPREAD])
    spread, asked = Pilot(result.counted_rows["episode_return"]), []
    planned["half_width"] = spread.half_width(episodes)
    planned["paired_difference"] = spread.difference(episodes, correlation)
    width, paired = (number(value, decimals(value / 10)) for value in [*planned.values()][2:])
    if half_width is not None:
        needed = spread.episodes_of_half_width(half_width)
        figures["mean"] = {"half_width": half_width, "episodes": needed, "minutes": minutes * needed}
        gives = f"episodes ({span(minutes * needed)}) for an interval of at most ± {half_width:g}"
        asked.append(Line("half width", f"{needed:,}", gives))
    if detect is not None:
        needed = spread.pairs(detect, correlation)
        figures["detect"] = {"difference": detect, "paired": needed, "paired_minutes": minutes * needed}
        shows = f"episodes per policy ({span(minutes * needed)}) to detect {detect:g} (power 80 %)"
        asked.append(Line("detect", f"{needed:,}", shows))
    related = f"correlate by {correlation:g}" if correlation else "do not correlate"
    shown = [
        Line("interval", f"± {width}", "approximate 95 % interval of the mean"),
        Line("detectable", paired, "difference that rl-eval compare shows (power 80 %)"),
        Line("", "", f"if the returns on equal seeds {related}"),
    ]
    return plain(figures), replace(page, sections=[*sections, shown, asked])


def span(minutes: float) -> str:
    """Return a duration as text."""
    if minutes < 1:
        return f"{60 * minutes:.2g} s"
    return f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"


def _rates_page(found: RateComparison) -> Page:
    def line(name: str, rate: Rate) -> Line:
        counts = f"{rate.successes:,} of {rate.episodes:,}   {interval_text(rate.interval)}"
        return Line(name, percent(rate.value), counts)

    differing = f"exact p-value of a difference of {percent(abs(found.difference))} or more if the rates are equal"
    more = "more" if found.difference > 0 else "less"
    difference = Line("b - a", percent(found.difference), interval_text(found.interval))
    sections = [
        [line("a", found.a), line("b", found.b)],
        [difference, Line("Fisher", f"{found.p_value:.2g}", differing)],
    ]
    if found.episodes_needed is not None:
        needed = "per policy detect this difference (power 80 %); with equal seeds, fewer episodes are enough"
        sections.append([Line("episodes", f"{found.episodes_needed:,}", needed)])
    verdict = f"b succeeds {more} often than a at 95 %" if found.is_shown else "no difference shown at 95 %"
    return Page("two success rates", "", "b against a", sections, verdict=verdict)

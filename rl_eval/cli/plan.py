"""``rl-eval plan``: how long an evaluation takes, and which differences it can show, from a short pilot."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, with_evaluated
from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import AsJson, print_json, print_note, print_page
from rl_eval.cli.settings import Assignments, OptionalConfigPath, Section, find_modules_here, read_settings
from rl_eval.cli.shared import option
from rl_eval.errors import EvalError, UsageError
from rl_eval.reports.page import Line, Page
from rl_eval.results.text import decimals, environment_name, number, policy_name

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult
    from rl_eval.results.stats.power import Spread

__all__ = ["plan"]

_FEWEST: Final = 5
"""Episodes from which a standard deviation can be guessed at all."""
_FEWEST_PLANNED: Final = 2
_NO_SPREAD: Final = (
    "the returns of the pilot do not vary, so they say nothing about differences: try a longer --pilot, unless this "
    "policy always reaches the greatest return there is"
)


@with_evaluated
def plan(
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    section: Section = None,
    trust: TrustPolicy = False,
    detect: Annotated[float | None, option("D", "Say how many episodes show a difference of D in returns.")] = None,
    half_width: Annotated[
        float | None, option("W", "Say how many episodes give the mean return an interval of ± W, roughly.")
    ] = None,
    pilot: Annotated[int, typer.Option(metavar="N", min=_FEWEST, help="Episodes of the pilot.")] = 20,
    correlation: Annotated[
        float,
        typer.Option(
            metavar="R",
            min=-1.0,
            max=0.99,
            help="Correlation of the returns of two policies on equal seeds, for paired figures; rl-eval compare "
            "measures it.",
        ),
    ] = 0.5,
    assignments: Assignments = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run a short pilot, and say how long an evaluation takes and which difference it can show."""
    with reported(debug):
        _check_positive("--detect", detect, "a difference")
        _check_positive("--half-width", half_width, "half the width of an interval,")
        if config is None:
            evaluated.check("plan", assignments)
        settings = read_settings(config, section, assignments, evaluated.keys(print_note, assignments, trust=trust))
        if settings.evaluation.num_episodes < _FEWEST_PLANNED:
            raise UsageError("evaluation.num_episodes is 1, but one episode shows no difference: plan 2 or more")
        find_modules_here()
        found = _Planned(settings, _run_pilot(settings, pilot), detect, half_width, correlation)
        if as_json:
            print_json(found.to_dict())
        else:
            print_page(found.page())
        if found.spread is None and (detect or half_width):
            raise typer.Exit(ExitCode.USAGE)


def _check_positive(name: str, value: float | None, what: str) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{name} {value:g}: give {what} above 0")


def _run_pilot(settings: EvalSettings, episodes: int) -> EvalResult:
    """Run the first episodes of the plan, in this process if that can be."""
    from rl_eval.execution.group import EvalRunnerGroup

    settings = _pilot_settings(settings, episodes)
    with EvalRunnerGroup(settings, threaded=settings.runners.num_runners > 0) as group:
        result = group.evaluate()
    if result.status == "failed":
        raise EvalError(f"the pilot failed: {result.reason}")
    if result.status != "complete":
        raise UsageError(f"the pilot is not complete, so nothing can be planned by it: {result.reason}")
    return result


def _pilot_settings(settings: EvalSettings, episodes: int) -> EvalSettings:
    from rl_eval.config.settings import with_values

    return with_values(
        settings,
        evaluation={"num_episodes": episodes, "determinism_check": 0.0},
        runners={"num_runners": int(_needs_a_process(settings))},
    )


def _needs_a_process(settings: EvalSettings) -> bool:
    from rl_eval.config.settings import SECTIONS, needs_processes

    if not settings.runners.num_runners:
        return False
    given = (getattr(getattr(settings, section), key) for section in SECTIONS for key in needs_processes(section))
    return settings.runners.runner_class.needs_processes or any(map(bool, given))


@dataclass(frozen=True)
class _Planned:
    """Figures of a plan, from a pilot of it."""

    settings: EvalSettings
    result: EvalResult
    detect: float | None
    half_width: float | None
    correlation: float

    @property
    def spread(self) -> Spread | None:
        """Standard deviation of the pilot's returns; None if they do not differ, or are not finite."""
        from rl_eval.results.stats.power import Spread

        numbers = self.result.aggregates
        return Spread(numbers.std, numbers.count) if 0 < numbers.std < math.inf else None

    @property
    def episodes(self) -> int:
        return self.settings.evaluation.num_episodes

    def minutes(self, episodes: int) -> float:
        """Return how long so many episodes take, if all runners are as fast as this process."""
        timing, runners = self.result.timing, max(1, self.settings.runners.num_runners)
        return timing.wall_seconds / len(self.result.plan) * episodes / runners / 60

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        from rl_eval.records.plain import plain

        numbers, spread = self.result.aggregates, self.spread
        planned: dict[str, Any] = {"episodes": self.episodes, "minutes": self.minutes(self.episodes)}
        pilot = {"episodes": numbers.count, "mean": numbers.mean, "std": numbers.std}
        described = {"pilot": pilot, "planned": planned, "correlation": self.correlation, "detect": None, "mean": None}
        if spread is not None:
            planned["half_width"] = spread.half_width(self.episodes)
            planned["unpaired_difference"] = spread.difference(self.episodes)
            planned["paired_difference"] = spread.difference(self.episodes, self.correlation)
            described["detect"] = None if self.detect is None else asdict(self._detection(spread, self.detect))
            described["mean"] = None if self.half_width is None else asdict(self._precision(spread, self.half_width))
        return {key: plain(value) for key, value in described.items()}

    def _detection(self, spread: Spread, difference: float) -> _Detection:
        unpaired, paired = spread.episodes(difference), spread.episodes(difference, self.correlation)
        return _Detection(difference, unpaired, self.minutes(unpaired), paired, self.minutes(paired))

    def _precision(self, spread: Spread, half_width: float) -> _Precision:
        episodes = spread.episodes_of_half_width(half_width)
        return _Precision(half_width, episodes, self.minutes(episodes))

    # The page

    def page(self) -> Page:
        """Lay the figures out."""
        spread = self.spread
        return Page(
            title=environment_name(self.result.provenance) or "plan",
            subtitle=policy_name(self.result.provenance),
            state="plan",
            sections=[self._time_lines(), *([] if spread is None else self._difference_sections(spread))],
            notes=[_NO_SPREAD] if spread is None else [],
        )

    def _time_lines(self) -> list[Line]:
        numbers, runners = self.result.aggregates, self.settings.runners.num_runners
        places = decimals(numbers.sem, numbers.mean)
        pilot = f"episodes: mean return {number(numbers.mean, places)}, std {number(numbers.std, places)}"
        where = f"on {runners} runners as fast as this process" if runners > 1 else "on one runner"
        return [
            Line("pilot", f"{numbers.count:,}", f"{pilot}, {number(self.result.timing.wall_seconds)} s"),
            Line("plan", f"{self.episodes:,}", f"episodes: about {_span(self.minutes(self.episodes))} {where}"),
        ]

    def _difference_sections(self, spread: Spread) -> list[list[Line]]:
        def write(value: float) -> str:
            return number(value, decimals(value / 10))

        paired = f"on equal seeds, if the returns correlate by {self.correlation:g}"
        shown = [
            Line("interval", f"± {write(spread.half_width(self.episodes))}", "95 % interval of the mean, roughly"),
            Line("shows", write(spread.difference(self.episodes)), "difference of two such means, in 80 % of cases"),
            Line("", write(spread.difference(self.episodes, self.correlation)), paired),
        ]
        asked = []
        if self.half_width is not None:
            precise = self._precision(spread, self.half_width)
            gives = f"episodes ({_span(precise.minutes)}) give an interval of ± {self.half_width:g}, roughly"
            asked.append(Line("half width", f"{precise.episodes:,}", gives))
        if self.detect is not None:
            found = self._detection(spread, self.detect)
            needs = f"episodes of either policy ({_span(found.unpaired_minutes)}) show {self.detect:g} in 80 % of cases"
            paired = f"{paired} ({_span(found.paired_minutes)})"
            asked += [Line("detect", f"{found.unpaired:,}", needs), Line("", f"{found.paired:,}", paired)]
        return [shown, asked]


@dataclass(frozen=True)
class _Detection:
    """How many episodes of either policy show a difference, and how long those of one take."""

    difference: float
    unpaired: int
    unpaired_minutes: float
    paired: int
    paired_minutes: float


@dataclass(frozen=True)
class _Precision:
    """How many episodes give the mean an interval of a half width, and how long they take."""

    half_width: float
    episodes: int
    minutes: float


def _span(minutes: float) -> str:
    if minutes < 1:
        return f"{60 * minutes:.2g} s"
    return f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"

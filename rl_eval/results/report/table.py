"""Pages of a result and of a comparison in 80 columns: the numbers, their order and their precision.

Both are first made into a :class:`Page`, a title and labelled lines of text. Plain text and the coloured
rich version are two renderings of the same page, so they cannot disagree.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rl_eval.results.report.printable import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rl_eval.results.comparison import Comparison
    from rl_eval.results.result import EvalResult
    from rl_eval.results.stats.interval import Interval
    from rl_eval.results.stats.paired import PairedDifference

__all__ = ["Line", "Page", "comparison_page", "lookup", "result_page", "rich_page", "text_page"]

WIDTH: Final = 80
_LABEL: Final = 13
_GAP: Final = "   "
_METHODS: Final = {
    "bca": "BCa bootstrap",
    "percentile": "percentile bootstrap",
    "student_t": "Student t",
    "wilson": "Wilson",
    "newcombe": "Newcombe",
}
_LOADER: Final = re.compile(r"rl_eval\.integrations\.(\w+):\w+")
"""Factory of the models of a library."""
_SETTINGS: Final = 8
"""Differing settings that a comparison shows."""
_NAMED: Final = ("policy", "policy_kwargs.path")
"""Settings that a policy's name stands for."""
_LEAST_SHOWN: Final = 0.0005
"""Share that is no longer written as 0.0 %."""
_COLOURS: Final = {"complete": "green", "partial": "yellow", "failed": "red"}


class Line(NamedTuple):
    """One labelled line; a second line of the same topic has an empty label."""

    label: str
    strong: str
    """What the line is about, set in bold."""
    rest: str = ""


@dataclass(frozen=True)
class Page:
    """Content of a page, before it is laid out."""

    title: str
    subtitle: str
    state: str
    """Shown at the right edge: ``complete``, ``partial``, ``failed``, or empty."""
    sections: list[list[Line]]
    notes: list[str] = field(default_factory=list)
    verdict: str = ""
    failure: str = ""
    """Why there are no numbers to trust, before everything else."""


# Numbers


def decimals(spread: float, value: float = 0.0) -> int:
    """Return how many decimals are worth showing.

    Args:
        spread: A standard error: two of its digits are shown.
        value: What is shown, when there is no spread: four of its digits, none if it is whole.
    """
    if math.isfinite(spread) and spread > 0:
        return max(0, 1 - math.floor(math.log10(spread)))
    if not math.isfinite(value) or value == round(value):
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def number(value: float, places: int = 2) -> str:
    """Write a number with thousands separators; ``n/a`` for NaN, powers of ten for the very large and small."""
    if math.isnan(value):
        return "n/a"
    if math.isfinite(value) and (abs(value) >= 1e12 or places > 8):
        return f"{value:.4g}"
    text = f"{value:,.{places}f}"
    return text if text.strip("-0.") else text.removeprefix("-")


def ends_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """Write how episodes ended: each does in one way at least, and some in both."""
    terminated, truncated = metrics["terminated_rate"], metrics["truncated_rate"]
    shown = {"terminated": percent(terminated), "truncated": percent(truncated)}
    both = terminated + truncated - 1
    return shown | {"both": percent(both)} if both >= _LEAST_SHOWN else shown


def percent(value: float) -> str:
    """Write a fraction as percentage; ``n/a`` for NaN."""
    return "n/a" if math.isnan(value) else f"{100 * value:.1f} %"


def interval_text(interval: Interval, write: Callable[[float], str] = percent) -> str:
    """Write an interval, its method and what there is to know about it; or why there is none."""
    if not interval.exists:
        return f"no interval: {interval.note}"
    level = f"{100 * interval.confidence:g} % interval"
    if interval.note == "all equal":
        return f"all equal, so the {level} is this one value"
    ends = f"{level} {write(interval.low)} to {write(interval.high)}, {_METHODS[interval.method]}"
    return f"{ends} ({interval.note})" if interval.note else ends


def columns(rows: list[dict[str, str]]) -> list[str]:
    """Write rows of named values as text, the same position in each row below one another."""
    cells = [list(row.items()) for row in rows]
    names = [max(len(name) for name, _ in column) for column in zip(*cells, strict=True)]
    values = [max(len(value) for _, value in column) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(f"{name:<{wide}} {value:>{far}}" for (name, value), wide, far in zip(row, names, values, strict=True))
        for row in cells
    ]


# A result


def result_page(result: EvalResult) -> Page:
    """Lay out a result."""
    sections = [
        [*_return_lines(result), *_length_lines(result), *_success_lines(result)],
        *([_agent_lines(result)] if len(result.agents) else []),
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
    """Say that actions were sampled, if those of all policies were."""
    identity = provenance.get("identity")
    several = identity.get("policies") if isinstance(identity, Mapping) else None
    asked = list(several.values()) if isinstance(several, Mapping) and several else [identity]
    return "sampled actions" if all(lookup(one, "deterministic") == "False" for one in asked) else ""


def _return_lines(result: EvalResult) -> list[Line]:
    numbers = result.aggregates
    places = decimals(numbers.sem, numbers.mean)

    def write(value: float) -> str:
        return number(value, places)

    lines = [Line("mean return", write(numbers.mean), interval_text(result.interval, write))]
    ends = result.mean_return_bounds
    if result.num_missing and ends:
        lines.append(Line("", "", f"mean if the failed were all worst {write(ends[0])}, all best {write(ends[1])}"))
    if numbers.minimum == numbers.maximum or not numbers.count:
        return lines
    spread = [
        {"median": write(numbers.median), "IQM": write(numbers.iqm), "std": write(numbers.std)},
        {"min": write(numbers.minimum), "max": write(numbers.maximum), "worst 10 %": write(numbers.cvar10)},
    ]
    return lines + [Line("", "", text) for text in columns(spread)]


def _length_lines(result: EvalResult) -> list[Line]:
    shown = result.metrics
    if not result.aggregates.count:
        return []
    ends = {"min": number(shown["episode_len_min"], 0), "max": number(shown["episode_len_max"], 0)}
    return [
        Line("mean length", number(shown["episode_len_mean"], 1), f"steps{_GAP}{columns([ends])[0]}"),
        Line("", "", columns([ends_of(shown)])[0]),
    ]


def _success_lines(result: EvalResult) -> list[Line]:
    interval = result.success_interval
    if interval is None or result.success_rate is None:
        return []
    lines = [Line("success", percent(result.success_rate), interval_text(interval))]
    once = result.metrics["success_once_rate"]
    if once != result.success_rate:
        lines.append(Line("", "", f"at any step {percent(once)}"))
    return lines


def _agent_lines(result: EvalResult) -> list[Line]:
    """Lay out what each policy got per agent and episode."""
    from rl_eval.results.agents import policy_names

    names = policy_names(result.provenance)
    means = [result.metrics[f"module_episode_returns_mean/{name}"] for name in names]
    places = max(decimals(abs(mean) / 10, mean) for mean in means)
    rows = [
        {"": name, "return": number(mean, places)}
        | {word: percent(result.metrics[f"{word}_rate/{name}"]) for word in ("win", "draw", "loss")}
        for name, mean in zip(names, means, strict=True)
    ]
    return [Line("" if place else "by policy", "", text.strip()) for place, text in enumerate(columns(rows))]


def _episode_lines(result: EvalResult) -> list[Line]:
    counts = {"failed": result.num_failed, "retried": result.num_retried, "faults": len(result.faults)}
    trouble = _GAP.join(f"{count:,} {what}" for what, count in counts.items())
    lines = [Line("episodes", f"{result.aggregates.count:,}", f"of {len(result.plan):,}{_GAP}{trouble}")]
    if result.fault_counts:
        kinds = [f"{count:,} {kind}" for kind, count in list(result.fault_counts.items())[:4]]
        more = len(result.fault_counts) - len(kinds)
        lines.append(Line("faults", "", _GAP.join(kinds) + (f"{_GAP}and {more} more kinds" if more else "")))
    return lines


def _time_lines(result: EvalResult) -> list[Line]:
    timing = result.timing
    where = "in this process" if not timing.num_runners else f"on {timing.num_runners} runner"
    where += "s" if timing.num_runners > 1 else ""
    steps = f"{timing.env_steps:,} steps in {number(timing.wall_seconds)} s {where}"
    lines = [Line("speed", number(result.metrics["env_steps_per_second"], 0), f"env steps/s{_GAP}{steps}")]
    if timing.shares:
        lines.append(
            Line("time", "", _GAP.join(f"{name} {100 * share:.0f} %" for name, share in timing.shares.items()))
        )
    return lines


def _identity_lines(result: EvalResult) -> list[Line]:
    lines = [Line("fingerprint", "", result.fingerprint[:16])]
    if weights := weights_name(result):
        lines.append(Line("weights", "", weights))
    return [*lines, Line("determinism", "", str(result.determinism))]


# A comparison


def comparison_page(comparison: Comparison) -> Page:
    """Lay out a comparison."""
    return Page(
        title=comparison.environment or "comparison",
        subtitle="",
        state="b against a",
        sections=[
            _side_lines(comparison),
            _setting_lines(comparison),
            _difference_lines(comparison),
            _mcnemar_lines(comparison),
        ],
        notes=comparison.notes,
        verdict=comparison.verdict,
    )


def _side_lines(comparison: Comparison) -> list[Line]:
    places = side_places(comparison)
    lines = []
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        lines.append(Line(name, number(side.mean_return, places), side.policy or "mean return"))
        lines.append(Line("", "", _GAP.join(filter(None, (side.weights, side.status)))))
    fewer = "" if comparison.num_pairs == comparison.num_planned else "; all numbers here go over these"
    return [*lines, Line("pairs", f"{comparison.num_pairs:,}", f"of {comparison.num_planned:,} planned{fewer}")]


def _setting_lines(comparison: Comparison) -> list[Line]:
    """Lay out the settings that differ, but for those that the lines of the sides show to differ."""
    a, b = comparison.a, comparison.b
    names, weights = a.policy != b.policy, a.weights != b.weights
    different = [
        one
        for one in comparison.different_settings
        if not (names and one.key in _NAMED) and not (weights and one.key.startswith("weights."))
    ]
    if not different:
        what = "else that is recorded" if names or weights else "that is recorded of policies, weights and settings"
        return [Line("settings", "", f"nothing {what} differs")]
    lines = [Line("" if position else "settings", "", str(one)) for position, one in enumerate(different[:_SETTINGS])]
    more = len(different) - len(lines)
    return lines + ([Line("", "", f"and {more} more differences: see --json")] if more else [])


def _difference_lines(comparison: Comparison) -> list[Line]:
    difference = comparison.difference
    places = difference_places(difference)

    def write(value: float) -> str:
        return number(value, places)

    if difference.rounding:
        return [Line("b - a", write(difference.mean), "rounding")]
    how = "all sign patterns" if difference.test == "exact" else "random sign patterns"
    lines = [
        Line("b - a", write(difference.mean), interval_text(difference.interval, write)),
        Line("p-value", f"{difference.p_value:.2g}", f"of no difference: sign-flip test over {how}"),
    ]
    if difference.correlation is not None:
        lines.append(Line("correlation", f"{difference.correlation:.2f}", "between the returns of the two sides"))
    if difference.episodes_saved is not None:
        saved = f"{difference.episodes_saved:,.2f} x"
        lines.append(Line("equal seeds", saved, "as many episodes would be needed without them"))
    return lines


def _mcnemar_lines(comparison: Comparison) -> list[Line]:
    found = comparison.success
    if found is None:
        return []
    counts = {"both": found.both, "only a": found.only_a, "only b": found.only_b, "neither": found.neither}
    return [
        Line("success", "", _GAP.join(f"{name} {count:,}" for name, count in counts.items())),
        Line("p-value", f"{found.p_value:.2g}", "of equal success rates: McNemar's exact test"),
    ]


def difference_places(difference: PairedDifference) -> int:
    """Return decimals that fit a difference: a quarter of its interval is about its standard error."""
    return decimals((difference.interval.high - difference.interval.low) / 4, difference.mean)


def side_places(comparison: Comparison) -> int:
    """Return decimals that fit the means of both sides: those of their difference, unless it does not vary."""
    difference = comparison.difference
    if difference.interval.high > difference.interval.low:
        return difference_places(difference)
    return max(decimals(0.0, side.mean_return) for side in (comparison.a, comparison.b))


# Names in the provenance


def environment_name(provenance: Mapping[str, Any]) -> str:
    """Return the environment's name, empty if the provenance has none."""
    return lookup(provenance, "identity", "environment", "env")


def policy_name(provenance: Mapping[str, Any]) -> str:
    """Return the policy's name, empty if the provenance has none.

    That of a model of another library is the end of its path, such as ``sb3:seed_1/best_model.zip``: all of them have
    one factory, and many have one file name. Switches follow, such as ``vecnormalize=False``.
    """
    factory = lookup(provenance, "identity", "policy")
    path = PurePath(lookup(provenance, "identity", "policy_kwargs", "path"))
    library = _LOADER.fullmatch(factory)
    if library is None or not path.name:
        return factory
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    kwargs = provenance["identity"]["policy_kwargs"]
    switches = [f"{key}={value}" for key, value in kwargs.items() if isinstance(value, bool)]
    return " ".join([f"{library[1]}:{name}", *switches])


def weights_name(result: EvalResult) -> str:
    """Return digests and version of the weights, as far as they are known."""
    digest, version = lookup(result.provenance, "weights", "digest"), result.metrics["weights_version"]
    recorded = result.provenance.get("weights")
    files = recorded.get("files") if isinstance(recorded, Mapping) else None
    named = {**files} if isinstance(files, Mapping) else {}
    of_files = [f"{'model file' if name == 'path' else name} {str(found)[:16]}" for name, found in named.items()]
    return _GAP.join(filter(None, (digest[:16], *of_files, "" if math.isnan(version) else f"version {int(version)}")))


def lookup(value: Any, *keys: str) -> str:
    """Follow keys into nested mappings; return the text found there, empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


# Two renderings


def text_page(page: Page) -> str:
    """Render a page as plain text."""
    page = _printable(page)
    rule = "-" * WIDTH
    strong = _strong_width(page)
    blocks = [
        "\n".join(_hang(line.label, line.strong.ljust(strong), line.rest) for line in section)
        for section in page.sections
        if section
    ]
    head = [page.title + page.state.rjust(max(WIDTH - len(page.title), len(page.state) + 1))]
    if page.subtitle:
        head.append(page.subtitle)
    if page.failure:
        head.append(_hang("failed", "", page.failure))
    tail = [_hang(label, "", text) for label, text in _tail(page)]
    return "\n".join([*head, rule, "\n\n".join(blocks), *([rule] if tail else []), *tail])


def rich_page(page: Page) -> RenderableType:
    """Render a page for :mod:`rich`, at most 80 columns wide."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    page = _printable(page)
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(page.title, style="bold"), Text(page.state, style=_COLOURS.get(page.state, "")))
    body = _grid(_LABEL, _strong_width(page))
    for position, section in enumerate(filter(None, page.sections)):
        if position:
            body.add_row()
        for line in section:
            body.add_row(Text(line.label, style="dim"), Text(line.strong, style="bold"), Text(line.rest))
    subtitle = [Text(page.subtitle)] if page.subtitle else []
    failure = [_labelled("failed", page.failure, "bold red")] if page.failure else []
    parts: list[RenderableType] = [head, *subtitle, *failure, Rule(style="dim"), body]
    if tail := _tail(page):
        closing = [_labelled(label, text, "bold" if label == "verdict" else "yellow") for label, text in tail]
        parts += [Rule(style="dim"), *closing]
    return Constrain(Group(*parts), WIDTH)


def _printable(page: Page) -> Page:
    """Return a page whose texts are what they are said to be, a line each: strangers' results name themselves."""
    return Page(
        title=one_line(page.title),
        subtitle=one_line(page.subtitle),
        state=one_line(page.state),
        sections=[[Line(*map(one_line, line)) for line in section] for section in page.sections],
        notes=[one_line(note) for note in page.notes],
        verdict=one_line(page.verdict),
        failure=one_line(page.failure),
    )


def _labelled(label: str, text: str, style: str) -> Table:
    """Return a sentence with a label before it."""
    from rich.text import Text

    row = _grid(_LABEL)
    row.add_row(Text(label, style=style), Text(text))
    return row


def _grid(*widths: int) -> Table:
    """Return an empty grid: columns of the given widths, and one that takes the rest."""
    from rich.table import Table

    grid = Table.grid()
    for width in widths:
        grid.add_column(width=width)
    grid.add_column(overflow="fold")
    return grid


def _tail(page: Page) -> list[tuple[str, str]]:
    """Return the closing sentences with their labels."""
    verdict = [("verdict", page.verdict)] if page.verdict else []
    return verdict + [("note", note) for note in page.notes]


def _strong_width(page: Page) -> int:
    """Return the width of the column of bold numbers, its gap included."""
    return max((len(line.strong) for section in page.sections for line in section), default=0) + len(_GAP)


def _hang(label: str, strong: str, rest: str) -> str:
    indent = " " * (_LABEL + len(strong))
    first = label.ljust(_LABEL) + strong
    return textwrap.fill(rest, WIDTH, initial_indent=first, subsequent_indent=indent) if rest else first.rstrip()

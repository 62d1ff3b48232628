"""Contents of a report: what its template shows of each result, as text, tables and charts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from rl_eval.records.episode import EpisodeRecord, Fault, Outcome
from rl_eval.records.plain import leaves
from rl_eval.redaction import redact, redact_text
from rl_eval.results.page.breakdowns import Table, agent_tables, group_tables
from rl_eval.results.page.columns import shown_rows
from rl_eval.results.page.meaning import meaning
from rl_eval.results.page.plots import Bar, Plot, histogram, running_mean, time_bars
from rl_eval.results.report.metrics import episode_seconds
from rl_eval.results.report.table import (
    decimals,
    ends_of,
    environment_name,
    interval_text,
    lookup,
    number,
    percent,
    policy_name,
    weights_name,
)
from rl_eval.results.result import EvalResult

__all__ = ["STATIC_ROWS", "FaultKind", "Run", "Tile", "run_section"]

STATIC_ROWS: Final = 100
"""Episodes that are readable without JavaScript."""

_MOST_KINDS: Final = 20
_MOST_VIDEOS: Final = 1_000
_MOST_LEAVES: Final = 400
_LONGEST: Final = 300
"""Characters of a value of the provenance that are shown."""
_HIDDEN: Final = ("signature", "notes")
"""Parts of the provenance that tell a reader nothing, or that stand elsewhere."""
_FATES: Final = {
    Outcome.COMPLETED: "completed all the same", Outcome.FAILED: "given up", Outcome.MISSING: "without a record",
}  # fmt: skip
"""Ends of episodes that had a fault."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One number of the headline, with its name and what there is to know about it."""

    label: str
    value: str
    detail: str = ""
    css: str = ""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """Faults of one type in one place of the code, with one of them in full."""

    name: str
    count: int
    episodes: str
    example: Fault


@dataclass(frozen=True)
class Run:
    """What a report shows of one result."""

    number: int
    """Position among the results of the report, from 1."""
    name: str
    """Name that tells it from the others."""
    path: str
    """Folder or URI, as a command line takes it."""
    title: str
    subtitle: str
    status: str
    headline: Tile
    meaning: str
    tiles: list[Tile]
    notes: list[str]
    histogram: Plot | None
    running_mean: Plot | None
    numbers: tuple[Table, Table]
    agents: list[Table]
    groups: list[Table]
    """By each info scalar that names a task, a level or the like."""
    fault_kinds: list[FaultKind]
    fault_note: str
    time: list[Bar]
    time_table: Table
    episodes: Table
    num_finished: int
    videos: list[tuple[int, str]]
    """Episodes with a video, and links to it."""
    provenance: Table

    @property
    def anchor(self) -> str:
        """Beginning of the names of its episodes in links."""
        return "" if self.number == 1 else f"run-{self.number}-"


def run_section(result: EvalResult, number_: int, name: str, path: str, videos: Mapping[int, str]) -> Run:
    """Return what a report shows of a result.

    Args:
        result: Finished or not.
        number_: Position among the results of the report, from 1.
        name: Name that tells it from the others.
        path: Folder or URI that it was read from.
        videos: Links to videos of its episodes, by index.
    """
    returns, confidence = result.counted_rows["episode_return"], result.confidence
    kinds = _fault_kinds(result.faults)
    return Run(
        number=number_,
        name=name,
        path=shlex.quote(redact_text(path)),
        title=environment_name(result.provenance) or "evaluation",
        subtitle=" · ".join(filter(None, (_policies(result.provenance), weights_name(result).replace("   ", ", ")))),
        status=result.status,
        headline=_headline(result),
        meaning=meaning(result),
        tiles=_tiles(result),
        notes=list(dict.fromkeys(map(str, filter(None, [result.reason, *result.notes])))),
        histogram=histogram(returns, "return", lines=_marks(result)),
        running_mean=running_mean(result.counted_rows["index"], returns, confidence),
        numbers=_numbers(result),
        agents=agent_tables(result),
        groups=group_tables(result),
        fault_kinds=kinds[:_MOST_KINDS],
        fault_note=_fault_note(result, kinds),
        time=time_bars(result.timing.shares),
        time_table=_time_table(result),
        episodes=_static_rows(result),
        num_finished=len(result.episodes),
        videos=list(islice(videos.items(), _MOST_VIDEOS)),
        provenance=_provenance(result.provenance),
    )


# Headline


def _headline(result: EvalResult) -> Tile:
    places = decimals(result.aggregates.sem, result.mean_return)
    text = interval_text(result.interval, lambda value: number(value, places))
    return Tile("mean return", number(result.mean_return, places), text)


def _tiles(result: EvalResult) -> list[Tile]:
    interval, rate = result.success_interval, result.success_rate
    success = [] if interval is None or rate is None else [Tile("success", percent(rate), interval_text(interval))]
    determinism = result.determinism
    css = {None: "", True: "good", False: "bad"}[determinism.passed]
    word = {None: "not checked", True: "passed", False: "failed"}[determinism.passed]
    where = "in one process" if not result.timing.num_runners else f"on {result.timing.num_runners:,} runners"
    return [
        *success,
        Tile("episodes", f"{result.aggregates.count:,}", f"counted of {len(result.plan):,} planned"),
        Tile("mean length", number(result.metrics["episode_len_mean"], 1), "environment steps"),
        Tile(
            "trouble",
            f"{len(result.faults):,}",
            f"faults in {len(result.table.faults):,} episodes; {result.num_failed:,} failed",
            "bad" if result.num_failed else "",
        ),
        Tile("speed", number(result.metrics["env_steps_per_second"], 0), f"environment steps per second, {where}"),
        Tile("determinism", word, str(determinism).removeprefix("not checked: "), css),
    ]


def _policies(provenance: Mapping[str, Any]) -> str:
    identity = provenance.get("identity")
    several = identity.get("policies") if isinstance(identity, Mapping) else None
    if not isinstance(several, Mapping):
        return policy_name(provenance)
    named = {key: part.get("policy") if isinstance(part, Mapping) else part for key, part in several.items()}
    return ", ".join(f"{key}: {policy}" for key, policy in named.items())


def _marks(result: EvalResult) -> list[tuple[str, str, float]]:
    interval = result.interval
    level = f"{100 * interval.confidence:g} % interval of the mean"
    ends = [("end", level, end) for end in (interval.low, interval.high)] if interval.exists else []
    return [("mean", "mean", result.mean_return), ("median", "median", result.aggregates.median), *ends]


def _numbers(result: EvalResult) -> tuple[Table, Table]:
    """Return the numbers of the returns, half of them in each table."""
    numbers, shown = result.aggregates, result.metrics
    places = decimals(numbers.sem, numbers.mean)
    named = {
        "median": numbers.median, "interquartile mean": numbers.iqm, "standard deviation": numbers.std,
        "standard error": numbers.sem, "minimum": numbers.minimum, "5 % quantile": numbers.q05,
        "25 % quantile": numbers.q25, "75 % quantile": numbers.q75, "95 % quantile": numbers.q95,
        "maximum": numbers.maximum, "mean of the worst 10 %": numbers.cvar10,
    }  # fmt: skip
    gamma = lookup(result.provenance, "identity", "gamma")
    if gamma not in ("", "1.0"):
        named[f"discounted by {gamma}"] = shown["discounted_return_mean"]
    rows = [(name, number(value, places)) for name, value in named.items()]
    rows += ends_of(shown).items()
    half = len(rows) // 2
    return Table((), rows[:half]), Table((), rows[half:])


# Faults and time


def _fault_kinds(faults: Iterable[Fault]) -> list[FaultKind]:
    kinds: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        kinds.setdefault((fault.error_type, fault.cause, fault.phase), []).append(fault)
    found = [
        FaultKind(f"{name}: {cause} failed in {phase}", len(own), _listed({fault.index for fault in own}), own[0])
        for (name, cause, phase), own in kinds.items()
    ]
    return sorted(found, key=lambda kind: (-kind.count, kind.name))


def _listed(indices: set[int]) -> str:
    first = ", ".join(map(str, sorted(indices)[:12]))
    return f"episodes {first}, and {len(indices) - 12:,} more" if len(indices) > 12 else f"episodes {first}"


def _fault_note(result: EvalResult, kinds: Sequence[FaultKind]) -> str:
    if not result.faults:
        return "No environment, policy or runner failed."
    more = f" The {_MOST_KINDS} most frequent of {len(kinds)} kinds are shown." if len(kinds) > _MOST_KINDS else ""
    had_one = np.isin(np.arange(len(result.plan)), list(result.table.faults))
    ends = result.table.rows["outcome"][had_one].tolist()
    told = ", ".join(f"{ends.count(outcome):,} {fate}" for outcome, fate in _FATES.items() if outcome in ends)
    return f"Attempts that ended in a fault: {len(result.faults):,}. Their episodes: {told}.{more}"


def _time_table(result: EvalResult) -> Table:
    timing = result.timing
    spent = {
        "environment: step": ("step", timing.step_seconds),
        "policy: inference": ("inference", timing.inference_seconds),
        "environment: reset": ("reset", timing.reset_seconds),
    }
    rows = [(name, number(seconds), percent(timing.shares.get(key, 0.0))) for name, (key, seconds) in spent.items()]
    rows.append(("everything else", "", percent(timing.shares.get("other", 0.0))))
    wall = f"{number(timing.wall_seconds)} s of wall time, {timing.env_steps:,} environment steps"
    return Table(("where", "seconds, all runners", "share"), rows, wall)


# Episodes


def _static_rows(result: EvalResult) -> Table:
    shown = shown_rows(result)[:STATIC_ROWS]
    records = [result.table.record(int(index)) for index in shown]
    seconds = episode_seconds(result.table.rows[shown]).tolist()
    rows = [_episode_row(record, spent) for record, spent in zip(records, seconds, strict=True)]
    if all(record.success_at_end is None for record in records):
        for row in rows:
            del row["success"]
    return Table(tuple(rows[0]) if rows else (), [list(row.values()) for row in rows])


def _episode_row(record: EpisodeRecord, seconds: float) -> dict[str, str]:
    """Return cells by heading."""
    return {
        "episode": str(record.index),
        "seed": str(record.seed),
        "return": _seven(record.episode_return),
        "length": str(record.length),
        "end": "failed" if record.outcome == "failed" else "terminated" if record.terminated else "truncated",
        "success": {None: "", True: "yes", False: "no"}[record.success_at_end],
        "attempts": str(record.attempts),
        "runner": "" if record.runner < 0 else str(record.runner),
        "seconds": f"{seconds:.3g}",
    }


def _seven(value: float) -> str:
    return "" if math.isnan(value) else f"{float(f'{value:.7g}') + 0.0!r}".removesuffix(".0")


# Provenance


def _provenance(provenance: Mapping[str, Any]) -> Table:
    """Return the leaves of a provenance without secrets, the items of a list in one row."""
    told: dict[str, list[str]] = {}
    for part in sorted(set(provenance) - set(_HIDDEN)):
        for key, value in leaves(redact(provenance[part], part), part):
            told.setdefault(key, []).append("none" if value is None else str(value))
    rows = [(key, _cut(redact_text(" ".join(values)))) for key, values in list(told.items())[:_MOST_LEAVES]]
    more = f"{len(told) - _MOST_LEAVES:,} more are in the result's files" if len(told) > _MOST_LEAVES else ""
    return Table(("what", "value"), rows, more)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

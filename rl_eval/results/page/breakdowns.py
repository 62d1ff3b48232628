"""Breakdowns of a result in a report: by agent, by policy, and by a task or level that environments put in ``info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.results.agents import policy_names
from rl_eval.results.report.metrics import success_counts
from rl_eval.results.report.table import number, percent
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import FEW, Interval, return_interval, success_interval

__all__ = ["Table", "agent_tables", "group_tables"]

_MOST_AGENTS: Final = 50
_MOST_GROUPS: Final = 50
"""Different values of an info scalar; one that has more is a measurement and not the name of a task."""
_MOST_TABLES: Final = 8


@dataclass(frozen=True, slots=True)
class Table:
    """A small table of text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def agent_tables(result: EvalResult) -> list[Table]:
    """Return a table of the agents and one of their policies; none for episodes of a single agent."""
    if not len(result.agents):
        return []
    rows = result.agents[np.isin(result.agents["index"], result.counted_rows["index"])]
    agents, policies = agents_in(result.table.info_keys)[:_MOST_AGENTS], policy_names(result.provenance)
    headings = ("agent", "episodes", "mean return", _level(result), "mean length", "won", "drawn", "lost")
    return [
        Table(headings, [_agent_row(result, agent, rows[rows["agent"] == agent]) for agent in agents]),
        Table(
            ("policy", "mean return", "team return", "per capita", "won", "drawn", "lost"),
            [_policy_row(result.metrics, name) for name in policies[:_MOST_AGENTS]],
        ),
    ]


def group_tables(result: EvalResult) -> list[Table]:
    """Return a table for each info scalar that divides the counted episodes into a few groups by whole numbers."""
    rows, infos, keys = result.counted_rows, result.table.infos[result.counted], result.table.info_keys
    of_agents = set(agent_columns(agents_in(keys)))
    divided = ((key, column) for key, column in zip(keys, infos.T, strict=True) if key not in of_agents)
    found = ((key, column, groups) for key, column in divided if (groups := _groups(column)))
    tables = []
    for key, column, groups in islice(found, _MOST_TABLES):
        headings = (key, "episodes", "mean return", _level(result), "mean length", "success", _level(result))
        own = [(f"{value:.0f}", *_group_row(rows[column == value], result.confidence)) for value in groups]
        few = any(np.count_nonzero(column == value) < FEW for value in groups)
        caption = f"Of fewer than {FEW} episodes an interval is too narrow if returns are skewed." if few else ""
        tables.append(Table(headings, own, caption))
    return tables


def _groups(column: npt.NDArray[np.float64]) -> list[float]:
    """Return the different values of a column if they are a few whole numbers, in ascending order."""
    values = np.unique(column[~np.isnan(column)])
    whole = (np.abs(values) < 1e6) & (values == np.rint(values))
    return values.tolist() if 2 <= len(values) <= _MOST_GROUPS and whole.all() else []


def _group_row(own: npt.NDArray[np.void], confidence: float) -> list[str]:
    successes, reporting = success_counts(own["success_at_end"])
    success = success_interval(successes, reporting, confidence, num_unknown=len(own) - reporting)
    return [
        f"{len(own):,}",
        number(exact_mean(own["episode_return"])),
        _ends(return_interval(own["episode_return"], confidence)),
        number(exact_mean(own["length"]), 1),
        percent(successes / len(own)) if reporting else "n/a",
        f"{percent(success.low)} to {percent(success.high)}" if success.exists else "n/a",
    ]


def _agent_row(result: EvalResult, agent: str, own: Any) -> list[str]:
    shares = [percent(float(np.mean(own["outcome"] == code))) if len(own) else "n/a" for code in (1, 0, -1)]
    means = [number(result.metrics[f"agent_{what}_mean/{agent}"], 3) for what in ("episode_returns", "episode_len")]
    ends = _ends(return_interval(own["return"], result.confidence), 3)
    return [agent, f"{len(own):,}", means[0], ends, means[1], *shares]


def _policy_row(metrics: Mapping[str, float], name: str) -> list[str]:
    means = ("module_episode_returns_mean", "policy_team_return_mean", "policy_per_capita_return_mean")
    return [
        name,
        *(number(metrics[f"{mean}/{name}"], 3) for mean in means),
        *(percent(metrics[f"{word}_rate/{name}"]) for word in ("win", "draw", "loss")),
    ]


def _level(result: EvalResult) -> str:
    return f"{100 * result.confidence:g} % interval"


def _ends(interval: Interval, places: int = 2) -> str:
    if not interval.exists:
        return interval.note
    return f"{number(interval.low, places)} to {number(interval.high, places)}"

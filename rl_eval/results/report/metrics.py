"""Metrics of a result: the names of its numbers, and the notes that a reader needs with them.

Names follow RLlib where it has one, so that dashboards and stopping rules written for it keep working.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.results.agents import agent_metrics, policy_names
from rl_eval.results.stats.aggregate import aggregate, exact_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_eval.results.result import EvalResult

__all__ = ["episode_seconds", "flat_metrics", "notes", "success_counts", "value_notes"]


def flat_metrics(result: EvalResult) -> dict[str, float]:
    """Return every number under its name; all keys are always there, NaN where undefined."""
    return {
        **_return_metrics(result),
        **_episode_metrics(result.counted_rows),
        **_run_metrics(result),
        **_agent_metrics(result),
    }


def success_counts(column: npt.NDArray[np.int8]) -> tuple[int, int]:
    """Return how many episodes were successful, and how many report success at all."""
    return int((column > 0).sum()), int((column >= 0).sum())


def notes(result: EvalResult) -> list[str]:
    """Return what a reader must know before using the numbers; empty for an ordinary result."""
    return [*_scope_notes(result), *value_notes(result)]


def _scope_notes(result: EvalResult) -> Iterator[str]:
    scope, counted, finished = int(result.scope.sum()), result.aggregates.count, len(result.episodes)
    if result.stopped_early:
        yield (
            f"stopped early: the numbers go over episodes 0 to {scope - 1} of {len(result.plan)} planned"
            if scope
            else "stopped early, before episode 0 finished: there are no numbers"
        )
        if finished > scope:
            yield f"finished after a gap in the plan, and not counted: {finished - scope}"
    if scope and not counted:
        yield "no episode completed: there are no numbers"
    elif counted < scope:
        yield f"failed: {scope - counted} of {scope}; the numbers go over the {counted} that completed"


def value_notes(result: EvalResult) -> Iterator[str]:
    """Yield the notes on the numbers themselves, whichever episodes they go over."""
    if result.num_outside_bounds:
        yield f"returns outside return_bounds {result.return_bounds}: {result.num_outside_bounds}"
    _, reporting = success_counts(result.counted_rows["success_at_end"])
    silent = len(result.counted_rows) - reporting
    if reporting and silent:
        yield f"completed without reporting success, counted as not successful: {silent}"
    agents = agents_in(result.table.info_keys)
    for key in _unreported_info_keys(result):
        agent = key.removeprefix("return/")
        if agent in agents:
            yield f"agent {agent!r} appeared in no completed episode"
        elif key not in agent_columns(agents):
            yield f"no completed episode has a number for info[{key!r}]: evaluation.info_keys may be misspelt"
    if result.audit_mismatches:
        shown = ", ".join(map(str, result.audit_mismatches[:5])) + (", ..." if len(result.audit_mismatches) > 5 else "")
        yield f"not deterministic: two runs of the same episode differ, for episodes {shown}"
    if result.determinism.passed is False:
        advice = f"; {result.determinism.advice}" if result.determinism.advice else ""
        yield f"{result.determinism}, so the numbers depend on the layout{advice}"
    told = result.provenance.get("notes")
    yield from map(str, told if isinstance(told, list) else ())


def _agent_metrics(result: EvalResult) -> dict[str, float]:
    counted = result.agents[np.isin(result.agents["index"], result.counted_rows["index"])]
    return agent_metrics(counted, result.table.info_keys, policy_names(result.provenance))


def _unreported_info_keys(result: EvalResult) -> list[str]:
    table = result.table
    reported = ~np.isnan(table.infos[table.completed])
    return [key for key, column in zip(table.info_keys, reported.T, strict=True) if len(column) and not column.any()]


def episode_seconds(rows: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Return how long each episode took, in reset, step and inference together, shape (n,)."""
    spent = [rows[f"{name}_seconds"].astype(np.float64) for name in ("reset", "step", "inference")]
    return np.asarray(spent[0] + spent[1] + spent[2])


def _return_metrics(result: EvalResult) -> dict[str, float]:
    numbers, interval, rows = result.aggregates, result.interval, result.counted_rows
    return {
        "episode_return_mean": numbers.mean,
        "episode_return_min": numbers.minimum,
        "episode_return_max": numbers.maximum,
        "episode_return_std": numbers.std,
        "episode_return_sem": numbers.sem,
        "episode_return_median": numbers.median,
        "episode_return_iqm": numbers.iqm,
        "episode_return_q05": numbers.q05,
        "episode_return_q25": numbers.q25,
        "episode_return_q75": numbers.q75,
        "episode_return_q95": numbers.q95,
        "episode_return_cvar10": numbers.cvar10,
        "episode_return_ci_low": interval.low,
        "episode_return_ci_high": interval.high,
        "discounted_return_mean": exact_mean(rows["discounted_return"]),
    }


def _episode_metrics(rows: npt.NDArray[np.void]) -> dict[str, float]:
    lengths = aggregate(rows["length"])
    seconds = episode_seconds(rows)
    successes_once, reporting = success_counts(rows["success_once"])
    return {
        "episode_len_mean": lengths.mean,
        "episode_len_min": lengths.minimum,
        "episode_len_max": lengths.maximum,
        "episode_duration_sec_mean": exact_mean(seconds),
        "terminated_rate": exact_mean(rows["terminated"]),
        "truncated_rate": exact_mean(rows["truncated"]),
        "success_once_rate": successes_once / len(rows) if reporting else math.nan,
        "num_episodes": len(rows),
        "weights_version": int(rows["weights_version"][0]) if len(rows) else math.nan,
    }


def _run_metrics(result: EvalResult) -> dict[str, float]:
    timing, rate, interval = result.timing, result.success_rate, result.success_interval
    return {
        "success_rate": math.nan if rate is None else rate,
        "success_ci_low": interval.low if interval else math.nan,
        "success_ci_high": interval.high if interval else math.nan,
        "num_failed_episodes": result.num_failed,
        "num_retried_episodes": result.num_retried,
        "num_faults": len(result.faults),
        "num_determinism_checked": result.determinism.checked,
        "num_determinism_mismatched": len(result.determinism.mismatched) + len(result.determinism.failed),
        "num_env_steps_sampled": timing.env_steps,
        "env_steps_per_second": timing.env_steps / timing.wall_seconds if timing.wall_seconds > 0 else math.nan,
        "wall_seconds": timing.wall_seconds,
        "reset_seconds": timing.reset_seconds,
        "step_seconds": timing.step_seconds,
        "inference_seconds": timing.inference_seconds,
    }

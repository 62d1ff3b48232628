"""What becomes of an evaluation in which one fault strikes: one word per contender and fault.

Every cell is a process of its own. Its outcome is named by comparing it with the contender's undisturbed
*twin*, the same evaluation in which nothing strikes: what takes much longer than that hangs.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks import strike
from benchmarks.runner import Cell, Interpreters, Row, run_cell

__all__ = ["SAME", "UNDISTURBED", "measure", "verdict"]

UNDISTURBED: Final = "undisturbed"
SAME: Final = "same result"
"""The verdict that one hopes for; an evaluation that goes on to hang has more to it."""
_EPISODES: Final = 40
_DEADLINE_S: Final = 2.0
_SAMPLE_TIMEOUT_S: Final = 8.0
_TWIN_LIMIT_S: Final = 300.0
_QUICK: Final = ("raise", "SIGKILL", "hang in reset")


def _contenders(runners: int) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Label, script, settings, and whether it needs the peers' interpreter."""
    ours = {"runners": runners, "deadline_s": _DEADLINE_S}
    yield (
        f"rl_eval single_agent, {runners} runners",
        "rl_eval_faults",
        {**ours, "runner": "single_agent", "envs": 1},
        False,
    )
    yield f"rl_eval vector, {runners} runners x 4", "rl_eval_faults", {**ours, "runner": "vector", "envs": 4}, False
    rllib = {"runners": runners, "envs": 4, "sample_timeout_s": _SAMPLE_TIMEOUT_S, "seed": 0}
    yield f"RLlib Algorithm.evaluate, {runners} runners x 4", "rllib", rllib, True
    yield "TorchRL Evaluator, process, SerialEnv(4)", "torchrl_evaluator", {"envs": 4}, True
    yield f"TorchRL RayEvalWorker, {runners} workers", "torchrl_worker", {"runners": runners, "envs": 1}, True
    yield "SB3 evaluate_policy, SubprocVecEnv(4)", "sb3", {"envs": 4}, True
    yield "gymnasium AsyncVectorEnv(4) loop", "async_vector", {"envs": 4}, True


def measure(
    interpreters: Interpreters,
    runners: int,
    patience_s: float,
    *,
    only: str,
    quick: bool,
    progress: Callable[[str], None],
) -> list[Row]:
    """One row per contender and fault, the undisturbed twin first.

    Args:
        interpreters: Where rl_eval and its peers are.
        runners: Ray actors of the contenders that have any.
        patience_s: A cell that takes this many seconds more than its twin hangs.
        only: Pattern of the contenders' labels.
        quick: Few faults instead of all.
        progress: Told what runs.
    """
    rows = []
    for label, script, settings, peers in _contenders(runners):
        if not re.search(only, label):
            continue
        twin = _cell(Cell(label, script, settings, UNDISTURBED, peers, _TWIN_LIMIT_S), interpreters)
        rows.append(twin)
        for fault in _QUICK if quick else strike.FAULTS:
            limit_s = patience_s + twin.get("wall_seconds", 0.0)
            row = _cell(Cell(label, script, settings, fault, peers, limit_s), interpreters)
            rows.append(row)
            progress(f"{label}: {fault}: {verdict(row, twin)}")
    return rows


def _cell(cell: Cell, interpreters: Interpreters) -> Row:
    with tempfile.TemporaryDirectory(prefix="rlb-strike-") as folder:
        params = {
            **cell.params,
            "scenario": "faults",
            "episodes": _EPISODES,
            "strike": strike.fault_of(cell.column, folder),
        }
        row = run_cell(replace(cell, params=params), interpreters)
        struck = strike.struck(Path(folder)) is not None
    return {**row, "label": cell.label, "column": cell.column, "peers": cell.peers, "struck": struck, "params": params}


def verdict(row: Row, twin: Row) -> str:
    """Name the outcome of a cell."""
    if row["status"] == "not installed":
        return "not installed"
    if row["column"] != UNDISTURBED and not row["struck"]:
        return f"not struck ({row['status']})"
    if row["status"] == "ok":
        return _result(row, twin)
    printed = row.get("printed", {})
    before = f"{_result(printed, twin)}, then " if printed.get("status") == "ok" else ""
    if printed.get("status") == "error":
        before = f"{_raised(printed)}, then "
    if row["status"] == "timeout":
        return f"{before}hangs"
    return f"{before}{_raised(row)}" if row["status"] == "error" else f"{before}dies"


def _raised(row: Row) -> str:
    return f"raises {row['error'].split(':')[0]}"


def _result(row: Row, twin: Row) -> str:
    if row.get("says", "complete") != "complete":
        return f"{row['says']}, says so"
    expected = twin.get("printed", twin)
    if "episodes" not in expected:
        return "complete, but its twin was not"
    same = all(_equal(row[key], expected.get(key)) for key in ("episodes", "mean_return", "fingerprint") if key in row)
    if same:
        return SAME
    over = "" if row["episodes"] == expected["episodes"] else f" over {row['episodes']} episodes"
    return f"another result: mean {row['mean_return']:.3f}{over}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)

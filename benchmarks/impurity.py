"""Whether an environment that is not a function of its seed gives the right numbers, or a result that says so.

Each kind is evaluated in one slot and in eight, and each setting that a result advises is tried. Then environments that
are functions of their seeds are evaluated, whose results must say nothing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.contenders.impurity import KINDS
from benchmarks.runner import Cell, Interpreters, Row, run_cell

__all__ = ["FAMILIES", "RARE", "measure", "verdict"]

EPISODES: Final = 50
LANES: Final = (1, 8)
RARE: Final = "numpy's generator, in a tenth of the episodes"
"""Listed, but not counted: such draws may be missed."""
FAMILIES: Final = {"gymnasium": 60, "ALE": 30, "PettingZoo": 30}
"""Environments that are functions of their seeds, and the steps of their episodes."""
_FIRST_PORT: Final = 23_000


def measure(*, only: str, quick: bool, timeout_s: float, progress: Callable[[str], None]) -> list[Row]:
    """One row per kind and layout, and one per family.

    Args:
        only: Pattern of kinds and families.
        quick: Few kinds, without the families.
        timeout_s: Limit of one evaluation; a family has ten times as long.
        progress: Told what was found.
    """
    kinds = [name for name in KINDS if re.search(only, name)][: 2 if quick else None]
    rows = []
    for place, name in enumerate(kinds):
        for lanes in LANES:
            port = _FIRST_PORT + 20 * place
            row = _evaluated(name, lanes, port, [], timeout_s)
            row["followed"] = [_evaluated(name, lanes, port, [one], timeout_s) for one in row.get("advised", [])]
            rows.append({"label": name, "lanes": lanes, "truth": KINDS[name].truth, **row})
            progress(f"{name}, {lanes}: {verdict(rows[-1])}")
    for family, steps in {} if quick else FAMILIES.items():
        if re.search(only, family):
            params = {"scenario": "pure", "family": family, "steps": steps}
            rows.append({"label": family, **_run(params, 10 * timeout_s)})
            progress(f"{family}: {rows[-1].get('alarms', rows[-1])}")
    return rows


def _evaluated(name: str, lanes: int, port: int, advised: list[Any], timeout_s: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        params = {"kind": name, "lanes": lanes, "folder": folder, "port": port, "advised": advised}
        return _run({"scenario": "kind", "episodes": EPISODES, **params}, timeout_s)


def _run(params: Row, timeout_s: float) -> Row:
    cell = Cell(params["scenario"], "impurity", params, timeout_s=timeout_s)
    return run_cell(cell, Interpreters(Path(sys.executable)))


def verdict(row: Row) -> str:
    """Name the outcome: right, said, or a defect in capitals."""
    if row["status"] not in ("complete", "partial", "failed", "ok"):
        return f"DIED: {row.get('error', '')}"
    if any(not _cured(row, one) for one in row["followed"]):
        return "WRONG ADVICE"
    if "refused" in row:
        return "refused"
    if row["right"] and not row["faults"]:
        return "FALSE ALARM" if row["passed"] is False else "right"
    return "flagged" if row["passed"] is False or row["noted"] else "SILENT"


def _cured(row: Row, followed: Row) -> bool:
    """Whether a setting that was advised gives the right numbers."""
    return bool(row["truth"] and followed.get("right") and followed["passed"] is not False)

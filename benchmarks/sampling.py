"""Sampling side by side: frames per second in the caller's hands, what recording costs, and memory over millions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from benchmarks.runner import Cell, Row

__all__ = ["cells", "memory", "tables"]

_SLOTS: Final = 64
_KINDS: Final = {"deterministic": {}, "drawn, with log-probabilities": {"drawn": True}}
_SHORT: Final = {"deterministic, 9 steps": {"episode_steps": 9, "episodes": 1024}}


def cells(frames: int, rounds: int) -> list[Cell]:
    """Return the contenders at one and at two runners, and the work with and without recording."""
    names = [
        ("rl_eval group.sample", "ours", _SLOTS),
        ("TorchRL RayCollector, SerialEnv(16)", "torchrl", 16),
        ("RLlib EnvRunnerGroup", "rllib", _SLOTS),
    ]
    found = [
        _cell(label, scenario, f"{runners} runners", {"frames": frames, "runners": runners, "envs": envs})
        for runners in (1, 2)
        for label, scenario, envs in names
    ]
    for label, kind in (_KINDS | _SHORT).items():
        work = {"episodes": _SLOTS, "drawn": False, "envs": _SLOTS, "rounds": rounds, **kind}
        found.append(_cell(label, "recording", "recording", work))
    return found


def memory(frames: int) -> list[Cell]:
    """Return the stream of frames whose memory is watched."""
    work = {"frames": frames, "runners": 1, "envs": _SLOTS}
    return [_cell("iter_samples", "memory", "memory", work, timeout_s=3600.0)]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of rates, one of the cost of recording, and one of memory, of what was measured."""
    rates = [row for row in rows if row["column"].endswith("runners")]
    recorded = [row for row in rows if row["column"] == "recording"]
    streamed = [row for row in rows if row["column"] == "memory"]
    made = ((_rates, rates), (_costs, recorded), (_memory, streamed))
    return [table(part) for table, part in made if part]


def _rates(rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(row["column"] for row in rows))
    title = "sampling: CartPole frames per second, least to most of the turns (and per CPU second of all processes)"
    table = _table(title, "contender", *columns)
    for label in dict.fromkeys(row["label"] for row in rows):
        found = {row["column"]: row for row in rows if row["label"] == label}
        table.add_row(label, *(_rate(found[column]) if column in found else "" for column in columns))
    return table


def _rate(row: Row) -> str:
    if row["status"] != "ok":
        return _failure(row)
    turns = [turn["steps_per_second"] for turn in row["turns"]]
    return (
        f"{row['steps_per_second']:,.0f}, {min(turns):,.0f} to {max(turns):,.0f} ({row['steps_per_cpu_second']:,.0f})"
    )


def _costs(rows: Sequence[Row]) -> Table:
    title = f"recording: {_SLOTS} slots, frames per CPU second"
    table = _table(title, "policy", "unrecorded", "recorded", "cost", "least to most")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["label"], _failure(row))
            continue
        costs = [turn["cost"] for turn in row["turns"]]
        rates = [statistics.median(turn["rates"][name] for turn in row["turns"]) for name in ("unrecorded", "recorded")]
        spread = f"{min(costs):.1%} to {max(costs):.1%}"
        table.add_row(row["label"], *(f"{rate:,.0f}" for rate in rates), f"{row['cost']:.1%}", spread)
    return table


def _memory(rows: Sequence[Row]) -> Table:
    table = _table("memory: resident megabytes", "frames", "driver", "runners")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(_failure(row))
        for frames, driver, runners in row.get("resident", ()):
            table.add_row(f"{frames:,}", f"{driver / 1e6:,.1f}", f"{runners / 1e6:,.1f}")
    return table


def _failure(row: Row) -> str:
    return f"{row['status']}: {row.get('error', '')}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _cell(label: str, scenario: str, column: str, work: dict[str, object], timeout_s: float = 600.0) -> Cell:
    return Cell(label, "sampling", {"scenario": scenario, **work}, column, peers=True, timeout_s=timeout_s)

"""What evaluation log, flight recorder and deadlines cost a run in which nothing happens.

The contenders are up at the same time, each on its own Ray cluster, and evaluate in turns: a slow minute of the
machine meets all of them, and each turn has a ratio of its own. Beside today's code, with and without its
safeguards, runs the code of a commit that had none.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks.runner import Launched, Row, launched
from benchmarks.scenarios import REPO

__all__ = ["BEFORE", "LANES", "measure"]

BEFORE: Final = "eb97ee5"
"""The last commit without log, recorder and watchdog."""

LANES: Final = 64
_DEADLINE_S: Final = 30.0
_START_S: Final = 180.0
_TURN_S: Final = 300.0
_SAFE: Final[dict[str, dict[str, Any]]] = {
    "no run folder, no deadlines": {},
    "deadlines": {"deadline_s": _DEADLINE_S},
    "run folder and deadlines": {"deadline_s": _DEADLINE_S, "log": True},
}


def measure(
    turns: int, runners: int, episodes: int, episode_steps: int | None, before: str, progress: Callable[[str], None]
) -> list[Row]:
    """One row per contender: its speed in every turn, and that as a share of the first contender's in the same turn.

    Args:
        turns: Evaluations of each contender.
        runners: Ray actors of each contender.
        episodes: Episodes per evaluation.
        episode_steps: Length of an episode; None for CartPole's 500.
        before: Commit whose code is the reference; empty, or not in a git checkout: the run without safeguards is.
        progress: Told what runs.
    """
    params = {"scenario": "throughput", "runners": runners, "envs": LANES, "episodes": episodes}
    params["episode_steps"] = episode_steps
    with contextlib.ExitStack() as stack:
        code = _archived(before, stack.enter_context(tempfile.TemporaryDirectory(prefix="rlb-before-")))
        contenders = {f"commit {before}": stack.enter_context(_contender(params, code))} if code else {}
        for label, settings in _SAFE.items():
            contenders[label] = stack.enter_context(_contender({**params, **settings}))
        for label, contender in contenders.items():
            progress(f"start: {label}")
            _answer(contender, 1, _START_S)
        found: dict[str, list[Row]] = {label: [] for label in contenders}
        for turn in range(turns):
            progress(f"turn {turn + 1} of {turns}")
            for label in _rotated(list(contenders), turn):
                found[label].append(_turn(contenders[label], turn))
    column = f"{episode_steps or 500}-step episodes"
    return [_row(label, column, rows, next(iter(found.values()))) for label, rows in found.items()]


def _archived(commit: str, folder: str) -> str:
    """Unpack the package as it was; empty if there is no such commit."""
    if not commit:
        return ""
    packed = subprocess.run(["git", "-C", str(REPO), "archive", commit, "rl_eval"], capture_output=True, check=False)
    if packed.returncode:
        return ""
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@contextlib.contextmanager
def _contender(params: dict[str, Any], path: str = "") -> Iterator[Launched]:
    command = [sys.executable, "-m", "benchmarks.contenders.rl_eval_turns", json.dumps(params)]
    with launched(command, path) as started:
        yield started


def _turn(contender: Launched, turn: int) -> Row:
    assert contender.process.stdin is not None
    contender.process.stdin.write(b"\n")
    contender.process.stdin.flush()
    return _answer(contender, turn + 2, _TURN_S)


def _answer(contender: Launched, count: int, timeout_s: float) -> Row:
    """The ``count``-th line of a contender, once it is there.

    Raises:
        RuntimeError: It ended, or took too long.
    """
    deadline = time.monotonic() + timeout_s
    while len(rows := contender.rows()) < count:
        if contender.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{contender.process.args!r} gives no answer: {contender.stderr()[-2000:]}")
        time.sleep(0.02)
    if rows[count - 1].get("status", "ok") != "ok":
        raise RuntimeError(f"{contender.process.args!r}: {rows[count - 1]['error']}")
    return rows[count - 1]


def _rotated(labels: Sequence[str], turn: int) -> list[str]:
    start = turn % len(labels)
    return [*labels[start:], *labels[:start]]


def _row(label: str, column: str, rows: Sequence[Row], reference: Sequence[Row]) -> Row:
    speeds, ratios = _compared("steps_per_second", rows, reference)
    cpu, cpu_ratios = _compared("cpu_seconds", rows, reference)
    return {
        "label": label,
        "column": column,
        "status": "ok",
        "steps_per_second": statistics.median(speeds),
        "speeds": speeds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_seconds": cpu,
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
        "episodes": rows[0]["episodes"],
        "same": all(row["fingerprint"] == reference[0]["fingerprint"] for row in rows),
    }


def _compared(key: str, rows: Sequence[Row], reference: Sequence[Row]) -> tuple[list[float], list[float]]:
    """The values of all turns, and as multiples of the reference's in the same turn."""
    values = [row[key] for row in rows]
    return values, [value / other[key] for value, other in zip(values, reference, strict=True)]

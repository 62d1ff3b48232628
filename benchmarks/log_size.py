"""What a long evaluation log costs: one million rows written, continued, read and summarised, in time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from rl_eval.log import EvaluationLog, Manifest, read_log
from rl_eval.records.episode import ROW, Batch, EpisodeTable, Outcome
from rl_eval.results.stats.aggregate import aggregate
from rl_eval.scheduling.plan import EpisodePlan

__all__ = ["measure"]

_REPORT: Final = 50
"""Rows of a batch: what one report of a fast runner holds."""
_BATCHES_PER_FLUSH: Final = 200


def measure(num_episodes: int = 1_000_000) -> dict[str, Any]:
    """Write a log in one process, then continue it and summarise it in one each, and return what they took."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder) / "run"
        measured = {step: _in_process(step, log_dir, num_episodes) for step in ("write", "continue", "summarise")}
        files = list((log_dir / "segments").iterdir())
        return {
            "num_episodes": num_episodes,
            "segments": len(files),
            "bytes_per_episode": sum(path.stat().st_size for path in files) / num_episodes,
            **{f"{step}_{name}": value for step, taken in measured.items() for name, value in taken.items()},
        }


def _in_process(step: str, log_dir: Path, num_episodes: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.log_size", step, str(log_dir), str(num_episodes)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    taken: dict[str, float] = json.loads(ran.stdout)
    return taken


def _write(log_dir: Path, plan: EpisodePlan) -> None:
    log = EvaluationLog.open(log_dir)
    log.begin(_manifest(plan))
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, len(plan), _REPORT)):
        index = np.arange(start, min(start + _REPORT, len(plan)))
        rows = np.zeros(len(index), ROW)
        rows["index"], rows["seed"], rows["outcome"], rows["attempts"] = index, plan.seeds[index], Outcome.COMPLETED, 1
        rows["episode_return"], rows["length"] = rng.normal(100, 20, len(index)), rng.integers(1, 500, len(index))
        rows["step_seconds"] = rng.random(len(index))
        log.append(Batch(rows, np.zeros((len(index), 0)), (), {"env_steps": float(rows["length"].sum())}))
        if number % _BATCHES_PER_FLUSH == 0:
            log.flush(60)
            log.poll()
    log.flush(60)
    log.close()


def _continue(log_dir: Path, plan: EpisodePlan) -> None:
    log = EvaluationLog.open(log_dir)
    contents = log.begin(_manifest(plan))
    log.close()
    assert len(contents.rows) == len(plan)


def _summarise(log_dir: Path, plan: EpisodePlan) -> None:
    contents = read_log(log_dir)
    table = EpisodeTable(len(plan))
    table.fill(contents.rows)
    assert table.filled.all()
    table.fingerprint()
    aggregate(table.rows["episode_return"])


def _manifest(plan: EpisodePlan) -> Manifest:
    return Manifest(len(plan), plan.seed, "", {}, {"version": 0, "digest": None}, (), {}, {})


def _main(step: str, log_dir: str, num_episodes: str) -> None:
    steps: dict[str, Callable[[Path, EpisodePlan], None]] = {
        "write": _write,
        "continue": _continue,
        "summarise": _summarise,
    }
    plan = EpisodePlan(int(num_episodes), 0)
    assert len(plan.seeds) == len(plan)
    before, started = _megabytes(), time.perf_counter()
    steps[step](Path(log_dir), plan)
    seconds, cpu = time.perf_counter() - started, sum(os.times()[:2])
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_mb": _megabytes(), "peak_mb_before": before}))


def _megabytes() -> float:
    """Return the peak of this process alone: what ``getrusage`` tells begins with that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(measure(), indent=2))
    else:
        _main(*sys.argv[1:])

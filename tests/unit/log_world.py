"""Episodes, faults and manifests for tests of the evaluation log: a row is a function of its index, as in reality."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rl_eval.log import EvaluationLog, Manifest, read_log
from rl_eval.records.episode import ROW, Batch, Fault, Outcome

ROOT = Path(__file__).parents[2]
NUM_EPISODES = 1000


def make_rows(indices: Iterable[int]):
    """Return finished rows; every seventh episode failed."""
    index = np.array(list(indices), dtype=np.int64)
    rows = np.zeros(len(index), ROW)
    failed = index % 7 == 3
    rows["index"], rows["seed"], rows["length"] = index, index * 31 + 5, np.where(failed, 0, index % 50 + 1)
    rows["episode_return"] = np.where(failed, np.nan, np.sqrt(index + 0.1))
    rows["discounted_return"] = rows["episode_return"] / 3
    rows["terminated"], rows["truncated"] = ~failed & (index % 2 == 0), ~failed & (index % 2 == 1)
    rows["truncated_by"] = np.where(rows["truncated"], 1 + index % 4 // 2, 0)
    rows["success_once"], rows["success_at_end"] = index % 3 - 1, (index + 1) % 3 - 1
    rows["outcome"] = np.where(failed, Outcome.FAILED, Outcome.COMPLETED)
    rows["attempts"], rows["runner"], rows["weights_version"] = 1 + index % 3, index % 4, 9
    rows["reset_seconds"], rows["step_seconds"], rows["inference_seconds"] = 0.1, 0.2, 0.3
    return rows


def make_infos(indices: Iterable[int]):
    """Return info scalars of two keys; the second is reported by every other episode."""
    index = np.array(list(indices), dtype=np.float64)
    return np.stack([index / 3, np.where(index % 2, np.nan, index)], axis=1)


def make_fault(index: int, **changes: Any) -> Fault:
    """Return a fault with every field set."""
    fields = {
        "index": index, "seed": 5, "attempt": 1, "cause": "env", "phase": "step", "step": 12,
        "error_type": "RuntimeError", "message": "bad\nthing", "traceback": "line\nline", "runner": 1,
        "node": "host", "seconds": 0.5, "charged": True,
    }  # fmt: skip
    return Fault(**(fields | changes))


def make_batch(indices: Iterable[int], faults: tuple[Fault, ...] = ()) -> Batch:
    """Return a batch of some episodes."""
    indices = list(indices)
    totals = {"env_steps": float(len(indices)), "wall_seconds": 0.5}
    return Batch(make_rows(indices), make_infos(indices), faults, totals, {"isa": "AVX2"})


def make_manifest(**changes: Any) -> Manifest:
    """Return a manifest of the evaluation that all these rows belong to."""
    fields: dict[str, Any] = {
        "num_episodes": NUM_EPISODES, "seed": 0, "plan_fingerprint": "ab12",
        "identity": {"environment": {"env": "CartPole-v1", "env_kwargs": {"g": 9.8}}, "policy": "pkg:make"},
        "weights": {"version": 9, "digest": "0123"}, "info_keys": ("height", "x"),
        "config": {"runners": {"num_runners": 2}}, "provenance": {"host": "h"},
    }  # fmt: skip
    return Manifest(**(fields | changes))


def start_driver(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process with everything above at hand; it talks through its pipes."""
    prelude = "import sys, os, time\nfrom tests.unit.log_world import *\nfrom rl_eval.log import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script, *arguments],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def cut(source: Path, target: Path, count: int) -> Path:
    """Write a log that ends after so many episodes."""
    found = read_log(source)
    log = EvaluationLog.open(target)
    log.begin(found.manifest)
    indices = set(found.rows["index"][:count].tolist())
    faults = tuple(fault for fault in found.faults if fault.index in indices)
    log.append(Batch(found.rows[:count], found.infos[:count], faults, {"env_steps": 7.0}, found.numerics))
    log.flush(10)
    log.close()
    return target

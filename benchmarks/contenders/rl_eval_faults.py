"""rl_eval in the fault matrix: one evaluation, seen from outside while a fault strikes a runner.

When a hung runner was detected is read off its process: it ends when it has been found out.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import scenarios, strike
from benchmarks.contenders import base
from benchmarks.runner import TAG, remaining

_WATCH_S = 0.01
_LEFT_S = 10.0
_NO_ACTORS = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Titles of processes that are Ray's own."""


class _Watch(threading.Thread):
    """Waits for the strike, and then for the end of the process that was struck."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.seconds: float | None = None
        """From the strike to the end of the process; None as long as there was no such end."""

    def run(self) -> None:
        while (found := strike.struck(self._folder)) is None:
            time.sleep(_WATCH_S)
        pid, at = found
        while _lives(pid):
            time.sleep(_WATCH_S)
        self.seconds = time.time() - at


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _config(params: base.Params) -> Any:
    from rl_eval import EvalConfig

    limit = params["deadline_s"]
    return (
        EvalConfig()
        .environment(scenarios.env_factory("faults", params))
        .policy("benchmarks.scenarios:idle_policy")
        .runners(
            runner=params["runner"],
            num_runners=params["runners"],
            num_envs_per_runner=params["envs"],
            num_cpus_per_runner=1,
        )
        .evaluation(num_episodes=params["episodes"], seed=0)
        .fault_tolerance(reset_timeout_s=limit, step_timeout_s=limit)
    )


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate on a fresh group, stop it, and count the processes that are left of it."""
    from rl_eval import EvalRunnerGroup

    watch = _Watch(Path(params["strike"]["folder"]))
    watch.start()
    with base.ray_cluster(num_cpus=params["runners"]):
        begin = time.perf_counter()
        group = EvalRunnerGroup(_config(params))
        result = group.evaluate()
        seconds = time.perf_counter() - begin
        row = base.evaluated(
            int(result.table.completed.sum()),
            float(result.mean_return),
            asked=params["episodes"],
            says=result.status,
            reason=result.reason,
            fingerprint=result.fingerprint,
            faults=[str(fault) for fault in result.faults],
            charged=sum(fault.charged for fault in result.faults),
            seconds=seconds,
            struck_process_ended_s=watch.seconds,
        )
        row["stop_seconds"] = base.timed(group.stop)[1]
        row["actors_left"] = _actors_left()
    if params["strike"]["phase"] == "close":
        row["struck_process_ended_s"] = watch.seconds
    row["processes_left"] = len(remaining(os.environ[TAG], _LEFT_S))
    return row


def _actors_left() -> int:
    """Processes of actors, once they had time to end."""
    deadline = time.monotonic() + _LEFT_S
    while (left := sum(map(_is_actor, remaining(os.environ[TAG], 0.0)))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_actor(pid: int) -> bool:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return title.startswith(b"ray::") and not title.startswith(_NO_ACTORS)


if __name__ == "__main__":
    base.run({"faults": faults})

"""rl_eval in turns: a warm group that evaluates whenever it reads a line, and prints a JSON line for each.

Its settings may hold a ``deadline_s`` and ``log``: then there are deadlines, and every evaluation has a run
folder of its own. It asks nothing of rl_eval that versions without these do not have, unless it is told to.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import base
from benchmarks.contenders.rl_eval_ import make_config, warm_group
from benchmarks.runner import TAG, remaining


def turns(params: base.Params) -> dict[str, Any]:
    """Say that the group is up, then evaluate once per line of standard input, until it ends."""
    config = make_config("throughput", params)
    if limit := params.get("deadline_s"):
        config.fault_tolerance(reset_timeout_s=limit, step_timeout_s=limit, runner_timeout_s=limit)
    count = 0
    with warm_group(config, params) as group:
        group.evaluate(num_episodes=params["runners"] * params["envs"], seed=1)
        _say(ready=True)
        for _ in sys.stdin:
            _say(**_turn(group, params))
            count += 1
    return {"turns": count}


def _turn(group: Any, params: base.Params) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        more = {"output": f"{folder}/run"} if params.get("log") else {}
        before = _cpu_seconds()
        result, seconds = base.timed(lambda: group.submit(num_episodes=params["episodes"], seed=0, **more).result())
        spent = _cpu_seconds() - before
    rows = result.table.rows
    row = base.steps_row(int(rows["length"].sum()), seconds, len(rows), float(result.mean_return))
    return {**row, "cpu_seconds": spent, "fingerprint": result.fingerprint}


def _cpu_seconds() -> float:
    """CPU time of this process and of all that it has started: driver, runners, agents and Ray."""
    ticks = 0
    for pid in [os.getpid(), *remaining(os.environ[TAG], 0.0)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _say(**row: Any) -> None:
    print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    base.run({"throughput": turns})

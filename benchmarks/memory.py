"""Memory of a process that evaluates a large policy: its peak, and the rest after the call, in copies of the policy."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.runner import Row, run_command
from rl_eval import EvalConfig, evaluate

__all__ = ["measure"]

_TIMEOUT_S: Final = 600.0
_RUNNERS: Final = (0, 2)


def measure(megabytes: Sequence[int], progress: Callable[[str], None]) -> list[Row]:
    """Evaluate a policy of each size in a process of its own, in that process and on two runners."""
    rows: list[Row] = []
    for size in megabytes:
        for runners in _RUNNERS:
            progress(f"{size} MB, {runners} runners")
            done = run_command([sys.executable, "-m", "benchmarks.memory", str(size), str(runners)], _TIMEOUT_S)
            found: Row = {"megabytes": size, "runners": runners, "status": "ok"}
            if done.code == 0:
                found |= json.loads(done.stdout.splitlines()[-1])
            else:
                found |= {"status": "error", "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
            rows.append(found)
    return rows


class _Padded(nn.Module):
    """Policy for CartPole with a parameter that nothing reads."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.padding = nn.Parameter(torch.ones(megabytes * 2**18))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.linear(observations)


def _copies(megabytes: int, runners: int) -> dict[str, float]:
    """Evaluate once with a small policy, which loads what is loaded only once, and then with the large one."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=20).runners(num_runners=runners)
    evaluate(config, _Padded(1))
    policy = _Padded(megabytes)
    gc.collect()
    gc.disable()  # The rest is counted without its help.
    Path("/proc/self/clear_refs").write_text("5")  # Sets the peak back to the present size.
    before = _resident("VmRSS")
    evaluate(config, policy)
    after = {"peak": _resident("VmHWM") - before, "rest": _resident("VmRSS") - before}
    return {name: value / 2**20 / megabytes for name, value in after.items()}


def _resident(name: str) -> int:
    """Return a size of this process in bytes: ``VmRSS``, the present one, or ``VmHWM``, the largest."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _main(arguments: Sequence[Any]) -> None:
    print(json.dumps(_copies(*map(int, arguments))))


if __name__ == "__main__":
    _main(sys.argv[1:])

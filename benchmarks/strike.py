"""The faults of the benchmark: which one an environment has, and when it happened.

Each happens once per folder, whoever runs the environment, so that an evaluator which tries again meets a healthy one:
a marker file, made just before the fault, outlives the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["FAULTS", "fault_of", "struck"]

FAULTS: Final[dict[str, tuple[str, str]]] = {
    "raise": ("raise", "step"),
    "os._exit": ("os_exit", "step"),
    "SIGSEGV": ("segfault", "step"),
    "SIGKILL": ("sigkill", "step"),
    "SIGSTOP": ("sigstop", "step"),
    "Python loop": ("loop", "step"),
    "C sleep that holds the GIL": ("gil_sleep", "step"),
    "memory balloon under an rlimit": ("balloon", "step"),
    "hang in the constructor": ("sleep", "construct"),
    "hang in reset": ("sleep", "reset"),
    "hang in close": ("sleep", "close"),
}
"""Kind and phase of each fault of :class:`rl_eval.testing.FaultyEnv`, by what it is called in a table."""

_STEP: Final = 40


def fault_of(name: str, folder: str) -> dict[str, Any]:
    """Return the arguments of :class:`rl_eval.testing.FaultyEnv`; a name that is not in the table is no fault."""
    kind, phase = FAULTS.get(name, ("none", "step"))
    # The first reset belongs to the start of an evaluation.
    after = 1 if phase == "reset" else 0
    return {"kind": kind, "phase": phase, "episodes": None, "step": _STEP, "after": after, "folder": folder}


def struck(folder: Path) -> tuple[int, float] | None:
    """Return which process had the fault, and when on the wall clock; None if none had it yet."""
    for marker in folder.iterdir():
        if pid := marker.read_text():
            return int(pid), marker.stat().st_mtime
    return None

"""Which processes belong to a runner, and how they are ended: all of them, whatever state they are in."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

from rl_eval.recorder import RUNNER_MARK, Residence, process_born, process_state

__all__ = ["STOPPED", "end_runner", "lives", "send_signal"]

STOPPED: Final = ("T", "t")
"""States of a process that stands still by a signal or under a debugger."""


def lives(residence: Residence) -> bool:
    """Whether the process is there, and is the one that was watched."""
    return process_born(residence.pid) == residence.born and process_state(residence.pid) not in ("Z", "X", "")


def end_runner(residence: Residence) -> None:
    """Kill a runner, its process group and whatever carries its mark."""
    if lives(residence):
        send_signal(residence.pid, signal.SIGKILL)
    # As long as the group has members no other process gets its number; afterwards one may.
    if process_born(residence.pid) in (None, residence.born):
        with contextlib.suppress(OSError):
            os.killpg(residence.pid, signal.SIGKILL)
    for pid in _marked(residence.mark):
        send_signal(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Find the processes that inherited a runner's mark."""
    wanted, found = f"{RUNNER_MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in entry.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def send_signal(pid: int, number: int) -> bool:
    """Signal a process; return whether it was there."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True

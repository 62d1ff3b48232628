"""Processes: whether they live, and the end of a runner's with all that it started, whatever state they are in."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

RUNNER_MARK: Final = "RL_EVAL_RUNNER"
"""Environment variable by which the processes that a runner started are found after its death."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Process of a runner, and the files of its recorder and its stacks."""

    node_id: str
    pid: int
    born: int
    """Start time of the process in clock ticks since boot: tells it from a later one with the same pid."""
    mark: str
    """Value of :data:`RUNNER_MARK` in its environment."""
    recorder: str
    stack: str


class ProcessStatus(NamedTuple):
    """One reading of ``/proc/PID/stat``."""

    state: str
    """A letter: ``R`` runs, ``S`` sleeps, ``T`` is stopped, ``Z`` is a zombie."""
    born: int
    """When it started, in clock ticks since boot."""

    @property
    def ended(self) -> bool:
        """Whether it only waits to be collected."""
        return self.state in ("Z", "X")

    @property
    def stopped(self) -> bool:
        """Whether it stands still by a signal, or under a debugger."""
        return self.state in ("T", "t")


def process_status(pid: int) -> ProcessStatus | None:
    """Read the status of a process; None if there is none, or the kernel does not say."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # What is read of a process that ends at this moment may be empty.
    return ProcessStatus(fields[0], int(fields[19])) if len(fields) > 19 else None


def process_born(pid: int) -> int | None:
    """Return when a process started; None if there is none."""
    status = process_status(pid)
    return None if status is None else status.born


def living(process_info: ProcessInfo) -> ProcessStatus | None:
    """Return the status of a runner's process; None if it is gone, and also if another one has its number now."""
    status = process_status(process_info.pid)
    return status if status is not None and status.born == process_info.born and not status.ended else None


def end_runner(process_info: ProcessInfo) -> None:
    """Kill a runner, its process group and whatever carries its mark."""
    if living(process_info):
        send_signal(process_info.pid, signal.SIGKILL)
    # As long as the group has members no other process gets its number; afterwards one may.
    if process_born(process_info.pid) in (None, process_info.born):
        with contextlib.suppress(OSError):
            os.killpg(process_info.pid, signal.SIGKILL)
    for pid in _marked(process_info.mark):
        send_signal(pid, signal.SIGKILL)


def erase_recordings(process_info: ProcessInfo) -> None:
    """Remove what a runner recorded, and the folder that was made for it."""
    for path in (process_info.recorder, process_info.stack):
        Path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path(process_info.recorder).parent.rmdir()


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

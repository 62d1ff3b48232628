"""Processes of a runner, and their end: all that it started, whatever state they are in."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from rl_eval.supervision.flight_recorder import RUNNER_MARK, ProcessInfo
from rl_eval.supervision.proc import ProcessStatus, process_born, process_status

__all__ = ["end_runner", "erase_recordings", "living", "send_signal"]


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

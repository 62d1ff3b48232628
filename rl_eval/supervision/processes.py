"""Which processes belong to a runner, and how they are ended: all of them, whatever state they are in."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from rl_eval.supervision.flight_recorder import RUNNER_MARK, Residence
from rl_eval.supervision.proc import ProcessStatus, process_born, process_status

__all__ = ["end_runner", "erase_recordings", "living", "send_signal"]


def living(residence: Residence) -> ProcessStatus | None:
    """Return the status of a runner's process; None if it is gone, and also if another one has its number now."""
    status = process_status(residence.pid)
    return status if status is not None and status.born == residence.born and not status.ended else None


def end_runner(residence: Residence) -> None:
    """Kill a runner, its process group and whatever carries its mark."""
    if living(residence):
        send_signal(residence.pid, signal.SIGKILL)
    # As long as the group has members no other process gets its number; afterwards one may.
    if process_born(residence.pid) in (None, residence.born):
        with contextlib.suppress(OSError):
            os.killpg(residence.pid, signal.SIGKILL)
    for pid in _marked(residence.mark):
        send_signal(pid, signal.SIGKILL)


def erase_recordings(residence: Residence) -> None:
    """Remove what a runner recorded, and the folder that was made for it."""
    for path in (residence.recorder, residence.stack):
        Path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path(residence.recorder).parent.rmdir()


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

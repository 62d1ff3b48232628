"""State and start time of a process; the start time tells a reused process id from the former one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessStatus", "process_born", "process_status"]


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

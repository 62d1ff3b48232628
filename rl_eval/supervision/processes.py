"""Processes: their status, and termination of a runner's process and its descendants, whatever their state is."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

RUNNER_MARK: Final = "RL_EVAL_RUNNER"
"""Environment variable that marks the descendants of a runner, to find them after its death."""


_LOADS, _LOAD_S = 10, 0.02
"""Number of searches for marked processes while a process loads its program, and the seconds between them."""
_YOUNG_S: Final = 2.0
"""Age in seconds from which a process has loaded its program. An older process without variables was started so."""
_EXIT_S: Final = 2.0
"""Seconds from the end of a runner's main thread until its process is killed."""


@cache
def machine_id() -> str:
    """Return the ids of the boot and of the process namespace; an empty string if they are unknown.

    They are equal for processes that see each other's process ids.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Process of a runner, with the files of its flight recorder and its stacks."""

    node_id: str
    pid: int
    born: int
    """Start time of the process in clock ticks since boot. It differs for a later process with the same pid."""
    mark: str
    """Value of :data:`RUNNER_MARK` in the environment of the process."""
    recorder: str
    stack: str


class ProcessStatus(NamedTuple):
    """Contents of ``/proc/PID/stat`` at one moment."""

    state: str
    """State as a letter: ``R`` runs, ``S`` sleeps, ``T`` or ``t`` is stopped, ``Z`` is a zombie, ``X`` is dead."""
    born: int
    """Start time, in clock ticks since boot."""

    @property
    def ended(self) -> bool:
        """Whether the process is dead, or a zombie."""
        return self.state in ("Z", "X")

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in ("T", "t")


def process_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if the process does not exist or cannot be read."""
    try:
        # The name, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # The file of a process that ends at this moment may be empty.
    return ProcessStatus(fields[0], int(fields[19])) if len(fields) > 19 else None


def process_born(pid: int) -> int | None:
    """Return the start time of a process; None if the process does not exist."""
    status = process_status(pid)
    return None if status is None else status.born


def living(process_info: ProcessInfo) -> ProcessStatus | None:
    """Return the status of a runner's process; None if it has ended, even if another process has the same pid now."""
    status = process_status(process_info.pid)
    return status if status is not None and status.born == process_info.born and not status.ended else None


def end_runner(process_info: ProcessInfo) -> None:
    """Kill the process of a runner, its process group, and all processes with its mark."""
    if living(process_info):
        send_signal(process_info.pid, signal.SIGKILL)
    # While the group has members, no other process gets its number.
    if process_born(process_info.pid) in (None, process_info.born):
        with contextlib.suppress(OSError):
            os.killpg(process_info.pid, signal.SIGKILL)
    end_marked(process_info.mark)


def end_after_main_thread() -> None:
    """Kill this process, with the process group that it leads, a few seconds after its main thread has ended.

    Otherwise, a thread of an environment or a handler of ``atexit`` could keep a process that Ray has ended politely.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(_EXIT_S)
        with contextlib.suppress(OSError):  # If it leads no group, another process leads its group.
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=end, name="rl_eval end", daemon=True).start()


def erase_recordings(process_info: ProcessInfo) -> None:
    """Remove the files of a runner's recorder, and their folder."""
    for path in (process_info.recorder, process_info.stack):
        Path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path(process_info.recorder).parent.rmdir()


def end_marked(*marks: str) -> None:
    """Kill all processes that inherited one of the marks of runners."""
    wanted = {f"{RUNNER_MARK}={mark}".encode() for mark in marks}
    for _ in range(_LOADS):
        loading = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    variables = entry.joinpath("environ").read_bytes()
                    if not wanted.isdisjoint(variables.split(b"\0")):
                        send_signal(int(entry.name), signal.SIGKILL)
                    loading = loading or (not variables and _loading(entry))
        if not loading:
            return
        time.sleep(_LOAD_S)


def _loading(entry: Path) -> bool:
    """Return whether a process without variables may still be loading its program. A kernel thread has no program."""
    born, now = process_born(int(entry.name)), time.clock_gettime(time.CLOCK_BOOTTIME)
    return born is not None and now - born / os.sysconf("SC_CLK_TCK") < _YOUNG_S and entry.joinpath("exe").exists()


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; return whether the process exists."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True

"""Node agent: terminates runners that exceed a deadline, and reports the last activity of dead runners.

There is one agent per node; Ray reserves no CPU for it. The agent works from outside the runners, with flight
recorders, signals and ``/proc``. So it can detect and terminate a process that is stopped, that holds the interpreter's
lock, or that Ray no longer tracks. It also terminates the child processes. Like the runner actor, the agent imports
only light modules.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rl_eval.supervision.flight_recorder import STACK_SIGNAL, CrashReport, EndCause, Moment, read_moment
from rl_eval.supervision.orphan_reaper import OrphanReaper
from rl_eval.supervision.processes import ProcessInfo, end_runner, erase_recordings, living, send_signal

_ROUND_S: Final = 0.1
_STACK_WAIT_S: Final = 0.4
_STACK_POLL_S: Final = 0.02
_CONFIRM_S: Final = 0.02
_PARTING_S: Final = 0.25
"""Seconds that Ray has to end a process itself. If the agent kills the process first, Ray prints that a worker was
lost."""
_PARTING_POLL_S: Final = 0.005
_FATAL: Final = "Fatal Python error: "


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits in seconds; None for no limit."""

    reset_s: float | None = None
    """Limit of one call of reset, the constructor or close."""
    step_s: float | None = None
    episode_s: float | None = None
    """Limit of one attempt, checked during its environment calls."""
    runner_s: float | None = None
    """Limit of any activity."""

    def passed(self, moment: Moment, now: float) -> str:
        """Return a description of the deadline that was passed; empty if none was passed."""
        if moment.phase == "idle":
            return ""
        seconds = now - moment.since
        key, limit = ("step_timeout_s", self.step_s) if moment.phase == "step" else ("reset_timeout_s", self.reset_s)
        if moment.phase != "act" and limit is not None and seconds > limit:
            return f"longer than fault_tolerance.{key}={limit:g}"
        if self.runner_s is not None and seconds > self.runner_s:
            return f"longer than fault_tolerance.runner_timeout_s={self.runner_s:g}"
        entries = moment.lanes if moment.shared else filter(None, [moment.current])
        starts = [entry.started for entry in entries if entry.live]
        # The runner checks this limit itself between steps. So act only if a call lasts for more than a second.
        if self.episode_s is not None and starts and seconds > 1.0 and now - min(starts) > self.episode_s + 1.0:
            return f"in an attempt that lasts longer than fault_tolerance.episode_timeout_s={self.episode_s:g}"
        return ""

    @property
    def shortest(self) -> float:
        """Time limit of a stopped process: the shortest of all limits except ``episode_s``; infinite if none is set."""
        given = [limit for limit in (self.reset_s, self.step_s, self.runner_s) if limit is not None]
        return min(given, default=math.inf)


@dataclass(slots=True)
class _Ward:
    """A runner that the agent watches."""

    process_info: ProcessInfo
    end_by_ray: Callable[[], object]
    """Function that asks Ray to end the process."""
    running: float = field(default_factory=time.perf_counter)
    """Time of the last check at which the process was not stopped."""
    crash_report: CrashReport | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class NodeAgent:
    """Watches the runners of its node."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._wards: dict[int, _Ward] = {}
        self._stopped = threading.Event()
        self._broken: BaseException | None = None
        """Error that ended the watching thread."""
        self._reaper = OrphanReaper()
        threading.Thread(target=self._monitor, daemon=True, name="rl_eval node agent").start()

    def watch(self, runner: int, process_info: ProcessInfo, end_by_ray: Callable[[], object]) -> None:
        """Watch a runner from now on. If :meth:`stop` was called before, terminate the runner.

        Args:
            runner: Number of the runner.
            process_info: Process of the runner.
            end_by_ray: Function that asks Ray to end the process.
        """
        self._reaper.learn(process_info)
        self._wards.setdefault(runner, _Ward(process_info, end_by_ray))
        if self._stopped.is_set():
            self.end(runner)

    def wait_closed(self) -> None:
        """Wait until the agent stops. If this call fails, the agent is lost.

        Raises:
            RuntimeError: The watching thread has ended; replace the agent.
        """
        self._stopped.wait()
        if self._broken is not None:
            raise RuntimeError("the node agent no longer watches its runners") from self._broken

    def crash_report(self, runner: int, process_info: ProcessInfo, end_by_ray: Callable[[], object]) -> CrashReport:
        """Terminate a runner and its child processes, and return its crash report.

        The arguments are those of :meth:`watch`.
        """
        ward = self._wards.setdefault(runner, _Ward(process_info, end_by_ray))
        with ward.lock:
            ward.crash_report = ward.crash_report or _examine(ward.process_info, "")
            _end_quietly(ward)
            self._forget(runner)
        return ward.crash_report

    def end(self, runner: int) -> None:
        """Wait briefly until Ray has terminated a runner. Then kill the runner and its child processes."""
        self._end(runner, time.perf_counter() + _PARTING_S)

    def stop(self) -> None:
        """Terminate the remaining runners, and remove their recordings."""
        deadline = time.perf_counter() + _PARTING_S
        for runner in list(self._wards):
            self._end(runner, deadline)
        self._reaper.stop()
        self._stopped.set()

    def _end(self, runner: int, deadline: float) -> None:
        ward = self._wards.get(runner)
        if ward is not None:
            _await_end(ward.process_info, deadline)
            with ward.lock:
                end_runner(ward.process_info)
                self._forget(runner)

    def _forget(self, runner: int) -> None:
        ward = self._wards.pop(runner, None)
        if ward is not None:
            erase_recordings(ward.process_info)

    def _monitor(self) -> None:
        try:
            self._watch_until_stopped()
        except BaseException as error:
            self._broken = error
            self._stopped.set()

    def _watch_until_stopped(self) -> None:
        while not self._stopped.wait(_ROUND_S):
            for ward in list(self._wards.values()):
                with ward.lock:
                    if ward.crash_report is None:
                        self._inspect(ward)

    def _inspect(self, ward: _Ward) -> None:
        """Terminate a runner if it passed a deadline.

        Ray reports the death of the runner, and then the backend asks for the crash report.
        """
        status = living(ward.process_info)
        if status is None:
            return
        if not status.stopped:
            ward.running = time.perf_counter()
        stood_still = time.perf_counter() - ward.running > self._deadlines.shortest
        overdue = self._overdue(ward.process_info)
        if stood_still or overdue:
            ward.crash_report = _examine(ward.process_info, overdue)
            _end_quietly(ward)

    def _overdue(self, process_info: ProcessInfo) -> str:
        """Return a description of the deadline that a runner's present activity has passed; empty if there is none."""
        moment = read_moment(process_info.recorder)
        if moment is None or not (passed := self._deadlines.passed(moment, time.perf_counter())):
            return ""
        # A reading may fall between the two stores of a step.
        time.sleep(_CONFIRM_S)
        return passed if read_moment(process_info.recorder) == moment else ""


def _end_quietly(ward: _Ward) -> None:
    """Terminate a runner through Ray if possible, because Ray prints a long message about any other end of a worker."""
    status = living(ward.process_info)
    if status is not None and not status.stopped:
        ward.end_by_ray()
        _await_end(ward.process_info, time.perf_counter() + _PARTING_S)
    end_runner(ward.process_info)


def _await_end(process_info: ProcessInfo, deadline: float) -> None:
    """Wait until a process ends or the deadline passes. Do not wait for a stopped process, which cannot end."""
    while (status := living(process_info)) and not status.stopped and time.perf_counter() < deadline:
        time.sleep(_PARTING_POLL_S)


def _examine(process_info: ProcessInfo, overdue: str) -> CrashReport:
    """Return the crash report of a runner. A live runner first writes its stacks."""
    now, status = time.perf_counter(), living(process_info)
    # Read before the stack signal: it may interrupt a sleep of the runner, which then starts another activity.
    moment = read_moment(process_info.recorder)
    stopped = status is not None and status.stopped
    if status is not None and not stopped:
        _ask_for_stack(process_info)
    stack = _read(process_info.stack)
    seconds = now - moment.since if moment is not None and moment.phase != "idle" else 0.0
    cause, detail = _cause(stopped, overdue, stack)
    return CrashReport(cause, moment, seconds, detail, stack, socket.gethostname())


def _cause(stopped: bool, overdue: str, stack: str) -> tuple[EndCause, str]:
    if stopped:
        return "stopped", "the process was stopped by a signal"
    if overdue:
        return "deadline", overdue
    for line in stack.splitlines():
        if line.startswith(_FATAL):
            return "signal", line.removeprefix(_FATAL)
    return "vanished", ""


def _ask_for_stack(process_info: ProcessInfo) -> None:
    """Ask a live process to write its stacks, and wait briefly until they are written."""
    before = len(_read(process_info.stack))
    if not send_signal(process_info.pid, STACK_SIGNAL):
        return
    deadline, size = time.perf_counter() + _STACK_WAIT_S, before
    while time.perf_counter() < deadline:
        time.sleep(_STACK_POLL_S)
        if (now := len(_read(process_info.stack))) > before and now == size:
            return
        size = now


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""

"""Flight recorder: what a runner is doing at this moment, readable by another process after its death.

The flight recorder is a small memory-mapped file that a runner rewrites before each reset and step. The kernel keeps
its pages whatever ends the process, so a node agent can tell which episode a dead or hanging runner was in. A write
costs two stores; there are no locks and no system calls. Times are ``perf_counter``, on Linux one clock for
all processes of a machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import shutil
import signal
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any, Final, Literal, NamedTuple, final, get_args

from rl_eval.errors import RunnerStartError
from rl_eval.supervision.processes import RUNNER_MARK, ProcessInfo, process_born

IDLE, CONSTRUCT, RESET, STEP, ACT, CLOSE = range(6)
PhaseName = Literal["idle", "construct", "reset", "step", "act", "close"]
_PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)

NOW: Final = 2
SINCE: Final = 3
_HEADER: Final = 4
"""Cells of 8 bytes: format, lanes, what is done now, and since when."""
_PER_LANE: Final = 5
"""Cells of a lane: whether it is live, index, seed, attempt, start of the attempt."""
_FORMAT: Final = 1
_LANE_SHIFT: Final = 36
_PHASE_SHIFT: Final = 56
_STEP_MASK: Final = 2**_LANE_SHIFT - 1
_LANE_MASK: Final = 2 ** (_PHASE_SHIFT - _LANE_SHIFT) - 1

STACK_SIGNAL: Final = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Sent to a runner, it writes the stacks of its threads to its stack file, in C and without the interpreter's lock."""

_FOLDER: Final = "rl_eval-runner-"
_YOUNG_S: Final = 60.0
"""A folder that is not older may belong to a runner that has not locked its file yet."""

Cause = Literal["deadline", "stopped", "signal", "vanished"]


class LaneEntry(NamedTuple):
    """The last attempt that a lane began."""

    live: bool
    index: int  # type: ignore[assignment]  # The field's name hides tuple.index, which nobody calls.
    seed: int
    attempt: int
    started: float


@dataclass(frozen=True, slots=True)
class Moment:
    """One reading of a flight recorder."""

    phase: PhaseName
    lane: int
    step: int
    """Environment steps that the attempt had completed."""
    since: float
    """When this began, by ``perf_counter``."""
    lanes: tuple[LaneEntry, ...]

    @property
    def current(self) -> LaneEntry | None:
        """The attempt that an environment call was made for; None between such calls."""
        if self.phase in ("idle", "act") or not self.lanes:
            return None
        return self.lanes[self.lane]


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Findings about a runner that is gone, or was terminated."""

    cause: Cause
    """A passed deadline; found stopped (SIGSTOP) at a passed deadline; a fatal signal that it had time to
    write down; or gone without a word."""
    moment: Moment | None
    """What it was doing; None if it never said."""
    seconds: float
    """How long it had been doing that."""
    detail: str
    """The deadline, or the signal."""
    stack: str
    """Stacks of its threads, the main thread's last; empty if it could not write them."""
    node: str

    def __str__(self) -> str:
        doing = "before it was ready" if self.moment is None else f"in {self.moment.phase} for {self.seconds:.1f} s"
        return ", ".join(filter(None, [self.cause, doing, self.detail, f"on {self.node}"]))


@final
class FlightRecorder:
    """The writing side.

    Args:
        lanes: Number of lanes.
        buffer: At least :meth:`size` bytes; by default memory of this process, which nobody else reads.
    """

    def __init__(self, lanes: int, buffer: Any = None) -> None:
        view = memoryview(bytearray(self.size(lanes)) if buffer is None else buffer)
        self.cells = view.cast("B").cast("q")
        """Integers, one of 8 bytes each."""
        self.clock = view.cast("B").cast("d")
        """The same bytes as floats: cells of times."""
        self.cells[1] = lanes
        self.cells[0] = _FORMAT

    @staticmethod
    def size(lanes: int) -> int:
        """Bytes needed for a number of lanes."""
        return 8 * (_HEADER + _PER_LANE * lanes)

    @staticmethod
    def mark(phase: int, lane: int) -> int:
        """Return what to store in ``cells[NOW]``, less the number of completed steps."""
        return phase << _PHASE_SHIFT | lane << _LANE_SHIFT

    def enter(self, phase: int, lane: int = 0, step: int = 0) -> None:
        """Something begins."""
        # Time first: a reader between the two stores sees something that seems to have begun too late, never too early.
        self.clock[SINCE] = perf_counter()
        self.cells[NOW] = self.mark(phase, lane) + step

    def idle(self) -> None:
        """Nothing of a user's is running."""
        self.cells[NOW] = IDLE

    def begin(self, lane: int, index: int, seed: int, attempt: int) -> None:
        """An attempt begins in a lane."""
        at, cells = _HEADER + _PER_LANE * lane, self.cells
        cells[at + 1] = index
        cells[at + 2] = seed
        cells[at + 3] = attempt
        self.clock[at + 4] = perf_counter()
        cells[at] = 1

    def end(self, lane: int) -> None:
        """The attempt of a lane is over."""
        self.cells[_HEADER + _PER_LANE * lane] = 0


_installed: FlightRecorder | None = None


def flight_recorder(lanes: int) -> FlightRecorder:
    """Return the recorder of this process if one is installed, else one that nobody reads."""
    return FlightRecorder(lanes) if _installed is None else _installed


def install(group: str, name: str, lanes: int, node_id: str) -> ProcessInfo:
    """Record from now on what this process does, for a runner that is its only one.

    The process becomes the leader of a process group and carries a mark, so that its descendants can be ended after it;
    fatal signals, and :data:`STACK_SIGNAL`, write stacks to a file. The files are in a new folder that only this user
    can enter. Folders that killed runners of other groups left behind are removed.

    Raises:
        RunnerStartError: There is no room for the files.
    """
    global _installed  # noqa: PLW0603  # One process, one runner, one recorder.
    try:
        _remove_abandoned(group)
        place = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{group}-"))
        recorder, stack = place / f"{name}.rec", place / f"{name}.stack"
        _installed = FlightRecorder(lanes, _mapped(recorder, FlightRecorder.size(lanes)))
        # The file stays open as long as the process: the handlers write to its descriptor.
        stacks = stack.open("w")
        fcntl.flock(stacks, fcntl.LOCK_EX)  # Until the process ends, however it ends.
    except OSError as error:
        raise RunnerStartError(
            f"runner {name} cannot create its flight recorder in {tempfile.gettempdir()}: {error.strerror}",
            key="TMPDIR",
            value=tempfile.gettempdir(),
            fix="Free disk space there, or set TMPDIR to another folder.",
        ) from error
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
    os.environ[RUNNER_MARK] = mark = f"{group}-{name}"
    with contextlib.suppress(OSError):  # It is the leader of a session, and so of a group, already.
        os.setpgid(0, 0)
    return ProcessInfo(node_id, os.getpid(), process_born(os.getpid()) or 0, mark, str(recorder), str(stack))


def _remove_abandoned(group: str) -> None:
    """Remove the recordings of runners that ended together with all that would have removed them.

    Those of the own group are left to its node agent, which may be about to read them.
    """
    for place in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # BlockingIOError: its runner lives.
            status = place.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time() - status.st_mtime > _YOUNG_S and not place.name.startswith(f"{_FOLDER}{group}-"):
                for stack in place.glob("*.stack"):
                    with stack.open() as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a new file whose blocks are reserved: without them, a store to memory on a full disk kills the process."""
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def read_moment(path: str) -> Moment | None:
    """Read a recorder; None if there is none, or none that this version wrote."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    if len(content) < FlightRecorder.size(0) or len(content) % 8:
        return None
    cells, clock = memoryview(content).cast("q"), memoryview(content).cast("d")
    if cells[0] != _FORMAT or len(content) < FlightRecorder.size(cells[1]):
        return None
    now = cells[NOW]
    phase, lane = now >> _PHASE_SHIFT, now >> _LANE_SHIFT & _LANE_MASK
    if phase >= len(_PHASES) or lane >= cells[1]:
        return None
    entries = [
        LaneEntry(bool(cells[at]), cells[at + 1], cells[at + 2], cells[at + 3], clock[at + 4])
        for at in range(_HEADER, _HEADER + _PER_LANE * cells[1], _PER_LANE)
    ]
    return Moment(_PHASES[phase], lane, now & _STEP_MASK, clock[SINCE], tuple(entries))

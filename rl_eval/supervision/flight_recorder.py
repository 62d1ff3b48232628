"""Flight recorder: the present activity of a runner, readable by another process after its death.

The flight recorder is a small memory-mapped file that a runner rewrites before each reset and step. The kernel keeps
the pages of the file, however the process ends. So a node agent can detect the episode of a dead or hanging runner.
A write needs two stores, and no locks or system calls. Times are ``perf_counter``, which on Linux is the same clock
for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import mmap
import os
import shutil
import signal
import stat
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any, Final, Literal, NamedTuple, final, get_args

from rl_eval.errors import RunnerStartError
from rl_eval.supervision.processes import RUNNER_MARK, ProcessInfo, end_marked, machine_id, process_born

IDLE, CONSTRUCT, RESET, STEP, ACT, CLOSE = range(6)
PhaseName = Literal["idle", "construct", "reset", "step", "act", "close"]
_PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)

NOW: Final = 2
SINCE: Final = 3
_HEADER: Final = 4
"""Number of cells of 8 bytes before the lanes: format, number of lanes, present activity, and start of the activity."""
_PER_LANE: Final = 5
"""Number of cells of a lane: whether the lane is live, index, seed, attempt, start of the attempt."""
_FORMAT: Final = 1
_LANE_SHIFT: Final = 36
_PHASE_SHIFT: Final = 56
_STEP_MASK: Final = 2**_LANE_SHIFT - 1
_LANE_MASK: Final = 2 ** (_PHASE_SHIFT - _LANE_SHIFT) - 1
ALL_LANES: Final = _LANE_MASK
"""Lane of a call for all live lanes at once."""

STACK_SIGNAL: Final = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal on which a runner writes the stacks of its threads to its stack file, in C, without the interpreter's lock."""

_FOLDER: Final = "rl_eval-runner-"
_YOUNG_S: Final = 60.0
"""Minimum seconds since the last change of an abandoned folder without a stack file, or of another machine's process.
A runner may be creating it, or a node agent may be about to read it."""

EndCause = Literal["deadline", "stopped", "signal", "vanished"]


class LaneEntry(NamedTuple):
    """Latest attempt of a lane."""

    live: bool
    index: int  # type: ignore[assignment]  # The field hides tuple.index, which is unused.
    seed: int
    attempt: int
    started: float


@dataclass(frozen=True, slots=True)
class Moment:
    """Contents of a flight recorder at one moment."""

    phase: PhaseName
    lane: int
    step: int
    """Number of environment steps that the attempt had completed."""
    since: float
    """Start of the activity, by ``perf_counter``."""
    lanes: tuple[LaneEntry, ...]

    @property
    def shared(self) -> bool:
        """Whether the present call concerns all live lanes."""
        return self.lane == ALL_LANES

    @property
    def current(self) -> LaneEntry | None:
        """Attempt of the present environment call; None between environment calls, and in a call for all lanes."""
        if self.phase in ("idle", "act") or self.shared or not self.lanes:
            return None
        return self.lanes[self.lane]


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Findings about a runner that died or was terminated."""

    cause: EndCause
    """Cause of the end: ``deadline`` (a deadline passed), ``stopped`` (the process was stopped, such as by SIGSTOP),
    ``signal`` (a recorded fatal signal) or ``vanished`` (no cause is recorded)."""
    moment: Moment | None
    """Last activity of the runner; None if it recorded no activity."""
    seconds: float
    """Duration of the last activity."""
    detail: str
    """Description of the deadline or the signal."""
    stack: str
    """Stacks of the runner's threads, with the main thread at the end; empty if the runner could not write them."""
    node: str

    def __str__(self) -> str:
        doing = "before it was ready" if self.moment is None else f"in {self.moment.phase} for {self.seconds:.1f} s"
        return ", ".join(filter(None, [self.cause, doing, self.detail, f"on {self.node}"]))


@final
class FlightRecorder:
    """Writer of a flight recorder.

    Args:
        lanes: Number of lanes.
        buffer: Buffer of at least :meth:`size` bytes; by default private memory of this process.
    """

    def __init__(self, lanes: int, buffer: Any = None) -> None:
        view = memoryview(bytearray(self.size(lanes)) if buffer is None else buffer)
        self.cells = view.cast("B").cast("q")
        """Cells as integers of 8 bytes."""
        self.clock = view.cast("B").cast("d")
        """The same cells as floats, for times."""
        self.cells[1] = lanes
        self.cells[0] = _FORMAT

    @staticmethod
    def size(lanes: int) -> int:
        """Return the size in bytes for a number of lanes."""
        return 8 * (_HEADER + _PER_LANE * lanes)

    @staticmethod
    def mark(phase: int, lane: int) -> int:
        """Return the value of ``cells[NOW]``, without the number of completed steps."""
        return phase << _PHASE_SHIFT | lane << _LANE_SHIFT

    def enter(self, phase: int, lane: int = 0, step: int = 0) -> None:
        """Record the start of an activity."""
        # Time first: a reader between the two stores sees an activity that seems to start too late, never too early.
        self.clock[SINCE] = perf_counter()
        self.cells[NOW] = self.mark(phase, lane) + step

    def idle(self) -> None:
        """Record that no code of the user is running."""
        self.cells[NOW] = IDLE

    def begin(self, lane: int, index: int, seed: int, attempt: int) -> None:
        """Record the start of an attempt in a lane."""
        at, cells = _HEADER + _PER_LANE * lane, self.cells
        cells[at + 1] = index
        cells[at + 2] = seed
        cells[at + 3] = attempt
        self.clock[at + 4] = perf_counter()
        cells[at] = 1

    def end(self, lane: int) -> None:
        """Record the end of the attempt of a lane."""
        self.cells[_HEADER + _PER_LANE * lane] = 0

    def clear(self) -> None:
        """Remove all attempts and the present activity, because they belong to a runner that has ended."""
        for cell in range(NOW, len(self.cells)):
            self.cells[cell] = 0


_installed: FlightRecorder | None = None


def flight_recorder(lanes: int) -> FlightRecorder:
    """Return the installed recorder of this process. If none is installed, return a recorder in private memory."""
    return FlightRecorder(lanes) if _installed is None else _installed


def close_installed() -> None:
    """Remove the installed recorder in a process that an environment has forked: the parent writes to the same memory.

    The runner that uses it raises an error if it continues in this process.
    """
    global _installed  # noqa: PLW0603
    if _installed is not None:
        _installed.cells.release()
        _installed.clock.release()
        _installed = None


def install(group: str, name: str, lanes: int, node_id: str) -> ProcessInfo:
    """Install the flight recorder of this process, which contains a single runner.

    The process becomes the leader of a process group and gets a mark, so that its descendants can be terminated after
    its end. Fatal signals and :data:`STACK_SIGNAL` write stacks to a file. The files are in a new folder that only this
    user can enter. Folders left by killed runners of other groups are removed.

    Raises:
        RunnerStartError: The files cannot be created, for example because the disk is full.
    """
    global _installed  # noqa: PLW0603  # One process, one runner, one recorder.
    try:
        remove_abandoned(group)
        place = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{group}-"))
        recorder, stack = place / f"{name}.rec", place / f"{name}.stack"
        _installed = FlightRecorder(lanes, _mapped(recorder, FlightRecorder.size(lanes)))
        # The file stays open: the handlers write to its descriptor.
        stacks = stack.open("w")
        fcntl.flock(stacks, fcntl.LOCK_EX)  # Until the process ends, however it ends.
    except OSError as error:
        problem = f"runner {name} cannot create its flight recorder in {tempfile.gettempdir()}: {error.strerror}"
        fix = "Free disk space there, or set TMPDIR to another folder."
        raise RunnerStartError(problem, key="TMPDIR", value=tempfile.gettempdir(), fix=fix) from error
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
    os.environ[RUNNER_MARK] = mark = f"{group}-{name}"
    with contextlib.suppress(OSError):  # The process is already the leader of a session, and so of a group.
        os.setpgid(0, 0)
    return ProcessInfo(node_id, os.getpid(), process_born(os.getpid()) or 0, mark, str(recorder), str(stack))


def new_group() -> str:
    """Return a new group name of the runners of this evaluating process.

    It begins with process id, start time and machine, which show to :func:`remove_abandoned` whether the process lives.
    """
    return f"{os.getpid()}-{process_born(os.getpid())}-{_machine()}-{uuid.uuid4().hex[:12]}"


def _machine() -> str:
    return hashlib.sha256(machine_id().encode()).hexdigest()[:12]


def remove_abandoned(group: str = "") -> None:
    """Remove the recordings of dead runners whose evaluating process has died, and end processes of their environments.

    Recordings of the same group, or of a living process, are kept, because a node agent may be about to read them. If
    the process belongs to another machine, they are removed a minute after a call has found the runner dead.
    """
    marks, places = [], []
    for place in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        other, _, _ = place.name.removeprefix(_FOLDER).rpartition("-")
        with contextlib.suppress(OSError, ValueError):  # BlockingIOError: the runner of the folder lives.
            status, stacks, (pid, born, machine) = place.lstat(), [*place.glob("*.stack")], other.split("-")[:3]
            here = machine == _machine()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or other == group:
                continue
            if here and process_born(int(pid)) == int(born):
                continue
            for stack in stacks:
                with stack.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stacks and not here and not status.st_mode & stat.S_ISVTX:
                place.chmod(0o1700)  # Found dead. This sets the time of the last change.
            elif (stacks and here) or time() - status.st_ctime > _YOUNG_S:
                places.append(place)
                marks += [f"{other}-{stack.stem}" for stack in stacks]
    if marks:
        end_marked(*marks)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a new file with reserved blocks.

    Without reserved blocks, a store to this memory kills the process if the disk is full.
    """
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def read_moment(path: str) -> Moment | None:
    """Read a flight recorder; return None if its file is missing or has another format."""
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
    if phase >= len(_PHASES) or cells[1] <= lane != ALL_LANES:
        return None
    entries = [
        LaneEntry(bool(cells[at]), cells[at + 1], cells[at + 2], cells[at + 3], clock[at + 4])
        for at in range(_HEADER, _HEADER + _PER_LANE * cells[1], _PER_LANE)
    ]
    return Moment(_PHASES[phase], lane, now & _STEP_MASK, clock[SINCE], tuple(entries))

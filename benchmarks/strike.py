"""Which fault strikes an environment, and where: once per folder, whoever runs the environment.

A marker file, created exclusively just before the fault, is what "once" means: it survives the process,
so that an evaluator which tries again meets a healthy environment. It imports neither rl_eval nor a peer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

__all__ = ["FAULTS", "StrikeEnv", "struck"]

FAULTS: Final[dict[str, tuple[str, str]]] = {
    "raise": ("raise", "step"),
    "os._exit": ("os_exit", "step"),
    "SIGSEGV": ("segfault", "step"),
    "SIGKILL": ("sigkill", "step"),
    "SIGSTOP": ("sigstop", "step"),
    "Python loop": ("loop", "step"),
    "C sleep that holds the GIL": ("gil_sleep", "step"),
    "memory balloon under an rlimit": ("balloon", "step"),
    "hang in the constructor": ("hang", "construct"),
    "hang in reset": ("hang", "reset"),
    "hang in close": ("hang", "close"),
}
"""Kind and phase of each fault, by what it is called in a table."""

_MARKER: Final = "struck"
_AT: Final = {"reset": 2, "step": 40}
"""Which reset or step of an environment is struck; the constructor and ``close`` at once."""
_FOREVER_S: Final = 3600
_STEP_S: Final = 0.001
"""A step takes a moment, so that a run lasts seconds and a fault comes in its middle."""
_HEADROOM_BYTES: Final = 2**29


class StrikeEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Passes everything through, except for one fault.

    Args:
        env: Environment to wrap.
        kind: What happens, see :data:`FAULTS`; empty for nothing.
        phase: When it happens.
        folder: Where the marker file is.
        spare: Id of a process in which nothing happens: that of a driver which builds an environment just to
            look at its spaces.
    """

    def __init__(self, env: gym.Env[Any, Any], kind: str, phase: str, folder: str, spare: int = 0) -> None:
        super().__init__(env)
        self._kind, self._phase, self._folder, self._spare = kind, phase, folder, spare
        self._seen = 0
        self._maybe("construct")

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._maybe("reset")
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._maybe("step")
        time.sleep(_STEP_S)
        return self.env.step(action)

    def render(self) -> None:
        """Nothing to see; TorchRL's worker asks after every step."""

    def close(self) -> None:
        self._maybe("close")
        self.env.close()

    def _maybe(self, phase: str) -> None:
        if not self._kind or phase != self._phase or os.getpid() == self._spare:
            return
        self._seen += 1
        if self._seen == _AT.get(phase, 1) and _first(Path(self._folder)):
            _STRIKES[self._kind]()


def struck(folder: Path) -> tuple[int, float] | None:
    """Which process was struck, and when on the wall clock; None if none was."""
    try:
        pid, at = (folder / _MARKER).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid), float(at)


def _first(folder: Path) -> bool:
    """Leave the marker, unless it is there."""
    mine = folder / f"{os.getpid()}-{time.monotonic_ns()}"
    mine.write_text(f"{os.getpid()} {time.time()}")
    try:
        os.link(mine, folder / _MARKER)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


# ---------------------------------------------------------------------- faults


def _raise() -> None:
    raise RuntimeError("the simulator lost its connection")


def _loop() -> None:
    while True:
        pass


def _hang() -> None:
    time.sleep(_FOREVER_S)


def _gil_sleep() -> None:
    ctypes.PyDLL(None).sleep(_FOREVER_S)


def _balloon() -> None:
    """Take memory until the limit, which is put just above what the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _HEADROOM_BYTES, before[1]))
    try:
        hoard = []
        while True:
            hoard.append(bytearray(2**24))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_STRIKES: Final[dict[str, Callable[[], Any]]] = {
    "raise": _raise,
    "os_exit": lambda: os._exit(13),
    "segfault": lambda: ctypes.string_at(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "hang": _hang,
    "gil_sleep": _gil_sleep,
    "balloon": _balloon,
}

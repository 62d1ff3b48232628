"""State of the caller's process that an evaluation preserves: signals, forks, working directory, torch threads.

A signal reaches Python code only in the main thread, through its handler. The handlers in this module remember what
they raised, as that of SIGINT does after Ctrl-C. Any other exception comes from the code of the user.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, final

from rl_eval.errors import traceback_of
from rl_eval.supervision.flight_recorder import close_installed

_PACKAGES: Final = ("rl_eval.runners.", "rl_eval.backends.")
"""Beginnings of the names of all modules that call code of the user in the process of a runner."""
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""

_unattended = threading.Event()
"""Set in a process that receives no Ctrl-C."""
_forking: list[FrameType] = []
"""Call of the code of the user that has forked this process from the process of a runner."""


@final
class _NotedHandler:
    """Handler of a signal that calls the former handler, and remembers the last exception that ends a run."""

    def __init__(self, former: Any) -> None:
        self.former = former
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.former(number, frame)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.raised = error
            raise


@contextmanager
def signals_noted() -> Iterator[None]:
    """Detect Ctrl-C and other signals while environments run in this thread, if it is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    noted = {number: _NotedHandler(handler) for number, handler in handlers.items() if callable(handler)}
    for number, ours in noted.items():
        signal.signal(number, ours)
    try:
        yield
    finally:
        for number, ours in noted.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handlers[number])


def expect_no_ctrl_c() -> None:
    """Declare that this process receives no Ctrl-C, so that any ``KeyboardInterrupt`` comes from an environment."""
    _unattended.set()


def survivable() -> tuple[type[BaseException], ...]:
    """Return the exceptions that are faults of an environment or a policy: all that no signal can have raised.

    Call it in an ``except`` clause: the present exception is no fault if a signal raised it or its cause. In a process
    that code of the user has forked, end the process.
    """
    end_fork()
    if _unattended.is_set() or threading.current_thread() is not threading.main_thread():
        return (BaseException,)
    handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    noted = [handler.raised for handler in handlers.values() if isinstance(handler, _NotedHandler)]
    if any(raised is error for raised in filter(None, noted) for error in _origins(sys.exc_info()[1])):
        return (Exception,)
    known = all(isinstance(handlers.get(number), _NotedHandler | None) for number in _ENDING)
    return (BaseException,) if known else (Exception, SystemExit)


def _origins(error: BaseException | None) -> list[BaseException]:
    """Return an exception, its causes, and the members of groups."""
    found = [] if error is None else [error]
    for one in found:  # The list grows.
        members = getattr(one, "exceptions", ())
        nearest = (one.__cause__, one.__context__, *(members if isinstance(members, tuple) else ()))
        found += [near for near in nearest if near is not None and all(near is not known for known in found)]
    return found


def _note_fork() -> None:
    """Note in a new process whether a runner's call has forked it."""
    called = sys._getframe()  # noqa: SLF001 -- inspect.currentframe, without its import.
    while (frame := called.f_back) is not None and not _name(frame).startswith("rl_eval."):
        called = frame
    while frame is not None and not _name(frame).startswith(_PACKAGES):
        frame = frame.f_back
    if frame is not None:
        close_installed()
        _forking[:] = [called]


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


os.register_at_fork(after_in_child=_note_fork)


def end_fork() -> None:
    """End this process if a runner's call has forked it, with the exit code of the present exception; otherwise return.

    It must not continue as a second evaluator. While the call has not returned, it may evaluate on its own. There is no
    cleanup, because all files belong to its parent.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0) if _forking else None  # noqa: SLF001
    while frame is not None and frame is not _forking[0]:
        frame = frame.f_back
    if not _forking or frame is not None:
        return
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else error.code is not None)
    cause = "" if error is None else f"\n{traceback_of(error)}"
    os.write(2, f"rl_eval: this process ends, since only its parent continues the evaluation{cause}\n".encode())
    os._exit(1)


def current_folder() -> str | None:
    """Return the working directory; None if it was removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109 - Called in each time slice.
    return None


@contextmanager
def working_in(folder: str | None) -> Iterator[None]:
    """Change the working directory, and change it back at the end.

    Args:
        folder: New working directory; None for the present one.
    """
    former = current_folder()
    change_to(folder)
    try:
        yield
    finally:
        change_to(former)


def change_to(folder: str | None) -> None:
    """Change the working directory, if the folder exists. None changes nothing."""
    if folder is not None and folder != current_folder():
        with suppress(FileNotFoundError, NotADirectoryError):  # The folder was removed.
            os.chdir(folder)


@contextmanager
def one_thread(*, kept: bool = False) -> Iterator[None]:
    """Compute with one torch thread, as runners in separate processes do.

    More threads slow down small networks, especially on a busy machine. The last bits of a sum depend on the number of
    threads. Each thread of a process has its own setting.

    Args:
        kept: Whether the calling thread keeps the setting; by default, the former number is restored at the end.
    """
    torch: Any = sys.modules.get("torch")
    # Another thread may be importing torch.
    if not hasattr(torch, "set_num_threads") or (former := torch.get_num_threads()) == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        # Torch also sets the number for threads that have not computed yet. Another thread restores their number.
        restoring = threading.Thread(target=torch.set_num_threads, args=(former,))
        restoring.start()
        restoring.join()
        yield
    finally:
        if not kept:
            torch.set_num_threads(former)

"""State of the caller's process that an evaluation preserves: Ctrl-C, working directory, torch threads.

Ctrl-C reaches Python code only in the main thread, through the handler of SIGINT. The handler in this module remembers
whether it raised. Any other ``KeyboardInterrupt`` comes from the environment.
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

_ERRORS: Final = (Exception, SystemExit)

_unattended = threading.Event()
"""Set in a process that receives no Ctrl-C."""


@final
class _NotedHandler:
    """Handler of SIGINT that calls the former handler, and remembers whether it raised."""

    def __init__(self, former: Any) -> None:
        self.former = former
        self.raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.former(number, frame)
        except BaseException:
            self.raised = True
            raise


@contextmanager
def ctrl_c_noted() -> Iterator[None]:
    """Detect Ctrl-C while environments run in this thread, if it is the main thread."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    noted = _NotedHandler(former)
    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is noted:
            signal.signal(signal.SIGINT, former)


def expect_no_ctrl_c() -> None:
    """Declare that this process receives no Ctrl-C, so that any ``KeyboardInterrupt`` comes from an environment."""
    _unattended.set()


def survivable() -> tuple[type[BaseException], ...]:
    """Return the exceptions that are faults of an environment.

    They are errors, ``sys.exit()``, and an interrupt that does not come from Ctrl-C.
    """
    return _ERRORS if _may_be_ctrl_c() else (*_ERRORS, KeyboardInterrupt)


def _may_be_ctrl_c() -> bool:
    """Whether a ``KeyboardInterrupt`` may come from SIGINT; true if this is unknown."""
    if _unattended.is_set() or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler in (signal.SIG_IGN, signal.SIG_DFL):
        return False  # A background process ignores SIGINT. Without a handler, SIGINT would have ended the process.
    return handler.raised if isinstance(handler, _NotedHandler) else True


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

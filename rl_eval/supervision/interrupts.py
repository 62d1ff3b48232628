"""Distinction of Ctrl-C from a ``KeyboardInterrupt`` that an environment raises of itself.

A Ctrl-C reaches Python code in the main thread only, and through the handler of SIGINT. So where that handler takes
note of what it raises, a ``KeyboardInterrupt`` without such a note is the environment's own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, final

__all__ = ["ctrl_c_noted", "expect_no_ctrl_c", "survivable"]

_ERRORS: Final = (Exception, SystemExit)

_unattended = threading.Event()
"""Set in a process that nobody interrupts with Ctrl-C."""


@final
class _NotedHandler:
    """Handler of SIGINT that does what the former one does, and remembers whether that raised."""

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
    """Take note of Ctrl-C while environments run in this thread, if it is the main one."""
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
    """Declare that this process runs environments and nothing else, so that any interrupt comes from them."""
    _unattended.set()


def survivable() -> tuple[type[BaseException], ...]:
    """Return what an environment may raise at its own charge: errors, ``sys.exit()``, and what is no Ctrl-C."""
    return _ERRORS if _may_be_ctrl_c() else (*_ERRORS, KeyboardInterrupt)


def _may_be_ctrl_c() -> bool:
    """Whether a ``KeyboardInterrupt`` of now may come from SIGINT; in doubt, it may."""
    if _unattended.is_set() or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler in (signal.SIG_IGN, signal.SIG_DFL):
        return False  # A process in the background ignores it, and one without a handler would be dead.
    return handler.raised if isinstance(handler, _NotedHandler) else True

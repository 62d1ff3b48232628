"""Handlers of the signals of a crash, such as those of :mod:`faulthandler`, kept over code that replaces them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["crash_handlers_kept"]

_SIGNALS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_SIZE: Final = 256
"""Bytes for a ``struct sigaction``, which has up to 152 and begins with the address of the handler."""
_DEFAULT: Final = bytes(ctypes.sizeof(ctypes.c_void_p))
"""Address that stands for no handler."""


@contextlib.contextmanager
def crash_handlers_kept() -> Iterator[None]:
    """Install again afterwards what was installed before; where there was no handler, a new one stays.

    Such handlers are installed by C code, and the module :mod:`signal` does not see them.
    """
    sigaction = ctypes.CDLL(None).sigaction
    kept: dict[signal.Signals, Any] = {number: ctypes.create_string_buffer(_SIZE) for number in _SIGNALS}
    for number, action in kept.items():
        sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            if not action.raw.startswith(_DEFAULT):
                sigaction(number, action, None)

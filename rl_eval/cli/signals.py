"""What Ctrl-C and SIGTERM do: before the evaluation they end the command, during it they ask it to stop.

A request is only noted, and looked at between two refreshes of the progress display, so that what has finished
can be saved in peace. A second signal ends the command wherever it is.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final, final

__all__ = ["Interrupted", "Interruption"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command at once."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@final
class Interruption:
    """Handles both signals while it is entered; in another thread than the main one it does nothing."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that asks to stop; None before any."""
        self._deferring = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def defer(self) -> None:
        """From now on the first signal is only noted. Call it after ``ray.init``, which takes SIGTERM for itself."""
        self._deferring = True
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            former = signal.signal(number, self._handle)
            self._former.setdefault(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferring or self.number is not None:
            raise Interrupted(number)
        self.number = number

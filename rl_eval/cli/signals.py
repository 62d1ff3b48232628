"""What Ctrl-C and SIGTERM do: before the evaluation they end the command, during it they ask it to stop.

A request is only noted, and looked at between two refreshes of the progress display, so that what has finished
can be saved in peace. A second signal ends the command wherever it is.

SIGTERM is followed by SIGKILL, from some supervisors after three seconds. So a thread of its own hears of it, even
while the main thread is stuck in a library: it flushes the evaluation log, and ends a process that is still there
when the time is up.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

from rl_eval.errors import EvalError

__all__ = ["Interrupted", "Interruption"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_CODES: Final = tuple(128 + number for number in _SIGNALS)
_GRACE_S: Final = 2.2
"""Time between SIGTERM and the end of the process."""
_FLUSH_S: Final = 2.0


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command at once."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@final
class Interruption:
    """Handles both signals while it is entered; in another thread than the main one it does nothing.

    A command that a signal ended ends its process here, at once; after SIGTERM the process ends in any case.

    Args:
        leave: Ends the process with an exit code, whatever it does.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.number: int | None = None
        """The signal that asks to stop; None before any."""
        self._leave = leave
        self._deferring = False
        self._flush: Callable[[float], None] | None = None
        self._exit_code: int | None = None
        self._former: dict[int, Any] = {}
        self._writing: int | None = None
        """Where the interpreter tells the thread of a signal, before any Python code runs."""
        self._former_fd = -1

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._watch()
            self._install()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
        if self._writing is not None:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._writing)
            self._writing = None
        if (code := getattr(error, "exit_code", 0)) in _CODES:
            # All is said and saved. Libraries that a signal found half started do not end in order: some abort.
            sys.stdout.flush()
            self._leave(code)

    def defer(self, flush: Callable[[float], None] | None = None) -> None:
        """From now on the first signal is only noted. Call it after ``ray.init``, which takes SIGTERM for itself.

        Args:
            flush: Commits what has finished, within a number of seconds; raises ``EvalError`` if it cannot.
        """
        self._flush = flush
        self._deferring = True
        if self._writing is not None:
            self._install()

    def conclude(self, exit_code: int) -> None:
        """There is nothing left to say or to lose: the process may end at any time, with this exit code."""
        self._exit_code = exit_code

    def _install(self) -> None:
        for number in _SIGNALS:
            former = signal.signal(number, self._handle)
            self._former.setdefault(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferring or self.number is not None:
            raise Interrupted(number)
        self.number = number

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._former_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="rl_eval signals", daemon=True).start()

    def _listen(self, reading: int) -> None:
        """Wait for SIGTERM, or for the end of the command."""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] == signal.SIGTERM:
                    self._end()
                    return

    def _end(self) -> None:
        """Keep what can be kept, and end the process when the time is up."""
        end = time.monotonic() + _GRACE_S
        fate = self._rescue()
        time.sleep(max(0.0, end - time.monotonic()))
        if self._exit_code is None:
            os.write(2, f"error: ended by SIGTERM before there was a result; {fate}\n".encode())
        self._leave(128 + signal.SIGTERM if self._exit_code is None else self._exit_code)

    def _rescue(self) -> str:
        """Flush the evaluation log, and say what became of the episodes that had finished."""
        if not self._deferring:
            return "nothing had finished"
        if self._flush is None:
            return "what had finished is lost; --run-dir would keep it"
        try:
            self._flush(_FLUSH_S)
        except EvalError as error:
            return str(error)
        return "what had finished is in the log, and the next run continues there"

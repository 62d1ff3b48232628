"""Handling of Ctrl-C, SIGTERM and SIGHUP.

Before the evaluation, a signal ends the command. During the evaluation, the first signal cancels it and flushes its
log. After that, the command saves and prints the finished episodes. A second signal, or a signal after the result is
printed, ends the command immediately.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, final

from rl_eval.cli.printing import discard, flush_results, results_descriptor
from rl_eval.errors import EvalError

_FLUSH_S: Final = 30.0
"""Time limit of a flush of the log, in seconds."""


class Interrupted(BaseException):
    """A signal ended the command; distinct from ``KeyboardInterrupt``, which an environment may raise."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def handled_signals() -> list[signal.Signals]:
    """Return the handled signals, without those that the caller ignores.

    ``nohup`` ignores SIGHUP, and a shell script ignores SIGINT for a command in the background.
    """
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@final
class Interruption:
    """Context manager that handles the signals; it has no effect outside the main thread.

    Args:
        leave: Ends the process with an exit code.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.number: int | None = None
        """First signal that asked the evaluation to stop, or None."""
        self._leave = leave
        self._stop: Callable[[], object] | None = None
        self._exit_code: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in handled_signals()}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if (code := getattr(error, "exit_code", 0)) in [128 + number for number in self._former]:
            # Output is saved and printed. A normal exit may abort in a library whose import the signal interrupted.
            flush_results()
            self._leave(code)

    def defer(
        self, flush: Callable[[float], None] | None = None, *, cancel: Callable[[], object] = lambda: None
    ) -> None:
        """From now on, the first signal only asks the evaluation to stop.

        Args:
            flush: Commits finished episodes to the log within the passed number of seconds, or raises ``EvalError``.
            cancel: Asks the evaluation to stop.
        """

        def stop() -> None:
            cancel()
            with suppress(EvalError):  # The end of the evaluation flushes again and reports the error.
                if flush is not None:
                    flush(_FLUSH_S)

        self._stop = stop

    def conclude(self, exit_code: int) -> None:
        """From now on, a signal ends the process with this exit code, because the result is saved and printed."""
        self._exit_code = exit_code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _replace_lost_terminal()
        if self._exit_code is not None:
            self._leave(self._exit_code)
            return
        # A supervisor's SIGTERM after Ctrl-C is not a second signal. The kernel and the shell both send SIGHUP.
        repeated = number == self.number or (self.number is not None and number == signal.SIGINT)
        if self._stop is None or (repeated and number != signal.SIGHUP):
            raise Interrupted(number)
        if self.number in (None, signal.SIGINT):
            self.number = number
            # A handler must not block. But the cancel of an evaluation that has not started delivers its result.
            threading.Thread(target=self._stop, name="rl_eval stop", daemon=True).start()


def _replace_lost_terminal() -> None:
    """Redirect output of a closed terminal to /dev/null, since every write to it raises an error."""
    for descriptor in filter(None, {1, 2, results_descriptor()}):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            discard(descriptor)

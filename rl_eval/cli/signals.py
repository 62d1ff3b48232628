"""Handling of Ctrl-C, SIGTERM and SIGHUP: before the evaluation they end the command, during it they ask it to stop.

A request is only passed on to the evaluation, which looks for it between two steps, so that what has finished can be
saved in peace. A second signal ends the command wherever it is.

SIGTERM is followed by SIGKILL, from some supervisors after three seconds. So other threads learn of it, even while the
main thread is stuck in a step or in a library: they flush the evaluation log, save what has finished if the main
thread does not come to it in time, and end a process that is still there then. SIGHUP, the end of the terminal or of
its connection, is treated in the same way.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

from rl_eval.cli.stdout import flush_results, results_descriptor
from rl_eval.errors import EvalError

__all__ = ["Interrupted", "Interruption", "handled_signals"]

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_CODES: Final = tuple(128 + number for number in (signal.SIGINT, *_ENDING))
_GRACE_S: Final = 2.2
"""Time between SIGTERM or SIGHUP and the end of the process."""
_TURN_S: Final = 1.0
"""Time in which the main thread should come back from what it does, and begin to save."""
_SAVING_S: Final = 30.0
"""Longest time that a log or a result may take to write: it is worth more than a process that ends in time."""
_PARTING_S: Final = 15.0
"""Time in which runners stop and environments close when all is said and saved."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command at once."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end a command in order: without SIGHUP if ``nohup`` started it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def _nothing() -> None:
    pass


@final
class Interruption:
    """Handles the signals while it is entered; in another thread than the main one it does nothing.

    A command that a signal ended ends its process here, at once; after SIGTERM or SIGHUP the process ends in any case.

    Args:
        leave: Ends the process with an exit code, whatever it does.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.number: int | None = None
        """The signal that asks to stop; None before any."""
        self._leave = leave
        self._deferring = False
        self._flush: Callable[[float], None] | None = None
        self._cancel: Callable[[], object] = _nothing
        self._hide: Callable[[], object] = _nothing
        self._rescue: Callable[[], str] | None = None
        self._saving = threading.Lock()
        """Held, for good, by the thread that saves the result."""
        self._saved = threading.Event()
        self._rescued = False
        self._fate = "nothing had finished"
        """What became of the episodes that had finished."""
        self._exit_code: int | None = None
        self._parting: threading.Timer | None = None
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
        if self._parting is not None:
            self._parting.cancel()
        if self._writing is not None:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._writing)
            self._writing = None
        if (code := getattr(error, "exit_code", 0)) in _CODES:
            # All is said and saved. Libraries that a signal found half started do not end in order: some abort.
            flush_results()
            self._leave(code)

    def defer(
        self,
        flush: Callable[[float], None] | None = None,
        *,
        cancel: Callable[[], object] = _nothing,
        hide: Callable[[], object] = _nothing,
        rescue: Callable[[], str] | None = None,
    ) -> None:
        """From now on the first signal only asks to stop. Call it after ``ray.init``, which takes SIGTERM for itself.

        Args:
            flush: Commits what has finished, within a number of seconds; raises ``EvalError`` if it cannot.
            cancel: Asks the evaluation to stop; called in a signal handler, so it must not wait for anything.
            hide: Gives the terminal back; called in another thread, after SIGTERM or SIGHUP.
            rescue: Saves what has finished, without the main thread's help, and says where; called in another thread,
                after SIGTERM or SIGHUP, if nobody has called :meth:`claim` by then. Raises ``EvalError`` if it cannot.
        """
        self._flush, self._cancel, self._hide, self._rescue = flush, cancel, hide, rescue
        self._fate = "what had finished is lost"
        self._deferring = True
        if self._writing is not None:
            self._install()

    def claim(self) -> None:
        """Take the saving of the result upon this thread.

        Raises:
            Interrupted: Another thread has done so after a signal, and did not end the process.
        """
        if not self._saving.acquire(blocking=False):
            time.sleep(_SAVING_S)
            raise Interrupted(self.number or signal.SIGTERM)

    def abort(self, message: str, exit_code: int) -> None:
        """End the process at once with an error, since it may not live to end in order."""
        os.write(2, f"error: {message}\n".encode())
        self._leave(exit_code)

    def conclude(self, exit_code: int) -> None:
        """There is nothing left to say or to lose: the process may end at any time, with this exit code, and will."""
        self._exit_code = exit_code
        self._saved.set()
        self._parting = threading.Timer(_PARTING_S, self._part)
        self._parting.daemon = True
        self._parting.start()

    def _part(self) -> None:
        """End a process in which something does not come to its end."""
        os.write(2, b"the environment or Ray does not close: the process ends without waiting any longer\n")
        self._leave(self._exit_code or 0)

    def _install(self) -> None:
        for number in handled_signals():
            former = signal.signal(number, self._handle)
            self._former.setdefault(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # SIGTERM after Ctrl-C comes from a supervisor. SIGHUP comes from the kernel and from the shell.
        repeated = number == self.number or (self.number is not None and number == signal.SIGINT)
        if not self._deferring or (repeated and number != signal.SIGHUP):
            raise Interrupted(number)
        if self.number in (None, signal.SIGINT):
            self.number = number
        self._cancel()

    # ------------------------------------------------------------------ the threads

    def _watch(self) -> None:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._former_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="rl_eval signals", daemon=True).start()

    def _listen(self, reading: int) -> None:
        """Wait for SIGTERM or SIGHUP, or for the end of the command."""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] in _ENDING:
                    self._end(signal.Signals(received[0]))
                    return

    def _end(self, number: signal.Signals) -> None:
        """Have what can be kept kept, and end the process when the time is up, whatever hangs."""
        _replace_lost_terminal()
        ends = time.monotonic() + _GRACE_S
        keeper = threading.Thread(target=self._keep, name="rl_eval rescue", daemon=True)
        keeper.start()
        keeper.join(_SAVING_S)
        if self._saving.locked():
            self._saved.wait(_SAVING_S)
        if not self._rescued:
            time.sleep(max(0.0, ends - time.monotonic()))
        if self._exit_code is None:
            os.write(2, f"error: ended by {number.name} before the evaluation could stop; {self._fate}\n".encode())
        self._leave(128 + number if self._exit_code is None else self._exit_code)

    def _keep(self) -> None:
        """Ask the evaluation to stop, flush its log, and save what has finished if the main thread does not."""
        turn_ends = time.monotonic() + _TURN_S
        self._cancel()
        self._hide()
        if self._flush is not None:
            self._fate = self._flushed(self._flush)
        if self._rescue is None:
            return
        self._saved.wait(max(0.0, turn_ends - time.monotonic()))
        if self._saving.acquire(blocking=False):
            self._fate = self._rescue_by(self._rescue)
            self._rescued = True
            self._saved.set()

    @staticmethod
    def _flushed(flush: Callable[[float], None]) -> str:
        try:
            flush(_SAVING_S)
        except EvalError as error:
            return str(error)
        return "what had finished is in the log, and the next run continues there"

    def _rescue_by(self, rescue: Callable[[], str]) -> str:
        try:
            saved = rescue()
        except Exception as error:
            saved = f"what had finished cannot be saved: {error}"
        return saved if self._flush is None else f"{self._fate}; {saved}"


def _replace_lost_terminal() -> None:
    """Send output to /dev/null that would go to a terminal that is gone: each write there raises an error."""
    for descriptor in filter(None, {1, 2, results_descriptor()}):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

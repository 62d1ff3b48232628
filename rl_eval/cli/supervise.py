"""``rl-eval supervise``: whether a run that ended is started again, when, and for how long that goes on.

The run is a child process, so that nothing that happens to it (out of memory, a crash in native code) happens to
its supervisor. What the child had finished is in its evaluation log; the next child continues there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, Final, final

import typer

from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.errors import ConfigError, EvalError
from rl_eval.redaction import redact_text

__all__ = ["Progress", "Supervisor", "delay_s", "is_final", "supervise"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_FIRST_DELAY_S: Final = 1.0
_LAST_DELAY_S: Final = 60.0
_POLL_S: Final = 0.1
_VERDICTS: Final = {ExitCode.COMPLETE, ExitCode.PARTIAL, ExitCode.FAILED}
"""How a run ends that has come to a result; a complete log then makes the result final."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the plan an evaluation log holds; both are 0 before there is a log."""

    finished: int = 0
    episodes: int = 0

    @property
    def complete(self) -> bool:
        """Whether every episode of the plan has a row."""
        return 0 < self.episodes <= self.finished


def delay_s(failures: int) -> float:
    """Return the pause before a restart, after this many ends in a row without a new episode."""
    return float(min(_FIRST_DELAY_S * 2.0 ** min(max(failures - 1, 0), 30), _LAST_DELAY_S))


def is_final(code: int, progress: Progress) -> bool:
    """Tell whether a run that ended by itself shall not be started again."""
    return code in {ExitCode.COMPLETE, ExitCode.USAGE} or (code in _VERDICTS and progress.complete)


@final
class Supervisor:
    """Keeps one command running until its work is done. SIGINT and SIGTERM are passed on to it, and end it for good.

    Args:
        command: The child's command line.
        progress: Reads how far its evaluation log is.
        max_restarts: Consecutive restarts without a new episode.
        say: Shows a line to the user.
    """

    def __init__(
        self, command: Sequence[str], progress: Callable[[], Progress], max_restarts: int, say: Callable[[str], None]
    ) -> None:
        self._command = list(command)
        self._progress = progress
        self._max_restarts = max_restarts
        self._say = say
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None

    def run(self) -> int:
        """Run the command as often as needed; return the exit code of its last run."""
        former: dict[int, Any] = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            return self._run()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        failures, before = 0, self._progress()
        while True:
            code = self._run_child()
            if self._asked is not None:
                return code
            now = self._progress()
            if is_final(code, now):
                return code
            failures = 1 if now.finished > before.finished else failures + 1
            if failures > self._max_restarts:
                self._say(f"{_ended(code, now)}; gave up after {self._max_restarts} restarts without a new episode")
                return code
            pause_s, before = delay_s(failures), now
            self._say(f"{_ended(code, now)}; restart {failures} of {self._max_restarts} in {pause_s:g} s")
            self._sleep(pause_s)
            if self._asked is not None:
                return 128 + self._asked

    def _run_child(self) -> int:
        # In a session of its own, so that a Ctrl-C reaches it once: by us.
        self._child = subprocess.Popen(self._command, start_new_session=True)  # noqa: S603 - our own command line.
        if self._asked is not None:  # It came between the decision to start and the start.
            self._child.send_signal(self._asked)
        code = self._child.wait()
        self._child = None
        return 128 - code if code < 0 else code

    def _sleep(self, pause_s: float) -> None:
        """Wait; Python goes on with a sleep after a signal, so this looks up now and then."""
        end = time.monotonic() + pause_s
        while self._asked is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        if self._child is not None:
            self._child.send_signal(number)


def supervise(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- run CONFIG --run-dir DIR ...",
            show_default=False,
            help="What follows rl-eval in the command to keep running.",
        ),
    ],
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="Give up after this many restarts in a row without a new episode.")
    ] = 10,
    debug: Debug = False,
) -> None:
    """Run an evaluation, and start it again with back-off, where it stopped, until its log is complete."""
    with reported(debug):
        run_dir = _run_dir(command)
        supervisor = Supervisor(
            [sys.executable, "-m", "rl_eval", *command], lambda: _read_progress(run_dir), max_restarts, _say
        )
        if code := supervisor.run():
            raise typer.Exit(code)


def _run_dir(command: Sequence[str]) -> str:
    """Return the ``--run-dir`` of a command.

    Raises:
        ConfigError: It is not a ``run`` that can be continued.
    """
    if command[0] != "run":
        raise ConfigError(f"supervise keeps `run` running, not {command[0]!r}: write -- run CONFIG --run-dir DIR")
    if "--fresh" in command:
        raise ConfigError("--fresh would start from nothing at every restart: leave it out under supervise")
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == "--run-dir":
            found = value if equals else "".join(command[position + 1 : position + 2])
            if found:
                return found
    raise ConfigError("supervise needs a log that the next run continues: add --run-dir DIR after `run CONFIG`")


def _read_progress(run_dir: str) -> Progress:
    """Read how far a log is; one that is not there, or cannot be read, is for the run to report."""
    from rl_eval.log import read_log

    try:
        contents = read_log(run_dir)
    except EvalError:
        return Progress()
    return Progress(len(contents.rows), contents.manifest.num_episodes)


def _ended(code: int, progress: Progress) -> str:
    """Say how a run ended, and how far."""
    name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else ""
    episodes = f"{progress.finished:,} of {progress.episodes:,} episodes in the log" if progress.episodes else "no log"
    return f"run ended with {code}{f' ({name})' if name else ''}, {episodes}"


def _say(line: str) -> None:
    typer.echo(redact_text(f"rl-eval supervise: {line}"), err=True)

"""Restarts of ``rl-eval run``: the same command as a child process, again and again until its log is complete.

Nothing that happens to the child (out of memory, a crash in native code) happens to the process that restarts it.
What the child had finished is in its evaluation log; the next child continues there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, final

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import results_descriptor
from rl_eval.cli.signals import handled_signals
from rl_eval.errors import ConfigError, EvalError
from rl_eval.redaction import redact_text

__all__ = ["Child", "Progress", "delay_s", "is_final", "repeated", "run_with_restarts", "without_option"]

_OPTION: Final = "--max-restarts"
_LONGEST_DELAY_S: Final = 60.0
_POLL_S: Final = 0.1
_OF_A_RESULT: Final = {ExitCode.COMPLETE, ExitCode.PARTIAL, ExitCode.FAILED, ExitCode.REQUIREMENT}


@dataclass(frozen=True, slots=True)
class Progress:
    """Number of episodes that an evaluation log holds, and of those planned; both are 0 before there is a log."""

    finished: int = 0
    episodes: int = 0


def run_with_restarts(run_dir: str | None, max_restarts: int, *, fresh: bool) -> int:
    """Run this process's own command in children, without the option that asks for restarts; return the exit code."""
    if run_dir is None:
        raise ConfigError(f"{_OPTION} continues the log in --log-dir after a restart: give --log-dir")
    if fresh:
        raise ConfigError(f"--fresh would start from nothing at every restart: leave it out beside {_OPTION}")
    child = Child([sys.executable, "-m", "rl_eval", *without_option(sys.argv[1:])])
    former = {number: signal.signal(number, child.forward) for number in handled_signals()}
    try:
        return repeated(child.run, lambda: _read_progress(run_dir), max_restarts, child.sleep, _report)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def repeated(
    run: Callable[[], int],
    progress: Callable[[], Progress],
    max_restarts: int,
    sleep: Callable[[float], int | None],
    report: Callable[[str], None],
) -> int:
    """Run until that is final, or until restarts in a row brought no new episode; return the last exit code.

    Args:
        run: Runs once; returns the exit code, negative where the run shall not be restarted.
        progress: Reads how far the log is.
        max_restarts: Consecutive restarts without a new episode.
        sleep: Waits; returns the exit code to end with at once, else None.
        report: Shows a line to the user.
    """
    failures, before = 0, progress()
    while (code := run()) >= 0 and not is_final(code, now := progress()):
        failures = 1 if now.finished > before.finished else failures + 1
        before = now
        if failures > max_restarts:
            report(f"{_ended(code, now)}; gave up after {max_restarts} restarts without a new episode")
            return code
        report(f"{_ended(code, now)}; restart {failures} of {max_restarts} in {delay_s(failures):g} s")
        if (asked := sleep(delay_s(failures))) is not None:
            return asked
    return abs(code)


def delay_s(failures: int) -> float:
    """Return the pause before a restart, after this many ends in a row without a new episode."""
    return min(2.0 ** min(failures - 1, 30), _LONGEST_DELAY_S)


def is_final(code: int, progress: Progress) -> bool:
    """Return whether a run that ended by itself is not to be started again."""
    complete = 0 < progress.episodes <= progress.finished
    return code in {ExitCode.COMPLETE, ExitCode.USAGE} or (code in _OF_A_RESULT and complete)


def without_option(words: Sequence[str]) -> list[str]:
    """Return the words of a command without ``--max-restarts N``."""
    kept, skip = [], False
    for word in words:
        if not skip and not word.startswith(f"{_OPTION}=") and word != _OPTION:
            kept.append(word)
        skip = not skip and word == _OPTION
    return kept


@final
class Child:
    """The child process. A signal to this process is forwarded to it, and ends both for good."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None

    def run(self) -> int:
        """Run it once; return its exit code, 128 + n for death by signal n, negated if it was asked to end."""
        # In a session of its own, so that a Ctrl-C reaches it once: from here.
        self._process = subprocess.Popen(  # noqa: S603 - our own command line.
            self._command, stdout=results_descriptor(), start_new_session=True
        )
        if self._asked is not None:  # It came between the decision to start and the start.
            self._process.send_signal(self._asked)
        code = self._process.wait()
        self._process = None
        code = 128 - code if code < 0 else code
        return code if self._asked is None else -code

    def sleep(self, pause_s: float) -> int | None:
        """Wait, and look for a signal now and then, since Python goes on with a sleep after one."""
        end = time.monotonic() + pause_s
        while self._asked is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        return None if self._asked is None else 128 + self._asked

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on, as its handler."""
        self._asked = number
        if self._process is not None:
            self._process.send_signal(number)


def _read_progress(run_dir: str) -> Progress:
    """Read how far a log is; one that is not there, or cannot be read, is for the run to report."""
    from rl_eval.log import read_log

    try:
        contents = read_log(run_dir)
    except EvalError:
        return Progress()
    return Progress(len(contents.rows), contents.manifest.num_episodes)


def _ended(code: int, progress: Progress) -> str:
    """Describe how a run ended, and how far."""
    name = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
    episodes = f"{progress.finished:,} of {progress.episodes:,} episodes in the log" if progress.episodes else "no log"
    return f"run ended with {code}{name}, {episodes}"


def _report(line: str) -> None:
    typer.echo(redact_text(f"rl-eval: {line}"), err=True)

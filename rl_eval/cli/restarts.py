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
from types import FrameType
from typing import Final, NamedTuple

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import results_descriptor
from rl_eval.cli.signals import handled_signals
from rl_eval.errors import ConfigError, EvalError

_OPTION: Final = "--max-restarts"
_LONGEST_DELAY_S: Final = 60.0
_POLL_S: Final = 0.1


class Progress(NamedTuple):
    """Number of episodes that an evaluation log holds, and of those planned; both are 0 before there is a log."""

    finished: int = 0
    planned: int = 0


def run_with_restarts(run_dir: str | None, max_restarts: int, *, fresh: bool) -> int:
    """Run this process's own command in children, without the option that asks for restarts; return the exit code."""
    if run_dir is None:
        raise ConfigError(f"{_OPTION} continues the log in --log-dir after a restart: give --log-dir")
    if fresh:
        raise ConfigError(f"--fresh would start from nothing at every restart: leave it out beside {_OPTION}")

    def progress() -> Progress:
        from rl_eval.log import read_log

        try:
            contents = read_log(run_dir)
        except EvalError:  # The run reports it.
            return Progress()
        return Progress(len(contents.rows), contents.manifest.num_episodes)

    return repeated([sys.executable, "-m", "rl_eval", *without_option(sys.argv[1:])], progress, max_restarts)


def repeated(
    command: Sequence[str], progress: Callable[[], Progress], max_restarts: int, first_delay_s: float = 1.0
) -> int:
    """Run a command until that is final, or until restarts in a row brought no new episode; return its exit code.

    A signal to this process is forwarded to the command, which ends for good then.

    Args:
        command: Words of the command.
        progress: Reads how far the log is.
        max_restarts: Consecutive restarts without a new episode.
        first_delay_s: Pause before the first restart; it doubles with each that brings no new episode.
    """
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(number)

    former = {number: signal.signal(number, forward) for number in handled_signals()}
    try:
        failures, before = 0, progress()
        while not asked:
            # In a session of its own, so that a Ctrl-C reaches it once: from here.
            child = subprocess.Popen(command, stdout=results_descriptor(), start_new_session=True)  # noqa: S603
            if asked:  # A signal came while it started.
                child.send_signal(asked[-1])
            code = child.wait()
            code, now = 128 - code if code < 0 else code, progress()
            if asked or _is_final(code, now):
                return code
            failures = 1 if now.finished > before.finished else failures + 1
            before = now
            delay = min(first_delay_s * 2.0 ** min(failures - 1, 30), _LONGEST_DELAY_S)
            far = f"{now.finished:,} of {now.planned:,} episodes in the log" if now.planned else "no log"
            told = f"rl-eval: run ended with {code}, {far}"
            if failures > max_restarts:
                typer.echo(f"{told}; gave up after {max_restarts} restarts without a new episode", err=True)
                return code
            typer.echo(f"{told}; restart {failures} of {max_restarts} in {delay:g} s", err=True)
            end = time.monotonic() + delay
            while not asked and time.monotonic() < end:  # Python goes on with a sleep after a signal.
                time.sleep(min(_POLL_S, delay))
        return 128 + asked[-1]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_final(code: int, progress: Progress) -> bool:
    """Return whether a run that ended by itself is not to be started again."""
    if code in (ExitCode.PARTIAL, ExitCode.FAILED, ExitCode.REQUIREMENT):
        return 0 < progress.planned <= progress.finished
    return code in (ExitCode.COMPLETE, ExitCode.USAGE)


def without_option(words: Sequence[str]) -> list[str]:
    """Return the words of a command without ``--max-restarts N``."""
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if _OPTION not in (before, word.partition("=")[0])]

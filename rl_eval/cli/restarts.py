"""Restarts of ``rl-eval run``: run the same command in a child process until its log is complete.

The parent survives any failure of the child, such as running out of memory or a crash in native code.
The evaluation log keeps the finished episodes. The next child continues the log.
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
    """Number of episodes in an evaluation log and in its plan; both are 0 if there is no log yet.

    If a rule ended the evaluation, only the episodes before this end are counted.
    """

    finished: int = 0
    planned: int = 0


def run_with_restarts(output: str | None, max_restarts: int) -> int:
    """Run the command of this process in child processes, without ``--max-restarts``; return the exit code."""
    if output is None:
        raise ConfigError(f"{_OPTION} needs --output", key=_OPTION, value=max_restarts, fix="Pass --output DIR.")

    def progress() -> Progress:
        from rl_eval.log import read_log

        try:
            contents = read_log(output)
        except EvalError:  # The run itself reports the error.
            return Progress()
        end = contents.ended_by
        return (
            Progress(len(contents.rows), contents.manifest.num_episodes) if end is None else Progress(*[end.after] * 2)
        )

    return repeated([sys.executable, "-m", "rl_eval", *without_option(sys.argv[1:])], progress, max_restarts)


def repeated(
    command: Sequence[str], progress: Callable[[], Progress], max_restarts: int, first_delay_s: float = 1.0
) -> int:
    """Run a command until its result is final or ``max_restarts`` is reached; return its exit code.

    A signal to this process is forwarded to the command. After a signal, the command is not restarted.

    Args:
        command: Program and arguments of the command.
        progress: Reads the number of episodes in the log.
        max_restarts: Maximum number of consecutive restarts without a new episode.
        first_delay_s: Seconds before the first restart. The delay doubles with each restart without a new episode.
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
            # A new session: a Ctrl-C reaches the child once, through this process.
            child = subprocess.Popen(command, stdout=results_descriptor(), start_new_session=True)  # noqa: S603
            if asked:  # A signal came while the child started.
                child.send_signal(asked[-1])
            code = child.wait()
            code, now = 128 - code if code < 0 else code, progress()
            if asked or _is_final(code, now):
                return code
            failures = 1 if now.finished > before.finished else failures + 1
            before = now
            delay = min(first_delay_s * 2.0 ** min(failures - 1, 30), _LONGEST_DELAY_S)
            far = f"{now.finished:,} of {now.planned:,} episodes in the log" if now.planned else "no log"
            text = f"rl-eval: run exited with {code}, {far}"
            if failures > max_restarts:
                typer.echo(f"{text}; giving up after {max_restarts} restarts without a new episode", err=True)
                return code
            typer.echo(
                f"{text}; the process restarts in {delay:g} s (restart {failures} of at most {max_restarts})", err=True
            )
            end = time.monotonic() + delay
            while not asked and time.monotonic() < end:  # Python resumes a sleep after a signal.
                time.sleep(min(_POLL_S, delay))
        return 128 + asked[-1]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_final(code: int, progress: Progress) -> bool:
    """Whether a run that exited by itself is final, so that it is not restarted."""
    if code in (ExitCode.PARTIAL, ExitCode.FAILED, ExitCode.REQUIREMENT, ExitCode.NO_ANSWER):
        return 0 < progress.planned <= progress.finished
    return code in (ExitCode.COMPLETE, ExitCode.USAGE)


def without_option(words: Sequence[str]) -> list[str]:
    """Return the words of a command without ``--max-restarts N``."""
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if _OPTION not in (before, word.partition("=")[0])]

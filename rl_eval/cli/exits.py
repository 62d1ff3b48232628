"""Exit codes of the commands, and the printing of errors."""

from __future__ import annotations

import errno
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

from rl_eval.cli.signals import Interrupted
from rl_eval.errors import ClusterError, EvalError, UsageError, summary_of, traceback_of
from rl_eval.errors.redaction import redact_text
from rl_eval.reports.page import lines


class ExitCode(IntEnum):
    """Exit codes; the code of a signal is 128 plus its number."""

    COMPLETE = 0
    PARTIAL = 1
    USAGE = 2
    FAILED = 3
    CLUSTER = 4
    REQUIREMENT = 5
    NO_ANSWER = 6
    BUG = 70
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


CODES: Final = {"complete": ExitCode.COMPLETE, "partial": ExitCode.PARTIAL, "failed": ExitCode.FAILED}
"""Codes of the statuses of a result."""

EXIT_CODES: Final = {
    "0": "done: every episode completed, and every requirement is met",
    "1": "in part: episodes, checkpoints or cells failed, differ or did not run; for compare, a requirement is not met",
    "2": "usage error in an option, a config, a file or a folder; for doctor, plan, ope and suite plan, also a problem",
    "3, 4": "no result: 3 if the environment or the policy does not work, 4 if the cluster or the log does not work",
    "5, 6": "a requirement of run is not met (5); a requirement of run or compare has no answer (6)",
    "70, 129, 130, 143": "ended by an unexpected error (70), by SIGHUP, by Ctrl-C or by SIGTERM; episodes are saved",
}
"""Meaning of the exit codes of all commands."""


def explained() -> str:
    """Return the exit codes as text for the help of a command."""
    width = max(map(len, EXIT_CODES)) + 2
    codes = [
        textwrap.fill(f"{code:<{width}}{meaning}", 78, subsequent_indent=" " * width)
        for code, meaning in EXIT_CODES.items()
    ]
    return "\n".join(["\b", "Exit codes:", *codes])


VERBOSE: Final = "RL_EVAL_VERBOSE"
"""Environment variable with the effect of ``--verbose``."""


def code_of(error: EvalError) -> ExitCode:
    """Return the exit code for an error of the caller, of the machine, or of the evaluation."""
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    return ExitCode.CLUSTER if isinstance(error, ClusterError) else ExitCode.FAILED


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn exceptions of a command into a message on stderr and an exit code.

    For an unexpected exception, print the traceback instead of a message.
    """
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except (Interrupted, KeyboardInterrupt, SystemExit) as stop:
        # While Ray starts, its handler of SIGTERM exits with the number of the signal.
        if isinstance(stop, SystemExit) and stop.code != signal.SIGTERM:
            raise
        _print_error("interrupted before there was a result")
        default = 128 + (signal.SIGTERM if isinstance(stop, SystemExit) else signal.SIGINT)
        raise typer.Exit(getattr(stop, "exit_code", default)) from None
    except Exception as error:
        message, code = _explained(error)
        if debug or not message:
            typer.echo(traceback_of(error), err=True, nl=False)
        if message:
            _print_error(message)
        raise typer.Exit(code) from None


def _explained(error: Exception) -> tuple[str, ExitCode]:
    """Return the message and exit code of an error; the message of an unexpected error is empty."""
    if isinstance(error, EvalError):
        return str(error), code_of(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # Any option or argument can be a path.
        return f"{error.strerror}: {error.filename}", ExitCode.USAGE
    policies = sys.modules.get("rl_eval.policies")  # Not imported: no policy factory was called.
    if policies is not None and policies.came_from_factory(error):
        summary = " ".join(summary_of(error).split())
        return f"the policy cannot be built: {summary}. Pass -v to see the traceback.", ExitCode.FAILED
    return "", ExitCode.BUG


def _print_error(message: str) -> None:
    """Print a message without control characters; keep its line breaks, and wrap long lines only on a terminal."""
    shown = lines(redact_text(message).strip()) or "no message"
    text = Text.assemble(("error: ", "bold red"), shown)
    Console(stderr=True, highlight=False, emoji=False).print(text, soft_wrap=not os.isatty(2))

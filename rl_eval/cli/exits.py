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
    BUG = 70
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


CODES: Final = {"complete": ExitCode.COMPLETE, "partial": ExitCode.PARTIAL, "failed": ExitCode.FAILED}
"""Codes of the statuses of a result."""

EXIT_CODES: Final = (
    (ExitCode.COMPLETE, "run, crossplay", "complete: every episode completed"),
    (ExitCode.COMPLETE, "watch", "complete: every checkpoint was evaluated, and all its episodes completed"),
    (ExitCode.COMPLETE, "suite run", "complete: every episode of every cell completed"),
    (ExitCode.COMPLETE, "replay", "every episode is bitwise equal to its record"),
    (
        ExitCode.COMPLETE,
        "compare",
        "compared; the requirements of --require are met, and --fail-on shows no regression",
    ),
    (ExitCode.COMPLETE, "doctor", "no problem; there may be warnings"),
    (ExitCode.COMPLETE, "", "done"),
    (ExitCode.PARTIAL, "run, crossplay", "partial: some episodes failed or did not run"),
    (
        ExitCode.PARTIAL,
        "watch",
        "partial: some checkpoints cannot be loaded, are not completely evaluated, or have a failed episode",
    ),
    (ExitCode.PARTIAL, "suite run", "partial: some cells have failed episodes, or no result"),
    (ExitCode.PARTIAL, "replay", "some episodes differ from their records"),
    (ExitCode.PARTIAL, "compare", "a requirement of --require is not met, or --fail-on shows a regression"),
    (ExitCode.USAGE, "compare", "usage error, or no answer: too few pairs, or pairs with a failed episode"),
    (ExitCode.USAGE, "plan", "usage error, or no answer: pilot episodes failed, or all have the same return"),
    (ExitCode.USAGE, "suite plan", "usage error, or some cells cannot run; the notes say why"),
    (ExitCode.USAGE, "ope", "usage error, or no estimator can identify the policy's value from the data"),
    (ExitCode.USAGE, "doctor", "usage error, or at least one problem"),
    (
        ExitCode.USAGE,
        "run, crossplay",
        "usage error, or the log belongs to another run or is being written by another process",
    ),
    (ExitCode.USAGE, "", "usage error in an option, a config, weights, a file or a folder; the message names it"),
    (
        ExitCode.FAILED,
        "run, crossplay",
        "failed: the environment or the policy does not work, or too many episodes failed",
    ),
    (ExitCode.FAILED, "watch", "failed: no checkpoint has a result"),
    (ExitCode.FAILED, "suite run", "failed: no cell has a result"),
    (ExitCode.FAILED, "replay, export, plan, ope", "failed: the environment or the policy does not work"),
    (
        ExitCode.CLUSTER,
        "run, watch, crossplay, suite run",
        "cluster error: no runner runs, the log or result cannot be written, or another process took over the log",
    ),
    (ExitCode.CLUSTER, "plan, ope, service", "cluster error: no answer at the address, or no runner starts"),
    (
        ExitCode.CLUSTER,
        "show, export, report, replay, compare, suite plan, suite report",
        "the evaluation log is damaged or cannot be read",
    ),
    (ExitCode.REQUIREMENT, "run", "complete, but a requirement of --require is not met, or its metric has no value"),
    (ExitCode.BUG, "", "unexpected error, shown with its traceback"),
    (ExitCode.HANGUP, "run, watch, crossplay, suite run", "interrupted by SIGHUP; finished episodes are saved"),
    (ExitCode.HANGUP, "", "interrupted by SIGHUP"),
    (ExitCode.INTERRUPTED, "run, watch, crossplay, suite run", "interrupted by Ctrl-C; finished episodes are saved"),
    (ExitCode.INTERRUPTED, "", "interrupted by Ctrl-C"),
    (ExitCode.TERMINATED, "run, watch, crossplay, suite run", "interrupted by SIGTERM; finished episodes are saved"),
    (ExitCode.TERMINATED, "", "interrupted by SIGTERM"),
)
"""Rows of code, commands and meaning. The first matching row wins; a row without commands matches every command."""


def exit_codes(command: str) -> dict[ExitCode, str]:
    """Return the meaning of each exit code of a command."""
    found: dict[ExitCode, str] = {}
    for code, commands, meaning in EXIT_CODES:
        if not commands or command in commands.split(", "):
            found.setdefault(code, meaning)
    return found


def explained(command: str) -> str:
    """Return the exit codes of a command as text for its help."""
    codes = [
        textwrap.fill(f"{code:<5}{meaning}", 78, subsequent_indent=" " * 5)
        for code, meaning in exit_codes(command).items()
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
    Console(stderr=True, highlight=False).print(text, soft_wrap=not os.isatty(2))

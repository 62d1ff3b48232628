"""Exit codes of the commands, and the printing of errors."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from rl_eval.cli.signals import Interrupted
from rl_eval.errors import ClusterError, EvalError, UsageError, summary_of
from rl_eval.redaction import redact_text
from rl_eval.reports.page import lines

__all__ = [
    "COMPARE_CODES",
    "CROSSPLAY_CODES",
    "DOCTOR_CODES",
    "INIT_CODES",
    "LIST_CODES",
    "OPE_CODES",
    "PLAN_CODES",
    "POWER_CODES",
    "READ_CODES",
    "REPLAY_CODES",
    "RETRY_CODES",
    "RUN_CODES",
    "VERBOSE",
    "VIDEO_CODES",
    "VIEW_CODES",
    "WATCH_CODES",
    "Debug",
    "ExitCode",
    "code_of",
    "reported",
]


class ExitCode(IntEnum):
    """Exit codes; a signal ends with 128 plus its number instead."""

    COMPLETE = 0
    PARTIAL = 1
    USAGE = 2
    FAILED = 3
    CLUSTER = 4
    REQUIREMENT = 5
    BUG = 70


RUN_CODES: Final = """\
\b
Exit codes:
0    complete: every episode completed
1    partial: some episodes failed or did not run
2    usage error: config, weights, unknown key, output folder; or the run in
     --log-dir is another one, or is being written by another process
3    failed: too many episodes failed, or environment or policy cannot work
4    cluster error: no runner came up, the address cannot be reached, the
     local cluster died, the evaluation log or the result cannot be written,
     or the log was taken over
5    complete, but what --require asks does not hold, or has no value
130  interrupted by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP: what had
     finished is saved
70   unexpected error, shown with its traceback
With --max-restarts it is that of the last run.
"""

WATCH_CODES: Final = """\
\b
Exit codes, over all checkpoints that the output folder knows:
0    complete: every checkpoint was evaluated, and all its episodes completed
1    partial: some could not be loaded, had failed episodes, or are still
     being written
2    usage error: config, option, no checkpoint at all; or the output folder
     is about another evaluation, or is being written by another process
3    failed: no checkpoint has a result
4    cluster error: no runner came up, or none is left; the next call
     continues there
130  interrupted by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP: what had
     finished is saved
70   unexpected error, shown with its traceback
"""

READ_CODES: Final = """\
\b
Exit codes:
0    done
2    usage error: there is no such result, or it contradicts the log beside it
4    the evaluation log is damaged or cannot be read
"""

INIT_CODES: Final = """\
\b
Exit codes:
0    written
2    usage error: an option, or the file exists already or cannot be written
"""

LIST_CODES: Final = """\
\b
Exit codes:
0    listed; what cannot be read is a line with the reason
2    usage error: there is no such folder
"""

RETRY_CODES: Final = """\
\b
Exit codes:
0    complete: no episode is failed any more
1    partial: some failed again or did not run
2    usage error: no evaluation log, other weights or code, a config of live
     objects, or the run is being written by another process
3    failed: too many episodes failed, or environment or policy cannot work
4    cluster error: no runner came up, or the evaluation log is damaged, or
     it or the result cannot be written
130  interrupted by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP: what had
     finished is saved
"""

REPLAY_CODES: Final = """\
\b
Exit codes:
0    every episode came out again as recorded, bit by bit
1    some came out differently
2    usage error: no such episode, other weights, a config of live objects, or
     --render without a display or with an environment that opens no window
3    the environment or the policy cannot be built, or the window failed
4    the evaluation log is damaged or cannot be read
"""

VIDEO_CODES: Final = """\
\b
Exit codes:
0    every episode came out again as recorded, bit by bit
1    recorded, but some came out differently
2    usage error: no such result, no episode selected, other weights, a config
     of live objects, or an environment that does not render
3    the environment or the policy cannot be built, or rendering failed
4    the evaluation log is damaged or cannot be read
"""

VIEW_CODES: Final = """\
\b
Exit codes:
0    ended by Ctrl-C
2    usage error: there is no such folder, or the port cannot be used
"""

COMPARE_CODES: Final = """\
\b
Exit codes:
0    compared; --require: it holds; --fail-on: no regression is shown
1    --require: it does not hold; --fail-on: b is shown to return less
2    the results cannot be compared or read; --require and --fail-on: no
     answer, as pairs are too few or lack a side that failed
4    an evaluation log is damaged or cannot be read
"""

OPE_CODES: Final = """\
\b
Exit codes:
0    at least one estimate is identified
2    the data identify none, or are refused; or a usage error
3    the environment or the policy cannot be built
4    cluster error in the simulation
"""

PLAN_CODES: Final = """\
\b
Exit codes:
0    planned
2    usage error; or some episodes of the pilot failed; or --detect or
     --half-width is asked, and all of them returned the same
3    the environment or the policy cannot work
4    cluster error: the pilot's runner did not come up
"""

POWER_CODES: Final = """\
\b
Exit codes:
0    compared
2    usage error: an argument is no success rate
"""

CROSSPLAY_CODES: Final = """\
\b
Exit codes:
0    complete: every game was played to its end
1    partial: some games failed or did not run; the numbers are those of the
     seeds that were played under all of their seatings
2    usage error: config, matchups, policies, weights, output folder
3    failed: too many games failed, or environment or a policy cannot work
4    cluster error: no runner came up, the address cannot be reached, the
     local cluster died, the evaluation log or the result cannot be written,
     or the log was taken over
130  interrupted by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP: what had
     finished is saved
70   unexpected error, shown with its traceback
"""

DOCTOR_CODES: Final = """\
\b
Exit codes:
0    no problem; there may be warnings
2    at least one problem
"""

_TERMINAL_CODE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

VERBOSE: Final = "RL_EVAL_VERBOSE"
"""Environment variable that does what ``--verbose`` does."""

Debug = Annotated[bool, typer.Option("--verbose", "-v", envvar=VERBOSE, help="Show the traceback of any error.")]


def code_of(error: EvalError) -> ExitCode:
    """Return the exit code of an error: the caller's, the machine's, or the evaluation's own."""
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    return ExitCode.CLUSTER if isinstance(error, ClusterError) else ExitCode.FAILED


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn what a command raises into a message on stderr and an exit code; bugs keep their traceback."""
    try:
        yield
    except EvalError as error:
        if debug:
            _print_traceback()
        _print_error(str(error))
        raise typer.Exit(code_of(error)) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        if (code := _signal_code(stop)) is None:
            raise
        _print_error("interrupted before there was a result")
        raise typer.Exit(code) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        said = _of_a_factory(error)
        if debug or not said:
            _print_traceback()
        if said:
            _print_error(said if debug else f"{said}; with -v there is its traceback")
        raise typer.Exit(ExitCode.FAILED if said else ExitCode.BUG) from None


def _of_a_factory(error: Exception) -> str:
    """Return what to say of an error that the factory of a policy raised; empty for any other."""
    policies = sys.modules.get("rl_eval.policies")  # Without it there was none.
    known = policies is not None and policies.came_from_factory(error)
    return f"the policy cannot be made: {' '.join(summary_of(error).split())}" if known else ""


def _signal_code(stop: KeyboardInterrupt | SystemExit) -> int | None:
    """Return the exit code of a signal that ended a command; None if something else did."""
    if isinstance(stop, SystemExit):
        # Ray's own handler of SIGTERM, which is in place while Ray starts.
        return 128 + signal.SIGTERM if stop.code == signal.SIGTERM else None
    return stop.exit_code if isinstance(stop, Interrupted) else 130


def _print_traceback() -> None:
    typer.echo(redact_text(traceback.format_exc()), err=True, nl=False)


def _print_error(message: str) -> None:
    """Print a message with the lines that it has, unwrapped for pipes and logs, and without control characters."""
    shown = lines(_TERMINAL_CODE.sub("", redact_text(message)).strip()) or "no reason is given"
    text = Text.assemble(("error: ", "bold red"), shown)
    Console(stderr=True, highlight=False).print(text, soft_wrap=not os.isatty(2))

"""Command line of rl_eval: the commands from ``rl-eval run`` to ``rl-eval doctor``.

Nothing here imports torch, Ray, gymnasium or scipy before a command needs it, so that help is instant.
"""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from rl_eval import __version__
from rl_eval.cli import (
    compare,
    crossplay,
    doctor,
    export,
    init,
    listing,
    ope,
    plan,
    power,
    replay,
    report,
    retry,
    run,
    service,
    show,
    video,
    view,
    watch,
)
from rl_eval.cli.exits import (
    COMPARE_CODES,
    CROSSPLAY_CODES,
    DOCTOR_CODES,
    INIT_CODES,
    LIST_CODES,
    OPE_CODES,
    PLAN_CODES,
    POWER_CODES,
    READ_CODES,
    REPLAY_CODES,
    RETRY_CODES,
    RUN_CODES,
    VERBOSE,
    VIDEO_CODES,
    VIEW_CODES,
    WATCH_CODES,
)
from rl_eval.cli.shared import CommandLine, NoColor

__all__ = ["app", "main"]

app = CommandLine(
    name="rl-eval",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=RUN_CODES, short_help="Evaluate a policy, print the result and save it.")(run.run)
app.command(epilog=INIT_CODES, short_help="Write a config file that explains every key.")(init.init)
app.command(epilog=WATCH_CODES, short_help="Evaluate the checkpoints of a training run as they appear.")(watch.watch)
app.command("list", epilog=LIST_CODES, short_help="List the runs in a folder, a line each.")(listing.list_)
app.command(epilog=READ_CODES, short_help="Show a run, finished or not, or one of its episodes.")(show.show)
app.command(epilog=READ_CODES, short_help="Write the episodes of a run to a file.")(export.export)
app.command(epilog=REPLAY_CODES, short_help="Run one episode of a run again, and compare.")(replay.replay)
app.command(epilog=RETRY_CODES, short_help="Run the failed episodes of a run again.")(retry.retry)
app.command(epilog=VIDEO_CODES, short_help="Make videos of chosen episodes of a run.")(video.video)
app.command(epilog=COMPARE_CODES, short_help="Compare two results, episode by episode.")(compare.compare)
app.command(epilog=READ_CODES, short_help="Write results as one HTML page that needs nothing else.")(report.report)
app.command(epilog=VIEW_CODES, short_help="Show the runs in a folder to a browser on this machine.")(view.view)
app.command(epilog=PLAN_CODES, short_help="Say how long an evaluation takes, and what it can show.")(plan.plan)
app.command(epilog=POWER_CODES, short_help="Compare two success rates, such as 17/20 and 14/20.")(power.power)
app.command(epilog=OPE_CODES, short_help="Estimate a policy's value from episodes of another.")(ope.ope)
app.command(epilog=CROSSPLAY_CODES, short_help="Play several policies against each other, and rate them.")(
    crossplay.crossplay
)
app.command(epilog=DOCTOR_CODES, short_help="Check a config, its environment and its policy.")(doctor.doctor)
app.add_typer(service.app)


_COMPLETE: Final = "_RL_EVAL_COMPLETE"


def main() -> None:
    """Run the command line; the process exits with the code that ``--help`` explains."""
    what, _, shell = os.environ.get(_COMPLETE, "").partition("_")
    if shell in ("source", "complete"):
        os.environ[_COMPLETE] = f"{shell}_{what}"  # click's order of the words; typer has the other one.
    app(prog_name="rl-eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rl-eval {__version__}")
        raise typer.Exit


def _with_tracebacks(wanted: bool) -> None:
    if wanted:
        os.environ[VERBOSE] = "1"  # Where every command finds it.


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", callback=_with_tracebacks, help="Show the traceback of any error."),
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Evaluate reinforcement learning policies: the result depends on policy, environment and plan alone."""

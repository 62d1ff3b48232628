"""Command line of rl_eval: the commands from ``rl-eval run`` to ``rl-eval doctor``.

torch, Ray, gymnasium and scipy are imported only when a command needs them, so that help is instant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from rl_eval import __version__
from rl_eval.cli import (
    compare,
    crossplay,
    doctor,
    export,
    init,
    ope,
    plan,
    replay,
    report,
    run,
    serve,
    service,
    show,
    suite,
    watch,
)
from rl_eval.cli.exits import ExitCode, explained
from rl_eval.cli.shared import CommandLine

__all__ = ["COMMANDS", "app", "main"]

EVALUATE, READ, COMPARE, SETUP, MORE = "Evaluate", "Read results", "Compare and run again", "Plan and check", "More"
"""Headings of the commands in the help."""

COMMANDS: Final = (
    (EVALUATE, "run", run.run, "Evaluate a policy, print the result and save it."),
    (EVALUATE, "watch", watch.watch, "Evaluate the checkpoints of a training run as they appear."),
    (READ, "show", show.show, "List the runs in a folder; show a run, or some of its episodes."),
    (READ, "report", report.report, "Write a self-contained HTML report of results."),
    (READ, "view", report.view, "Serve the runs in a folder to a browser on this machine."),
    (READ, "export", export.export, "Write the episodes of a run to a file."),
    (COMPARE, "compare", compare.compare, "Compare two results, episode by episode."),
    (COMPARE, "replay", replay.replay, "Run episodes of a run again, compare them, and record videos."),
    (SETUP, "plan", plan.plan, "Estimate the time of an evaluation and the difference it can detect."),
    (SETUP, "doctor", doctor.doctor, "Check a config, its environment and its policy."),
    (MORE, "init", init.init, "Write a config file from the options of run."),
    (MORE, "crossplay", crossplay.crossplay, "Play several policies against each other and rate them."),
    (MORE, "ope", ope.ope, "Estimate the value of a policy from episodes of another policy."),
    (MORE, "serve", serve.serve, "Serve a policy to evaluations and clients of openpi."),
)

app = CommandLine(
    name="rl-eval",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _heading, _name, _function, _summary in COMMANDS:
    app.command(_name, epilog=explained(), short_help=_summary, rich_help_panel=_heading)(_function)
app.add_typer(suite.app, rich_help_panel=EVALUATE)
app.add_typer(service.app, rich_help_panel=MORE)


def main() -> None:
    """Run the command line. Exit with a code that ``--help`` of the command lists, or 141 if stdout was closed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        typer.echo("error: the current folder was removed. Change to a folder that exists.", err=True)
        sys.exit(ExitCode.USAGE)
    app(prog_name="rl-eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rl-eval {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Evaluate reinforcement learning policies: results depend only on the policy, the environment and the plan."""

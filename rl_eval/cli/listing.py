"""``rl-eval list``: the runs in a folder, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, print_json, print_line
from rl_eval.cli.shared import FolderOfRuns
from rl_eval.redaction import redact_text

if TYPE_CHECKING:
    from rl_eval.results.listing import ListedRun

__all__ = ["list_"]

_GAP: Final = "   "
_HEADINGS: Final = ["when", "status", "episodes", "mean return (interval)", "environment", "policy", "run"]


def list_(
    folder: FolderOfRuns = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs in a folder and below, the latest first; what they hold is read, and nothing they name runs."""
    with reported(debug):
        from rl_eval.results.listing import list_runs

        runs = list_runs(folder)
        if as_json:
            print_json([run.to_dict() for run in runs])
            return
        if not runs:
            typer.echo(
                f"no runs in {folder}: rl-eval run keeps them there, unless --log-dir or --output says where", err=True
            )
            return
        for line in _lines([_HEADINGS, *map(_cells, runs)]):
            print_line(redact_text(line))


def _cells(run: ListedRun) -> list[str]:
    """Return the texts of a line; a broken run has a reason after its path, and no numbers."""
    if run.status == "broken":
        return ["", run.status, "", "", "", "", f"{run.name}: {run.problem}"]
    return [run.minute, run.state, run.count, run.mean, run.environment, run.policy, run.name]


def _lines(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""Printing of results and comparisons: coloured on a terminal, as plain text in a pipe or a file."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_eval.cli.stdout import print_line, results, written
from rl_eval.redaction import redact_text
from rl_eval.results.report.table import Page, rich_page, text_page

if TYPE_CHECKING:
    from rl_eval.ope import OffPolicyEstimates
    from rl_eval.results.comparison import Comparison
    from rl_eval.results.result import EvalResult

__all__ = ["AsJson", "Quiet", "counted", "print_either", "print_json", "print_note", "print_report"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table, one line only.")]


def print_report(report: Page | EvalResult | Comparison | OffPolicyEstimates) -> None:
    """Print a page, a result, a comparison or estimates."""
    console = Console(file=results(), highlight=False)
    if console.is_terminal:
        with written():
            console.print(rich_page(report) if isinstance(report, Page) else report)
    else:
        print_line(text_page(report) if isinstance(report, Page) else str(report))


def print_either(as_json: bool, described: Any, report: Any) -> None:
    """Print plain JSON values with ``--json``, and otherwise a line of text or what :func:`print_report` takes."""
    if as_json:
        print_json(described)
    elif isinstance(report, str):
        print_line(report)
    else:
        print_report(report)


def counted(count: int, noun: str) -> str:
    """Write a number of things, as in ``1 run`` or ``2,000 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_json(described: Any) -> None:
    """Print plain JSON values, of which schemas are in the docs."""
    print_line(json.dumps(described, indent=2, allow_nan=False))


def print_note(line: str) -> None:
    """Write a line to stderr, above a live display; secrets are replaced."""
    sys.stderr.write(f"{redact_text(line)}\n")  # typer.echo would go around the display, which is drawn over it then.

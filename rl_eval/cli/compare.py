"""``rl-eval compare``: what two saved results say about their difference."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import print_report

__all__ = ["compare"]


def compare(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False, help="Output folder, or run folder or URI.")],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False, help="The one whose advantage is asked for.")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare also results that are not a function of their seeds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Compare two results of the same plan, episode by episode: b minus a."""
    with reported(debug):
        from rl_eval.results.comparison import compare as compare_results
        from rl_eval.results.loading import load

        comparison = compare_results(load(a), load(b), force=force)
        if as_json:
            typer.echo(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        else:
            print_report(comparison)

"""``rl-eval compare``: what two saved results say about their difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.show import show

__all__ = ["compare"]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", show_default=False, help="Output folder, or its result.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The one whose advantage is asked for.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Compare two results of the same plan, episode by episode: b minus a."""
    with reported(debug):
        from rl_eval.comparison import compare as compare_results
        from rl_eval.result import EvalResult

        comparison = compare_results(EvalResult.load(a), EvalResult.load(b))
        if as_json:
            typer.echo(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        else:
            show(comparison)

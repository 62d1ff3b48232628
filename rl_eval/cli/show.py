"""How a result or a comparison reaches stdout: coloured on a terminal, as plain text in a pipe or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rl_eval.comparison import Comparison
    from rl_eval.result import EvalResult

__all__ = ["show"]


def show(shown: EvalResult | Comparison) -> None:
    """Print it."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(shown)
    else:
        typer.echo(str(shown))

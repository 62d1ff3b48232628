"""Question whether code that a result names may run, for the commands that run episodes again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rl_eval.cli.settings import find_modules_here
from rl_eval.errors import UntrustedError

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult

__all__ = ["Trust", "consents", "load_to_run"]

Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that DIR names although somebody else may have made it.")
]


def load_to_run(path: str, trust: bool) -> EvalResult:
    """Load a result whose episodes are to run again, and have its modules found in the current folder.

    Nothing is looked for in that folder before it is known to be trusted: it may be the stranger's as well.

    Raises:
        UntrustedError: Somebody else may have made the result, and the user does not trust it or cannot be asked.
    """
    from rl_eval.results.loading import load
    from rl_eval.results.trust import check_trust

    result = load(path)
    try:
        if not trust:
            check_trust(result.provenance)
    except UntrustedError as error:
        if not consents(str(error), "Run this code?"):
            raise
    find_modules_here()
    return result


def consents(facts: str, question: str) -> bool:
    """Ask whoever sits at the terminal, if anybody does."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    typer.echo(facts, err=True)
    return typer.confirm(question, default=False, err=True)

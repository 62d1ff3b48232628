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

Trust = Annotated[bool, typer.Option("--trust", help="Import and call the code that DIR names, without asking.")]


def load_to_run(path: str, trust: bool) -> EvalResult:
    """Load a result whose episodes are to run again, and make the modules of the current folder importable.

    The folder is put on the path after consent only: it may come from the author of the result.

    Raises:
        UntrustedError: The user does not consent, or there is no terminal to ask on.
    """
    from rl_eval.results.loading import load
    from rl_eval.results.provenance import check_trust

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
    """Ask at the terminal; False if there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    typer.echo(facts, err=True)
    return typer.confirm(question, default=False, err=True)

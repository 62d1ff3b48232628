"""Options of commands that take episodes of a run: which, and consent to the code that runs them again."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.settings import find_modules_here
from rl_eval.cli.shared import argument, option
from rl_eval.errors import UntrustedError, UsageError

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult

__all__ = ["Results", "Trust", "consents", "episodes_option", "load_to_run", "parse_episodes", "with_episodes"]

_PART: Final = re.compile(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?", re.ASCII)

Results = Annotated[str, argument("DIR", "Run folder or URI, or the output folder of a result.")]


def episodes_option(text: str) -> Any:
    """Return the option with a help text of its own; it is the same in all commands."""
    return option("I,J-K", text, "--episodes")


def parse_episodes(text: str, num_episodes: int) -> list[int]:
    """Return the indices that a text such as ``3,7-9`` names, each once, in its order.

    Args:
        text: Indices and ranges, whose ends belong to them, with commas between.
        num_episodes: Of the plan; its episodes have the indices from 0 on.
    """
    indices: dict[int, None] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise UsageError(f"--episodes {text}: {part.strip()!r} is not an index or a range: write 3,7-9")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UsageError(f"--episodes {text}: {part.strip()} ends before it begins: give {last}-{first}")
        if last >= num_episodes:
            raise UsageError(f"--episodes {text}: there is no episode {last}: the plan has {num_episodes}, from 0 on")
        indices |= dict.fromkeys(range(first, last + 1))
    return list(indices)


def with_episodes(settings: EvalSettings, text: str) -> EvalSettings:
    """Return settings whose plan is one range of the plan, with the seeds that its episodes have there."""
    from rl_eval.config.settings import with_values

    section = settings.evaluation
    indices = sorted(parse_episodes(text, section.num_episodes))
    first, count = indices[0], len(indices)
    if indices[-1] - first >= count:
        whole = f"{first}-{indices[-1]}"
        raise UsageError(f"--episodes {text}: an evaluation runs one range of the plan, such as {whole}: give one")
    return with_values(settings, evaluation={"first_index": section.first_index + first, "num_episodes": count})


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

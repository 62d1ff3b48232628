"""``rl-eval compare``: what two saved results say about their difference."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, print_json, print_report
from rl_eval.cli.shared import argument, option

__all__ = ["compare"]


def compare(
    a: Annotated[str, argument("A", "Output folder, or run folder or URI.")],
    b: Annotated[str, argument("B", "The one whose advantage is asked for.")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare also results that are not a function of their seeds.")
    ] = False,
    require: Annotated[
        list[str] | None,
        option(
            "'b >= a - 5'",
            "Exit with 0 if the interval shows that this holds for the mean returns, with 1 if it shows that it "
            "does not, and with 2 if it shows neither, or pairs are missing because a side failed or was ended early. "
            "May be repeated: all must hold.",
        ),
    ] = None,
    fail_on: Annotated[
        Literal["regression"] | None,
        typer.Option(
            show_default=False,
            help="Exit with 1 if b is shown to return less than a, and with 2 if pairs are missing because a side "
            "failed or was ended early, or are too few to show anything.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two results of the same plan, episode by episode: b minus a."""
    with reported(debug):
        from rl_eval.results.comparison import compare as compare_results
        from rl_eval.results.loading import load
        from rl_eval.results.requirements import Answer, parse_difference

        requirements = [parse_difference(text) for text in require or ()]
        comparison = compare_results(load(a), load(b), force=force)
        if as_json:
            print_json(comparison.to_dict())
        else:
            print_report(comparison)
        why = comparison.unanswerable
        if fail_on and comparison.regressed:
            typer.echo("b is shown to return less than a", err=True)
            raise typer.Exit(1)
        if fail_on and why:
            typer.echo(f"whether b returns less than a {Answer.OPEN.value}: {why}", err=True)
            raise typer.Exit(2)
        if fail_on:
            typer.echo("b is not shown to return less than a", err=True)
        answers, why = [], why or comparison.unbounded
        for requirement in requirements:
            interval = comparison.difference.interval
            answers.append(Answer.OPEN if why else requirement.judge(interval))
            said = why or (requirement.undecided(interval) if answers[-1] is Answer.OPEN else "")
            typer.echo(f"{requirement}: {answers[-1].value}{said and f': {said}'}", err=True)
        if Answer.FAILS in answers:
            raise typer.Exit(1)
        if Answer.OPEN in answers:
            raise typer.Exit(2)

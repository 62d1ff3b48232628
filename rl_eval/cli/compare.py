"""``rl-eval compare``: the difference of two saved results."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, Quiet, print_either, print_note
from rl_eval.cli.shared import argument, option, shown


def compare(
    a: Annotated[str, argument("A", "Output folder, run folder or URI.")],
    b: Annotated[str, argument("B", "Output folder, run folder or URI. Differences are B minus A.")],
    force: Annotated[bool, typer.Option("--force", help="Compare even if a determinism check failed.")] = False,
    require: Annotated[
        list[str] | None,
        option(
            "'b >= a - 5'",
            "Requirement on the mean difference. Exit with 1 if interval and test show that it is violated, with 6 if "
            "they do not answer it.",
        ),
    ] = None,
    fail_on: Annotated[
        Literal["regression"] | None,
        option(None, "Exit with 1 if the mean return of b is significantly lower than that of a."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare two results of the same plan, episode by episode: b minus a."""
    from rl_eval.results.comparison import compare as compare_results
    from rl_eval.results.loading import load
    from rl_eval.results.requirements import Answer, parse_difference

    requirements = [parse_difference(text) for text in require or ()]
    comparison = compare_results(load(a), load(b), force=force)
    unknown = bool(comparison.unanswerable())  # The verdict has the reason.
    answers, lines, verdict = list[Answer](), list[str](), comparison.verdict_on(shown(a), shown(b))
    if fail_on:
        answers.append(Answer.FAILS if comparison.regressed else Answer.OPEN if unknown else Answer.HOLDS)
        lower = f"b is {'' if comparison.regressed else 'not '}shown to have a lower return than a"
        lines.append(f"--fail-on regression {Answer.OPEN.value}" if answers[-1] is Answer.OPEN else lower)
    for requirement in requirements:
        answers.append(Answer.OPEN if unknown else requirement.judge(comparison.difference))
        why = requirement.undecided(comparison.difference) if answers[-1] is Answer.OPEN and not unknown else ""
        lines.append(f"{requirement}: {answers[-1].value}{why and f': {why}'}")
    if quiet:
        lines = [line for line, answer in zip(lines, answers, strict=True) if answer is not Answer.HOLDS]
    print_either(as_json, comparison.to_dict(), "; ".join([verdict, *lines]) if quiet else comparison)
    for line in lines if as_json or not quiet else ():
        print_note(line)
    if Answer.FAILS in answers or Answer.OPEN in answers:
        raise typer.Exit(ExitCode.PARTIAL if Answer.FAILS in answers else ExitCode.NO_ANSWER)

"""``rl-eval crossplay``: play several policies against each other; print a matrix and ratings."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rl_eval.atomic_write import write_text
from rl_eval.cli.output import Force, Output
from rl_eval.cli.printing import AsJson, Quiet, print_json, print_line, print_note, print_report
from rl_eval.cli.run import carry_out, deliver, exit_code_of, name_of, print_result
from rl_eval.cli.settings import Assignments, ConfigPath, Section, read_settings
from rl_eval.cli.shared import option
from rl_eval.errors import ConfigError, EpisodeError, UsageError

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult


_NUMBERS: Final = "crossplay.json"
_GAMES: Final = "openskill.json"
_PAYOFFS: Final = "alpharank.npz"


def crossplay(
    ctx: typer.Context,
    config: ConfigPath,
    section: Section = None,
    output: Output = None,
    force: Force = False,
    num_episodes: Annotated[int | None, option("N", "Number of episodes.", "--num-episodes", "-n")] = None,
    assignments: Assignments = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Play the matchups of a config, and print and save the win rates and ratings of its policies."""
    from rl_eval.cli.progress import Monitor

    with closing(Monitor(quiet=quiet or as_json)) as monitor:
        monitor.say(f"reading {config.name}")
        keys = {} if num_episodes is None else {"evaluation.num_episodes": num_episodes}
        settings = read_settings(config, section, assignments, keys)
        if len(settings.policy.policies) < 2 or settings.evaluation.matchups is None:
            fix = "Set at least two policies in policy.policies, and evaluation.matchups: round_robin."
            key = "evaluation.matchups" if settings.evaluation.matchups is None else "policy.policies"
            raise ConfigError("cross-play needs several policies and matchups", key=key, fix=fix)
        if output is not None and not force:
            _check_folder(Path(output))
        name, give = name_of(settings, config, section), partial(_deliver, quiet=quiet, as_json=as_json)
        result, _ = carry_out(settings, give, print_note, ctx.obj, monitor, name=name, output=output, force=force)
    if code := exit_code_of(result, ctx.obj):
        raise typer.Exit(code)


def _check_folder(folder: Path) -> None:
    from rl_eval.results.files import RESULT_FILE

    found = [name for name in (_NUMBERS, _GAMES, _PAYOFFS) if (folder / name).exists()]
    if found and not (folder / RESULT_FILE).exists():
        problem = f"{folder / found[0]} exists, and the folder has no result"
        fix = "Pass another --output, or --force to replace the file."
        raise ConfigError(problem, key="--output", value=str(folder), fix=fix)


def _deliver(result: EvalResult, folder: Path | None, _: EpisodeError | None, *, quiet: bool, as_json: bool) -> None:
    """Save and print a result with its cross-play statistics.

    Raises:
        UsageError: A game has a seat without a return.
    """
    from rl_eval.records.plain import plain
    from rl_eval.results.crossplay import crossplay as play
    from rl_eval.results.crossplay import games_of, whole_games, write_openskill, write_payoffs

    games = games_of(result) if whole_games(result).size else None
    played = None if games is None else play(games, result.confidence)
    of_result = {"status": result.status, "reason": result.reason, "fingerprint": result.fingerprint}
    numbers = {} if played is None else played.to_dict()
    described = plain({**of_result, "plan": result.plan.to_dict(), "notes": result.notes, **numbers})

    def save(folder: Path) -> None:
        result.save(folder)
        if games is None:
            return
        write_text(folder / _NUMBERS, json.dumps(described, indent=2, allow_nan=False) + "\n")
        write_openskill(folder / _GAMES, games)
        try:
            write_payoffs(folder / _PAYOFFS, games)
        except UsageError as error:
            print_note(f"{_PAYOFFS} was not written: {error}")

    def show() -> None:
        if as_json:
            print_json(described)
        elif quiet or played is None:
            print_result(result, quiet=quiet, as_json=False)
        else:
            if result.status != "complete":
                print_report(result)
            print_report(played)
            for note in result.notes:
                print_line(f"note: {note}")

    deliver(result, folder, quiet=quiet, as_json=as_json, save=save, show=show)

"""``rl-eval crossplay``: several policies against each other, from a config file to a matrix and ratings."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rl_eval.atomic_write import write_text
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.output import Force, LogDir, claimed_folders, save_patiently, unsaved_folder
from rl_eval.cli.printing import AsJson, Quiet, print_json, print_line, print_note, print_report, results
from rl_eval.cli.run import exit_code_of, look_up, name_of, print_result, run_evaluation
from rl_eval.cli.settings import Assignments, ConfigPath, Section, find_modules_here, read_settings
from rl_eval.cli.shared import absolute_path, option, shown
from rl_eval.cli.signals import Interruption
from rl_eval.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from rl_eval.results.crossplay import Games
    from rl_eval.results.result import EvalResult

__all__ = ["crossplay"]


def crossplay(
    config: ConfigPath,
    section: Section = None,
    output: Annotated[
        Path | None,
        option("FOLDER", "Folder of all files; by default that of the log.", "--output", "-o", parser=absolute_path),
    ] = None,
    run_dir: LogDir = None,
    force: Force = False,
    num_episodes: Annotated[int | None, option("N", "Episodes to run.", "--num-episodes", "-n")] = None,
    assignments: Assignments = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Play the matchups of a config, print the shares and ratings of its policies, and save them."""
    from rl_eval.cli.progress import Monitor

    with Interruption() as interruption, reported(debug), closing(Monitor(quiet=quiet or as_json)) as monitor:
        monitor.say(f"reading {config.name}")
        keys = {} if num_episodes is None else {"evaluation.num_episodes": num_episodes}
        settings = read_settings(config, section, assignments, keys)
        if len(settings.policy.policies) < 2 or settings.evaluation.matchups is None:
            raise ConfigError("cross-play needs at least two policy.policies, and evaluation.matchups: round_robin")
        find_modules_here()
        run_dir, result = look_up(run_dir, False, settings, print_note)
        if result is None:
            with claimed_folders(output, run_dir, name_of(settings, config, section), force=force) as (log_dir, place):
                deliver = partial(_deliver, folder=place, quiet=quiet, as_json=as_json)
                result = run_evaluation(settings, log_dir, False, interruption, monitor, deliver)
        else:
            monitor.close()
            place = unsaved_folder(result.fingerprint, output, run_dir, print_note, force=force)
            _deliver(result, place, quiet=quiet, as_json=as_json)
        if code := exit_code_of(result, interruption):
            raise typer.Exit(code)


def _deliver(result: EvalResult, folder: Path | None, *, quiet: bool, as_json: bool) -> str:
    """Save and print a result; return its place. A result that cannot be saved is printed all the same.

    Raises:
        ClusterError: It cannot be saved.
        UsageError: A game has a seat without a return; the result is saved.
    """
    from rl_eval.records.plain import plain
    from rl_eval.results.crossplay import crossplay as play
    from rl_eval.results.crossplay import games_of, whole_games

    games = games_of(result) if whole_games(result).size else None
    played = None if games is None else play(games, result.confidence)
    of_result = {"status": result.status, "reason": result.reason, "fingerprint": result.fingerprint}
    numbers = {} if played is None else played.to_dict()
    described = plain({**of_result, "plan": result.plan.to_dict(), "notes": result.notes, **numbers})
    try:
        if folder is not None:
            save_patiently(partial(result.save, folder), folder)
    finally:
        if as_json:
            print_json(described)
        elif quiet or played is None:
            print_result(result, quiet=quiet, as_json=False)
        else:
            if result.status != "complete":
                print_report(result)
            Console(file=results(), highlight=False).print(played)
            for note in result.notes:
                print_line(f"note: {note}")
    if folder is None:
        return "the numbers are printed"
    if games is not None:
        save_patiently(partial(_save, folder, described, games), folder)
    if not quiet:
        print_line(f"saved in {shown(folder)}", err=as_json)
    return f"what had finished is saved in {shown(folder)}"


def _save(folder: Path, described: Any, games: Games) -> None:
    from rl_eval.results.crossplay import write_openskill, write_payoffs

    write_text(folder / "crossplay.json", json.dumps(described, indent=2, allow_nan=False) + "\n")
    write_openskill(folder / "openskill.json", games)
    try:
        write_payoffs(folder / "alpharank.npz", games)
    except UsageError as error:
        print_note(f"alpharank.npz is not written: {error}")

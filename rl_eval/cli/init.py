"""``rl-eval init``: a config file of the options of ``rl-eval run``, with every key explained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rl_eval.cli.evaluated import Evaluated, with_evaluated
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, print_json, print_note
from rl_eval.cli.settings import Assignments, read_config
from rl_eval.cli.shared import argument
from rl_eval.errors import ConfigError

__all__ = ["init"]


@with_evaluated
def init(
    path: Annotated[Path, argument("FILE", "YAML file to write; it must not exist.")],
    evaluated: Evaluated,
    assignments: Assignments = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a config file that does what rl-eval run does with the same options, and explains every key."""
    with reported(debug):
        evaluated.check(f"init {path}", assignments, takes_file=False)
        keys = evaluated.keys(print_note, assignments, trust=None)
        config = read_config(None, None, assignments, keys)
        config.build()
        from rl_eval.config.commented import commented_yaml

        _write(path, commented_yaml(config))
        command = f"rl-eval run {shlex.quote(str(path))}"
        if as_json:
            print_json({"path": str(path), "command": command})
        else:
            typer.echo(f"written: run it with {command}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: give another path") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

"""What a command runs: a config file, flags and ``--set``, or episodes of a run, with consent to its code."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.shared import argument, option
from rl_eval.errors import ConfigError, UntrustedError, UsageError
from rl_eval.errors.redaction import redact_command

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult


_PART: Final = re.compile(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?", re.ASCII)

_CONFIG = argument("CONFIG", "YAML file that says what to evaluate, and how; options change it.")
ConfigPath = Annotated[Path, _CONFIG]
OptionalConfigPath = Annotated[Path | None, _CONFIG]
Section = Annotated[str | None, option("NAME", "Use this (dotted) section of the file, not all of it.", "--section")]
Trust = Annotated[bool, typer.Option("--trust", help="Import and call the code that DIR names, without asking.")]
Results = Annotated[str, argument("DIR", "Run folder or URI, or the output folder of a result.")]
Assignments = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Set any key of the config, such as environment.env_kwargs.gravity=9.0, to a YAML value; may be repeated.",
        "--set",
    ),
]


def read_settings(
    path: Path | None, section: str | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> EvalSettings:
    """Read a file, if there is one, apply flags (by dotted key) and assignments, and validate.

    Raises:
        ConfigError: Anything about it is wrong; the message names the key.
    """
    return read_config(path, section, assignments, flags).build()


def read_config(
    path: Path | None, section: str | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> EvalConfig:
    """Read a file, if there is one, and apply flags (by dotted key) and assignments.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or there is a section without a file.
    """
    if path is None and section is not None:
        raise ConfigError(f"--section {section} is a part of a config file: give CONFIG, or leave --section out")
    from rl_eval.config.builder import EvalConfig

    config = EvalConfig() if path is None else EvalConfig.from_yaml(path, section)
    for key, value in (flags or {}).items():
        config.set(key, value)
    for assignment in assignments or ():
        _assign(config, assignment)
    return config


def find_modules_here() -> None:
    """Have ``"my_pkg.policies:make"`` looked for in the current folder first, as with ``python -m``."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _assign(config: EvalConfig, assignment: str) -> None:
    """Apply one ``KEY=VALUE``; a key longer than ``section.name`` reaches into a mapping."""
    import yaml

    from rl_eval.config.builder import read_yaml
    from rl_eval.records.plain import with_leaf

    key, equals, text = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--set {assignment}: it lacks = and a value, as in evaluation.num_episodes=50")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        shown = redact_command([assignment])[0]
        raise ConfigError(
            f"--set {shown}: the value is not valid YAML, see its quotes and brackets, and whether a key is there twice"
        ) from None
    parts = key.strip().split(".")
    if inner := parts[2:]:
        value = with_leaf(config.to_dict().get(parts[0], {}).get(parts[1]), inner, value)
    config.set(".".join(parts[:2]), value)


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

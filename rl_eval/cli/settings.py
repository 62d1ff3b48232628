"""Settings of a command, from a config file, options and ``--set``.

Also the option ``--episodes``, and the question whether the code that a result names may run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.shared import advanced, argument, option
from rl_eval.errors import ConfigError, UntrustedError, UsageError
from rl_eval.errors.redaction import redact_command

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult


_PART: Final = re.compile(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?", re.ASCII)

_CONFIG = argument("CONFIG", "YAML config file; options override it.")
ConfigPath = Annotated[Path, _CONFIG]
OptionalConfigPath = Annotated[Path | None, _CONFIG]
Section = Annotated[
    str | None,
    advanced("NAME", "Use only this section of the file; separate nested names with dots: a.b.", "--section"),
]
Trust = Annotated[bool, typer.Option("--trust", help="Do not ask before running the code that DIR names.")]
Results = Annotated[str, argument("DIR", "Run folder or URI, or output folder.")]
Assignments = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Set a config key to a YAML value, such as environment.env_kwargs.gravity=9.0; may be repeated.",
        "--set",
    ),
]


def read_settings(
    path: Path | None, section: str | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> EvalSettings:
    """Read a config file, if given, apply flags (by dotted key) and assignments, and validate.

    The modules that it names are found in the current folder.

    Raises:
        ConfigError: The config is invalid; the error names the key.
    """
    from rl_eval.runners import layout_of

    settings = read_config(path, section, assignments, flags).build()
    find_modules_here()
    layout_of(settings)
    return settings


def read_config(
    path: Path | None, section: str | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> EvalConfig:
    """Read a config file, if given, and apply flags (by dotted key) and assignments.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a section is passed without a file.
    """
    if path is None and section is not None:
        fix = "Pass CONFIG, or omit --section."
        raise ConfigError(f"--section {section} needs a config file", key="--section", value=section, fix=fix)
    from rl_eval.config.builder import EvalConfig

    config = EvalConfig() if path is None else EvalConfig.from_yaml(path, section)
    for key, value in (flags or {}).items():
        config.set(key, value)
    for assignment in assignments or ():
        _assign(config, assignment)
    return config


def find_modules_here() -> None:
    """Put the current folder first on the module path, as ``python -m`` does, to find modules of the user there."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _assign(config: EvalConfig, assignment: str) -> None:
    """Apply one ``KEY=VALUE``; a key longer than ``section.name`` addresses an entry of a mapping."""
    import yaml

    from rl_eval.config.builder import read_yaml
    from rl_eval.records.plain import with_leaf

    key, equals, text = assignment.partition("=")
    if not equals:
        fix = "Pass a key with its value, such as evaluation.num_episodes=50."
        raise ConfigError(f"--set {assignment}: = and a value are missing", key="--set", value=assignment, fix=fix)
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        shown = redact_command([assignment])[0]
        fix = "Check its quotes and brackets, and that no key occurs twice."
        raise ConfigError(f"--set {shown}: the value is not valid YAML", key="--set", value=shown, fix=fix) from None
    parts = key.strip().split(".")
    former = config.to_dict().get(parts[0], {}).get(parts[1]) if len(parts) > 1 else None
    if inner := parts[2:]:
        value = with_leaf(former, inner, value)
    elif parts == ["policy", "policy_kwargs"] and isinstance(former, Mapping) and isinstance(value, Mapping):
        value = {**former, **value}  # The file of --policy is one of the arguments.
    config.set(".".join(parts[:2]), value)


def episodes_option(text: str) -> Any:
    """Return the option ``--episodes`` with the help text of a command."""
    return option("I,J-K", text, "--episodes")


def parse_episodes(text: str, num_episodes: int, key: str = "--episodes") -> list[int]:
    """Parse a text such as ``3,7-9`` into indices, in the order of the text and without duplicates.

    Args:
        text: Indices and inclusive ranges, separated by commas.
        num_episodes: Number of episodes in the plan.
        key: Option that has the text, for errors.

    Raises:
        UsageError: The text is malformed, or an index is outside of the plan.
    """
    indices: dict[int, None] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            problem, fix = f"{part.strip()!r} is not an index or a range", "Pass indices such as 3,7-9."
            raise UsageError(f"{key} {text}: {problem}", key=key, value=text, fix=fix)
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            problem, fix = f"{part.strip()} ends before it starts", f"Pass {last}-{first}."
            raise UsageError(f"{key} {text}: {problem}", key=key, value=text, fix=fix)
        if last >= num_episodes:
            problem, fix = f"episode {last} is not in the plan", f"Pass indices from 0 to {num_episodes - 1}."
            raise UsageError(f"{key} {text}: {problem}", key=key, value=text, episode=last, fix=fix)
        indices |= dict.fromkeys(range(first, last + 1))
    return list(indices)


def with_indices(settings: EvalSettings, text: str) -> EvalSettings:
    """Return settings for one range of the plan; its episodes keep their seeds.

    Raises:
        UsageError: The text is malformed, contains several ranges, or has an index outside of the plan.
    """
    from rl_eval.config.settings import with_values

    section = settings.evaluation
    indices = sorted(parse_episodes(text, section.num_episodes, "--indices"))
    first, count = indices[0], len(indices)
    if indices[-1] - first >= count:
        whole = f"{first}-{indices[-1]}"
        problem, fix = "an evaluation runs a single range of the plan", f"Pass one range, such as {whole}."
        raise UsageError(f"--indices {text}: {problem}", key="--indices", value=text, fix=fix)
    return with_values(settings, evaluation={"first_index": section.first_index + first, "num_episodes": count})


def only_one(settings: EvalSettings, text: str) -> str:
    """Return a remark if ``--indices`` chooses a single episode, since its value may be meant as a number."""
    index = settings.evaluation.first_index
    number = f"; for {text} episodes pass -n {text}" if text.isdecimal() and int(text) else ""
    return f"episode {index} only{number}" if settings.evaluation.num_episodes == 1 else ""


def load_to_run(path: str, trust: bool, is_needed: Callable[[EvalResult], bool] = lambda _: True) -> EvalResult:
    """Load a result to rerun its episodes, and add the current folder to the module path.

    The folder is added only after the user consents, because the folder may come from the author of the result.
    ``is_needed`` returns whether the code of the result will run.

    Raises:
        UntrustedError: The user does not consent, or there is no terminal to ask.
    """
    from rl_eval.results.loading import load
    from rl_eval.results.provenance import check_trust

    result = load(path)
    try:
        if is_needed(result) and not trust:
            check_trust(result.provenance)
    except UntrustedError as error:
        if not consents(str(error), "Run this code?"):
            raise
    find_modules_here()
    return result


def consents(facts: str, question: str) -> bool:
    """Ask the user on the terminal; return False if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    typer.echo(facts, err=True)
    return typer.confirm(question, default=False, err=True)

"""Configuration of a command: the file, then the flags, then ``--set``; the last one wins."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rl_eval.cli.shared import argument, option
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact_command

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig
    from rl_eval.config.settings import EvalSettings

__all__ = [
    "Assignments",
    "ConfigPath",
    "OptionalConfigPath",
    "Section",
    "find_modules_here",
    "read_config",
    "read_settings",
]

_CONFIG = argument("CONFIG", "YAML file that says what to evaluate, and how; options change it.")
ConfigPath = Annotated[Path, _CONFIG]
OptionalConfigPath = Annotated[Path | None, _CONFIG]
Section = Annotated[str | None, option("NAME", "Use this (dotted) section of the file, not all of it.", "--section")]
Assignments = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Set any key of the config, such as environment.env_kwargs.gravity=9.0, to a YAML value; may be repeated.",
        "--set",
    ),
]


def read_settings(
    path: Path | None,
    section: str | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, Any] | None = None,
) -> EvalSettings:
    """Read a file, if there is one, apply flags (by dotted key) and assignments, and validate.

    Raises:
        ConfigError: Anything about it is wrong; the message names the key.
    """
    return read_config(path, section, assignments, flags).build()


def read_config(
    path: Path | None,
    section: str | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, Any] | None = None,
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

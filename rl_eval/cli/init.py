"""``rl-eval init``: write a config file from the options of ``rl-eval run``, with its keys explained."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rl_eval.cli.evaluated import Evaluated, with_evaluated
from rl_eval.cli.printing import AsJson, print_json, print_note, written
from rl_eval.cli.settings import Assignments, read_config
from rl_eval.cli.shared import argument, option
from rl_eval.errors import UsageError

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig


@with_evaluated
def init(
    path: Annotated[Path, argument("FILE", "YAML file to create.")],
    evaluated: Evaluated,
    assignments: Assignments = None,
    every: Annotated[bool, option(None, "Write and explain every key, unset ones as comments.", "--all")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a config file with the settings of rl-eval run with the same options, except defaults."""
    evaluated.check(f"init {path}", assignments, takes_file=False)
    config = read_config(None, None, assignments, evaluated.keys(print_note, assignments, trust=None))
    config.build()
    text = commented_yaml(config, every=every)
    if path.exists():
        raise UsageError(f"{path} already exists", key=str(path), fix="Pass another path.")
    with written(path), path.open("x", encoding="utf-8") as file:
        file.write(text)
    command = f"rl-eval run {shlex.quote(str(path))}"
    if as_json:
        print_json({"path": str(path), "command": command})
    else:
        print_note(f"{path} written. Run it with {command}")


def commented_yaml(config: EvalConfig, *, every: bool) -> str:
    """Return YAML that loads to the same settings.

    Args:
        config: Config to write.
        every: Write every key with an explanation. Unset keys and sections become comments with their defaults.
            Otherwise, write only the keys whose values differ from their defaults.

    Raises:
        ConfigError: A value is a Python object that YAML cannot represent.
    """
    import yaml

    given = yaml.safe_load(config.to_yaml())
    if every:
        return "\n".join(_commented(given))
    differing = {section: {key: keys[key] for key in keys if keys[key] != _default(section, key)}
                 for section, keys in given.items()}  # fmt: skip
    return _yaml({section: keys for section, keys in differing.items() if keys})


def _default(section: str, key: str) -> Any:
    from rl_eval.config.settings import SECTIONS
    from rl_eval.records.plain import plain

    return plain(SECTIONS[section].model_fields[key].get_default(call_default_factory=True))


def _yaml(values: Any) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)


def _commented(given: dict[str, dict[str, Any]]) -> Iterator[str]:
    from rl_eval.config.settings import SECTIONS

    for section, model in SECTIONS.items():
        yield from _comment(model.__doc__, "# ")
        yield f"{section}:" if section in given else f"# {section}:"
        for key, field in model.model_fields.items():
            yield from _comment(field.description, "  # ")
            is_set = key in given.get(section, {})
            written = _yaml({key: given[section][key] if is_set else _default(section, key)})
            yield textwrap.indent(written, "  " if is_set else "  # ", lambda _: True).rstrip("\n")
        yield ""


def _comment(text: str | None, mark: str) -> list[str]:
    plain_text = " ".join((text or "").replace("``", "`").split())
    return textwrap.wrap(plain_text, 100, initial_indent=mark, subsequent_indent=mark)

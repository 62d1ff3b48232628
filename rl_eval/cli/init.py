"""``rl-eval init``: write a config file from the options of ``rl-eval run``, with every key explained."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rl_eval.cli.evaluated import Evaluated, with_evaluated
from rl_eval.cli.printing import AsJson, print_json, print_note, written
from rl_eval.cli.settings import Assignments, read_config
from rl_eval.cli.shared import argument
from rl_eval.errors import UsageError

if TYPE_CHECKING:
    from rl_eval.config.builder import EvalConfig


@with_evaluated
def init(
    path: Annotated[Path, argument("FILE", "YAML file to create.")],
    evaluated: Evaluated,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Write a config file that explains every key. Its settings are those of rl-eval run with the same options."""
    evaluated.check(f"init {path}", assignments, takes_file=False)
    config = read_config(None, None, assignments, evaluated.keys(print_note, assignments, trust=None))
    config.build()
    text = commented_yaml(config)
    if path.exists():
        raise UsageError(f"{path} already exists", key=str(path), fix="Pass another path.")
    with written(path), path.open("x", encoding="utf-8") as file:
        file.write(text)
    command = f"rl-eval run {shlex.quote(str(path))}"
    if as_json:
        print_json({"path": str(path), "command": command})
    else:
        print_note(f"{path} written. Run it with {command}")


def commented_yaml(config: EvalConfig) -> str:
    """Return YAML that loads to the same settings, with every key explained.

    Args:
        config: Config to write. Unset keys and sections become comments with their defaults.

    Raises:
        ConfigError: A value is a Python object that YAML cannot represent.
    """
    return "\n".join(_commented(config))


def _commented(config: EvalConfig) -> Iterator[str]:
    import yaml

    from rl_eval.config.settings import SECTIONS
    from rl_eval.records.plain import plain

    given = yaml.safe_load(config.to_yaml())
    for section, model in SECTIONS.items():
        yield from _comment(model.__doc__, "# ")
        yield f"{section}:" if section in given else f"# {section}:"
        for key, field in model.model_fields.items():
            yield from _comment(field.description, "  # ")
            is_set = key in given.get(section, {})
            value: Any = given[section][key] if is_set else plain(field.get_default(call_default_factory=True))
            written = yaml.safe_dump({key: value}, sort_keys=False, width=100, allow_unicode=True)
            yield textwrap.indent(written, "  " if is_set else "  # ", lambda _: True).rstrip("\n")
        yield ""


def _comment(text: str | None, mark: str) -> list[str]:
    plain_text = " ".join((text or "").replace("``", "`").split())
    return textwrap.wrap(plain_text, 100, initial_indent=mark, subsequent_indent=mark)

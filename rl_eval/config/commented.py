"""Commented YAML of a config: the keys that were set, and every other key with its default and what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml
from pydantic.fields import FieldInfo

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import SECTIONS
from rl_eval.records.plain import plain

__all__ = ["commented_yaml"]

_WIDTH: Final = 100
_INDENT: Final = "  "


def commented_yaml(config: EvalConfig) -> str:
    """Return YAML that loads to the same settings, in which every key is explained.

    Args:
        config: What to write. Keys that were not set are comments with their defaults, and so are sections without any.

    Raises:
        ConfigError: A value is a live object.
    """
    given = yaml.safe_load(config.to_yaml())
    return "\n".join(line for section in SECTIONS for line in _section(section, given.get(section, {})))


def _section(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    model = SECTIONS[name]
    yield from _comment(model.__doc__ or "", "")
    yield f"{name}:" if given else f"# {name}:"
    for key, field in model.model_fields.items():
        yield from _key(key, field, given)
    yield ""


def _key(key: str, field: FieldInfo, given: Mapping[str, Any]) -> Iterator[str]:
    yield from _comment(field.description or "", _INDENT)
    if key in given:
        yield from (_INDENT + line for line in _written(key, given[key]))
    else:
        yield from (f"{_INDENT}# {line}" for line in _written(key, plain(field.get_default(call_default_factory=True))))


def _written(key: str, value: Any) -> list[str]:
    """Return the lines of ``key: value``."""
    return yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True).splitlines()


def _comment(text: str, indent: str) -> list[str]:
    said = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(said, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")

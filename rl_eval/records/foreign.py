"""Data that somebody else may have written: parsed, checked against a type, and what is wrong with it in one line."""

from __future__ import annotations

import functools
import json
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

Value = TypeVar("Value")

MOST_UNRECORDED: Final = 10_000_000
"""Episodes of a plan that are believed without a record: a table has a row of 72 bytes for each, whoever plans it."""
_MOST_SCALARS: Final = 10 * MOST_UNRECORDED
"""Info scalars of such episodes, of 8 bytes each."""
_WIDEST: Final = 10_000
"""Info scalars of one episode: numbers are computed of each, and of each agent that they are about."""

_DEEPEST: Final = 100
"""Levels of nested JSON that are read; what walks through it afterwards has room for several times as many."""
_TOO_DEEP: Final = f"it is nested too deeply: the most are {_DEEPEST} levels"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is no JSON, or is nested more deeply than anything that is written here.
    """
    try:
        level = [value := json.loads(text)]
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    for _ in range(_DEEPEST + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def typed(kind: type[Value], value: Any) -> Value:
    """Return parsed JSON as a value of a type. Keys that a dataclass does not know are left out.

    Raises:
        ValueError: It does not fit.
    """
    try:
        found: Value = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from error
    return found


def check_claim(num_episodes: int, num_records: int, num_scalars: int) -> None:
    """Refuse a plan that claims far more episodes than there are records, before anything of its size is made.

    Args:
        num_episodes: What the plan says.
        num_records: How many of its episodes have a record.
        num_scalars: Info scalars of each.

    Raises:
        ValueError: There are too many.
    """
    missing = num_episodes - num_records
    claim = f"its plan has {num_episodes:,} episodes, {missing:,} more than there are records"
    if missing > MOST_UNRECORDED:
        raise ValueError(f"{claim}: at most {MOST_UNRECORDED:,} more are read")
    if missing * num_scalars > _MOST_SCALARS:
        raise ValueError(f"{claim}, with {num_scalars:,} info scalars each: at most {_MOST_SCALARS:,} more are read")
    if num_scalars > _WIDEST:
        raise ValueError(f"its episodes have {num_scalars:,} info scalars each: at most {_WIDEST:,} are read")


def damage(error: Exception) -> str:
    """Say what is wrong with data that could not be read: an error's text, with its type unless that says nothing."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

"""Plain data: nested values as JSON holds them, their leaves, and the leaves in which two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

ABSENT: Final = "(absent)"
"""Stands for a value that one of two trees lacks."""

_PLAIN: Final = frozenset({str, int, bool, type(None)})


class Difference(NamedTuple):
    """One leaf in which two trees differ."""

    key: str
    """Dotted path of the leaf."""
    a: Any
    b: Any


def plain(value: Any) -> Any:
    """Return a value as plain JSON: NaN becomes None, infinity and the unknown their texts, a set a sorted list."""
    return convert(value, plain_leaf)


def convert(value: Any, leaf: Callable[[str, Any], Any], key: str = "", name: Callable[[Any], Any] = str) -> Any:
    """Copy nested data: mappings become dicts, sequences and sets lists, numpy's scalars Python's.

    Args:
        value: The data.
        leaf: Called with the dotted key and the value of what is neither a container nor text, int, bool or None.
        key: Dotted key of the data itself.
        name: Called with each key of a mapping.
    """
    if type(value) in _PLAIN:  # Nearly all values of nearly all faults, of which there may be very many.
        return value
    if type(value) is dict or isinstance(value, Mapping):
        return {name(part): convert(item, leaf, f"{key}.{part}".lstrip("."), name) for part, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert(item, leaf, key, name) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((convert(item, leaf, key, name) for item in value), key=repr)
    return leaf(key, value.item() if isinstance(value, np.generic) else value)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of plain data with their dotted keys; the items of a list have the key of the list."""
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from leaves(item, f"{key}.{part}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value


def with_leaf(old: Any, path: Sequence[str], value: Any) -> Any:
    """Return a mapping like another, of which nothing is changed, in which a path of keys leads to a value."""
    if not path:
        return value
    known = old if isinstance(old, Mapping) else {}
    return {**known, path[0]: with_leaf(known.get(path[0]), path[1:], value)}


def differences(a: Any, b: Any, key: str = "") -> Iterator[Difference]:
    """Yield the leaves in which two trees of plain data differ; a list is one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for part in dict.fromkeys([*a, *b]):
            yield from differences(a.get(part, ABSENT), b.get(part, ABSENT), f"{key}.{part}".lstrip("."))
    elif a != b:
        yield Difference(key, a, b)


def plain_leaf(key: str, value: Any) -> Any:
    """Return what is neither a container nor text, int, bool or None as :func:`plain` does."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, np.ndarray):
        return convert(value.tolist(), plain_leaf, key)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

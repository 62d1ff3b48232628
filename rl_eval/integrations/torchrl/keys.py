"""Keys of tensordicts, and values by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Key", "nested"]

Key: TypeAlias = str | tuple[str, ...]


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return leaves by their paths as dicts of dicts."""
    whole: dict[str, Any] = {}
    for path, leaf in leaves.items():
        target = whole
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = leaf
    return whole

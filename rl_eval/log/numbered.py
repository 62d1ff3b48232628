"""Numbered files of a log: JSON with a checksum of itself, which is written once and never changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from rl_eval.errors import LogError
from rl_eval.log.manifest import checksum
from rl_eval.log.storage import Storage
from rl_eval.records.foreign import parse_json, typed

__all__ = ["read_numbered", "write_numbered"]

Value = TypeVar("Value")


def write_numbered(storage: Storage, folder: str, number: int, fields: Any, indent: int | None = None) -> None:
    """Write a file of a folder; numbers begin at 1."""
    body = json.loads(json.dumps(fields))
    text = json.dumps({"checksum": checksum(body), **body}, indent=indent) + "\n"
    storage.write(f"{folder}/{number:06d}.json", text.encode())


def read_numbered(storage: Storage, folder: str, kind: type[Value], unknown: str) -> Iterator[Value]:
    """Yield the contents of each file of a folder as a dataclass, in order.

    Raises:
        LogError: One is damaged, which leaves something ``unknown``.
    """
    for name in storage.names(folder):
        try:
            body = parse_json(storage.read(f"{folder}/{name}"))
            intact = body.pop("checksum") == checksum(body)
            found = typed(kind, body)
        except (ValueError, TypeError, KeyError, AttributeError):
            intact = False
        if not intact:
            raise LogError(
                f"{storage.label}/{folder}/{name} is damaged, so nobody knows {unknown}: restore the file from a copy, "
                "or start anew with --fresh or another --log-dir"
            )
        yield found

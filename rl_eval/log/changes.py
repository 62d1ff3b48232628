"""Changes to a log after it was begun: code that was accepted, and failed episodes to run again.

The manifest never changes. Each change is a numbered file of its own, under ``amendments/`` or ``retries/``, that never
changes either; the last amendment holds the digests that the next session is compared with.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rl_eval.errors import LogError
from rl_eval.log.manifest import Manifest, checksum
from rl_eval.log.storage import Storage
from rl_eval.records.episode import Outcome
from rl_eval.records.plain import parse_json, typed

__all__ = [
    "Amendment",
    "Retry",
    "amend",
    "ask_again",
    "code_differences",
    "counts",
    "newest_code",
    "read_amendments",
    "read_numbered",
    "read_retries",
    "retried_since",
    "write_numbered",
]

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


_AMENDMENTS: Final = "amendments"
_SHOWN_DIGITS: Final = 12
"""Hexadecimal digits of a digest that are shown."""


@dataclass(frozen=True)
class Amendment:
    """One change of the code that was accepted."""

    accepted_at: str
    host: str
    num_finished: int
    """Episodes that the log held then."""
    differences: tuple[str, ...]
    code: dict[str, Any]
    """Digests from here on."""

    def __str__(self) -> str:
        return (
            f"the code was changed after {self.num_finished:,} finished episodes, which was accepted on "
            f"{self.accepted_at}: {'; '.join(self.differences)}"
        )


def code_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per file or package that both sides know and that differs."""
    files, packages = before.get("files", {}), before.get("packages", {})
    return [
        *(
            f"file {found['path']} (module {module}): sha256 {files[module]['sha256'][:_SHOWN_DIGITS]} -> "
            f"{found['sha256'][:_SHOWN_DIGITS]}"
            for module, found in now.get("files", {}).items()
            if module in files and files[module]["sha256"] != found["sha256"]
        ),
        *(
            f"package {name}: {packages[name]} -> {version}"
            for name, version in now.get("packages", {}).items()
            if packages.get(name, version) != version
        ),
    ]


def newest_code(manifest: Manifest, amendments: Sequence[Amendment]) -> dict[str, Any]:
    """Return the digests of the last session."""
    return amendments[-1].code if amendments else manifest.code


def read_amendments(storage: Storage) -> list[Amendment]:
    """Read all amendments of a log, in order.

    Raises:
        LogError: One is damaged.
    """
    return list(read_numbered(storage, _AMENDMENTS, Amendment, "which code the last episodes were made with"))


def amend(storage: Storage, manifest: Manifest, known: Sequence[Amendment], ours: Manifest, finished: int) -> Amendment:
    """Write an amendment that makes this session's code that of the log from now on."""
    before = newest_code(manifest, known)
    amendment = Amendment(
        accepted_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        num_finished=finished,
        differences=tuple(code_differences(before, ours.code)),
        code={part: {**before.get(part, {}), **found} for part, found in ours.code.items()},
    )
    write_numbered(storage, _AMENDMENTS, len(known) + 1, asdict(amendment), indent=2)
    return amendment


_RETRIES: Final = "retries"
_SHOWN_INDICES: Final = 8
"""Indices that a note names."""


@dataclass(frozen=True)
class Retry:
    """One decision to run failed episodes again."""

    asked_at: str
    epoch: int
    """Session that asked."""
    indices: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.indices[:_SHOWN_INDICES])) + (
            ", ..." if len(self.indices) > _SHOWN_INDICES else ""
        )
        return f"failed episodes were run again, as asked on {self.asked_at}: {len(self.indices):,}, with index {named}"


def ask_again(storage: Storage, epoch: int, indices: Iterable[int], known: Sequence[Retry]) -> Retry:
    """Write a retry.

    Raises:
        OSError: It cannot be written.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    retry = Retry(now, epoch, tuple(sorted(indices)))
    write_numbered(storage, _RETRIES, len(known) + 1, asdict(retry))
    return retry


def read_retries(storage: Storage) -> list[Retry]:
    """Read all retries of a log, in order.

    Raises:
        LogError: One is damaged.
    """
    return list(read_numbered(storage, _RETRIES, Retry, "which failed episodes were run again"))


def retried_since(retries: Iterable[Retry]) -> dict[int, int]:
    """Return the last session that asked for each retried index."""
    return {index: retry.epoch for retry in retries for index in retry.indices}


def counts(rows: npt.NDArray[np.void], epoch: int, retried: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Return which rows of a session count: all but failed ones that were to run again, shape (n,)."""
    superseded = [index for index, since in retried.items() if epoch < since]
    return np.asarray(~((rows["outcome"] == Outcome.FAILED) & np.isin(rows["index"], superseded)))

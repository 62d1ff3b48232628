"""Retries of failed episodes: amendments of a log that put failed records aside, so that their episodes run again.

Nothing is removed: the segments stay as they are, and so do all faults. A retry names the session that asked for it,
and failed records of its episodes count only if that session or a later one wrote them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import LogError
from rl_eval.log.manifest import checksum
from rl_eval.log.storage import Storage
from rl_eval.records.episode import Outcome
from rl_eval.records.plain import parse_json

__all__ = ["Retry", "ask_again", "counts", "read_retries", "retried_since"]

_FOLDER: Final = "retries"
_SHOWN: Final = 8
"""Indices that a note names."""


@dataclass(frozen=True)
class Retry:
    """One decision to run failed episodes again."""

    asked_at: str
    epoch: int
    """Session that asked."""
    indices: tuple[int, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.indices[:_SHOWN])) + (", ..." if len(self.indices) > _SHOWN else "")
        return f"{len(self.indices):,} failed episodes were run again, as asked on {self.asked_at}: {named}"


def ask_again(storage: Storage, epoch: int, indices: Iterable[int], known: Sequence[Retry]) -> Retry:
    """Write a retry.

    Raises:
        OSError: It cannot be written.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    retry = Retry(now, epoch, tuple(sorted(indices)))
    body = json.loads(json.dumps(asdict(retry)))
    text = json.dumps({"checksum": checksum(body), **body}) + "\n"
    storage.write(f"{_FOLDER}/{len(known) + 1:06d}.json", text.encode())
    return retry


def read_retries(storage: Storage) -> list[Retry]:
    """Read all retries of a log, in order.

    Raises:
        LogError: One is damaged.
    """
    return [_parse(storage, f"{_FOLDER}/{name}") for name in storage.names(_FOLDER)]


def retried_since(retries: Iterable[Retry]) -> dict[int, int]:
    """Return the last session that asked for each retried index."""
    return {index: retry.epoch for retry in retries for index in retry.indices}


def counts(rows: npt.NDArray[np.void], epoch: int, retried: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Return which rows of a session count: all but failed ones that were to run again, shape (n,)."""
    superseded = [index for index, since in retried.items() if epoch < since]
    return np.asarray(~((rows["outcome"] == Outcome.FAILED) & np.isin(rows["index"], superseded)))


def _parse(storage: Storage, name: str) -> Retry:
    try:
        body = parse_json(storage.read(name))
        intact = body.pop("checksum") == checksum(body)
        found = Retry(body["asked_at"], int(body["epoch"]), tuple(map(int, body["indices"])))
    except (ValueError, TypeError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise LogError(
            f"{storage.label}/{name} is damaged, so nobody knows which failed episodes were run again: restore the "
            "file from a copy, or start anew with --fresh or another --log-dir"
        )
    return found

"""Retries of failed episodes: amendments of a log that put failed records aside, so that their episodes run again.

Nothing is removed: the segments stay as they are, and so do all faults. A retry names the session that asked for it,
and failed records of its episodes count only if that session or a later one wrote them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rl_eval.log.numbered import read_numbered, write_numbered
from rl_eval.log.storage import Storage
from rl_eval.records.episode import Outcome

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
    indices: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.indices[:_SHOWN])) + (", ..." if len(self.indices) > _SHOWN else "")
        return f"failed episodes were run again, as asked on {self.asked_at}: {len(self.indices):,}, with index {named}"


def ask_again(storage: Storage, epoch: int, indices: Iterable[int], known: Sequence[Retry]) -> Retry:
    """Write a retry.

    Raises:
        OSError: It cannot be written.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    retry = Retry(now, epoch, tuple(sorted(indices)))
    write_numbered(storage, _FOLDER, len(known) + 1, asdict(retry))
    return retry


def read_retries(storage: Storage) -> list[Retry]:
    """Read all retries of a log, in order.

    Raises:
        LogError: One is damaged.
    """
    return list(read_numbered(storage, _FOLDER, Retry, "which failed episodes were run again"))


def retried_since(retries: Iterable[Retry]) -> dict[int, int]:
    """Return the last session that asked for each retried index."""
    return {index: retry.epoch for retry in retries for index in retry.indices}


def counts(rows: npt.NDArray[np.void], epoch: int, retried: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Return which rows of a session count: all but failed ones that were to run again, shape (n,)."""
    superseded = [index for index, since in retried.items() if epoch < since]
    return np.asarray(~((rows["outcome"] == Outcome.FAILED) & np.isin(rows["index"], superseded)))

"""Log of a runner's sweeps: what the policy saw and chose in each, for the observers that record episodes.

A sweep is one act of the policy for all live slots. To copy an observation takes about as long as a small environment
takes for a step, so a sweep is copied as the batch that it is, and an episode is cut out of it once it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

__all__ = ["EpisodeLog", "Steps", "SweepLog"]

Array = npt.NDArray[Any]
Outputs = Iterable[tuple[Any, Any]]

_SWEEPS: Final = 64
"""Sweeps that there is room for at first."""


class Steps(NamedTuple):
    """Steps of one episode, of T sweeps: views that hold until the next sweep."""

    observations: Array
    r"""What the policy saw, shape (T, \*shape)."""
    actions: Array
    r"""What the environment was given, shape (T, \*shape)."""
    outputs: dict[str, Array]
    r"""What the policy computed besides actions at every step, each of shape (T, \*shape)."""


@final
class SweepLog:
    """Sweeps since the first step of the oldest episode that is recorded, each with a row for every slot.

    Args:
        observations: A batch of observations.
        actions: A batch of actions.
    """

    def __init__(self, observations: Array, actions: Array) -> None:
        self._rows = len(observations)
        self._columns = {"observations": self._empty(observations), "actions": self._empty(actions)}
        self._starts: dict[int, int] = {}
        """First sweep of the episodes that are recorded, by slot."""
        self._told_since: dict[str, int] = {}
        """First sweep from which on a policy's output has a value in each."""
        self._first = self._count = 0
        """Number of the first sweep that is held, and of all sweeps so far."""

    @property
    def wanted(self) -> bool:
        """Whether any episode is recorded."""
        return bool(self._starts)

    def begin(self, slot: int) -> None:
        """Record the episode that begins with the next sweep; it is to act in every sweep until its end."""
        self._starts[slot] = self._count

    def end(self, slot: int) -> None:
        """Forget the episode of a slot."""
        self._starts.pop(slot, None)

    def add(self, observations: Array, actions: Array, outputs: Outputs) -> None:
        """Copy a sweep.

        Args:
            observations: Rows that the policy saw.
            actions: Rows that environments are given.
            outputs: Rows of each forward pass, and what it computed for them besides actions: a dict of arrays.
        """
        self._make_room()
        sweep = self._count - self._first
        self._columns["observations"][sweep] = observations
        self._columns["actions"][sweep] = actions
        told = set()
        for rows, computed in outputs:
            for name, values in computed.items():
                self._told(name, np.asarray(values))[sweep, rows] = values
                told.add(name)
        self._told_since = {name: since for name, since in self._told_since.items() if name in told}
        self._count += 1

    def steps(self, slot: int) -> Steps:
        """Return the steps of an episode so far."""
        start = self._starts[slot]
        held = slice(start - self._first, self._count - self._first)
        told = [name for name, since in self._told_since.items() if since <= start]
        return Steps(
            self._columns["observations"][held, slot],
            self._columns["actions"][held, slot],
            {name: self._columns[f"outputs.{name}"][held, slot] for name in told},
        )

    def _told(self, name: str, values: Array) -> Array:
        """Return the column of an output, which begins when it is first told in this form."""
        key = f"outputs.{name}"
        column = self._columns.get(key)
        if column is None or column.shape[2:] != values.shape[1:] or column.dtype != values.dtype:
            column = self._columns[key] = self._empty(values, len(self._columns["actions"]))
            self._told_since.pop(name, None)
        self._told_since.setdefault(name, self._count)
        return column

    def _empty(self, batch: Array, room: int = _SWEEPS) -> Array:
        return np.empty((room, self._rows, *batch.shape[1:]), batch.dtype)

    def _make_room(self) -> None:
        """Drop the sweeps of no episode; double the room where that leaves less than half of it."""
        room, held = len(self._columns["actions"]), self._count - self._first
        if held < room:
            return
        kept = self._count - min(self._starts.values())
        for key, column in self._columns.items():
            grown = np.empty((room if 2 * kept <= room else 2 * room, *column.shape[1:]), column.dtype)
            grown[:kept] = column[held - kept : held]
            self._columns[key] = grown
        self._first = self._count - kept


class EpisodeLog(NamedTuple):
    """A slot's part of a log."""

    sweeps: SweepLog
    slot: int

    def begin(self) -> None:
        """See :meth:`SweepLog.begin`."""
        self.sweeps.begin(self.slot)

    def steps(self) -> Steps:
        """See :meth:`SweepLog.steps`."""
        return self.sweeps.steps(self.slot)

"""Log of a runner's sweeps, with the observations and actions of each sweep, for observers that record episodes.

A sweep is one call of the policy for all live slots. To copy a single observation takes about as long as a step of a
small environment, and to create an array takes as long as several steps. So a sweep is copied as a whole batch. When a
report is due or the log is full, the steps of all finished episodes are copied out of the log together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from rl_eval.policies.inference.spaces import fitting

Array = npt.NDArray[Any]
Outputs = Iterable[tuple[Any, Any]]

_SWEEPS: Final = 64
"""Initial capacity of the log, in sweeps."""


class Steps(NamedTuple):
    """Steps of finished episodes. In each array, one episode follows the other."""

    rows: Sequence[tuple[Any, ...]]
    """Records of the episodes, in the form of :data:`rl_eval.records.episode.ROW`."""
    lengths: npt.NDArray[np.int64]
    """Number of steps of each episode."""
    observations: Array
    r"""Observations in the form that the policy receives, shape (steps + episodes, \*shape). In each episode, the last
    observation comes after the last step."""
    actions: Array
    r"""Actions passed to environments, shape (steps, \*shape)."""
    rewards: npt.NDArray[np.float64]
    """Rewards, shape (steps,)."""
    outputs: Mapping[str, Array]
    r"""Outputs of the policy besides actions, by name, each of shape (steps, \*shape)."""


class SweepRecorder(Protocol):
    """Observer that builds the artifacts of finished episodes from the log of sweeps, without a call per step."""

    @property
    def reads_sweeps(self) -> bool:
        """Whether the observer needs only the log; otherwise the runner passes every step to it."""

    def read_sweeps(self, steps: Steps) -> Mapping[int, Any]:
        """Return the artifacts of episodes, by episode index, in a mapping that can be pickled."""


class _Finished(NamedTuple):
    """A finished episode whose steps are in the log."""

    slot: int
    start: int
    stop: int
    row: tuple[Any, ...]
    told: tuple[str, ...]
    """Names of the policy's outputs that have a value at every step of the episode."""
    recorders: Mapping[str, SweepRecorder]


@final
class SweepLog:
    """Sweeps since the first step of the oldest episode that is recorded. Each sweep has a row for every slot."""

    def __init__(self, observations: Array, actions: Array) -> None:
        self._rows = len(observations)
        self._columns = {"observations": self._empty(observations), "actions": self._empty(actions)}
        self._columns["rewards"] = np.empty((_SWEEPS, self._rows))
        self._starts: dict[int, int] = {}
        """First sweep of each episode that is being recorded, by slot."""
        self._told_since: dict[str, int] = {}
        """Number of the sweep from which on every sweep has a value of an output, by name of the output."""
        self._first = self._count = 0
        """Index of the first stored sweep, and count of all sweeps so far."""
        self._finished: list[_Finished] = []
        self._lasts = np.empty((_SWEEPS, *observations.shape[1:]), observations.dtype)
        """Last observation of each finished episode, with spare capacity."""
        self._cut: list[tuple[Mapping[str, SweepRecorder], Steps]] = []

    @property
    def wanted(self) -> bool:
        """Whether any episode is recorded."""
        return bool(self._starts)

    def begin(self, slot: int) -> None:
        """Record the episode that starts in a slot with the next sweep.

        The episode must act in every sweep until its end.
        """
        self._starts[slot] = self._count

    def end(self, slot: int) -> None:
        """Forget the episode of a slot, unless it has finished."""
        self._starts.pop(slot, None)

    def finish(
        self,
        slot: int,
        row: tuple[Any, ...],
        rewards: Sequence[float],
        last: Any,
        recorders: Mapping[str, SweepRecorder],
    ) -> None:
        """Store the finished episode of a slot.

        Args:
            slot: Slot of the episode.
            row: Record of the episode.
            rewards: Rewards of the episode's steps; empty if :meth:`reward` has written them.
            last: Observation after the last step.
            recorders: Observers that record the episode, by the names of their artifacts.

        Raises:
            EnvError: The last observation does not fit the observation space.
        """
        place = len(self._finished)
        if place == len(self._lasts):
            self._lasts = np.concatenate([self._lasts, np.empty_like(self._lasts)])
        self._lasts[place] = fitting(last, self._lasts.dtype, self._lasts.shape[1:])
        start = self._starts.pop(slot)
        if rewards:
            self._columns["rewards"][start - self._first : self._count - self._first, slot] = rewards
        told = tuple([name for name, since in self._told_since.items() if since <= start])
        self._finished.append(_Finished(slot, start, self._count, row, told, recorders))

    def take(self) -> list[tuple[Mapping[str, SweepRecorder], Steps]]:
        """Return the steps of episodes that have finished since the last call, with the observers that record them."""
        self._cut_finished()
        cut, self._cut = self._cut, []
        return cut

    def add(self, observations: Array, actions: Array, outputs: Outputs) -> None:
        """Copy a sweep.

        Args:
            observations: Rows that the policy received.
            actions: Rows that environments receive.
            outputs: A pair for each forward pass: its rows, and a dict of the outputs besides actions for these rows.
        """
        self._make_room()
        sweep = self._count - self._first
        self._columns["observations"][sweep] = observations
        self._columns["actions"][sweep, : len(actions)] = actions  # Rows that fill up the last block may lack actions.
        told = set()
        for rows, computed in outputs:
            for name, values in computed.items():
                self._told(name, np.asarray(values))[sweep, rows] = values
                told.add(name)
        self._told_since = {name: since for name, since in self._told_since.items() if name in told}
        self._count += 1

    def reward(self, rewards: npt.NDArray[np.float64]) -> None:
        """Write rewards, shape (n,), into the last sweep, for its first n slots."""
        self._columns["rewards"][self._count - 1 - self._first, : len(rewards)] = rewards

    def _told(self, name: str, values: Array) -> Array:
        """Return the column of an output. If the output is new or has another shape or dtype, create the column."""
        key = f"outputs.{name}"
        column = self._columns.get(key)
        if column is None or column.shape[2:] != values.shape[1:] or column.dtype != values.dtype:
            self._cut_finished()
            column = self._columns[key] = self._empty(values, len(self._columns["actions"]))
            self._told_since.pop(name, None)
        self._told_since.setdefault(name, self._count)
        return column

    def _empty(self, batch: Array, room: int = _SWEEPS) -> Array:
        return np.empty((room, self._rows, *batch.shape[1:]), batch.dtype)

    def _make_room(self) -> None:
        """If the log is full, drop sweeps that no episode needs; if it is still more than half full, double it."""
        room, held = len(self._columns["actions"]), self._count - self._first
        if held < room:
            return
        self._cut_finished()
        kept = self._count - min(self._starts.values())
        for key, column in self._columns.items():
            grown = np.empty((room if 2 * kept <= room else 2 * room, *column.shape[1:]), column.dtype)
            grown[:kept] = column[held - kept : held]
            self._columns[key] = grown
        self._first = self._count - kept

    # ------------------------------------------------------------------ cutting

    def _cut_finished(self) -> None:
        """Copy finished episodes out of the sweeps, in groups of episodes with the same outputs and recorders."""
        alike: dict[Any, list[int]] = {}
        for place, one in enumerate(self._finished):
            alike.setdefault((one.told, *one.recorders), []).append(place)
        self._cut += [(self._finished[places[0]].recorders, self._steps(places)) for places in alike.values()]
        self._finished = []

    def _steps(self, finished: Sequence[int]) -> Steps:
        episodes = [self._finished[place] for place in finished]
        slots, starts, stops = np.array([one[:3] for one in episodes]).T
        lengths = stops - starts
        places = _places(starts - self._first, slots, lengths, self._rows)
        seen = _places(starts - self._first, slots, lengths + 1, self._rows)
        observations = self._taken("observations", seen)
        observations[(lengths + 1).cumsum() - 1] = self._lasts[finished]
        return Steps(
            [one.row for one in episodes],
            lengths,
            observations,
            self._taken("actions", places),
            self._taken("rewards", places),
            {name: self._taken(f"outputs.{name}", places) for name in episodes[0].told},
        )

    def _taken(self, key: str, places: npt.NDArray[np.int64]) -> Array:
        """Return a copy of rows. Rows beyond the last sweep have arbitrary content."""
        column = self._columns[key]
        rows: Array = column.reshape(-1, *column.shape[2:]).take(places, axis=0, mode="clip")
        return rows


def _places(
    starts: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], rows: int
) -> npt.NDArray[np.int64]:
    """Return the row in the log of each step: ``sweep * rows + slot``, one episode after the other.

    Args:
        starts: Sweep of each episode's first step, shape (episodes,).
        slots: Slot of each episode, shape (episodes,).
        lengths: Number of steps of each episode, shape (episodes,).
        rows: Number of rows per sweep.
    """
    before = lengths.cumsum() - lengths
    sweeps = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
    return sweeps * rows + np.repeat(slots, lengths)

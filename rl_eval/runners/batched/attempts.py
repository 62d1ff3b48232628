"""Attempts of all slots of a batched runner, as arrays."""

from __future__ import annotations

from time import perf_counter
from typing import final

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import PROGRESS, Lease


@final
class Attempts:
    """Attempts in all slots, as arrays of shape (slots,)."""

    def __init__(self, slots: int, num_keys: int) -> None:
        self.live = np.zeros(slots, bool)
        self._live_slots: npt.NDArray[np.int64] | None = None
        self.faulty: set[int] = set()
        """Slots with an invalid value since the simulator was built."""
        self.indices, self.numbers = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        """Episode of each slot, and number of its attempt, from 1."""
        self.steps = 0
        """Steps of the runner; every live slot takes part in each."""
        self.began = np.zeros(slots, np.int64)
        """Number of them when the attempts started."""
        self.returns, self.discounted, self.discount = np.zeros(slots), np.zeros(slots), np.ones(slots)
        self.success_once = np.full(slots, -1, np.int64)
        self.success_at_end = np.full(slots, -1, np.int64)
        self.infos = np.full((slots, num_keys), np.nan)
        self.started, self.reset_seconds = np.zeros(slots), np.zeros(slots)
        self.inference_clock, self.step_clock = np.zeros(slots), np.zeros(slots)
        """Readings of the runner's clocks when the attempts started."""

    def begin(self, slot: int, lease: Lease, inference_clock: float, step_clock: float) -> None:
        """Start an attempt in a slot, with all sums at zero."""
        self.indices[slot], self.numbers[slot] = lease.index, lease.attempt
        self.live[slot], self._live_slots = True, None
        self.began[slot], self.returns[slot], self.discounted[slot], self.discount[slot] = self.steps, 0.0, 0.0, 1.0
        self.success_once[slot] = self.success_at_end[slot] = -1
        self.infos[slot], self.reset_seconds[slot], self.started[slot] = np.nan, 0.0, perf_counter()
        self.inference_clock[slot], self.step_clock[slot] = inference_clock, step_clock

    def end(self, slot: int) -> None:
        """Free a slot."""
        self.live[slot], self._live_slots = False, None

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Live slots, in ascending order."""
        if self._live_slots is None:  # It changes only when an attempt starts or ends.
            self._live_slots = np.flatnonzero(self.live)
        return self._live_slots

    def progress(self) -> npt.NDArray[np.void]:
        """Return the progress of the live attempts, shape (live,)."""
        slots = self.slots
        progress = np.empty(len(slots), PROGRESS)
        progress["index"], progress["attempt"] = self.indices[slots], self.numbers[slots]
        progress["step"] = self.steps - self.began[slots]
        return progress

    def length(self, slot: int) -> int:
        """Return the number of steps of a live attempt."""
        return self.steps - int(self.began[slot])

    def add(self, rewards: npt.NDArray[np.float64], gamma: float) -> None:
        """Add the rewards of the last step, shape (width,); those of slots without an attempt are 0."""
        width = len(rewards)
        self.returns[:width] += rewards
        if gamma != 1.0:
            self.discounted[:width] += self.discount[:width] * rewards
            self.discount *= gamma

    def report_success(self, flags: npt.NDArray[np.int64]) -> None:
        """Record success in slots that report it.

        Args:
            flags: Shape (width,): 0 or 1, and -1 in slots without a report.
        """
        width, reported = len(flags), flags >= 0
        self.success_at_end[:width][reported] = flags[reported]
        self.success_once[:width][reported] = np.maximum(self.success_once[:width][reported], flags[reported])

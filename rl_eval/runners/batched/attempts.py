"""Attempts of all slots of a batched runner, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, final

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
        """Slots that have returned an invalid value since the simulator was built."""
        self.steps = 0
        """Number of steps of the runner. Every live slot takes part in each step."""
        self._integers = np.zeros((5, slots), np.int64)
        self.indices, self.numbers, self.began, self.success_once, self.success_at_end = self._integers
        """For each slot: index of the episode, number of the attempt (from 1), :attr:`steps` at the attempt's start,
        and success at any step and at the last report (1 or 0; -1 without a report)."""
        self._floats = np.zeros((7, slots))
        self.returns, self.discounted, self.discount, self.started, self.reset_seconds = self._floats[:5]
        self.inference_clock, self.step_clock = self._floats[5:]
        """Readings of the runner's clocks when the attempts started."""
        self.infos = np.full((slots, num_keys), np.nan)

    def begin(self, slots: Sequence[int], leases: Sequence[Lease], inference_clock: float, step_clock: float) -> None:
        """Start an attempt in each of these slots. Set all sums of the attempts to zero."""
        begun = [(lease.index, lease.attempt, self.steps, -1, -1) for lease in leases]
        self._integers[:, slots] = np.array(begun, np.int64).T
        zeros = 0.0, 0.0, 1.0, perf_counter(), 0.0, inference_clock, step_clock
        self._floats[:, slots] = np.array(zeros)[:, np.newaxis]
        self.infos[slots] = np.nan
        self.live[slots], self._live_slots = True, None

    def end(self, slots: Sequence[int]) -> None:
        """Mark these slots as free."""
        self.live[slots], self._live_slots = False, None

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

    def sums(self, slots: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the sums of live attempts.

        Args:
            slots: Slots with a live attempt.

        Returns:
            A tuple for each slot: length, return, discounted return, success at any step, success at the last report,
            reset seconds, and the readings of the inference clock and the step clock when the attempt started.
        """
        began, once, at_end = self._integers[2:, slots].tolist()
        returns, discounted, _, _, resets, *clocks = self._floats[:, slots].tolist()
        lengths = [self.steps - step for step in began]
        return list(zip(lengths, returns, discounted, once, at_end, resets, *clocks, strict=True))

    def add(self, rewards: npt.NDArray[np.float64], gamma: float) -> None:
        """Add the rewards of the last step, shape (width,). Rewards of slots without an attempt are 0."""
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

"""Observers of the slots of a batched simulator. They receive each step of their slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, final

import tree

from rl_eval.policies.inference.inference import RowInference
from rl_eval.records.episode import EpisodeRecord, Lease
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Reported
from rl_eval.runners.observers import ObservedSlot


@final
class ObservedBatch:
    """Observers of all slots of a simulator.

    Args:
        simulator: The simulator.
        slots: Observers of each slot.
        inference: Inference, with the observations of the slots.
    """

    def __init__(self, simulator: BatchSimulator, slots: Sequence[ObservedSlot], inference: RowInference) -> None:
        self.simulator = simulator
        self._slots = slots
        self._inference = inference
        self._live: dict[int, ObservedSlot] = {}
        """Observers of the slots whose episode is observed, by slot."""
        self._told: dict[int, ObservedSlot] = {}
        """Live observers that receive every step, by slot."""

    def start(self, slot: int, lease: Lease) -> None:
        """Start an attempt. Attempts of the determinism check are not observed."""
        if lease.how.again:
            return
        observed = self._live[slot] = self._slots[slot]
        observed.start(lease.spec, lease.attempt, self._inference.observations.row(slot))
        if observed.told:
            self._told[slot] = observed

    def act(self, actions: Any) -> None:
        """Store the actions of the next step for observers: nested arrays, shape (slots, ...)."""
        for slot, observed in self._told.items():
            observed.act(tree.map_structure(lambda leaf, slot=slot: leaf[slot], actions))

    def keys(self, step: BatchStep) -> Collection[str]:
        """Return the keys of infos to read for observers. The runner reads the keys of its records in any case."""
        return step.keys if self._told else ()

    def step(self, step: BatchStep, reported: Reported) -> None:
        """Add a step to all live slots; ``reported`` has the values and masks of the step's infos, by key."""
        if (sweeps := self._inference.sweeps) is not None and sweeps.wanted:
            sweeps.reward(step.rewards)
        for slot, observed in self._told.items():
            # The next step may reuse the arrays.
            info = {key: copy(values[slot]) for key, (values, mask) in reported.items() if mask[slot]}
            flags = bool(step.terminated[slot]), bool(step.truncated[slot])
            observed.step(self._inference.observations.row(slot), float(step.rewards[slot]), *flags, info)

    def complete(self, slot: int, row: tuple[Any, ...], record: Callable[[], EpisodeRecord]) -> dict[str, Any]:
        """Return the artifacts of a completed episode, by observer name."""
        if (observed := self._live.get(slot)) is None:
            return {}
        observed.last = self._inference.observations.row(slot)
        return observed.complete(row, record)

    def end(self, slot: int) -> None:
        """End the attempt of a slot, completed or not."""
        self._told.pop(slot, None)
        if (observed := self._live.pop(slot, None)) is not None:
            observed.end()

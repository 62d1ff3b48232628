"""Observers of the slots of a batched simulator, to which each step of all slots is pushed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import tree

from rl_eval.policies.inference.inference import Inference
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec, Lease
from rl_eval.runners.batched.simulator import BatchStep
from rl_eval.runners.observers import ObservedSlot


@final
class ObservedBatch:
    """Observers of all slots of a simulator.

    Args:
        slots: Observers of each slot.
        info_keys: Keys of the infos that observers see, in addition to the keys that a step names.
        inference: Inference, with the observations of the slots.
    """

    def __init__(self, slots: Sequence[ObservedSlot], info_keys: Sequence[str], inference: Inference) -> None:
        self._slots = slots
        self._info_keys = info_keys
        self._inference = inference
        self._live: dict[int, ObservedSlot] = {}
        """Observers of the slots with an episode that is observed, by slot."""
        self._told: dict[int, ObservedSlot] = {}
        """Those of them that receive every step."""

    def start(self, slot: int, lease: Lease) -> None:
        """Start an attempt; those of the determinism check are not observed."""
        if lease.fresh:
            return
        observed = self._live[slot] = self._slots[slot]
        spec = EpisodeSpec(lease.index, lease.seed, lease.seating)
        observed.start(spec, lease.attempt, self._inference.observations.row(slot))
        if observed.told:
            self._told[slot] = observed

    def act(self, actions: Any) -> None:
        """Keep the actions of the next step: nested arrays, shape (slots, ...)."""
        for slot, observed in self._told.items():
            observed.act(tree.map_structure(lambda leaf, slot=slot: leaf[slot], actions))

    def step(self, step: BatchStep) -> None:
        """Add a step to all live slots."""
        if (sweeps := self._inference.sweeps) is not None and sweeps.wanted:
            sweeps.reward(step.rewards)
        reported = self._reported(step) if self._told else {}
        for slot, observed in self._told.items():
            info = {key: values[slot] for key, (values, mask) in reported.items() if mask[slot]}
            flags = bool(step.terminated[slot]), bool(step.truncated[slot])
            observed.step(self._inference.observations.row(slot), float(step.rewards[slot]), *flags, info)

    def _reported(self, step: BatchStep) -> Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
        """Return the values and masks of all infos of a step, by key."""
        keys = dict.fromkeys((*self._info_keys, *step.keys))
        return {key: found for key in keys if (found := step.values(key)) is not None}

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

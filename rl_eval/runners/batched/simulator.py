"""Contract between the batched runner and a simulator that steps many slots in one call."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import EpisodeSpec

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]


def _no_values(key: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One step of all slots; the arrays may be reused by the next step."""

    observations: Any
    """Nested arrays, shape (num_envs, ...). In a slot that ended: the last observation of its episode."""
    rewards: Floats
    """Rewards, shape (num_envs,)."""
    terminated: Flags
    """Shape (num_envs,)."""
    truncated: Flags
    """Shape (num_envs,)."""
    values: Callable[[str], tuple[npt.NDArray[Any], Flags] | None] = _no_values
    """Returns the values of an ``info`` key and the mask of the slots that reported it; None if no slot did."""
    started: tuple[Flags, Any] | None = None
    """Mask of the slots that started another episode by themselves, and observations of shape (num_envs, ...) with its
    first one in these slots; None if no slot did. Only blocks use it."""


class BatchSimulator(abc.ABC):
    """Simulator whose slots are restarted one by one, each with a seed of its own, and stepped in one call.

    An episode must be a function of its spec: neither the number of slots nor the other slots may change it. A slot
    that ended stays idle until it is restarted, or continues by itself; the runner ignores it.
    """

    num_envs: int
    """Number of slots."""
    observation_space: gym.Space[Any]
    """Space of the observation of one slot."""
    action_space: gym.Space[Any]
    """Space of the action of one slot."""
    name: str = "simulator"
    """Name of the simulator, which is part of the numerics key of blocks."""
    notes: tuple[str, ...] = ()
    """Notes for readers of the result, such as settings of the simulator that change the returns."""

    @abc.abstractmethod
    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        """Start an episode in each of some slots.

        Args:
            slots: Slots, shape (k,), in ascending order. The others keep their episodes.
            specs: Specs of the episodes, in the order of the slots.

        Returns:
            First observations of these slots: nested arrays, shape (k, ...).
        """

    def reset(self, seed: int) -> Any:
        """Start an episode in every slot, from one seed, for a block; return observations of shape (num_envs, ...).

        Raises:
            NotImplementedError: The simulator does not support blocks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset() for blocks")

    @abc.abstractmethod
    def step(self, actions: Any) -> BatchStep:
        """Take a step in every slot.

        Args:
            actions: Nested arrays, shape (num_envs, ...). Slots without an episode get some valid action.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release the simulator."""

"""Protocol of inference: the methods and attributes through which a runner applies policies to all live lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt


class Observations(Protocol):
    """Observations of all lanes."""

    note: Callable[[int, str, str], None]
    """Called with the lane, a description of an unusual observation, and the value."""

    @property
    def has_texts(self) -> bool:
        """Whether a part of the observations is a text."""

    def learn_texts(self, observations: Sequence[Any]) -> None:
        """Use the texts of these observations in the probe."""

    def write(self, lane: int, observation: Any) -> None:
        """Copy the observation of a lane.

        Raises:
            EnvError: The observation does not fit its space.
        """

    def content(self, observation: Any) -> bytes:
        """Return the bytes of an observation, in the form that the policy receives, for a trace."""

    def clear(self, lane: int) -> None:
        """Set the observation of a lane to zero, because the policy must not see it."""

    def nonfinite_rows(self, live: npt.NDArray[np.bool_]) -> list[int]:
        """Return the live lanes with a NaN or infinite observation."""

    def describe_nonfinite(self, lane: int) -> str:
        """Return which part of a lane's observation is NaN or infinite."""

    def look_outside(self, live: npt.NDArray[np.bool_]) -> None:
        """Note live observations outside of the space's bounds."""

    def forget_notes(self) -> None:
        """Allow the same notes to be reported again."""


Answers = tuple[Sequence[int], Any, Mapping[int, BaseException]]
"""Lanes with an answer of the policy, actions that can be indexed by lane, and errors by lane."""

NO_ANSWERS: Final[Answers] = ((), (), {})


class Inference(Protocol):
    """One or more policies, applied to all live lanes at once."""

    live: npt.NDArray[np.bool_]
    """Mask of the live lanes. It may have more elements than there are lanes; the additional ones are False."""
    numerics: dict[str, Any]
    """The numerics key; empty until :meth:`probe`."""
    probes: int
    """Number of calls of :meth:`probe_again`, including those after a new connection of the policy."""
    keeps_outputs: bool
    """Whether to keep the outputs of the policy for :meth:`outputs`."""

    @property
    def observations(self) -> Observations:
        """Observations for the next call of :meth:`act`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for readers of the result, about how the policy is computed and how its actions are used."""

    def begin(self, lane: int, seed: int) -> None:
        """Start an episode in a lane, with a new recurrent state and with noise from the episode's seed."""

    def end(self, lane: int) -> None:
        """Free a lane."""

    def act(self) -> tuple[Sequence[Any], dict[int, BaseException]]:
        """Choose an action for every live lane.

        Returns:
            Actions by lane, and the error of each lane in which the policy failed.
        """

    def ask(self, lanes: Sequence[int]) -> None:
        """Ask the policy for an action of each of these live lanes."""

    def answered(self) -> Answers:
        """Return the answers since the last call. A local policy has then answered for every lane."""

    def outputs(self, lane: int) -> Any:
        """Return the policy's outputs besides the action for a lane; None if the policy has no other outputs."""

    def forget_notes(self) -> None:
        """Allow the same notes to be reported again."""

    def probe(self) -> None:
        """Probe the policy, and set the numerics key.

        Raises:
            ConfigError: The policy cannot act as configured, or gives different results for the same call.
            PolicyError: The policy's actions do not fit the action space.
        """

    def act_once(self, other: bool) -> None:
        """Act on generated observations, with ``other`` on different ones. Ignore an error of the policy."""

    def probe_again(self) -> None:
        """Compute the outputs of the probe again, and write their digest to the numerics key.

        Raises:
            PolicyUnavailable: The policy cannot act for now.
        """

"""Weights of a group: those that its runners have, those that were posted last, and the number of the next."""

from __future__ import annotations

import operator
import threading
from typing import Any, NamedTuple, final

from rl_eval.weights import WeightsSnapshot

__all__ = ["GroupWeights", "PublishedWeights"]


class PublishedWeights(NamedTuple):
    """Weights that every runner can fetch."""

    handle: Any
    """Argument of :class:`~rl_eval.backends.requests.SetWeights`."""
    snapshot: WeightsSnapshot


@final
class GroupWeights:
    """The one place that knows the weights of a group; its methods may be called from any thread.

    Args:
        initial: Weights that runners start with; None if each has those that its policy was built with.
    """

    def __init__(self, initial: PublishedWeights | None = None) -> None:
        self.sent = initial
        """Weights that runners get when they start, and that the next evaluation uses unless others are posted."""
        self.posted = initial
        """Weights that were posted last; they are sent when all jobs before them are done."""
        self._last_number = 0
        self._lock = threading.Lock()

    @property
    def posted_version(self) -> int:
        """Version of the weights that were posted last; 0 before any."""
        return 0 if self.posted is None else self.posted.snapshot.version

    def number(self, version: int | None = None) -> int:
        """Take a number for new weights, which the next ones go on from.

        Args:
            version: The number; by default one more than the last, that of refused weights included.

        Raises:
            TypeError: The version is not an integer.
        """
        with self._lock:
            self._last_number = self._last_number + 1 if version is None else operator.index(version)
            return self._last_number

    def post(self, weights: PublishedWeights) -> None:
        """Take weights that are about to be sent."""
        with self._lock:
            self.posted = weights

    def send(self, weights: PublishedWeights) -> PublishedWeights | None:
        """Make weights those of the runners; return those before."""
        with self._lock:
            former, self.sent = self.sent, weights
            return former

    def withdraw(self, refused: PublishedWeights, former: PublishedWeights | None) -> None:
        """Go back to former weights, unless others were posted meanwhile."""
        with self._lock:
            self.sent = former
            if self.posted is refused:
                self.posted = former

    def drop(self) -> None:
        """Drop all weights; cycles keep the group until the garbage collector runs."""
        self.sent = self.posted = None

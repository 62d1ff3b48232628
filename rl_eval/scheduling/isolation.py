"""Episodes that may have ended their runner: they run again apart from all others."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Final, final

__all__ = ["Isolation"]

_SPLIT: Final = 8
"""Into how many groups the suspects of one loss are split."""


@final
class Isolation:
    """Suspected episodes, and those that wait for a runner of their own.

    Where many episodes were live when a process ended, they run again in groups of an eighth, so that one round clears
    most of them; a group that ends its runner again is split once more, until each suspect runs alone.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._largest: dict[int, int] = {}
        """Suspects that may share a runner with it, itself included, by index; kept until it is done."""

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def __contains__(self, index: int) -> bool:
        """Return whether an episode runs apart from others."""
        return index in self._largest

    @property
    def waiting(self) -> tuple[int, ...]:
        """Indices that wait for a runner."""
        return tuple(self._waiting)

    def suspect(self, indices: Iterable[int]) -> None:
        """Isolate episodes one of which may have ended their runner; a single one is isolated from all others."""
        suspects = list(indices)
        for index in suspects:
            self._largest[index] = -(-len(suspects) // _SPLIT)

    def add(self, index: int) -> None:
        """Have an episode wait."""
        insort(self._waiting, index)

    def discard(self, indices: Iterable[int]) -> None:
        """Let episodes go: they are done."""
        for index in self._largest.keys() & indices:
            del self._largest[index]

    def take(self, lanes: int, runners: int) -> list[int]:
        """Remove and return what runs together on one runner.

        Args:
            lanes: Of the runner.
            runners: Runners that are free for isolated episodes.
        """
        first = self._waiting[0]
        room = min(lanes, self._largest[first], -(-len(self._waiting) // runners))
        # Those that must be alone wait for another runner.
        beside = [index for index in self._waiting[1:] if self._largest[index] > 1][: room - 1]
        room = min([room, *(self._largest[index] for index in beside)])
        taken = [first, *beside[: room - 1]]
        self._waiting = [index for index in self._waiting if index not in taken]
        return taken

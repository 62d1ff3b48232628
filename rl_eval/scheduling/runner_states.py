"""States of runners in the schedule: their leases, idle and failing runners, and isolated episodes."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

_ACCIDENT: Final = 0.001
"""Probability below which chance does not explain a streak of failures, so that the runner counts as broken."""
_SHORTEST_STREAK: Final = 3


@dataclass(slots=True)
class RunnerState:
    """State of one runner in the schedule."""

    lanes: int
    held: dict[int, None] = field(default_factory=dict)
    """Indices of the leases that the runner holds, in the order in which they were granted."""
    reclaiming: set[int] = field(default_factory=set)
    """Indices of the leases that the runner was asked to return."""
    live: int = 0
    """Number of attempts that were running at the runner's last report."""
    pace: int = 0
    """Number of episodes that were completed in the runner's last report."""
    isolating: bool = False
    """Whether the runner's episodes are isolated."""
    streak: int = 0
    """Number of failed attempts since the runner's last report with a completed episode."""
    since: tuple[int, int] = 0, 0
    """Numbers of completed episodes and of failed attempts of the group when the streak began."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """(index, attempt) of every attempt that failed on the runner."""
    untried: bool = True
    """Whether no attempt has ended on the runner yet."""

    @property
    def depth(self) -> int:
        """Target number of leases. Two calls are in flight, so a fast runner needs enough leases for two reports."""
        return self.lanes + max(self.lanes, 2 * self.pace)

    @property
    def queued(self) -> int:
        """Number of leases that certainly have not started, excluding leases that are being reclaimed."""
        return max(0, len(self.held) - len(self.reclaiming) - self.lanes)

    @property
    def free(self) -> int:
        """Number of lanes without a lease; 0 while the runner's episodes are isolated."""
        return 0 if self.isolating else max(0, self.lanes - len(self.held))


@final
class RunnerStates(dict[int, RunnerState]):
    """States by runner, with sets of runners that need attention. Call :meth:`note` after each change of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.dry: set[int] = set()
        """Runners without leases."""
        self.backlogged: set[int] = set()
        """Runners with leases that have not started yet and are not being reclaimed."""
        self.failing: set[int] = set()
        """Runners with a suspicious streak of failures."""
        self._completed = 0
        self._failed = 0
        """Number of failed attempts on runners without a suspicious streak."""

    def note(self, runner: int) -> None:
        """Update the sets after the state of a runner changed, or after the runner left."""
        state = self.get(runner)
        (self.dry.add if state and not state.held else self.dry.discard)(runner)
        (self.backlogged.add if state and state.queued else self.backlogged.discard)(runner)
        failing = state is not None and state.streak >= _suspicious_streak(state.lanes)
        (self.failing.add if failing else self.failing.discard)(runner)

    def hungry(self) -> list[int]:
        """Return the runners with a free lane, sorted by their number of leases."""
        free = [runner for runner, state in self.items() if state.free]
        return sorted(free, key=lambda runner: len(self[runner].held))

    @property
    def asked(self) -> int:
        """Number of runners that have not answered a reclaim yet."""
        return sum(bool(state.reclaiming) for state in self.values())

    def ended(self, runner: int, completed: int, failed: list[tuple[int, int]]) -> None:
        """Count the attempts that a runner reports as ended.

        A completed episode ends the runner's streak of failures.
        """
        state = self[runner]
        state.untried = state.untried and not (completed or failed)
        state.failed += failed
        if completed or not state.streak:
            state.since = self._completed, self._failed
        was_failing, before = runner in self.failing, state.streak
        state.streak = 0 if completed else before + len(failed)
        self._completed += completed
        self.note(runner)
        # Failures of a suspicious runner say nothing about other runners. They count once it completes an episode.
        if runner in self.failing:
            self._failed -= 0 if was_failing else before
        else:
            self._failed += len(failed) + (before if was_failing else 0)

    def untried_beside(self, runner: int) -> bool:
        """Whether there is another runner on which no attempt has ended yet."""
        return any(state.untried for other, state in self.items() if other != runner)

    def broken(self) -> list[int]:
        """Return the runners that keep failing while others complete episodes."""
        return [runner for runner in sorted(self.failing) if self._is_broken(self[runner])]

    def _is_broken(self, state: RunnerState) -> bool:
        completed, failed = self._completed - state.since[0], max(0, self._failed - state.since[1])
        return _chance_of_streak(state.streak, state.live, completed, failed) < _ACCIDENT


def _chance_of_streak(streak: int, live: int, completed: int, failed: int) -> float:
    """Return an upper bound of the probability that a healthy runner has such a streak of failures.

    The failure rate is estimated from the results of the other runners. With a uniform prior, the rate has the
    distribution ``Beta(1 + failed, 1 + completed)``. So the number of failures on the runner has a beta-binomial
    distribution.
    Failures come early, and completed episodes come late, so the running attempts may all complete. Therefore, any
    ``streak`` of the ``streak + live`` attempts may have failed.

    Args:
        streak: Number of attempts that failed on the runner since its last completed episode.
        live: Number of attempts that are running on the runner.
        completed: Number of episodes that other runners completed during the streak.
        failed: Number of attempts that failed during the streak on runners that complete episodes.
    """
    if not completed:
        return 1.0
    one_way = _log_beta(1 + failed + streak, 1 + completed) - _log_beta(1 + failed, 1 + completed)
    return math.exp(min(0.0, one_way + _log_choose(streak + live, live)))


def _suspicious_streak(lanes: int) -> int:
    """Return the number of consecutive failures after which a runner is paused.

    The pause lasts until every other runner has ended an attempt.
    """
    return max(_SHORTEST_STREAK, lanes)


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


_SPLIT: Final = 8
"""Approximate number of groups into which the suspects of one lost runner or fault are split."""


@final
class Isolation:
    """Suspected episodes, and the queue of suspected episodes that wait for a separate runner.

    If many episodes were live when a process ended or a shared call failed, they run again in smaller groups, each with
    about an eighth of the episodes. So one round clears most episodes. A group that fails again is split again, until
    each suspect runs alone.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._largest: dict[int, int] = {}
        """Maximum size of the group in which a suspect runs, by index; kept until the episode has a record."""

    def __len__(self) -> int:
        """Return the number of waiting episodes."""
        return len(self._waiting)

    def __contains__(self, index: int) -> bool:
        """Return whether an episode is isolated."""
        return index in self._largest

    @property
    def waiting(self) -> tuple[int, ...]:
        """Indices of the episodes that wait for a runner."""
        return tuple(self._waiting)

    def alone(self, index: int) -> bool:
        """Whether an episode runs without other episodes on its runner from now on."""
        return self._largest.get(index) == 1

    def suspect(self, indices: Iterable[int]) -> None:
        """Isolate episodes, because one of them may have ended a runner or caused a fault.

        If there are at most eight episodes, each of them runs alone.
        """
        suspects = list(indices)
        for index in suspects:
            self._largest[index] = -(-len(suspects) // _SPLIT)

    def add(self, index: int) -> None:
        """Add an episode to the queue."""
        insort(self._waiting, index)

    def discard(self, indices: Iterable[int]) -> None:
        """Remove episodes that have a record."""
        for index in self._largest.keys() & indices:
            del self._largest[index]

    def take(self, fit: list[int], lanes: int, runners: int) -> list[int]:
        """Remove and return a group of episodes for one runner; an empty list if none fits.

        Args:
            fit: Waiting episodes that may run on the runner, in order.
            lanes: Number of lanes of the runner.
            runners: Number of runners that are free for isolated episodes, including this runner.
        """
        if not fit:
            return []
        first = fit[0]
        room = min(lanes, self._largest[first], -(-len(self._waiting) // runners))
        # Episodes that must run alone wait for another runner.
        beside = [index for index in fit[1:] if self._largest[index] > 1][: room - 1]
        room = min([room, *(self._largest[index] for index in beside)])
        taken = [first, *beside[: room - 1]]
        if len(taken) == 1:
            self._largest[first] = 1  # A fault shows that it is the cause, so it never runs with others again.
        self._waiting = [index for index in self._waiting if index not in taken]
        return taken

"""Choice of the simulator that a batched runner steps: when to build one, and when to close it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from rl_eval.errors import ConfigError
from rl_eval.records.episode import Lease
from rl_eval.runners.batched.simulator import BatchSimulator


@final
class CurrentSimulator:
    """Simulator of the configured width, or a new simulator while episodes that need one are running.

    Args:
        width: Configured number of slots.
        build: Builds a simulator with a number of slots.
        close: Closes a simulator.
        only: Whether there is only one simulator, so that even episodes that need a new one use it.
        one_at_a_time: Whether a simulator is closed before another one is built.
    """

    def __init__(
        self,
        width: int,
        build: Callable[[int], BatchSimulator],
        close: Callable[[BatchSimulator], None],
        *,
        only: bool,
        one_at_a_time: bool,
    ) -> None:
        self._width, self._build, self._close = width, build, close
        self._only, self._one_at_a_time = only, one_at_a_time
        self.configured: BatchSimulator | None = None
        """Simulator of the configured width."""
        self._new: BatchSimulator | None = None
        """Simulator for episodes that need a new one; with fewer slots, if possible."""
        self._rejected = False
        self._faulty: set[int] = set()
        """Slots of :attr:`configured` that have returned an invalid value."""

    @property
    def now(self) -> BatchSimulator | None:
        """The simulator that the runner steps; None before it is built."""
        return self.configured if self._new is None else self._new

    @property
    def one_slot(self) -> bool:
        """Whether a fault certainly belongs to the live episode, because the simulator has only one slot."""
        return self.now is None or self.now.num_envs == 1

    def make_room(self, lease: Lease, *, idle: bool) -> bool:
        """Close the simulators that do not fit an episode; return whether it may start now.

        Args:
            lease: Lease of the episode.
            idle: Whether no episode is live and all ended attempts are reported. Otherwise no simulator is closed,
                because ``close`` may hang or kill the process.
        """
        if not (self._rejected or lease.how.fresh or lease.how.alone or self._new is not None):
            return True
        if not idle:
            return False
        configured_is_rejected = self._rejected and self._new in (None, self.configured)
        in_the_way = self._one_at_a_time and (lease.how.fresh or lease.how.alone)
        self._close_new()
        if configured_is_rejected or (in_the_way and not self._only):
            self._close_configured()
        self._rejected = False
        return True

    def built(self, lease: Lease, num_slots: int) -> BatchSimulator:
        """Return the simulator for a lease; build it if necessary.

        Args:
            lease: Lease of the first episode.
            num_slots: Number of slots that a new simulator needs.
        """
        if lease.how.fresh or lease.how.alone:
            self._new = self._another(num_slots)
            return self._new
        self.configured = self.configured or self._build(self._width)
        return self.configured

    def _another(self, num_slots: int) -> BatchSimulator:
        if self._only:
            self.configured = self.configured or self._build(self._width)
            return self.configured
        try:
            return self._build(num_slots)
        except ConfigError:
            return self._build(self._width)  # Its factory has one width.

    def reject(self) -> None:
        """Mark the current simulator as unusable. It is replaced when its live episodes have ended."""
        self._rejected = True

    def blame(self, slot: int) -> None:
        """Count an invalid value of a slot; after the second one, do not use the simulator again."""
        if self.now is self.configured:
            self._rejected = self._rejected or slot in self._faulty
            self._faulty.add(slot)

    def close(self) -> None:
        """Close all simulators."""
        self._close_new()
        self._close_configured()

    def _close_new(self) -> None:
        simulator, self._new = self._new, None
        if simulator is not None and simulator is not self.configured:
            self._close(simulator)

    def _close_configured(self) -> None:
        self._faulty.clear()
        simulator, self.configured = self.configured, None
        if simulator is not None:
            self._close(simulator)

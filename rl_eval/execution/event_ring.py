"""Ring of the last events of an evaluation: who was given which episode, and what became of it, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from rl_eval.results.story import Event, Kind
from rl_eval.scheduling import events

__all__ = ["EventRing"]

_CAPACITY: Final = 10_000


class _Granted(NamedTuple):
    """A grant without its leases, which would be some thousand more objects for the garbage collector."""

    runner: int
    attempts: dict[int, int]
    """Attempt by episode."""


@final
class EventRing:
    """Last events of the schedule, with the commands that it returned; the oldest are forgotten.

    Args:
        capacity: How many mentions of episodes are kept, and events without any.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.positions: dict[int, int] = {}
        """Position in the group of each runner, by incarnation."""
        self._capacity = capacity
        self._entries: deque[tuple[float, int, events.Event, list[events.Command | _Granted]]] = deque()
        self._size = 0
        self._began: float | None = None

    def append(self, now: float, event: events.Event, commands: Sequence[events.Command]) -> None:
        """Take an event and what came of it, without a look at single episodes."""
        self._began = now if self._began is None else self._began
        kept = [_kept(command) for command in commands]
        size = 1 + sum(len(command.attempts) for command in kept if isinstance(command, _Granted))
        size += len(event.finished) if isinstance(event, events.RunnerReported) else 0
        self._entries.append((now, size, event, kept))
        self._size += size
        while self._size > self._capacity and len(self._entries) > 1:
            self._size -= self._entries.popleft()[1]

    def moves(self, index: int) -> list[Event]:
        """Return what is kept of one episode, in order; may be called from any thread.

        Of a failed attempt that is when and where it ended; its fault is in the table of records.
        """
        moves: list[Event] = []
        held = (-1, 0)
        """Runner and attempt."""
        for now, _, event, commands in list(self._entries):
            told = [*_ended(event, index, *held), *_decided(commands, index, *held)]
            for kind, text, runner, attempt in told:
                held = (runner, attempt) if kind in ("granted", "reclaimed") else (-1, 0)
                moves.append(Event(kind, text, attempt, self.positions.get(runner), at=now - (self._began or now)))
        return moves


def _kept(command: events.Command) -> events.Command | _Granted:
    if not isinstance(command, events.Grant):
        return command
    return _Granted(command.runner, {lease.index: lease.attempt for lease in command.leases})


def _ended(event: events.Event, index: int, runner: int, attempt: int) -> Iterator[tuple[Kind, str, int, int]]:
    """Tell whether an attempt that a runner was given came to an end."""
    match event:
        case events.RunnerReported(reporter) if reporter == runner:
            if (index, attempt) in event.failed_attempts:
                yield "fault", "failed", runner, attempt
            elif index in event.returned:
                yield "returned", "given back before it started", runner, attempt
            elif index in event.finished:
                yield "completed", "reported", runner, attempt
        case events.RunnerLost(lost) if lost == runner:
            yield "lost", "its runner was lost", runner, attempt
        case _:
            pass


def _decided(
    commands: Sequence[events.Command | _Granted], index: int, runner: int, attempt: int
) -> Iterator[tuple[Kind, str, int, int]]:
    """Tell what the schedule did with an episode."""
    for command in commands:
        match command:
            case _Granted(receiver, attempts) if index in attempts:
                yield "granted", "given to the runner", receiver, attempts[index]
            case events.Reclaim(holder, indices) if holder == runner and index in indices:
                yield "reclaimed", "asked back, to be run elsewhere", runner, attempt
            case events.Exclude(excluded) if excluded == runner:
                yield "excluded", "its runner was excluded", runner, attempt
            case _:
                pass

"""Lanes of a policy server: which episode has which lane, and which rows make the next block. No clock, no sockets.

An episode takes a lane with its first row. It frees the lane when it ends, or when its connection is closed. A row of
an episode without a lane waits until a lane is free. The rows with a lane are *ready*. A block begins when it is full,
when no episode can add a row, or when its oldest row has waited half of the time of the last forward pass.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

_Key = tuple[int, int]


class Row(NamedTuple):
    """Request for one action."""

    connection: int
    episode: int
    """Number of the episode in its connection. It is negative for a row of a client that does not number its episodes:
    such a row is an episode of its own."""
    seed: int = 0
    step: int = 0
    begin: bool = True
    """Whether this is the first row of the episode."""
    request: Any = None
    """The request, with the observation."""

    @property
    def key(self) -> _Key:
        """Connection and episode."""
        return self.connection, self.episode


class Reply(NamedTuple):
    """Answer to the requests of a row, as a message."""

    row: Row
    message: bytes | str


class Refusal(NamedTuple):
    """A row that is not computed, with the reason. Its episode may run again."""

    row: Row
    reason: str


class Place(NamedTuple):
    """Row of a block, with its lane."""

    lane: int
    row: Row
    begins: bool
    """Whether the lane begins the episode with this row."""


GONE: Final = "the server does not know the state of this episode"
NO_LANE: Final = "no lane of the server became free"
TOGETHER: Final = "the episode asks for two steps at the same time"


@dataclass(slots=True)
class _Episode:
    lane: int
    row: Row
    """The last row."""
    begins: bool = True
    message: bytes | str | None = None
    """Answer to the last row; None while it is ready."""
    repeats: list[Row] = field(default_factory=list)
    """Requests for the same step that came before its answer."""


@final
class Lanes:
    """Episodes of all connections, in a fixed number of lanes.

    Args:
        count: Number of lanes.
        block: Number of rows in a full block.
        memory: Whether the policy has a recurrent state, so that an episode must begin here.
        patience_s: Longest wait for a lane, in seconds.
    """

    def __init__(self, count: int, block: int, *, memory: bool, patience_s: float) -> None:
        self._free = list(range(count))
        self._most_waiting = 4 * count
        self._block = block
        self._memory = memory
        self._patience_s = patience_s
        self._episodes: dict[_Key, _Episode] = {}
        self._ready: deque[tuple[float, _Key]] = deque()
        self._waiting: deque[tuple[float, Row]] = deque()
        self._nameless: set[int] = set()
        """Connections whose clients do not name their episodes; each may send a row at any time."""
        self.pass_s = 0.0
        """Seconds of the last forward pass."""

    # ------------------------------------------------------------------ requests

    def add(self, row: Row, now: float) -> Reply | Refusal | None:
        """Accept a row. Return its answer if it is known already, or the reason why it is not computed."""
        held = self._episodes.get(row.key)
        if held is not None:
            return self._add_next(held, row, now)
        if row.episode < 0:
            self._nameless.add(row.connection)
        elif self._memory and not row.begin:
            return Refusal(row, GONE)
        if self._free and not self._waiting:
            self._place(row, now)
        elif len(self._waiting) >= self._most_waiting:
            return Refusal(row, NO_LANE)
        else:
            self._waiting.append((now, row))
        return None

    def _add_next(self, held: _Episode, row: Row, now: float) -> Reply | Refusal | None:
        """Accept a row of an episode with a lane. A repeated request gets the same answer again."""
        if row.step == held.row.step and row.begin == held.row.begin:
            if held.message is not None:
                return Reply(row, held.message)
            held.repeats.append(row)
            return None
        if held.message is None:
            return Refusal(row, TOGETHER)
        if self._memory and not row.begin and row.step < held.row.step:
            return Refusal(row, GONE)
        held.row, held.message, held.begins = row, None, row.begin
        self._ready.append((now, row.key))
        return None

    def _place(self, row: Row, now: float) -> None:
        key = row.key
        self._episodes[key] = _Episode(heapq.heappop(self._free), row)
        self._ready.append((now, key))

    def end(self, connection: int, episode: int, now: float) -> list[int]:
        """End an episode; return the lane that it frees."""
        return self._release(lambda key: key == (connection, episode), now)

    def leave(self, connection: int, now: float) -> list[int]:
        """End all episodes of a connection, and drop its rows; return the lanes that they free."""
        self._nameless.discard(connection)
        return self._release(lambda key: key[0] == connection, now)

    def _release(self, ends: Callable[[_Key], bool], now: float) -> list[int]:
        self._ready = deque(one for one in self._ready if not ends(one[1]))
        self._waiting = deque(one for one in self._waiting if not ends(one[1].key))
        lanes = [self._episodes.pop(key).lane for key in [key for key in self._episodes if ends(key)]]
        for lane in lanes:
            heapq.heappush(self._free, lane)
        while self._free and self._waiting:
            self._admit(now)
        return lanes

    def _admit(self, now: float) -> None:
        """Give a lane to the episode that has waited longest, also for repeated requests of its row."""
        row = self._waiting.popleft()[1]
        self._place(row, now)
        self._episodes[row.key].repeats += [one for _, one in self._waiting if one.key == row.key]
        self._waiting = deque(one for one in self._waiting if one[1].key != row.key)

    # ------------------------------------------------------------------ blocks

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a block begins or a wait for a lane ends; None if nothing waits."""
        waits = [] if not self._waiting else [self._waiting[0][0] + self._patience_s - now]
        if self._ready:
            waits.append(0.0 if self._is_full() else self._ready[0][0] + self.pass_s / 2 - now)
        return max(0.0, min(waits)) if waits else None

    def _is_full(self) -> bool:
        """Whether the block is full, or no episode can add a row to it."""
        most = sum(episode >= 0 for _, episode in self._episodes) + len(self._nameless)
        return len(self._ready) >= min(self._block, most)

    def next_block(self, now: float) -> list[Place]:
        """Return the rows of the block that begins now; an empty list if no block begins."""
        if not self._ready or not (self._is_full() or now >= self._ready[0][0] + self.pass_s / 2):
            return []
        keys = [self._ready.popleft()[1] for _ in range(min(self._block, len(self._ready)))]
        return [Place(held.lane, held.row, held.begins) for held in map(self._episodes.__getitem__, keys)]

    def answered(self, row: Row, message: bytes | str) -> list[Reply]:
        """Keep the answer to a row of the last block; return it for all requests of the row, if it has a lane still."""
        if (held := self._episodes.get(row.key)) is None:
            return []
        replies = [Reply(one, message) for one in (row, *held.repeats)]
        held.message, held.repeats = message, []
        return replies

    def overdue(self, now: float) -> list[Refusal]:
        """Return the rows that have waited too long for a lane."""
        found = []
        while self._waiting and now >= self._waiting[0][0] + self._patience_s:
            found.append(Refusal(self._waiting.popleft()[1], NO_LANE))
        return found

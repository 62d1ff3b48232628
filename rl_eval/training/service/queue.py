"""Fair queue: clients take turns, and the requests of one client keep their order.

After each turn of a client every other one that waits has its own before it comes round again. So a request that is the
first of its client's waits for at most one request of every other client.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, final

__all__ = ["FairQueue"]

Item = TypeVar("Item")


@final
class FairQueue(Generic[Item]):
    """Waiting requests by client. Pure: no clock, threads or chance."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}
        """Never empty ones, in the order of their next turns."""

    def push(self, client: str, item: Item) -> None:
        """Put an item at the end of its client's line."""
        self._lines.setdefault(client, deque()).append(item)

    def take(self) -> Item | None:
        """Remove and return the item whose turn it is; None if none waits."""
        if not self._lines:
            return None
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        item = line.popleft()
        if line:
            self._lines[client] = line  # Behind all others.
        return item

    def remove(self, client: str, item: Item) -> bool:
        """Take an item out of its client's line; return whether it was waiting."""
        line = self._lines.get(client, deque())
        if item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[client]
        return True

    def waiting(self, client: str) -> int:
        """Return the number of items in a client's line."""
        return len(self._lines.get(client, ()))

    def clients(self) -> list[str]:
        """Return the clients that have items in line."""
        return list(self._lines)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

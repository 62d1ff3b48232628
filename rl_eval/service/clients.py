"""Which clients a service knows, what each of them has asked for, and when one is forgotten.

A client is a name. Whoever connected under it last is the client; connections before it are told so. A client with a
name of its own choice is remembered when it is gone, with the results that it has not read; one whose name was made up
cannot come back, so it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from rl_eval.errors import ClusterError, UsageError
from rl_eval.service.messages import Answer, Ticket

if TYPE_CHECKING:
    from rl_eval.fleet import PublishedWeights
    from rl_eval.handle import EvalHandle

__all__ = ["Client", "ClientBook", "Request"]

_MAX_CLIENTS: Final = 64
_SILENT_S: Final = 60.0
"""A client that lives says something every few seconds."""
_FORGET_S: Final = 900.0
_MAX_UNREAD: Final = 256
_MAX_KNOWN: Final = 4096
"""Requests that are recognized when they are sent a second time."""


@dataclass(eq=False)
class Request:
    """A request that the service has accepted."""

    client: Client
    ticket: Ticket
    weights: PublishedWeights | None
    """To be evaluated; None for those that the policy was built with."""
    handle: EvalHandle | None = None
    """Once it runs."""
    answer: Answer | None = None
    received: bool = False
    """Whether the present session has the answer."""


@dataclass(eq=False)
class Client:
    """A name, and what was asked under it."""

    name: str
    lasting: bool
    """Whether somebody can come back under this name."""
    session: int
    seen: float
    """When it last showed a sign of life."""
    gone: bool = False
    """Whether it has said goodbye."""
    requests: dict[str, Request] = field(default_factory=dict)
    """That are not done or not read, in order."""
    known: dict[str, Ticket] = field(default_factory=dict)
    weights: PublishedWeights | None = None
    """Those that were sent last."""
    proven: PublishedWeights | None = None
    """Those that episodes were last run with, in case that later ones do not fit; None for those of the policy."""
    next_step: int = 0

    @property
    def weights_version(self) -> int:
        """Of the weights that were sent last; 0 before any."""
        return 0 if self.weights is None else self.weights.snapshot.version

    @property
    def unfinished(self) -> list[Request]:
        """Requests without an answer."""
        return [request for request in self.requests.values() if request.answer is None]

    @property
    def unsent(self) -> list[Answer]:
        """Answers that the present session has not received."""
        return [one.answer for one in self.requests.values() if one.answer is not None and not one.received]

    def accept(self, request: Request) -> None:
        """Remember a request."""
        ticket = request.ticket
        self.requests[ticket.request] = request
        self.known[ticket.request] = ticket
        if len(self.known) > _MAX_KNOWN:
            del self.known[next(iter(self.known))]
        self.weights = request.weights
        self.next_step = ticket.step + 1

    def fall_back(self, misfits: PublishedWeights | None) -> None:
        """These weights do not fit the policy: go on from the last that did, unless newer ones were sent."""
        if self.weights is misfits:
            self.weights = self.proven

    def receive(self, requests: list[str]) -> None:
        """The present session has these answers; the oldest of very many need not be read."""
        for name in requests:
            if (request := self.requests.get(name)) is not None and request.answer is not None:
                request.received = True
        held = [name for name, request in self.requests.items() if request.received]
        self.read(held[:-_MAX_UNREAD])

    def read(self, requests: list[str]) -> None:
        """These results have reached whoever wants them."""
        for name in requests:
            if (request := self.requests.get(name)) is not None and request.answer is not None:
                del self.requests[name]


@final
class ClientBook:
    """The clients of a service, by name."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._sessions = 0

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def connect(self, name: str, lasting: bool, now: float) -> Client:
        """Begin a session, for a new name or in place of the former one.

        Raises:
            ClusterError: There are too many clients.
        """
        self._sessions += 1
        client = self._clients.get(name)
        if client is None:
            self._make_room(now)
            client = self._clients[name] = Client(name, lasting, self._sessions, now)
        client.session, client.seen, client.lasting, client.gone = self._sessions, now, lasting, False
        for request in client.requests.values():
            request.received = False
        return client

    def find(self, name: str, session: int, now: float) -> Client:
        """Return a client that shows a sign of life.

        Raises:
            UsageError: Its session is over.
        """
        client = self._clients.get(name)
        if client is None:
            raise UsageError(f"client {name!r} was forgotten, since it was silent for long: connect again")
        if client.gone:
            raise UsageError(f"client {name!r} was shut down")
        if client.session != session:
            raise UsageError(
                f"client {name!r} has connected once more, and this connection is over: give each its own name"
            )
        client.seen = now
        return client

    def leave(self, client: Client) -> None:
        """A client says goodbye; it may come back if its name is its own."""
        client.gone = True
        self.settle(client)

    def settle(self, client: Client) -> None:
        """Forget a client, or its results, if nobody can come back for them."""
        if client.lasting or not client.gone:
            return
        client.read(list(client.requests))
        if not client.requests:
            self._clients.pop(client.name, None)

    def _make_room(self, now: float) -> None:
        silent = sorted(
            (one for one in self if (one.gone or now - one.seen > _SILENT_S) and not one.unfinished),
            key=lambda one: one.seen,
        )
        lost = [one for one in silent if not one.lasting and now - one.seen > _FORGET_S]
        excess = len(self._clients) - len(lost) + 1 - _MAX_CLIENTS
        lost += [one for one in silent if one not in lost][: max(0, excess)]
        for client in lost:
            del self._clients[client.name]
        if len(self._clients) >= _MAX_CLIENTS:
            raise ClusterError(
                f"the service has {len(self._clients)} clients already: shut down evaluators that are not needed"
            )

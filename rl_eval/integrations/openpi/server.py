"""Server of a policy, by openpi's websocket protocol: one thread that reads requests and computes blocks.

A client that breaks the protocol, does not have the token, does not read or dies loses its connection, and nothing else
changes.
"""

from __future__ import annotations

import hmac
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from time import monotonic, perf_counter
from typing import Any, Final, final

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from rl_eval.integrations.openpi.greeting import EXTENSION
from rl_eval.integrations.openpi.lanes import Lanes, Refusal, Reply, Row
from rl_eval.integrations.openpi.served import ServedPolicy, refused
from rl_eval.integrations.openpi.wire import pack, unpack
from rl_eval.policies.inference.probe import BLOCK

_MOST_BYTES: Final = 2**26
"""Longest message of a client, and most bytes of answers that it has not read."""
_READ_BYTES: Final = 2**20
_HANDSHAKE_S: Final = 10.0
"""Longest handshake, in seconds."""
_CLOSING_S: Final = 2.0
"""Longest wait for the end of a connection, in seconds."""
_PATIENCE_S: Final = 30.0
"""Longest wait of an episode for a lane, in seconds."""
_LEAVING, _BROKEN = 1001, 1011
"""Close codes: the server ends, and an error as in openpi's servers."""
_STATELESS: Final = (
    "this server has a {} policy, which needs a client that numbers its episodes, such as rl_eval: rl-eval run "
    "--policy openpi://HOST:PORT"
)


class _Invalid(Exception):
    """A client sent something that is not a request; the text is the reason."""


@final
class _Connection:
    """Connection of one client: its socket, the state of its protocol, and bytes that it has not read."""

    def __init__(self, number: int, connected: socket.socket) -> None:
        self.number = number
        self.socket = connected
        self.protocol = ServerProtocol(max_size=_MOST_BYTES)
        self.ends_at = monotonic() + _HANDSHAKE_S
        """Time limit of the handshake, and of the end of the connection."""
        self.requests = 0
        self._unsent = bytearray()
        self._message = bytearray()
        self._closing = False

    def messages(self) -> Iterator[Request | bytes]:
        """Read the bytes that have come; yield the request for the connection, and the messages.

        Raises:
            OSError: The connection is lost, or the client has ended it.
        """
        received = self.socket.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError
        self.protocol.receive_data(received)
        for event in self.protocol.events_received():
            if isinstance(event, Request):
                yield event
            elif isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
                self._message += event.data
                if event.fin:
                    message, self._message = bytes(self._message), bytearray()
                    yield message

    def send(self, message: bytes | str) -> None:
        """Send a message, unless the client has closed the connection. Close it after a text, which is an error."""
        if self.protocol.state is not State.OPEN:
            return
        if isinstance(message, bytes):
            self.protocol.send_binary(message)
        else:
            self.protocol.send_text(message.encode(errors="replace"))
            self.end(_BROKEN)

    def end(self, code: int) -> None:
        """Close the connection; the client has some seconds to agree."""
        if self.protocol.state is State.OPEN:
            self.protocol.send_close(code)
            self.ends_at = monotonic() + _CLOSING_S

    def flush(self) -> bool:
        """Send as many bytes as the client takes; return whether some are left.

        Raises:
            OSError: The connection is lost or has ended, or the client does not read its answers.
        """
        for part in self.protocol.data_to_send():
            self._closing |= not part
            self._unsent += part
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        if len(self._unsent) > _MOST_BYTES or (self._closing and not self._unsent):
            raise ConnectionResetError
        return bool(self._unsent)


@final
class PolicyServer:
    """Server of one policy for many clients.

    Args:
        served: The policy.
        listener: Listening socket. The server owns it.
        lanes: Number of lanes: most episodes at the same time.
        token: Token that a client must send; None if every client may connect.
    """

    def __init__(self, served: ServedPolicy, listener: socket.socket, lanes: int, token: str | None) -> None:
        self._served = served
        self._listener = listener
        self._token = None if token is None else f"Api-Key {token}".encode()
        self._lanes = Lanes(lanes, BLOCK, memory=served.memory, patience_s=_PATIENCE_S)
        self._connections: dict[int, _Connection] = {}
        self._accepted = 0
        self.greeting = served.greeting
        """First message to a client."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve_forever(self) -> None:
        """Answer clients until an exception, such as that of a signal, is raised."""
        while True:
            self._read(self._wait_s())
            now = monotonic()
            for refusal in self._lanes.overdue(now):
                self._reply(refusal)
                self._flush(refusal.row.connection)
            self._compute(now)
            for connection in [one for one in self._connections.values() if now > one.ends_at]:
                self._drop(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._connections.values()]:
            with suppress(OSError):
                connection.end(_LEAVING)
                connection.flush()
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    # ------------------------------------------------------------------ the policy

    def _wait_s(self) -> float | None:
        now = monotonic()
        waits = [connection.ends_at - now for connection in self._connections.values()]
        if (wait := self._lanes.wait_s(now)) is not None:
            waits.append(wait)
        least = min(waits, default=float("inf"))
        return None if least == float("inf") else max(0.0, least)

    def _compute(self, now: float) -> None:
        """Compute a block, if one begins."""
        block = self._lanes.next_block(now)
        if not block:
            return
        started = perf_counter()
        messages = self._served.act(block)
        self._lanes.pass_s = perf_counter() - started
        for row, message in messages:
            for reply in self._lanes.answered(row, message):
                self._reply(reply)
            if row.episode < 0:
                self._served.end(self._lanes.end(*row.key, monotonic()))
        for number in {row.connection for row, _ in messages}:
            self._flush(number)

    # ------------------------------------------------------------------ clients

    def _read(self, timeout: float | None) -> None:
        for key, events in self._selector.select(timeout):
            if key.data is None:
                self._accept()
            elif key.data.number in self._connections:
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
                self._flush(key.data.number)

    def _accept(self) -> None:
        with suppress(OSError):  # The client has gone, or this process has no free descriptor.
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._accepted += 1
            connection = self._connections[self._accepted] = _Connection(self._accepted, connected)
            self._selector.register(connected, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            for message in connection.messages():
                if isinstance(message, Request):
                    self._greet(connection, message)
                else:
                    self._request(connection, message)
        except _Invalid as error:
            connection.send(str(error))
        except OSError:
            self._drop(connection)

    def _greet(self, connection: _Connection, request: Request) -> None:
        """Answer the HTTP request with which a connection begins, and send the metadata."""
        protocol, given = connection.protocol, "".join(request.headers.get_all("Authorization"))
        if request.path == "/healthz":
            response = protocol.reject(HTTPStatus.OK, "OK\n")
        elif self._token is not None and not hmac.compare_digest(given.encode(errors="replace"), self._token):
            response = protocol.reject(HTTPStatus.UNAUTHORIZED, "The token is missing or wrong.\n")
        else:
            response = protocol.accept(request)
        protocol.send_response(response)
        if protocol.state is State.OPEN:
            connection.ends_at = float("inf")
            connection.send(pack(self.greeting))

    def _request(self, connection: _Connection, message: bytes) -> None:
        if connection.protocol.state is not State.OPEN:
            return
        now = monotonic()
        try:
            request = unpack(message)
            named = request.get(EXTENSION)
            if named is not None and named.get("end") is True:
                self._served.end(self._lanes.end(connection.number, int(named["id"]), now))
                return
            row = self._row(connection, request, named)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _Invalid(f"the message is not a request: {type(error).__name__}: {error}") from error
        found = self._lanes.add(row, now)
        if found is not None:
            self._reply(found)

    def _row(self, connection: _Connection, request: dict[Any, Any], named: Any) -> Row:
        connection.requests += 1
        if named is not None:
            episode, seed, step = (int(named[key]) for key in ("id", "seed", "step"))
            if not all(0 <= number < 2**63 for number in (episode, seed, step)):
                raise ValueError(f"a number in {named} is out of range")
            return Row(connection.number, episode, seed, step, bool(named["begin"]), request)
        if self._served.memory or self._served.sampled:
            raise _Invalid(_STATELESS.format("recurrent" if self._served.memory else "sampled"))
        return Row(connection.number, -connection.requests, request=request)

    def _reply(self, reply: Reply | Refusal) -> None:
        row, found = reply
        message = refused(row, str(found), unavailable=True) if isinstance(reply, Refusal) else found
        if (connection := self._connections.get(row.connection)) is not None:
            connection.send(message)

    def _flush(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            more = connection.flush()
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection, and free the lanes of its episodes."""
        if self._connections.pop(connection.number, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._served.end(self._lanes.leave(connection.number, monotonic()))

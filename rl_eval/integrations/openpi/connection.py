"""Connection to a server of openpi's protocol, without a thread: the runner waits for its socket and its environments.

It uses the part of ``websockets`` that does no input and output.
"""

from __future__ import annotations

import select
import socket
import time
import weakref
from collections import deque
from typing import Any, Final, final

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from rl_eval.integrations.openpi.wire import unpack

_MOST_BYTES: Final = 2**26
"""Longest message that the client accepts."""
_READ_BYTES: Final = 2**18


class LostError(Exception):
    """The connection cannot be used any longer."""


class RejectedError(Exception):
    """The server rejects the key of the client."""


@final
class Connection:
    """Open connection, after the greeting of the server.

    Args:
        address: ``HOST:PORT``.
        headers: Additional headers of the first request.
        connect_timeout_s: Time limit until the greeting.
        send_timeout_s: Time limit of one message to the server.

    Raises:
        LostError: The server does not answer, or not in this protocol.
        RejectedError: The server rejects the key of the client.
    """

    def __init__(self, address: str, headers: dict[str, str], connect_timeout_s: float, send_timeout_s: float) -> None:
        ends = time.monotonic() + connect_timeout_s
        uri = parse_uri(f"ws://{address}")
        try:
            self._socket = socket.create_connection((uri.host, uri.port), connect_timeout_s)
        except OSError as error:
            raise LostError(str(error)) from error
        weakref.finalize(self, self._socket.close)  # Unlike __del__, it comes before the socket's own finalizer.
        self.messages: deque[str | bytes] = deque()
        """Messages of the server that were not used. A string is an error of the server."""
        self._part: list[bytes] = []
        self._is_text = False
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._protocol = ClientProtocol(uri, max_size=_MOST_BYTES)
            request = self._protocol.connect()
            for name, value in headers.items():
                request.headers[name] = value
            self._protocol.send_request(request)
            self._flush()
            while not self.messages and select.select([self._socket], [], [], max(0.0, ends - time.monotonic()))[0]:
                self.read()
            self.metadata = _greeting(self.messages)
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(send_timeout_s)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            LostError: The server does not take the message.
        """
        self._protocol.send_binary(message)
        self._flush()

    def read(self) -> None:
        """Read the bytes that have come, and add whole messages to :attr:`messages`.

        Raises:
            LostError: The server closed the connection, or sent something else. Messages before that are kept.
            RejectedError: The server rejects the key of the client.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise LostError(str(error)) from error
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._add(event)
        refused = self._protocol.handshake_exc
        if isinstance(refused, InvalidStatus) and refused.response.status_code in (401, 403):
            raise RejectedError(f"status {refused.response.status_code}")
        if refused is not None or self._protocol.close_expected() or not data:
            raise LostError(str(refused or self._protocol.parser_exc or "the server closed the connection"))
        self._flush()

    def _add(self, frame: Frame) -> None:
        if frame.opcode in {Opcode.TEXT, Opcode.BINARY}:
            self._part, self._is_text = [], frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return
        self._part.append(bytes(frame.data))
        if frame.fin:
            whole = b"".join(self._part)
            self.messages.append(whole.decode("utf-8", "replace") if self._is_text else whole)

    def _flush(self) -> None:
        try:
            for data in self._protocol.data_to_send():
                if data:
                    self._socket.sendall(data)
        except OSError as error:
            raise LostError(f"the server does not read: {error}") from error


def _greeting(messages: deque[str | bytes]) -> dict[str, Any]:
    if not messages:
        raise LostError("no greeting in time")
    message = messages.popleft()
    try:
        metadata = message if isinstance(message, str) else unpack(message)
    except ValueError as error:
        raise LostError(str(error)) from error
    if not isinstance(metadata, dict):
        raise LostError(f"the server did not greet with metadata, but with {str(metadata)[:200]!r}")
    return metadata

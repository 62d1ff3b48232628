"""Server of the pages of a folder's runs, for browsers on this machine.

It listens on the loopback alone, and answers only requests that name it so: a page of somebody else whose host name
was made to lead here is refused. All answers forbid to load anything from elsewhere, to guess at types, and to be put
into somebody else's page.
"""

from __future__ import annotations

import os
import re
import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from rl_eval.results.page.html import served_policy
from rl_eval.results.page.site import Answer, RunSite

__all__ = ["RunServer"]

_LOOPBACK: Final = "127.0.0.1"
_OWN_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1)(:\d{1,5})?", re.IGNORECASE)
"""Any port: a tunnel to this machine has one of its own."""
_PART: Final = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII)
_FOREIGN: Final = Answer(
    b"this server answers to localhost and 127.0.0.1 alone\n", HTTPStatus.MISDIRECTED_REQUEST, "text/plain"
)


class RunServer(socketserver.ThreadingTCPServer):
    """HTTP server of a site, on 127.0.0.1, until it is closed.

    Args:
        site: What it shows.
        port: By default one that is free.

    Raises:
        OSError: The port cannot be had.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, site: RunSite, port: int = 0) -> None:
        self.site = site
        self.headers = {
            "Content-Security-Policy": served_policy(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        super().__init__((_LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """Address of the index."""
        return f"http://{_LOOPBACK}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong with a request, unless it is that the browser has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "rl-eval"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer with the content."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        answer = self.server.site.answer(self.path) if self._names_this_machine() else _FOREIGN
        if answer.file is not None:
            self._send_file(answer.file, answer.kind, with_content=with_content)
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if with_content:
            self.wfile.write(answer.content)

    def _send_file(self, path: Path, kind: str, *, with_content: bool) -> None:
        """Send a file, or the part of it that is asked for, without which a browser cannot seek in a video."""
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")  # No link.
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            part = _part(self.headers.get("Range", ""), size)
            first, last = part or (0, size - 1)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Accept-Ranges", "bytes")
            if part:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if with_content and size:
                self.connection.sendfile(file, first, last - first + 1)

    def _names_this_machine(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and _OWN_HOST.fullmatch(hosts[0].strip()) is not None

    def end_headers(self) -> None:
        """Add what all answers have, errors included."""
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # Its name in the base class.
        """Say nothing."""


def _part(asked: str, size: int) -> tuple[int, int] | None:
    """Return the first and the last byte that a header asks for; None for all, as for what is out of range."""
    found = _PART.fullmatch(asked)
    if found is None:
        return None
    first, last = int(found[1]), min(int(found[2] or size), size - 1)
    return (first, last) if first <= last else None

"""Local server of the runs in a folder: an index, reports and videos.

Pages are rendered on request. The server listens only on the loopback interface, and rejects requests with the name of
another host, which prevents DNS rebinding. URLs contain ids from the index and names of videos, but no paths.

Files of runs are only read as data. Code of a run is never executed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from typing_extensions import override

from rl_eval.errors import EvalError
from rl_eval.errors.redaction import redact_text
from rl_eval.recording.video_selection import video_files, videos_of
from rl_eval.records.plain import damage
from rl_eval.reports.html import Source, asset, render, render_template
from rl_eval.reports.listing import HEADINGS, ListedRun, list_runs, used
from rl_eval.results.loading import load

_LOOPBACK: Final = "127.0.0.1"
_OWN_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1)(:\d{1,5})?", re.IGNORECASE)
"""Pattern of the host names of this server. It allows any port, because a tunnel to this machine may use another
port."""
_MOST_ROWS: Final = 2_000
"""Maximum number of runs in the index. The newest runs are shown."""
_MOST_FIELDS: Final = 200
"""Maximum number of fields in a query."""
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class RunServer(socketserver.ThreadingTCPServer):
    """HTTP server on 127.0.0.1 that shows the runs in a folder and its subfolders.

    Args:
        folder: Folder of runs.
        port: Port; 0 for any free port.

    Raises:
        UsageError: The folder does not exist.
        OSError: The port is in use.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folder: str | os.PathLike[str], port: int = 0) -> None:
        self._folder = Path(folder)
        self._one_at_a_time = threading.Lock()
        self._runs: dict[str, ListedRun] = {}
        self.num_runs = self._list()
        super().__init__((_LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """URL of the index."""
        return f"http://{_LOOPBACK}:{self.server_address[1]}/"

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report the error of a request, unless the browser closed the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def at(self, target: str) -> Path | str | None:
        """Return the video or the rendered page for a URL; None if it does not exist. Pages are not kept.

        Raises:
            EvalError: The runs cannot be read.
        """
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query, max_num_fields=_MOST_FIELDS)
        except ValueError:
            return None
        with self._one_at_a_time:
            known = [self._runs[id_] for id_ in dict.fromkeys(query.get("run", [])) if id_ in self._runs]
            if parts.path == "/video" and known:
                return video_files(self._folder / known[0].path).get(query.get("name", [""])[0])
            if parts.path == "/" or (parts.path == "/report" and "run" not in query):
                return self._index()
            if parts.path == "/report" and known:
                return render([self._source(run) for run in sorted(known, key=lambda run: run.when)])
        return None

    def _list(self) -> int:
        """List the runs, and assign ids to the newest runs. Return the number of runs."""
        runs = list_runs(self._folder)
        self._runs = {_id(run): run for run in runs[:_MOST_ROWS]}
        return len(runs)

    def _index(self) -> str:
        count, title = self._list(), redact_text(f"Runs in {self._folder}")
        rows = {id_: (run, run.cells) for id_, run in self._runs.items()}
        shown = used((HEADINGS[-1], *HEADINGS[:-1], "weights"), [cells for _, cells in rows.values()])
        metrics = dict.fromkeys(key for run in self._runs.values() for key in run.metrics)
        values: dict[str, Any] = {"title": title, "headings": [*shown, *metrics], "shown": len(shown), "count": count}
        return render_template("index.html.j2", asset("table.js"), form="'self'", runs=rows, **values)

    def _source(self, run: ListedRun) -> Source:
        path = str(self._folder / run.path)
        result = load(path)
        videos = videos_of(result, path).items()
        return Source(path, result, {index: f"video?run={_id(run)}&name={quote(file.name)}" for index, file in videos})


def _id(run: ListedRun) -> str:
    """Return the id of a run in URLs. It stays the same when the folder is listed again."""
    return hashlib.sha256(os.fsencode(run.path)).hexdigest()[:16]


class _Handler(SimpleHTTPRequestHandler):
    server: RunServer
    server_version = "rl-eval"
    sys_version = ""
    timeout = 60

    @override
    def send_head(self) -> Any:
        """Send the headers of a page or a video, and return its content as an open file; None after an error."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0].strip()):
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                explain="this server accepts only the host names localhost and 127.0.0.1",
            )
            return None
        try:
            found = self.server.at(self.path)
        except Exception as error:  # Any error is possible in files of others.
            why = str(error) if isinstance(error, EvalError) else f"the run is damaged ({damage(error)})"
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=redact_text(why))
            return None
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND, explain="page not found; the list of runs is at /")
            return None
        content = io.BytesIO(found.encode()) if isinstance(found, str) else found.open("rb")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8" if isinstance(found, str) else "video/mp4")
        self.send_header("Content-Length", str(content.seek(0, io.SEEK_END)))
        self.end_headers()
        content.seek(0)
        return content

    @override
    def end_headers(self) -> None:
        """Add the headers of all responses, including errors."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    @override
    def log_message(self, format: str, *args: Any) -> None:  # Name in the base class.
        """Write no log."""

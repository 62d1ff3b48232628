"""Site of the runs in a folder: an index, and a report of one or several of them, made when it is asked for.

Addresses name runs by ids that the index has given out, and never a file: what is not listed cannot be asked for. Runs
are strangers' files: they are read as data, and one that cannot be read has a page that says why.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from rl_eval.errors import EvalError
from rl_eval.records.foreign import damage
from rl_eval.redaction import redact_text
from rl_eval.results.listing import ListedRun, list_runs
from rl_eval.results.loading import load
from rl_eval.results.page.html import Source, page_of, render
from rl_eval.results.videos import video_files, videos_of

__all__ = ["Answer", "RunSite"]

_HTML: Final = "text/html; charset=utf-8"
_TEXT: Final = "text/plain; charset=utf-8"
_MOST_ROWS: Final = 2_000
"""Runs that the index has: the newest."""
_MOST_FIELDS: Final = 200
"""Parts of a query that are read."""


class Answer(NamedTuple):
    """What the site says to a request."""

    content: bytes
    status: HTTPStatus = HTTPStatus.OK
    kind: str = _HTML
    """Media type of the content."""
    file: Path | None = None
    """What holds the content, if it is in a file."""


class _Row(NamedTuple):
    id: str
    run: ListedRun


class RunSite:
    """Index and reports of the runs in a folder and below.

    Args:
        folder: Which may be anybody's.

    Raises:
        UsageError: There is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._listed: dict[str, ListedRun] = {}
        self._one_at_a_time = threading.Lock()
        self.num_runs = self._list()

    def answer(self, target: str) -> Answer:
        """Return what there is at an address, given as in the first line of a request."""
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query, max_num_fields=_MOST_FIELDS)
        except ValueError:
            return _refusal(HTTPStatus.BAD_REQUEST, "this is no address")
        if parts.scheme or parts.netloc or parts.path not in ("/", "/report", "/video"):
            return _refusal(HTTPStatus.NOT_FOUND, "there is no such page; the list of runs is at /")
        chosen = query.get("run", [])
        if parts.path == "/video":
            return self._video(chosen[0] if chosen else "", query.get("name", [""])[0])
        with self._one_at_a_time:
            return self._index() if parts.path == "/" else self._report(chosen)

    def _list(self) -> int:
        """Look for runs, and give the newest ids; return how many there are."""
        runs = list_runs(self._folder)
        self._listed = {_id(run): run for run in runs[:_MOST_ROWS]}
        return len(runs)

    def _index(self) -> Answer:
        try:
            count = self._list()
        except EvalError as error:
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        rows = [_Row(id_, _without_secrets(run)) for id_, run in self._listed.items()]
        title = f"Runs in {redact_text(str(self._folder))}"
        return _page(page_of("index.html.j2", form_action="'self'", title=title, rows=rows, count=count))

    def _report(self, chosen: list[str]) -> Answer:
        runs = [self._listed.get(id_) for id_ in dict.fromkeys(chosen)]
        known = [run for run in runs if run is not None and run.status != "broken"]
        if not known or len(known) < len(runs):
            return _refusal(HTTPStatus.NOT_FOUND, "choose runs of the list at /; what was asked for is not in it")
        try:
            return _page(render([self._source(run) for run in sorted(known, key=lambda run: run.when)]))
        except EvalError as error:
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except Exception as error:  # Strangers' files can be wrong in any way.
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"the run is damaged ({damage(error)})")

    def _source(self, run: ListedRun) -> Source:
        path = str(self._folder / run.path)
        result = load(path)
        videos = videos_of(result, path).items()
        return Source(path, result, {index: f"video?run={_id(run)}&name={quote(file.name)}" for index, file in videos})

    def _video(self, id_: str, name: str) -> Answer:
        run = self._listed.get(id_)
        file = video_files(self._folder / run.path).get(name) if run is not None else None
        if file is None:
            return _refusal(HTTPStatus.NOT_FOUND, "there is no such video; reports, from the list at /, have links")
        return Answer(b"", kind="video/mp4", file=file)


def _id(run: ListedRun) -> str:
    """Return a name for an address, the same whenever the folder is listed again."""
    return hashlib.sha256(os.fsencode(run.path)).hexdigest()[:16]


def _without_secrets(run: ListedRun) -> ListedRun:
    return replace(
        run,
        path=redact_text(run.path),
        policy=redact_text(run.policy),
        environment=redact_text(run.environment),
        problem=redact_text(run.problem),
    )


def _page(text: str) -> Answer:
    return Answer(text.encode())


def _refusal(status: HTTPStatus, text: str) -> Answer:
    return Answer(f"{redact_text(text)}\n".encode("utf-8", "replace"), status, _TEXT)

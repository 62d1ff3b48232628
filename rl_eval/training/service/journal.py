"""Journal of a service: a folder per request, from its acceptance to its result.

Whatever a service has acknowledged is in here, so that a process which takes its place goes on where it was. A folder
counts once its ``request.json`` is there, which is written last; ``log`` is its evaluation log, and ``answer.pkl`` its
result or error.
"""

from __future__ import annotations

import fcntl
import json
import pickle
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final
from urllib.parse import quote

from rl_eval.atomic_write import write_bytes, write_text
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.training.service.messages import Ticket
from rl_eval.weights import WeightsSnapshot

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalHandle

__all__ = ["Journal", "Request"]

_REQUEST: Final = "request.json"
_ANSWER: Final = "answer.pkl"
_WEIGHTS: Final = "weights.pkl"
_STARTS: Final = "starts"
_DELIVERED: Final = "delivered"
_LONGEST: Final = 100
"""Characters of a client's name in the name of a folder."""


@dataclass(eq=False)
class Request:
    """A request that the service has accepted."""

    folder: Path
    number: int
    """Position in the order of acceptance."""
    id: str
    """The client's name for it."""
    client: str
    step: int
    weights_version: int
    weights: int | None
    """Number of the request that brought the weights to be evaluated; None for those of the policy."""
    done: Future[None] = field(default_factory=Future)
    handle: EvalHandle | None = None
    """Once it runs."""
    cancelled: str | None = None
    """Why it was cancelled while it was being started."""
    unsaved: bytes | None = None
    """Its answer, where that could not be written."""

    @property
    def ticket(self) -> Ticket:
        """Acknowledgement for the client."""
        return Ticket(self.id, self.step, self.weights_version)

    @property
    def run_dir(self) -> Path:
        """Folder of the evaluation log."""
        return self.folder / "log"

    @property
    def delivered(self) -> bool:
        """Whether the client has had the result."""
        return (self.folder / _DELIVERED).exists()

    @property
    def finished(self) -> float:
        """Time at which the answer was written, in seconds since the epoch."""
        path = self.folder / _ANSWER
        return path.stat().st_mtime if path.exists() else 0.0

    def answer(self) -> bytes:
        """Return the pickled outcome of a request that is done."""
        return self.unsaved if self.unsaved is not None else (self.folder / _ANSWER).read_bytes()


@final
class Journal:
    """Requests of a service, by name, in the order of their acceptance.

    Args:
        folder: Where they are; those that are there already are read.

    Raises:
        ConfigError: Another service uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"run_dir: another evaluation service uses {folder}: end it, or give another") from None
        self.requests: dict[str, Request] = {}
        """By name, in order."""
        self._numbered: dict[int, Request] = {}
        self._sources: dict[str, list[Request]] = {}
        """By client: the requests whose weights are kept, in order."""
        self._version = 0
        """Highest version of any weights."""
        for path in sorted(folder.iterdir()):
            if (path / _REQUEST).exists():
                self._register(_read(path))

    def accept(self, name: str, client: str, step: int, version: int, snapshot: WeightsSnapshot | None) -> Request:
        """Write a request down; when this returns nothing that the client holds is needed any more.

        Args:
            name: The client's name for it.
            client: Who asks.
            step: Training step.
            version: Least version of the weights.
            snapshot: Weights; None for the last ones of this client that fitted.
        """
        number = 1 + max(self._numbered, default=-1)
        kept = self._sources.get(client, [])
        weights, weights_version = (kept[-1].number, kept[-1].weights_version) if kept else (None, 0)
        folder = self._folder / f"{number:08d}_{quote(client, safe='')[:_LONGEST]}_step_{step}"
        if snapshot is not None:
            weights, weights_version = number, max(version, self._version + 1)
            write_bytes(folder / _WEIGHTS, pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL))
        facts = {"number": number, "id": name, "client": client, "step": step}
        facts |= {"weights_version": weights_version, "weights": weights}
        write_text(folder / _REQUEST, json.dumps(facts))
        request = _read(folder)
        self._register(request)
        return request

    def weights(self, request: Request) -> WeightsSnapshot | None:
        """Read the weights of a request; None for those of the policy.

        Raises:
            WeightsError: An earlier request has found that they do not fit.
        """
        if request.weights is None:
            return None
        source = self._numbered[request.weights]
        try:
            found: WeightsSnapshot = pickle.loads((source.folder / _WEIGHTS).read_bytes())
        except FileNotFoundError:
            raise WeightsError(
                f"the weights that client {request.client!r} sent with step {source.step} do not fit the policy: send "
                "others"
            ) from None
        return found

    def count_start(self, request: Request) -> int:
        """Note that a request is started; return how often it was."""
        path = request.folder / _STARTS
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    def conclude(self, request: Request, answer: bytes, fitted: bool | None) -> None:
        """Write the answer of a request, and remove weights that no request can need any more.

        Args:
            request: That is done.
            answer: Its pickled outcome.
            fitted: Whether its weights fit the policy; None if nothing ran.
        """
        write_bytes(request.folder / _ANSWER, answer)
        kept, used = self._sources.get(request.client, []), request.weights
        for other in list(kept) if fitted is not None else ():
            if used is not None and (other.number < used if fitted else other.number == used):
                kept.remove(other)
                (other.folder / _WEIGHTS).unlink(missing_ok=True)

    def deliver(self, request: Request) -> None:
        """Note that the client has had a result."""
        (request.folder / _DELIVERED).touch()

    def unfinished(self) -> list[Request]:
        """Return the requests without an answer, in order."""
        return [request for request in list(self.requests.values()) if not request.done.done()]

    def close(self) -> None:
        """Let another service use the folder."""
        self._lock.close()

    def of_client(self, client: str) -> list[Request]:
        """Return the requests of a client, in order."""
        return [request for request in list(self.requests.values()) if request.client == client]

    def _register(self, request: Request) -> None:
        self.requests[request.id] = self._numbered[request.number] = request
        self._version = max(self._version, request.weights_version)
        if (request.folder / _WEIGHTS).exists():
            self._sources.setdefault(request.client, []).append(request)


def _read(folder: Path) -> Request:
    facts = json.loads((folder / _REQUEST).read_text())
    request = Request(folder=folder, **facts)
    if (folder / _ANSWER).exists():
        request.done.set_result(None)
    return request

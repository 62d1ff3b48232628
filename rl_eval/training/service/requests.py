"""Requests of a service, the messages between the service and its clients, and the pickling of these messages."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import cloudpickle

from rl_eval.atomic_write import write_bytes, write_text
from rl_eval.backends.runner_actor import Failure
from rl_eval.errors import ClusterError, EvalError, UsageError
from rl_eval.records.plain import damage, parse_json, typed

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.recording.video_selection import VideoSettings
    from rl_eval.results.result import EvalResult
    from rl_eval.weights import WeightsSnapshot


_SHORTEST: Final = 6  # A shorter secret is recognized only as a whole string.
_LONGEST: Final = 100  # Longest part of a client's name in a folder name, in characters.

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceOptions:
    """Arguments of a service's actor; Ray passes them again to a replacement process.

    Attributes:
        name: Name of the service.
        namespace: Ray namespace of the name.
        output: Folder of the service, on the machine of the cluster's head.
        detached: Whether the service continues after the process that started it.
        idle_timeout_s: Time without calls and evaluations after which the service ends, in seconds.
        videos: Selection of episodes to record after each evaluation; None for no videos.
        start: Identifier of this start of the service; a replacement process has the same identifier.
        secrets: Values with secrets, which are omitted from the file with settings and policy.
    """

    name: str
    namespace: str
    output: str
    detached: bool
    idle_timeout_s: float
    videos: VideoSettings | None = None
    start: str = ""
    secrets: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Ticket:
    """Acknowledgement of an accepted request, and the content of its ``request.json``.

    Attributes:
        number: Position in the order of acceptance.
        id: Identifier that the client chose, unique.
        client: Name of the client.
        step: Training step.
        weights_version: Version of the weights to evaluate; 0 for the initial weights of the policy.
    """

    number: int
    id: str
    client: str
    step: int
    weights_version: int


@dataclass(frozen=True)
class Welcome:
    """Reply to a client that connects.

    Attributes:
        settings: Settings of the service, without the policy.
        tickets: Requests of this client whose results were not delivered, in order.
        next_step: One more than the step of the client's last request; 0 if the client has sent no request.
        weights_version: Version of the client's last weights; 0 if the client has sent no weights.
    """

    settings: EvalSettings
    tickets: Sequence[Ticket]
    next_step: int
    weights_version: int


@dataclass(frozen=True)
class FinishedEvaluation:
    """One line of a service's history.

    Attributes:
        client: Name of the client.
        step: Training step.
        weights_version: Version of the weights.
        output: Folder of the evaluation log on the service's machine, for ``rl_eval.load``.
        outcome: Result of the evaluation, or the error that prevented it.
    """

    client: str
    step: int
    weights_version: int
    output: str
    outcome: EvalResult | Exception


@dataclass(eq=False)
class Request:
    """An accepted request and its answer. The files of a request are in one folder.

    When a request is accepted, ``request.json`` is written last. ``log`` is the evaluation log. The file ``answer`` is
    written when the request is done. The file ``delivered`` is written when the client has the result.

    Attributes:
        folder: Folder of the request.
        ticket: Acknowledgement sent to the client.
        answer: Pickled error or result; empty if the log contains the whole result; None until the request is done.
        delivered: Whether the client has the result.
        handle: Handle of the evaluation while it runs.
    """

    folder: Path
    ticket: Ticket
    answer: bytes | None = None
    delivered: bool = False
    handle: EvalHandle | None = None

    @classmethod
    def create(cls, parent: Path, ticket: Ticket, weights: WeightsSnapshot | None) -> Request:
        """Write a request to a new folder; also write its weights, if it has weights."""
        name = f"{ticket.number:08d}_{quote(ticket.client, safe='')[:_LONGEST]}_step_{ticket.step}"
        request = cls(parent / name, ticket)
        if weights is not None:
            request.put_weights(weights)
        request.use(ticket.weights_version)
        return request

    @classmethod
    def read_all(cls, parent: Path) -> dict[str, Request]:
        """Read the accepted requests in a folder; return them by identifier, in order of acceptance.

        The answer to a damaged request is an error. The client and the step are those in the name of its folder.
        """
        found = {}
        for file in sorted(parent.glob(f"{'[0-9]' * 8}_*_step_*/request.json")):
            folder, answer = file.parent, file.with_name("answer")
            try:
                ticket = typed(Ticket, parse_json(file.read_bytes()))
                content = answer.read_bytes() if answer.exists() else None
            except (OSError, ValueError) as error:
                lost = UsageError(f"the request in {folder} is damaged: {damage(error)}", fix="Submit it again.")
                _logger.warning("%s", lost)
                number, client, step = re.split(r"(?<=^\d{8})_|_step_(?=-?\d+$)", folder.name)
                ticket, content = Ticket(int(number), folder.name, unquote(client), int(step), 0), pickled(lost)
            found[ticket.id] = cls(folder, ticket, content, file.with_name("delivered").exists())
        return found

    def put_weights(self, weights: WeightsSnapshot) -> None:
        """Write the weights."""
        write_bytes(self.weights, pickle.dumps(weights, pickle.HIGHEST_PROTOCOL))

    def use(self, weights_version: int) -> None:
        """Write the ticket, with this version of the weights."""
        self.ticket = replace(self.ticket, weights_version=weights_version)
        write_text(self.folder / "request.json", json.dumps(asdict(self.ticket)))

    @property
    def output(self) -> Path:
        """Folder of the evaluation log."""
        return self.folder / "log"

    @property
    def weights(self) -> Path:
        """File of the weights. Requests with the same weights version share it; version 0 has no file."""
        return self.folder.parent.parent / "weights" / f"{self.ticket.weights_version}.pkl"

    def conclude(self, outcome: EvalResult | Exception) -> None:
        """Store the result or the error as the answer. An answer that cannot be written is lost with this process."""
        self.handle = None
        logged = not isinstance(outcome, Exception) and outcome.status == "complete" and not outcome.artifacts
        self.answer = b"" if logged else pickled(outcome)
        try:
            write_bytes(self.folder / "answer", self.answer)
        except Exception:
            _logger.exception("the answer of %s cannot be written, so it is lost when this process ends", self.folder)

    def outcome(self) -> bytes:
        """Return the pickled result or error."""
        from rl_eval.results.loading import load

        try:
            return self.answer or pickled(load(self.output))
        except EvalError as error:  # The log was damaged after the answer.
            return pickled(error)

    def note_delivery(self) -> None:
        """Record that the client has the result; it is not sent again."""
        self.delivered = True
        try:
            (self.folder / "delivered").touch()
        except OSError as error:
            _logger.warning(
                "the delivery of %s is not noted, so it is repeated after a restart: %s", self.folder, error
            )


def unreachable(name: str, problem: str) -> ClusterError:
    """Return the error for a service that does not work as it should."""
    fix = "Run rl-eval service list, and start the service again if it is missing."
    return ClusterError(f"evaluation service {name!r} {problem}", key="name", value=name, fix=fix)


def pickled(outcome: EvalResult | Exception) -> bytes:
    """Pickle a result or an exception; an exception that cannot be pickled keeps its text."""
    return bytes(cloudpickle.dumps(Failure.of(outcome) if isinstance(outcome, Exception) else outcome))


def unpickled(data: bytes) -> EvalResult | Exception:
    """Return a pickled result or exception; if a class in it is missing in this process, return a UsageError."""
    try:
        outcome: EvalResult | Failure = pickle.loads(data)
    except Exception as error:
        problem = f"the result is damaged, or has an object whose class is missing in this process: {damage(error)}"
        return UsageError(problem, fix="Install the package of the class, or load the result from its log.")
    return outcome.error() if isinstance(outcome, Failure) else outcome


def split_secrets(value: Any, secrets: Collection[str]) -> tuple[bytes, list[Any]]:
    """Pickle a value without the strings and numbers that contain a secret; return the pickle and these values."""
    file, long = io.BytesIO(), [one for one in secrets if len(one) >= _SHORTEST]
    positions: dict[tuple[type, Any], int] = {}  # Each value once, to keep the list short.

    def position(found: Any) -> int | None:
        if not isinstance(found, (str, bytes, int, float)):
            return None
        text = found.decode("latin-1") if isinstance(found, bytes) else str(found)
        if text not in secrets and not any(one in text for one in long):
            return None
        return positions.setdefault((type(found), found), len(positions))

    pickler: Any = cloudpickle.Pickler(file)
    pickler.persistent_id = position
    pickler.dump(value)
    return file.getvalue(), [value for _, value in positions]


def join_secrets(data: bytes, taken: Sequence[Any]) -> Any:
    """Restore a value from the pickle and the list that :func:`split_secrets` returned."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = taken.__getitem__
    return unpickler.load()

"""What a service and its clients tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_eval.errors import EvalError

if TYPE_CHECKING:
    from rl_eval.result import EvalResult
    from rl_eval.settings import EvalSettings

__all__ = ["Answer", "ClientStatus", "FinishedEvaluation", "Past", "ServiceStatus", "Ticket", "Welcome", "pickled"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that the service has accepted, and owns."""

    request: str
    """The client's name for it, unique."""
    step: int
    weights_version: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended."""

    request: str
    weights_version: int
    outcome: bytes
    """Pickled: an ``EvalResult``, or the exception that there is in its place."""


@dataclass(frozen=True, slots=True)
class Past:
    """A finished evaluation, as the service keeps it."""

    client: str
    step: int
    finished: float
    """In seconds since the epoch."""
    answer: Answer


@dataclass(frozen=True)
class Welcome:
    """What a client learns when it connects."""

    session: int
    """To be given with every call; a later connection under the same name gets another, and ends this one."""
    settings: EvalSettings
    """Of the service, without the policy."""
    max_queue: int
    tickets: tuple[Ticket, ...]
    """Requests of earlier connections under this name whose results were not read."""
    next_step: int
    """One more than the step of this name's last request; 0 before any."""
    weights_version: int
    """Of the weights that were last sent under this name; 0 before any."""


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """One line of a service's history: ``result``, or the ``error`` that there is in its place."""

    client: str
    step: int
    weights_version: int
    finished: float
    """When, in seconds since the epoch, on the clock of the service's machine."""
    result: EvalResult | None
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client, as its service sees it."""

    name: str
    silent_s: float
    """Since its last sign of life."""
    num_waiting: int
    num_unread: int
    """Results that it has not read."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What a service is doing."""

    name: str
    namespace: str
    detached: bool
    state: Literal["starting", "idle", "running", "stopping"]
    node: str
    """Address of its machine."""
    pid: int
    age_s: float
    idle_timeout_s: float
    running: str
    """Whose request, of which step; empty if none."""
    num_waiting: int
    num_finished: int
    """Since it began."""
    num_runners: int
    """That are up."""
    clients: tuple[ClientStatus, ...]


def pickled(outcome: Any) -> bytes:
    """Pickle a result or an exception; one that would not arrive is replaced by an error with its text."""
    import cloudpickle

    try:
        data = bytes(cloudpickle.dumps(outcome))
        if isinstance(outcome, BaseException):
            cloudpickle.loads(data)  # Errors with arguments of their own can often be written only.
    except Exception as error:
        reason = f"it cannot be pickled: {type(error).__name__}"
        return bytes(cloudpickle.dumps(EvalError(f"{type(outcome).__name__}: {_text(outcome)} ({reason})")))
    return data


def _text(outcome: Any) -> str:
    try:
        return str(outcome)
    except Exception as error:
        return f"its text cannot be had: {type(error).__name__}"

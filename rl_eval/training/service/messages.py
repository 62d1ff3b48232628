"""Values that a service and its clients exchange."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rl_eval.errors import EvalError, UsageError, summary_of

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult

__all__ = ["ClientStatus", "FinishedEvaluation", "ServiceStatus", "Ticket", "Welcome", "pickled", "unpickled"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that the service has in its journal."""

    request: str
    """The client's name for it, unique."""
    step: int
    weights_version: int


@dataclass(frozen=True)
class Welcome:
    """Reply to a client that connects."""

    settings: EvalSettings
    """Of the service, without the policy."""
    max_queue: int
    tickets: tuple[Ticket, ...]
    """Requests of this client whose results were not delivered, in order."""
    next_step: int
    """One more than the step of the client's last request; 0 before any."""
    weights_version: int
    """Of the weights that the client sent last; 0 before any."""
    beat_s: float
    """How often at least it should show that it lives."""


@dataclass(frozen=True)
class FinishedEvaluation:
    """One line of a service's history: ``result``, or the ``error`` that there is in its place."""

    client: str
    step: int
    weights_version: int
    finished: float
    """When, in seconds since the epoch, on the clock of the service's machine."""
    run_dir: str
    """Folder of its evaluation log on that machine, for ``rl_eval.load``."""
    pickled: bytes = field(repr=False)
    """Result or error."""

    @cached_property
    def outcome(self) -> Any:
        """Result or error."""
        return unpickled(self.pickled)

    @property
    def result(self) -> EvalResult | None:
        """Result of the evaluation; None if it could not be evaluated."""
        return None if isinstance(self.outcome, BaseException) else self.outcome

    @property
    def error(self) -> BaseException | None:
        """Error that kept it from being evaluated; None if there is a result."""
        return self.outcome if isinstance(self.outcome, BaseException) else None


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client that is connected or has requests that wait."""

    name: str
    silent_s: float
    """Since its last sign of life; infinite for one that is not connected."""
    num_waiting: int
    num_undelivered: int
    """Results that were not delivered to it."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """State of a service."""

    name: str
    namespace: str
    detached: bool
    state: Literal["starting", "idle", "running", "stopping"]
    node: str
    """Address of its machine."""
    pid: int
    run_dir: str
    age_s: float
    """Since its process began."""
    idle_timeout_s: float
    running: str
    """Whose request, of which step; empty if none."""
    num_waiting: int
    num_finished: int
    """In its folder."""
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
        return bytes(cloudpickle.dumps(EvalError(f"{summary_of(outcome)} ({reason})")))
    return data


def unpickled(data: bytes) -> Any:
    """Return what was pickled; an error if it is of a class that is not there in this process."""
    try:
        return pickle.loads(data)
    except Exception as error:
        return UsageError(
            f"the outcome of an evaluation cannot be unpickled in this process ({type(error).__name__}: {error}): it "
            "names a class of a module that is not there"
        )

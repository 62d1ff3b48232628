"""Backends: they run runners and deliver requests to them.

The reference backend runs them in this process, the other backend as Ray actors. In the core, only this folder imports
Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_eval.backends.requests import Request, RunnerRequest
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import RunnerLost
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import WeightsSnapshot

__all__ = ["Backend", "Call", "Reply"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one runner."""

    runner: int
    """Incarnation."""
    request: Request
    tag: int
    """Mark set by the caller, returned with the reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call, or its error."""

    call: Call
    value: Any = None
    error: BaseException | None = None
    lost: bool = False
    """Whether the runner is dead; ``error`` has the reason, and ``crash_report`` its last activity, if known."""
    crash_report: CrashReport | None = None
    preempted: bool = False
    """Whether the node of a lost runner was pre-empted."""


class Backend(Protocol):
    """Runners by incarnation number.

    A replacement of a lost runner has another number. Calls of one runner run in order; ``wait`` returns their replies.
    """

    payload: Any
    """Settings and policy of all later starts, from :meth:`pack`."""

    def pack(self, settings: EvalSettings, policy: Any) -> Any:
        """Return settings and a policy object, or None, in the form that runners get.

        Raises:
            ConfigError: The settings or the policy cannot be pickled.
        """

    def spawn(self, runner: int, index: int, weights: Any) -> None:
        """Start a runner; its reply to :class:`Start` follows.

        If there is a runner with this number, it stops first, and the new one uses its process.

        Args:
            runner: Incarnation.
            index: Position.
            weights: Handle from :meth:`publish` of the policy's initial weights; None if it has none.
        """

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        """Queue a request."""

    def publish(self, weights: WeightsSnapshot) -> tuple[Any, WeightsSnapshot]:
        """Make weights available to all runners; return their handle, and the weights as stored."""

    def wait(self, timeout_s: float) -> list[Reply]:
        """Return replies; wait at most ``timeout_s`` for the first."""

    @property
    def busy(self) -> bool:
        """Whether any call is unanswered."""

    def kill(self, runner: int) -> None:
        """Terminate a runner at once, without answers to its calls."""

    def terminate(self, runner: int, why: RunnerLost) -> None:
        """Terminate a faulty runner; a reply with ``lost`` and its crash report follows soon."""

    def shortage(self) -> str:
        """Return requested and available resources, to explain why a runner does not start."""

    def capacity(self) -> int | None:
        """Return the number of runners that the resources allow; None if unknown."""

    def starting(self, runners: Sequence[int]) -> str:
        """Return the activity of runners that are not ready yet, in a few words."""

    def leave(self) -> None:
        """Release the resources of the calling thread; called once, at the end of that thread."""

    def stop(self) -> None:
        """Terminate all runners and helper processes, within a time limit; may be called again."""

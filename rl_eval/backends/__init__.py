"""Backends: where runners live, and how requests reach them.

The reference runs them in this process, the other as Ray actors. The only folder of the core that imports Ray.
Imported by ``results/`` (to replay) and ``execution/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_eval.backends.requests import Request, RunnerRequest
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
    """The caller's mark, returned with the reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call, or the error that it ended with."""

    call: Call
    value: Any = None
    error: BaseException | None = None
    lost: bool = False
    """Whether the runner is gone; ``error`` says so, and ``crash_report`` what it was doing, if that is known."""
    crash_report: CrashReport | None = None
    preempted: bool = False
    """Whether the node of a lost runner was taken away."""


class Backend(Protocol):
    """Holds runners by incarnation number. Calls on one runner run in order; replies come through ``wait``."""

    def spawn(self, runner: int, index: int, weights: Any) -> None:
        """Start a runner at a position of the group; a reply to :class:`Start` follows.

        Args:
            runner: Incarnation.
            index: Position.
            weights: Handle from :meth:`publish` of the weights to build the policy with; None if it has none.
        """

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        """Queue a request."""

    def publish(self, weights: WeightsSnapshot) -> tuple[Any, WeightsSnapshot]:
        """Make weights available to all runners; return a handle to pass, and the weights as stored."""

    def wait(self, timeout_s: float) -> list[Reply]:
        """Return finished calls, waiting for the first at most ``timeout_s``."""

    @property
    def busy(self) -> bool:
        """Whether any call is unanswered."""

    def kill(self, runner: int) -> None:
        """End a runner at once; its calls are never answered."""

    def terminate(self, runner: int, why: RunnerLost) -> None:
        """End a runner that has gone wrong; a reply that says that it is lost follows soon, with what is known."""

    def shortage(self) -> str:
        """Say what was asked for and what there is, for a runner that does not come up."""

    def capacity(self) -> int | None:
        """Return how many runners there is room for in all; None if that is not known."""

    def starting(self, runners: Sequence[int]) -> str:
        """Say in a few words what runners are busy with that are not up yet."""

    def leave(self) -> None:
        """Called once in the thread that made the calls, when it ends."""

    def stop(self) -> None:
        """End all runners, and what else this backend started; bounded and idempotent."""

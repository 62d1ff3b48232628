"""Backends: they run runners and deliver requests to them.

The reference backend runs the runners in this process. The other backend runs them as Ray actors. In the core, only
this folder imports Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_eval.backends.requests import Request, RunnerRequest
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError, RunnerLost
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import WeightsSnapshot

__all__ = ["Backend", "Call", "Reply"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one runner."""

    runner: int
    """Number of the runner."""
    request: Request
    tag: int
    """Number that the caller chooses. The reply has the same number."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call, or its error."""

    call: Call
    value: Any = None
    error: BaseException | None = None
    lost: bool = False
    """Whether the runner is dead. Then ``error`` has the reason, and ``crash_report`` has the last activity, if it is
    known."""
    crash_report: CrashReport | None = None
    preempted: bool = False
    """Whether the node of a lost runner was pre-empted."""


class Backend(Protocol):
    """Runners, each with a unique number.

    A runner that replaces another runner has a new number. The calls of one runner run in order, and ``wait`` returns
    their replies.
    """

    payload: Any
    """Settings and policy of all later starts, from :meth:`pack`."""
    on_death: Callable[[EvalError], object]
    """Function that another thread calls when the runners' cluster is lost. :meth:`wait` may block then."""

    def pack(self, settings: EvalSettings, policy: Any) -> Any:
        """Return settings and a policy object (or None), packed for runners.

        Raises:
            ConfigError: The settings or the policy cannot be pickled.
        """

    def spawn(self, runner: int, index: int, weights: Any) -> None:
        """Start a runner. Its reply to :class:`Start` follows.

        If there is a runner with this number, it is stopped first, and the new runner uses its process.

        Args:
            runner: Number of the runner.
            index: Position of the runner in the group.
            weights: Handle of the policy's initial weights, from :meth:`publish`; None if the policy has no weights.
        """

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        """Queue a request."""

    def publish(self, weights: WeightsSnapshot) -> tuple[Any, WeightsSnapshot]:
        """Make weights available to all runners. Return a handle of the weights, and the stored weights."""

    def wait(self, timeout_s: float) -> list[Reply]:
        """Return the available replies. Wait at most ``timeout_s`` for the first reply."""

    @property
    def busy(self) -> bool:
        """Whether any call is unanswered."""

    def kill(self, runner: int) -> None:
        """Terminate a runner immediately. Its calls get no replies."""

    def terminate(self, runner: int, why: RunnerLost) -> None:
        """Terminate a faulty runner. A reply with ``lost`` and the crash report of the runner follows soon."""

    def shortage(self) -> str:
        """Return the requested and the available resources as text, to explain why a runner does not start."""

    def capacity(self) -> int | None:
        """Return the maximum number of runners for which the cluster has resources; None if unknown."""

    def starting(self, runners: Sequence[int]) -> str:
        """Return the activity of runners that are not ready yet, in a few words."""

    def leave(self) -> None:
        """Release the resources of the calling thread. This is called once, at the end of that thread."""

    def stop(self) -> None:
        """Terminate all runners and helper processes, within a time limit. Further calls have no effect."""

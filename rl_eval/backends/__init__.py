"""Backends: where runners live, and how requests reach them.

The reference runs them in this process, the other as Ray actors. The only folder of the core that imports Ray.
Imported by ``results/`` (to replay) and ``execution/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_eval.backends.policy_pickle import pickle_without_weights
from rl_eval.backends.requests import Request, RunnerRequest
from rl_eval.config.settings import SECTIONS, EvalSettings
from rl_eval.errors import ConfigError, RunnerLost
from rl_eval.supervision.flight_recorder import CrashReport
from rl_eval.weights import WeightsSnapshot

__all__ = ["Backend", "Call", "Reply", "pickled", "pickled_settings"]


def pickled(value: Any, what: str, without_weights_of: Any = None) -> bytes:
    """Pickle a value for a runner.

    Args:
        value: The value.
        what: Its name, for the error.
        without_weights_of: Policy, or several by id, whose weights are left out; for :func:`unpickle_with_weights`.

    Raises:
        ConfigError: It cannot be pickled.
    """
    try:
        return pickle_without_weights(value, without_weights_of)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to a runner, because pickling failed: {error}. Give it as "
            '"module:attr", or keep open files, locks and generators out of it'
        ) from error


def pickled_settings(settings: EvalSettings, policy: Any, *more: Any, without_weights: bool = False) -> bytes:
    """Pickle settings, a policy object, and other values.

    Raises:
        ConfigError: They cannot be pickled; the message names the key, if it is one.
    """
    try:
        return pickled((settings, policy, *more), "the configuration", policy if without_weights else None)
    except ConfigError:
        for section in SECTIONS:
            for key, value in dict(getattr(settings, section)).items():
                pickled(value, f"{section}.{key}")
        pickled(policy, "the policy")
        raise


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

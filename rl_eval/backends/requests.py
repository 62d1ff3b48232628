"""Requests of the control loop to a runner, and the function that answers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import assert_never

from rl_eval.errors import ConfigError
from rl_eval.records.episode import Lease, RunReport

if TYPE_CHECKING:
    from rl_eval.runners import Runner


@dataclass(frozen=True, slots=True)
class Start:
    """Request to build the runner with its environments and its policy. A former runner is stopped first."""

    index: int
    """Position of the runner in the group."""
    weights: Any
    """Handle of the policy's initial weights, from :meth:`rl_eval.backends.Backend.publish`; None if the policy has no
    weights."""


@dataclass(frozen=True, slots=True)
class Run:
    """Request to run episodes for some time, and to report everything that happened since the last report."""

    leases: tuple[Lease, ...] = ()
    """Episodes to add to the queue."""
    budget_s: float = 0.1
    """Seconds to work."""
    reclaim: tuple[int, ...] = ()
    """Indices of the leases to return, if their episodes have not started."""
    abort: bool = False
    """Whether to drop the queue and live episodes first."""


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Request to copy weights into the policy. The answer is the version of the weights."""

    weights: Any
    """Handle from :meth:`rl_eval.backends.Backend.publish`."""


@dataclass(frozen=True, slots=True)
class GetWeightsVersion:
    """Request for the version of the policy's weights."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Request to call a function with the runner. The answer is the return value of the function."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to close all environments."""


RunnerRequest: TypeAlias = Run | SetWeights | GetWeightsVersion | Apply | Stop
"""Request to a runner that is ready."""

Request: TypeAlias = Start | RunnerRequest


def answer(runner: Runner, request: RunnerRequest) -> Any:
    """Carry out a request on a runner, and return the answer."""
    match request:
        case Run(leases, budget_s, reclaim, abort):
            return _checked(runner, runner.run(leases, budget_s, reclaim, abort))
        case SetWeights(weights):
            return runner.set_weights(weights)
        case GetWeightsVersion():
            return runner.weights_version
        case Apply(function):
            return runner.apply(function)
        case Stop():
            return runner.stop()
        case _:
            assert_never(request)


def _checked(runner: Runner, report: Any) -> RunReport:
    """Return a report of ``run`` unchanged.

    Raises:
        ConfigError: The value is not a report.
    """
    if not isinstance(report, RunReport):
        problem = f"{type(runner).__name__}.run() returned {report!r}, not a RunReport"
        fix = "End run() with: return self.report()."
        raise ConfigError(problem, key=f"{type(runner).__name__}.run", value=report, fix=fix)
    return report

"""Requests to a runner: everything that the control loop can ask of one, and the one place that answers them."""

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
    """Build the runner: environments, policy and all that they import."""

    index: int
    """Position in the group."""
    weights: Any
    """Handle from :meth:`rl_eval.backends.Backend.publish` of the weights to build the policy with; None for none."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run episodes for a while, and report what has happened since the last report."""

    leases: tuple[Lease, ...] = ()
    """Episodes to add to the queue."""
    budget_s: float = 0.1
    """Seconds to work."""
    reclaim: tuple[int, ...] = ()
    """Indices to give back, as far as they have not started."""
    abort: bool = False
    """Drop queue and live episodes first."""


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Copy weights into the policy; the answer is their version."""

    weights: Any
    """What :meth:`rl_eval.backends.Backend.publish` returned for them."""


@dataclass(frozen=True, slots=True)
class GetWeightsVersion:
    """Answer with the version of the weights that the policy has."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Call a function with the runner; the answer is what it returns."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close all environments."""


RunnerRequest: TypeAlias = Run | SetWeights | GetWeightsVersion | Apply | Stop
"""Request to a runner that is up."""

Request: TypeAlias = Start | RunnerRequest


def answer(runner: Runner, request: RunnerRequest) -> Any:
    """Have a runner do what is requested, and return what it answers."""
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
    """Return what ``run`` has returned.

    Raises:
        ConfigError: It is not a report.
    """
    if not isinstance(report, RunReport):
        raise ConfigError(
            f"{type(runner).__name__}.run() returned {report!r}, not a RunReport",
            key=f"{type(runner).__name__}.run",
            value=report,
            fix="End it with return self._report().",
        )
    return report

"""Runners: leases to records, one environment slot at a time; and the class that a config selects.

:class:`Runner` is all that the control loop needs of one, whatever it steps and however; ``base`` the abstract runner
over slots. Imported by backends and test tools; knows no schedule, store or log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, nearest
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.base import EvalRunner
from rl_eval.runners.observers import EpisodeObserver
from rl_eval.runners.vector import SingleAgentEvalRunner, VectorEvalRunner
from rl_eval.weights import WeightsSnapshot

__all__ = [
    "KINDS",
    "EpisodeObserver",
    "EvalRunner",
    "Runner",
    "SingleAgentEvalRunner",
    "VectorEvalRunner",
    "runner_class",
]

Result = TypeVar("Result")


class Runner(Protocol):
    """Turns leases into rows, in slices of time.

    A runner is built where it works, as ``cls(settings, runner_index, policy)``, and called by one thread. It answers
    for three things: every lease becomes one row or one fault, or is given back; the row depends on the lease, the
    environment and the policy alone; and no call takes much longer than its budget.
    :class:`~rl_eval.testing.EvalRunnerContract` tests them. What went wrong in an episode is a
    :class:`~rl_eval.records.episode.Fault` of the report; what a method raises is the runner's own failure.
    """

    default_lanes: ClassVar[int]
    """Episodes that it runs at once, if ``runners.num_envs_per_runner`` does not say."""
    max_lanes: ClassVar[int | None]
    """Most episodes that it can run at once; None for any number."""
    needs_processes: ClassVar[bool]
    """Whether it cannot share its process, so that ``runners.num_runners`` must be at least 1."""
    several_agents: ClassVar[bool]
    """Whether its environments have several agents, whose policies may be ``policy.policies``."""

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        """Build environments and policy; a live policy replaces the configured one."""

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the numbers that its rows have besides the fixed columns, ``RunReport.infos``."""

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Add leases to the queue, work for about ``budget_s`` seconds, and report.

        Unfinished episodes go on in the next call. Every call gets something done, however small its budget.

        Args:
            leases: Episodes to add.
            budget_s: Seconds to work; a runner that runs out of episodes returns earlier.
            reclaim: Indices to give back, as far as they have not started.
            abort: Drop queue and live episodes first.
        """

    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        """Copy weights into the policy, and return their version.

        Raises:
            EvalError: An episode is live.
            WeightsError: The weights do not fit, or the policy has none.
        """

    @property
    def weights_version(self) -> int:
        """Version of the weights that the policy has; 0 before any were set."""

    def apply(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with this runner, where it lives."""

    def metrics(self) -> dict[str, float]:
        """Return lifetime counters."""

    def stop(self) -> None:
        """Close all environments."""


KINDS: Final[Mapping[str, str]] = {
    "vector": "vector:VectorEvalRunner",
    "single_agent": "vector:SingleAgentEvalRunner",
    "multi_agent": "multi_agent.runner:MultiAgentEvalRunner",
    "subprocess": "subprocess_slots:SubprocessEvalRunner",
}
"""Runner kinds by name, as ``module:Class`` of this package: a process imports the kind that it uses.

All that differs between kinds is a fact of the class, as :class:`Runner` lists them.
"""
_MEMBERS: Final = (
    *("default_lanes", "max_lanes", "needs_processes", "several_agents", "columns"),
    *("run", "set_weights", "weights_version", "apply", "metrics", "stop"),
)


def runner_class(selected: str | type) -> type[Runner]:
    """Return the class that ``runners.runner`` names.

    Raises:
        ConfigError: The name is unknown, cannot be imported, or is no concrete :class:`Runner`.
    """
    if isinstance(selected, str):
        if selected in KINDS:
            selected = f"{__name__}.{KINDS[selected]}"
        if ":" not in selected:
            raise ConfigError(f'runners.runner is {selected!r}: {nearest(selected, KINDS)} (or "module:Class")')
        selected = cast("Any", import_attribute("runners.runner", selected))
    if not inspect.isclass(selected) or inspect.isabstract(selected):
        raise ConfigError(f"runners.runner is {selected!r}, which is not a concrete subclass of rl_eval.EvalRunner")
    if missing := [name for name in _MEMBERS if not hasattr(selected, name)]:
        raise ConfigError(
            f"runners.runner is {selected!r}, which lacks {', '.join(missing)} of a runner: derive it from "
            "rl_eval.EvalRunner, or write all members of rl_eval.runners.Runner"
        )
    return cast("type[Runner]", selected)

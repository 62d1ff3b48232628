"""Contract of a runner: all that the control loop needs of one, whatever it steps and however."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from rl_eval.config.settings import EvalSettings
from rl_eval.records.episode import Lease, RunReport
from rl_eval.weights import WeightsSnapshot

__all__ = ["Runner"]

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

"""Runners, which turn leases into records; and the selection of the runner class that a config names.

:class:`Runner` is the protocol that the control loop needs; ``base`` is the abstract runner over slots. Backends and
test tools import this package. It does not depend on the schedule, the store or the log.
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
    """Worker that turns leases into rows. Each call of :meth:`run` works for a limited time.

    A runner is built as ``cls(settings, runner_index, policy)`` in the process in which it works. One thread calls it.
    A runner guarantees that every lease becomes one row or one fault, or is returned. A row depends only on the lease,
    the environment and the policy. No call takes much longer than its budget.
    :class:`~rl_eval.testing.EvalRunnerContract` tests these guarantees. A failure of an episode is a
    :class:`~rl_eval.records.episode.Fault` in the report; an exception of a method is a failure of the runner.
    """

    default_lanes: ClassVar[int]
    """Number of simultaneous episodes, if ``runners.num_envs_per_runner`` is not set."""
    max_lanes: ClassVar[int | None]
    """Highest number of simultaneous episodes; None for no limit."""
    needs_processes: ClassVar[bool]
    """Whether the runner needs its own process, so that ``runners.num_runners`` must be at least 1."""
    several_agents: ClassVar[bool]
    """Whether the runner's environments have several agents, with policies from ``policy.policies``."""

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        """Build environments and policy; a policy object replaces the configured one."""

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the columns in ``RunReport.infos``. Records contain these columns and the fixed ones."""

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Add leases to the queue, work for about ``budget_s`` seconds, and report.

        Unfinished episodes continue in the next call. Every call makes progress, even with a budget of 0.

        Args:
            leases: Episodes to add.
            budget_s: Seconds to work; a runner that runs out of episodes returns before the budget is used up.
            reclaim: Indices of queued episodes to give back. Episodes that have started continue.
            abort: Drop queue and live episodes first.
        """

    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        """Copy weights into the policy, and return their version.

        Raises:
            EvalError: An episode is live.
            WeightsError: The weights do not fit the policy, or the policy has no weights.
        """

    @property
    def weights_version(self) -> int:
        """Version of the policy's weights; 0 before any were set."""

    def apply(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with this runner, in the runner's process."""

    def metrics(self) -> dict[str, float]:
        """Return counters over the runner's lifetime, by name."""

    def stop(self) -> None:
        """Close all environments."""


KINDS: Final[Mapping[str, str]] = {
    "vector": "vector:VectorEvalRunner",
    "single_agent": "vector:SingleAgentEvalRunner",
    "multi_agent": "multi_agent.runner:MultiAgentEvalRunner",
    "subprocess": "subprocess_slots:SubprocessEvalRunner",
    "batched": "batched.runner:BatchedEvalRunner",
}
"""Runner kinds by name, as ``module:Class`` of this package. A process imports only the kind that it uses.

Kinds differ only in the class variables that :class:`Runner` lists.
"""
_IN_BLOCKS: Final = {"batched": "batched.blocks:BlockEvalRunner"}
"""Runner kinds for ``runners.block``."""
_MEMBERS: Final = (
    *("default_lanes", "max_lanes", "needs_processes", "several_agents", "columns"),
    *("run", "set_weights", "weights_version", "apply", "metrics", "stop"),
)


def runner_class(selected: str | type, *, in_blocks: bool = False) -> type[Runner]:
    """Return the class that ``runners.runner`` names.

    Args:
        selected: Name in ``KINDS``, ``"module:Class"``, or a class.
        in_blocks: Whether ``runners.block`` is set.

    Raises:
        ConfigError: The name is unknown, cannot be imported, or is not a concrete :class:`Runner`.
    """
    if isinstance(selected, str):
        if selected in KINDS:
            kind = _IN_BLOCKS.get(selected, KINDS[selected]) if in_blocks else KINDS[selected]
            selected = f"{__name__}.{kind}"
        if ":" not in selected:
            text = f'runners.runner is {selected!r}: {nearest(selected, KINDS)} (or "module:Class")'
            raise ConfigError(text, key="runners.runner", value=selected)
        selected = cast("Any", import_attribute("runners.runner", selected))
    if not inspect.isclass(selected) or inspect.isabstract(selected):
        text = f"runners.runner is {selected!r}, which is not a concrete subclass of rl_eval.EvalRunner"
        raise ConfigError(text, key="runners.runner", value=selected)
    if missing := [name for name in _MEMBERS if not hasattr(selected, name)]:
        problem = f"runners.runner is {selected!r}, which lacks these members of a runner: {', '.join(missing)}"
        fix = "Derive it from rl_eval.EvalRunner, or define all members of rl_eval.runners.Runner."
        raise ConfigError(problem, key="runners.runner", value=selected, fix=fix)
    return cast("type[Runner]", selected)

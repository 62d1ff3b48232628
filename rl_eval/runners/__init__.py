"""Runners, which turn leases into records; and the selection of the runner class that a config names.

:class:`Runner` is the protocol that the control loop needs; ``base`` is the abstract runner over slots. Backends and
test tools import this package. It does not depend on the schedule, the store or the log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import EnvironmentSection, EvalSettings, needs_interruption
from rl_eval.errors import ConfigError, nearest
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.base import EvalRunner
from rl_eval.runners.facts import RunnerFacts, slots_of
from rl_eval.runners.observers import EpisodeObserver
from rl_eval.runners.vector import SingleAgentEvalRunner, VectorEvalRunner
from rl_eval.weights import WeightsSnapshot

__all__ = [
    "KINDS",
    "EpisodeObserver",
    "EvalRunner",
    "Layout",
    "Runner",
    "RunnerFacts",
    "SingleAgentEvalRunner",
    "VectorEvalRunner",
    "class_of",
    "layout_of",
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

    facts: ClassVar[RunnerFacts]
    """Facts of the class; an evaluation reads no other attribute of it."""

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

Kinds differ only in their :class:`RunnerFacts`.
"""
_IN_BLOCKS: Final = {"batched": "batched.blocks:BlockEvalRunner"}
"""Runner kinds for ``runners.block``."""
_MEMBERS: Final = ("facts", "columns", "run", "set_weights", "weights_version", "apply", "metrics", "stop")


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


def class_of(settings: EvalSettings) -> type[Runner]:
    """Return the class of the runners.

    Raises:
        ConfigError: The class does not exist.
    """
    return runner_class(settings.runners.runner, in_blocks=settings.runners.block is not None)


class Layout(NamedTuple):
    """Runner class of a group, with its facts and widths."""

    runner: type[Runner]
    facts: RunnerFacts
    lanes: int
    """Number of lanes per runner."""
    block_size: int
    """Number of episodes in a block; 0 without blocks."""


def layout_of(settings: EvalSettings) -> Layout:
    """Check settings against the class of their runners, and return the layout.

    Raises:
        ConfigError: The settings contradict the class, or the class does not exist.
    """
    cls = class_of(settings)
    lanes = cls.facts.lanes(settings)
    _check_environment(settings, cls.facts)
    _check_lanes(settings, cls.facts, lanes)
    _check_features(settings, cls.facts)
    return Layout(cls, cls.facts, lanes, lanes * (settings.runners.block or 0))


def _check_environment(settings: EvalSettings, facts: RunnerFacts) -> None:
    """Reject an environment that does not fit the class."""
    section, runners = settings.environment, settings.runners
    if facts.agents and section.wrappers:
        problem = "environment.wrappers are gymnasium wrappers, which a multi-agent environment cannot have"
        fix = "Wrap the environment in the function of environment.env."
        raise ConfigError(problem, key="environment.wrappers", value=section.wrappers, fix=fix)
    if section.python is not None:
        _check_interpreter(section, runners.runner, facts)
    if (slots := slots_of(settings)) and not facts.steps_all_slots:
        problem = (
            f"environment.env is a {type(section.env).__name__} object that steps {slots} environments in one call, "
            f"but runners.runner {runners.runner!r} steps single environments"
        )
        fix = "Set runners.runner: batched."
        raise ConfigError(problem, key="environment.env", value=type(section.env).__name__, fix=fix)
    if (section.instances, section.env_reuse) == ("one", "episode"):
        problem = "environment.env_reuse is episode, but environment.instances is one"
        fix = "Remove one of the keys."
        raise ConfigError(problem, key="environment.env_reuse", value="episode", fix=fix)


def _check_interpreter(section: EnvironmentSection, runner: str | type, facts: RunnerFacts) -> None:
    """Reject settings that do not work with an environment in another interpreter."""
    if facts.unit != "process":
        problem = f"environment.python is set, but runners.runner is {runner!r}"
        fix = "Remove runners.runner: environment.python implies subprocess."
        raise ConfigError(problem, key="environment.python", value=runner, fix=fix)
    for key in ("agents", "action_masks"):
        if value := getattr(section, key):
            problem = f"environment.{key} is set, which does not work with environment.python"
            raise ConfigError(problem, key=f"environment.{key}", value=value, fix="Remove one of the keys.")


def _check_lanes(settings: EvalSettings, facts: RunnerFacts, lanes: int) -> None:
    """Reject a number of lanes that the class or the environment cannot have."""
    slots = slots_of(settings)
    if slots and lanes != slots:
        name = type(settings.environment.env).__name__
        problem, fix = f"environment.env is a {name} object of {slots} environments", "pass a function of num_envs."
    elif facts.one_environment(settings) and lanes > 1:
        problem = "a process can build only one environment (environment.instances)"
        fix = "set runners.runner: subprocess, which has one process per environment."
    elif facts.max_lanes is not None and lanes > facts.max_lanes:
        problem = f"runners.runner {settings.runners.runner!r} has at most {facts.max_lanes}"
        fix = 'set runners.runner to "vector".'
    else:
        return
    problem, fix = f"runners.num_envs_per_runner is {lanes}, but {problem}", f"Remove the key, or {fix}"
    raise ConfigError(problem, key="runners.num_envs_per_runner", value=lanes, fix=fix)


def _check_features(settings: EvalSettings, facts: RunnerFacts) -> None:
    """Reject a setting that the class does not support."""
    runners, policies = settings.runners, settings.policy.policies
    if policies and not facts.agents:
        problem = f"runners.runner is {runners.runner!r}, which has one policy, but policy.policies has {len(policies)}"
        fix = 'Set runners.runner to "multi_agent", or remove the key.'
        raise ConfigError(problem, key="runners.runner", value=runners.runner, fix=fix)
    if runners.block is not None and facts.unit != "block":
        problem = f"runners.block is {runners.block}, but runners.runner {runners.runner!r} runs single episodes"
        fix = "Remove the key, or set runners.runner: batched."
        raise ConfigError(problem, key="runners.block", value=runners.block, fix=fix)
    if settings.evaluation.conditions is not None and not facts.conditions:
        blocks = " with runners.block" if runners.block else ""
        problem = f"evaluation.conditions is set, but runners.runner {runners.runner!r}{blocks} does not support them"
        raise ConfigError(problem, key="evaluation.conditions", fix='Set runners.runner to "vector" or "subprocess".')
    faults = settings.fault_tolerance
    limits = {key: getattr(faults, key) for key in needs_interruption("fault_tolerance") if getattr(faults, key)}
    if limits and not runners.num_runners and facts.unit != "process":
        key, limit = next(iter(limits.items()))
        problem = f"fault_tolerance.{key} is {limit:g}, but no deadline can interrupt an environment in this process"
        fix = "Set runners.runner to subprocess, or runners.num_runners to 1 or more."
        raise ConfigError(problem, key=f"fault_tolerance.{key}", value=limit, fix=fix)
    if facts.processes and not runners.num_runners:
        problem = f"runners.num_runners is 0, but runners.runner {runners.runner!r} cannot share this process"
        raise ConfigError(problem, key="runners.num_runners", value=0, fix="Set runners.num_runners to 1 or more.")

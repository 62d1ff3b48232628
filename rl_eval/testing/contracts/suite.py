"""Base of the contract suites. It builds policies and runners, and runs leases to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.policies import adapt_policy
from rl_eval.protocols import EnvContext, Policy
from rl_eval.records.episode import EpisodeSpec, EpisodeTable, Fault, Lease, RunReport
from rl_eval.runners import Runner, SingleAgentEvalRunner, runner_class
from rl_eval.runners.environment import construct_env
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing.faulty_env import faulty
from rl_eval.weights import (
    WeightsSnapshot,
    apply_weights,
    load_weights_file,
    module_of,
    snapshot_weights,
    weights_of,
)


class Subject(NamedTuple):
    """Policy with the spaces of its environment."""

    policy: Policy
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]

    def snapshot(self) -> WeightsSnapshot | None:
        """Return the policy's weights; None if the policy has no module."""
        return weights_of(self.policy)


def build_subject(settings: EvalSettings) -> Subject:
    """Build the configured policy in the same way as a runner."""
    env = construct_env(settings.environment, 0, 0, 1)
    spaces = env.observation_space, env.action_space
    env.close()
    policy = adapt_policy(settings.policy, *spaces)
    if settings.policy.weights is not None:
        snapshot = snapshot_weights(load_weights_file(settings.policy.weights, settings.policy.weights_key), 0)
        apply_weights(snapshot, module_of(policy))
    return Subject(policy, *spaces)


MAX_ATTEMPTS: Final = 3
PATIENCE: Final = 200
"""Maximum number of consecutive calls without progress."""
_PLENTY_S: Final = 1.0
"""Budget that is long enough for a whole run, in seconds."""


class Played(NamedTuple):
    """Combined reports of leases that ran to the end."""

    rows: npt.NDArray[np.void]
    faults: tuple[Fault, ...]
    env_steps: int
    artifacts: dict[int, Mapping[str, Any]]
    notes: tuple[str, ...]
    most_live: int
    """Maximum number of live episodes at the end of a call."""


class RunnerSuite:
    """Base of tests of runners. It builds runners of the tested class and of the reference class."""

    runner: str | type[Runner]
    """Runner class, or another value of ``runners.runner``."""
    config: EvalConfig | None = None
    """Environment, policy and evaluation settings. The default is CartPole with a recurrent policy that samples its
    actions."""
    lane_counts: tuple[int, ...] = (1, 3, 8)
    """Numbers of lanes to test; ``(1,)`` for a runner with a single environment."""
    num_episodes: int = 10

    @cached_property
    def settings(self) -> EvalSettings:
        """Environment, policy and evaluation settings of all runners."""
        if self.config is not None:
            return self.config.build()
        policy = EvalConfig().policy("rl_eval.testing:make_gru", deterministic=False)
        return policy.environment("CartPole-v1").build()

    @cached_property
    def reference(self) -> EpisodeTable:
        """Rows of the reference loop."""
        leases = leases_of(max(self.lane_counts) + self.num_episodes)
        table = EpisodeTable(len(leases))
        with self.make_runner(1, runner=SingleAgentEvalRunner) as runner:
            table.fill(play(runner, leases).rows)
        return table

    @cached_property
    def weights(self) -> WeightsSnapshot | None:
        """Weights of every runner; None for a policy without weights."""
        return build_subject(self.settings).snapshot()

    @contextlib.contextmanager
    def make_runner(
        self,
        lanes: int,
        fault: Mapping[str, Any] | None = None,
        *,
        runner: str | type[Runner] | None = None,
        wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None,
        timeout_s: float | None = None,
        observers: Sequence[Callable[[Any], Any]] = (),
    ) -> Iterator[Runner]:
        """Context with a new runner, which is stopped when the context ends.

        Args:
            lanes: Number of lanes.
            fault: Arguments of :class:`FaultyEnv`; None for no faults.
            runner: Runner class; by default, the tested class.
            wrapper: Wrapper for every environment.
            timeout_s: Time limit of an attempt, in seconds. With this argument, there is no step limit.
            observers: Factories of observers.
        """
        selected = runner_class(self.runner if runner is None else runner)
        section = self.settings.environment
        env_kwargs = {"env": section.env, "env_kwargs": section.env_kwargs, **(fault or {})}
        limits = {} if timeout_s is None else {"max_episode_steps": None}
        settings = with_values(
            self.settings.model_copy(update={"runners": RunnersSection(runner=selected, num_envs_per_runner=lanes)}),
            environment={"env": _factory(wrapper), "env_kwargs": env_kwargs},
            evaluation={"observers": tuple(observers), **limits},
            fault_tolerance={"episode_timeout_s": timeout_s or 3600.0},
        )
        built = selected(settings, 0)
        try:
            if self.weights is not None:
                built.set_weights(self.weights)
            yield built
        finally:
            built.stop()

    def runners(self, fault: Mapping[str, Any] | None = None, **others: Any) -> Iterator[tuple[int, Runner]]:
        """Yield each tested number of lanes, with a runner. The arguments are those of :meth:`make_runner`."""
        for lanes in self.lane_counts:
            with self.make_runner(lanes, fault, **others) as runner:
                yield lanes, runner

    def expect_reference(self, rows: npt.NDArray[np.void], what: str) -> None:
        """Assert that rows equal the rows of the reference loop."""
        wrong = self.reference.mismatches(rows, np.zeros((len(rows), 0)))
        if wrong:
            row = rows[rows["index"] == wrong[0]][0]
            raise AssertionError(
                f"{what}: rows {wrong} differ from those of the reference loop. Episode {wrong[0]} is {row} instead of "
                f"{self.reference.rows[wrong[0]]}. Index, seed, return, length, terminated, truncated and success must "
                "be equal."
            )


def leases_of(count: int) -> list[Lease]:
    """Return leases for the first ``count`` episodes of a plan."""
    plan = EpisodePlan(count)
    return [Lease(plan[index], 1) for index in range(count)]


def play(
    runner: Runner,
    leases: Sequence[Lease],
    budget_s: float = _PLENTY_S,
    *,
    begun: Sequence[RunReport] = (),
    count: int | None = None,
    calls: int = 100_000,
) -> Played:
    """Run leases until all their episodes have ended. Then call the runner once more, for its last report.

    An episode that fails runs again until it has used all attempts. If all attempts fail, it has no row.

    Args:
        runner: The runner.
        leases: Leases of the first call.
        budget_s: Budget of every call, in seconds.
        begun: Reports of earlier calls that belong to the same run.
        count: Number of episodes that must end; by default, the number of leases.
        calls: Maximum number of calls.
    """
    count = len(leases) if count is None else count
    reports = [*begun, runner.run(leases, budget_s)]
    idle = failed = 0
    while sum(len(report.rows) for report in reports) + failed < count and idle < PATIENCE and len(reports) < calls:
        faults = reports[-1].faults
        again = [Lease(EpisodeSpec(at.index, at.seed), at.attempt + 1) for at in faults if at.attempt < MAX_ATTEMPTS]
        failed += len(faults) - len(again)
        reports.append(runner.run(again, budget_s))
        idle = 0 if reports[-1].env_steps or len(reports[-1].rows) or reports[-1].faults else idle + 1
    reports.append(runner.run((), 0.0))
    rows = np.concatenate([report.rows for report in reports])
    failed = sum(fault.attempt >= MAX_ATTEMPTS for report in reports for fault in report.faults)
    indices = sorted(rows["index"].tolist())
    if len(rows) + failed != count or len(set(indices)) != len(rows):
        raise AssertionError(
            f"{count} leases must give {count - failed} different rows, but {len(reports)} calls of "
            f"run(budget_s={budget_s}) gave rows {indices}"
        )
    return Played(
        rows,
        faults=tuple(fault for report in reports for fault in report.faults),
        env_steps=sum(report.env_steps for report in reports),
        artifacts=_by_index(reports),
        notes=tuple(note for report in reports for note in report.notes),
        most_live=max(len(report.progress) for report in reports),
    )


def _by_index(reports: Sequence[RunReport]) -> dict[int, Mapping[str, Any]]:
    """Return the artifacts of reports, by index and observer."""
    found: dict[int, dict[str, Any]] = {}
    for name, kept in (pair for report in reports for pair in report.artifacts):
        for index, artifact in kept.items():
            found.setdefault(index, {})[name] = artifact
    return dict(found)


def expect(got: Any, due: Any, what: str) -> None:
    """Assert that two values are equal."""
    if got != due:
        raise AssertionError(f"{what}: {got!r} instead of {due!r}")


def _factory(wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None) -> Callable[[EnvContext], Any]:
    return faulty if wrapper is None else lambda context: wrapper(faulty(context))

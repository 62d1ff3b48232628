"""Base of the contract suites. It builds policies and runners, and runs leases to the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, EvaluationSection, RunnersSection, with_values
from rl_eval.policies import adapt_policy
from rl_eval.policies.inference.inference import RowInference
from rl_eval.protocols import EnvContext, Policy
from rl_eval.records.episode import ROW, EpisodeSpec, Fault, Lease, Outcome, Row, RunReport, Truncation
from rl_eval.records.plain import canonical_digest
from rl_eval.runners import Runner, runner_class
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


class BuiltPolicy(NamedTuple):
    """Policy with the spaces of its environment."""

    policy: Policy
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]

    def snapshot(self) -> WeightsSnapshot | None:
        """Return the policy's weights; None if the policy has no module."""
        return weights_of(self.policy)


def built_policy(settings: EvalSettings) -> BuiltPolicy:
    """Build the configured policy in the same way as a runner."""
    env = construct_env(settings.environment, 0, 0, 1)
    spaces = env.observation_space, env.action_space
    env.close()
    policy = adapt_policy(settings.policy, *spaces)
    if settings.policy.weights is not None:
        snapshot = snapshot_weights(load_weights_file(settings.policy.weights, settings.policy.weights_key), 0)
        apply_weights(snapshot, module_of(policy))
    return BuiltPolicy(policy, *spaces)


class Reference(NamedTuple):
    """Episodes of a plain loop, in index order, and the numerics key of its inference."""

    rows: npt.NDArray[np.void]
    infos: npt.NDArray[np.float64]
    steps: list[tuple[bytes, ...]]
    """For each episode: digest of the first observation, and a digest of the action and the results of each step."""
    numerics: Mapping[str, Any]


def plain_loop(settings: EvalSettings, env: Any, policy: Policy, specs: Sequence[EpisodeSpec]) -> Reference:
    """Run episodes one after the other, without a runner. The inference is shared, because it defines the actions."""
    inference = RowInference(policy, env.observation_space, env.action_space, 1, settings.policy)
    inference.probe()
    played = [_episode(settings.evaluation, env, inference, spec) for spec in specs]
    rows, infos, steps = map(list, zip(*played, strict=True))
    return Reference(np.array(rows, ROW), np.array(infos), steps, inference.numerics)


def _episode(
    section: EvaluationSection, env: Any, inference: RowInference, spec: EpisodeSpec
) -> tuple[tuple[Any, ...], list[float], tuple[bytes, ...]]:
    """Run one episode; return its row, its info scalars and the digests of its steps."""
    env.get_wrapper_attr("begin_episode")(spec.position, spec.seed, 1)
    observation, _ = env.reset(**spec.reset_arguments)
    inference.begin(0, spec.seed)
    total, discounted, discount, once, at_end = 0.0, 0.0, 1.0, -1, -1
    scalars, steps = dict.fromkeys(section.info_keys, math.nan), [canonical_digest(observation)]
    terminated, cut = False, Truncation.NONE
    while not (terminated or cut):
        inference.observations.write(0, observation)
        action = inference.act()[0][0]
        observation, reward, terminated, truncated, info = env.step(action)
        steps.append(canonical_digest((observation, action, reward, terminated, truncated, info)))
        total, discounted = total + float(reward), discounted + discount * float(reward)
        discount *= section.gamma
        first, second = section.success_keys
        if (success := info.get(first, info.get(second))) in (0, 1):
            at_end, once = int(success), max(once, int(success))
        scalars |= {key: info[key] for key in scalars if key in info}
        if truncated:
            cut = Truncation.ENVIRONMENT
        elif not terminated and len(steps) > (section.max_episode_steps or math.inf):
            cut = Truncation.MAX_EPISODE_STEPS
    ending = bool(terminated), bool(cut), cut, once, at_end, Outcome.COMPLETED
    row = Row(spec.index, spec.seed, total, discounted, len(steps) - 1, *ending)
    return row, [*scalars.values()], tuple(steps)


_FREE: Final = ("attempts", "runner", "weights_version", "reset_seconds", "step_seconds", "inference_seconds")
"""Columns that may differ from those of the reference."""
MAX_ATTEMPTS: Final = 3
PATIENCE: Final = 200
"""Maximum number of consecutive calls without progress."""
_PLENTY_S: Final = 1.0
"""Budget that is long enough for a whole run, in seconds."""


class Played(NamedTuple):
    """Combined reports of leases that ran to the end."""

    rows: npt.NDArray[np.void]
    infos: npt.NDArray[np.float64]
    faults: tuple[Fault, ...]
    env_steps: int
    artifacts: dict[int, Mapping[str, Any]]
    notes: tuple[str, ...]
    most_live: int
    """Maximum number of live episodes at the end of a call."""


class RunnerSuite:
    """Base of tests of runners. It builds runners of the tested class, and runs the reference."""

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
    def reference(self) -> Reference:
        """Episodes of the plain loop."""
        return self.reference_of()

    def reference_of(self, **others: Any) -> Reference:
        """Run the plain loop. The arguments are those of :meth:`settings_of`."""
        settings, plan = self.settings_of(1, **others), EpisodePlan(max(self.lane_counts) + self.num_episodes)
        with contextlib.closing(construct_env(settings.environment, 0, 0, 1)) as env:
            return plain_loop(settings, env, self.subject.policy, [plan[index] for index in range(len(plan))])

    @cached_property
    def subject(self) -> BuiltPolicy:
        """Policy with which the plain loop acts."""
        return built_policy(self.settings)

    @cached_property
    def weights(self) -> WeightsSnapshot | None:
        """Weights of every runner; None for a policy without weights."""
        return self.subject.snapshot()

    def settings_of(
        self,
        lanes: int,
        fault: Mapping[str, Any] | None = None,
        *,
        wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None,
        timeout_s: float | None = None,
        **evaluation: Any,
    ) -> EvalSettings:
        """Return the settings of a runner.

        Args:
            lanes: Number of lanes.
            fault: Arguments of :class:`FaultyEnv`; None for no faults.
            wrapper: Wrapper for every environment.
            timeout_s: Time limit of an attempt, in seconds. With this argument, there is no step limit.
            evaluation: Other values of keys of ``evaluation``, such as ``observers``.
        """
        section = self.settings.environment
        env_kwargs = {"env": section.env, "env_kwargs": section.env_kwargs, **(fault or {})}
        limits = {} if timeout_s is None else {"max_episode_steps": None}
        runners = RunnersSection(runner=runner_class(self.runner), num_envs_per_runner=lanes)
        return with_values(
            self.settings.model_copy(update={"runners": runners}),
            environment={"env": _factory(wrapper), "env_kwargs": env_kwargs},
            evaluation={**limits, **evaluation},
            fault_tolerance={"episode_timeout_s": timeout_s or 3600.0},
        )

    @contextlib.contextmanager
    def make_runner(
        self, lanes: int, fault: Mapping[str, Any] | None = None, *, policy: Policy | None = None, **others: Any
    ) -> Iterator[Runner]:
        """Context with a new runner, which is stopped when the context ends.

        The arguments are those of :meth:`settings_of`, and ``policy``, which replaces the configured policy.
        """
        built = runner_class(self.runner)(self.settings_of(lanes, fault, **others), 0, policy)
        try:
            if self.weights is not None:
                built.set_weights(self.weights)
            yield built
        finally:
            built.stop()

    def runners(self, fault: Mapping[str, Any] | None = None, **others: Any) -> Iterator[tuple[int, Runner]]:
        """Yield each tested number of lanes, with a runner. The arguments are those of :meth:`settings_of`."""
        for lanes in self.lane_counts:
            with self.make_runner(lanes, fault, **others) as runner:
                yield lanes, runner

    def expect_reference(self, rows: npt.NDArray[np.void], what: str, reference: Reference | None = None) -> None:
        """Assert that rows equal the rows of the plain loop, or of another reference."""
        due = (reference or self.reference).rows[rows["index"]]
        columns = [name for name in ROW.names or () if name not in _FREE]
        for ours, row in zip(due, rows, strict=True):
            if wrong := [name for name in columns if ours[name] != row[name]]:
                raise AssertionError(
                    f"{what}: {', '.join(wrong)} of episode {row['index']} differ from the plain loop. The row is "
                    f"{row} instead of {ours}"
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
    rows, infos = (np.concatenate([getattr(report, name) for report in reports]) for name in ("rows", "infos"))
    failed = sum(fault.attempt >= MAX_ATTEMPTS for report in reports for fault in report.faults)
    indices = sorted(rows["index"].tolist())
    if len(rows) + failed != count or len(set(indices)) != len(rows):
        raise AssertionError(
            f"{count} leases must give {count - failed} different rows, but {len(reports)} calls of "
            f"run(budget_s={budget_s}) gave rows {indices}"
        )
    return Played(
        rows,
        infos,
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

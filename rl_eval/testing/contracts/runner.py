"""What every runner owes its group: exactly one row per lease, the same row in every layout, and control.

The rows are compared with those of :class:`~rl_eval.SingleAgentEvalRunner`, the loop of a textbook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, FaultToleranceSection, RunnersSection
from rl_eval.errors import EvalError
from rl_eval.protocols import EnvContext
from rl_eval.records.episode import EpisodeTable, Fault, Lease, RunReport
from rl_eval.runners import Runner, SingleAgentEvalRunner, runner_class
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing.contracts.subject import build_subject
from rl_eval.testing.faulty_env import faulty
from rl_eval.weights import WeightsSnapshot, snapshot_weights

__all__ = ["EvalRunnerContract"]

_ATTEMPTS: Final = 3
_PATIENCE: Final = 200
"""Calls in a row that may achieve nothing."""
_PLENTY_S: Final = 1.0
"""A budget that is no hurry."""
_TIMEOUT_S: Final = 0.2


class _Played(NamedTuple):
    """What a run to the end gave."""

    rows: npt.NDArray[np.void]
    faults: tuple[Fault, ...]
    env_steps: int


class EvalRunnerContract:
    """Tests of a runner class, to inherit by a pytest class of your own.

    Example:
        >>> class TestMyRunner(EvalRunnerContract):
        ...     runner = "my_pkg.runners:MyRunner"

    Environment, policy, evaluation settings and number of lanes can be replaced as well. An environment must have
    a few steps per episode; runners are built in the process of the tests.
    """

    runner: str | type[Runner]
    """The class, or what ``runners.runner`` may be."""
    config: EvalConfig | None = None
    """Where environment, policy and evaluation settings come from; by default CartPole with a recurrent policy
    that samples."""
    lane_counts: tuple[int, ...] = (1, 3, 8)
    """Numbers of lanes to try; ``(1,)`` for a runner with a single environment."""
    num_episodes: int = 10

    # ------------------------------------------------------------------ the same rows, once each

    def test_every_lease_gets_exactly_one_row(self) -> None:
        """Rows are as many as leases, with their indices and seeds, whatever the number of lanes."""
        for lanes in self.lane_counts:
            for count in (1, self.num_episodes):
                leases = _leases(count)
                with self._runner(lanes) as runner:
                    rows = _play(runner, leases).rows
                got = sorted((int(row["index"]), int(row["seed"])) for row in rows)
                _expect(got, [(lease.index, lease.seed) for lease in leases], f"(index, seed) of rows, {lanes} lanes")

    def test_rows_are_those_of_the_reference_loop(self) -> None:
        """Bit for bit, for every number of lanes and every order of leases."""
        leases = _leases(self.num_episodes)
        for lanes in self.lane_counts:
            for order in (leases, leases[::-1], leases[::2] + leases[1::2]):
                with self._runner(lanes) as runner:
                    self._expect_reference(_play(runner, order).rows, f"{lanes} lanes")

    def test_many_small_budgets_are_one_big_budget(self) -> None:
        """Interruptions leave no trace in the rows, and every call gets something done."""
        for lanes in self.lane_counts:
            with self._runner(lanes) as runner:
                rows = _play(runner, _leases(self.num_episodes), budget_s=0.0).rows
            self._expect_reference(rows, f"{lanes} lanes, budgets of 0 s")

    def test_leases_may_come_one_by_one(self) -> None:
        """A lease that joins while others are live changes none of them."""
        for lanes in self.lane_counts:
            with self._runner(lanes) as runner:
                reports = [runner.run([lease], 0.0) for lease in _leases(self.num_episodes)]
                rows = _play(runner, (), budget_s=0.0, begun=reports, count=self.num_episodes).rows
            self._expect_reference(rows, f"{lanes} lanes, one lease per call")

    def test_steps_are_counted(self) -> None:
        """Without faults, the reported environment steps are the lengths of the episodes."""
        for lanes in self.lane_counts:
            with self._runner(lanes) as runner:
                played = _play(runner, _leases(self.num_episodes), budget_s=0.0)
            _expect(played.env_steps, int(played.rows["length"].sum()), f"env_steps, {lanes} lanes")

    def test_the_numerics_key_is_the_references(self) -> None:
        """A runner that works on nothing reports nothing but its numerics key, the same for every layout."""
        with self._runner(1, runner=SingleAgentEvalRunner) as reference:
            key = reference.run().numerics
        for lanes in self.lane_counts:
            with self._runner(lanes) as runner:
                report = runner.run()
            _expect(dict(report.numerics), dict(key), f"numerics key, {lanes} lanes")
            _expect((len(report.rows), report.faults, report.progress, report.returned), (0, (), (), ()), "idle report")

    # ------------------------------------------------------------------ faults

    def test_a_fault_is_retried_with_the_same_seed(self) -> None:
        """An exception in reset or step costs an attempt, is reported with its number, and changes no outcome."""
        guilty, leases = {1, 3}, _leases(self.num_episodes)
        for lanes in self.lane_counts:
            for phase in ("reset", "step"):
                fault = {"kind": "raise", "phase": phase, "episodes": sorted(guilty), "attempts": [1, 2]}
                with self._runner(lanes, fault) as runner:
                    played = _play(runner, leases)
                what = f"{lanes} lanes, faults in {phase}"
                self._expect_reference(played.rows, what)
                attempts = {int(row["index"]): int(row["attempts"]) for row in played.rows}
                _expect(attempts, {at.index: 3 if at.index in guilty else 1 for at in leases}, f"attempts, {what}")
                told = sorted((at.index, at.seed, at.attempt, at.cause, at.phase) for at in played.faults)
                due = [(at.index, at.seed, n, "env", phase) for at in leases if at.index in guilty for n in (1, 2)]
                _expect(told, due, f"faults, {what}")

    def test_a_nan_observation_is_the_environments_fault(self) -> None:
        """The policy never sees it; the attempt is charged."""
        for lanes in self.lane_counts:
            for phase in ("reset", "step"):
                fault = {"kind": "nan_observation", "phase": phase, "episodes": [0, 2], "attempts": [1]}
                with self._runner(lanes, fault) as runner:
                    played = _play(runner, _leases(self.num_episodes))
                what = f"{lanes} lanes, NaN in {phase}"
                self._expect_reference(played.rows, what)
                told = sorted((at.index, at.attempt, at.cause) for at in played.faults)
                _expect(told, [(0, 1, "env"), (2, 1, "env")], f"faults, {what}")

    def test_a_failed_attempt_is_reported_and_frees_its_lane(self) -> None:
        """It has a fault and no row: the group decides whether the episode runs again. The others complete."""
        for lanes in self.lane_counts:
            with self._runner(lanes, {"kind": "raise", "episodes": [1]}) as runner:
                played = _play(runner, _leases(self.num_episodes))
            _expect(1 in played.rows["index"], False, f"a row of the episode that fails, {lanes} lanes")
            _expect([fault.attempt for fault in played.faults], [*range(1, _ATTEMPTS + 1)], "attempts of its faults")
            _expect(len(played.rows), self.num_episodes - 1, f"rows of the others, {lanes} lanes")
            self._expect_reference(played.rows, f"{lanes} lanes")

    def test_a_lease_may_begin_at_a_later_attempt(self) -> None:
        """Attempts that other runners were charged with count."""
        leases = [lease._replace(attempt=2) for lease in _leases(3)]
        for lanes in self.lane_counts:
            with self._runner(lanes, {"kind": "raise", "episodes": [1], "attempts": [2]}) as runner:
                played = _play(runner, leases)
            attempts = {int(row["index"]): int(row["attempts"]) for row in played.rows}
            _expect(attempts, {0: 2, 1: 3, 2: 2}, f"attempts, {lanes} lanes")
            _expect([fault.attempt for fault in played.faults], [2], f"attempts of faults, {lanes} lanes")

    def test_an_endless_episode_runs_into_its_timeout(self) -> None:
        """``episode_timeout_s`` ends it, between steps."""
        for lanes in self.lane_counts:
            with self._runner(lanes, wrapper=_Endless, timeout_s=_TIMEOUT_S) as runner:
                played = _play(runner, _leases(2), budget_s=_TIMEOUT_S / 2, calls=20)
            _expect(len(played.rows), 0, f"rows, {lanes} lanes")
            _expect({fault.cause for fault in played.faults}, {"timeout"}, f"causes, {lanes} lanes")

    # ------------------------------------------------------------------ control

    def test_a_spent_budget_ends_the_call(self) -> None:
        """Without time, a call takes at most one step per lane and leaves the rest for the next."""
        for lanes in self.lane_counts:
            leases = _leases(lanes + self.num_episodes)
            with self._runner(lanes) as runner:
                reports = [runner.run(leases, 0.0)]
                while not reports[-1].env_steps and len(reports) < _PATIENCE:
                    reports.append(runner.run((), 0.0))
            report = reports[-1]
            if not 0 < report.env_steps <= lanes:
                raise AssertionError(
                    f"run() with budget_s=0 took {report.env_steps} steps in {lanes} lanes, call {len(reports)}: check "
                    "the budget after every reset and step, return, and go on with unfinished lanes in the next call"
                )

    def test_reclaim_gives_back_only_what_has_not_started(self) -> None:
        """Live episodes go on; what was given back has no row, and can be leased again."""
        for lanes in self.lane_counts:
            leases = _leases(lanes + self.num_episodes)
            with self._runner(lanes) as runner:
                first = runner.run(leases, 0.0)
                second = runner.run((), 0.0, reclaim=[lease.index for lease in leases])
                started = {int(index) for index in first.rows["index"]} | {at.index for at in first.progress}
                given_back = [lease for lease in leases if lease.index not in started]
                _expect(sorted(second.returned), [at.index for at in given_back], f"given back, {lanes} lanes")
                rest = _play(runner, (), begun=[first, second], count=len(started))
                again = _play(runner, given_back)
            self._expect_reference(np.concatenate([rest.rows, again.rows]), f"{lanes} lanes, after reclaim")

    def test_abort_gives_everything_back(self) -> None:
        """Live episodes are dropped too, and leave nothing behind for those that follow."""
        for lanes in self.lane_counts:
            leases = _leases(lanes + self.num_episodes)
            with self._runner(lanes) as runner:
                reports = [runner.run(leases, 0.0), *(runner.run((), 0.0) for _ in range(3 * lanes))]
                finished = {int(index) for report in reports for index in report.rows["index"]}
                unfinished = [lease for lease in leases if lease.index not in finished]
                report = runner.run((), 0.0, abort=True)
                _expect(sorted(report.returned), [at.index for at in unfinished], f"given back, {lanes} lanes")
                _expect((report.progress, len(report.rows)), ((), 0), f"lanes and rows after abort, {lanes} lanes")
                rows = _play(runner, unfinished).rows
            self._expect_reference(rows, f"{lanes} lanes, after abort")

    def test_leases_that_come_with_an_abort_are_run(self) -> None:
        """What was there before is dropped first."""
        leases = _leases(self.num_episodes)
        for lanes in self.lane_counts:
            with self._runner(lanes) as runner:
                runner.run(leases, 0.0)
                report = runner.run(leases[:2], 0.0, abort=True)
                rows = _play(runner, (), begun=[report], count=2).rows
            _expect(sorted(rows["index"].tolist()), [0, 1], f"rows after abort, {lanes} lanes")

    def test_weights_are_refused_while_an_episode_is_live(self) -> None:
        """One evaluation never sees two versions; between evaluations, rows carry the new one."""
        for lanes in self.lane_counts:
            with self._runner(lanes, wrapper=_Endless) as runner:
                _expect(bool(runner.run(_leases(2), 0.0).progress), True, "an episode is live after the first call")
                weights = self._weights or _some_weights()
                try:
                    runner.set_weights(weights)
                except EvalError as error:
                    _expect(type(error), EvalError, "error of set_weights() while an episode is live")
                else:
                    raise AssertionError("set_weights() changed the weights while an episode was live")

    def test_rows_carry_the_version_of_the_weights(self) -> None:
        """The version that was set before the first lease."""
        with self._runner(self.lane_counts[-1]) as runner:
            if self._weights is not None:
                _expect(runner.set_weights(dataclasses.replace(self._weights, version=7)), 7, "set_weights()")
                rows = _play(runner, _leases(3)).rows
                _expect(set(rows["weights_version"].tolist()), {7}, "versions of the rows")
                _expect(runner.weights_version, 7, "weights_version")

    def test_stop_closes_every_environment(self) -> None:
        """Those that faults cost, and those of live episodes."""
        for lanes in self.lane_counts:
            open_envs: list[_Counted] = []
            fault = {"kind": "raise", "episodes": [0, 2], "attempts": [1]}
            with self._runner(lanes, fault, wrapper=functools.partial(_Counted, open_envs)) as runner:
                _play(runner, _leases(3))
                runner.run(_leases(lanes), 0.0)
                _expect(0 < len(open_envs) <= lanes, True, f"1 to {lanes} environments are open during a run")
            _expect(len(open_envs), 0, f"environments open after stop(), {lanes} lanes")

    # ------------------------------------------------------------------ what the tests are made of

    @cached_property
    def _settings(self) -> EvalSettings:
        if self.config is not None:
            return self.config.build()
        policy = EvalConfig().policy("rl_eval.testing:make_gru", deterministic=False)
        return policy.environment("CartPole-v1").build()

    @cached_property
    def _reference(self) -> EpisodeTable:
        leases = _leases(max(self.lane_counts) + self.num_episodes)
        table = EpisodeTable(len(leases))
        with self._runner(1, runner=SingleAgentEvalRunner) as runner:
            table.fill(_play(runner, leases).rows)
        return table

    @cached_property
    def _weights(self) -> WeightsSnapshot | None:
        return build_subject(self._settings).snapshot()

    @contextlib.contextmanager
    def _runner(
        self,
        lanes: int,
        fault: Mapping[str, Any] | None = None,
        *,
        runner: str | type[Runner] | None = None,
        wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Runner]:
        """Build a runner, and stop it in the end.

        Args:
            lanes: Number of lanes.
            fault: Arguments of :class:`FaultyEnv`.
            runner: The class; by default the one under test.
            wrapper: Put around every environment.
            timeout_s: Limit of an attempt, instead of the limit of steps.
        """
        selected = runner_class(self.runner if runner is None else runner)
        section = self._settings.environment
        env_kwargs = {"env": section.env, "env_kwargs": section.env_kwargs, **(fault or {})}
        evaluation, tolerance = self._settings.evaluation, FaultToleranceSection()
        if timeout_s is not None:
            evaluation = evaluation.model_copy(update={"max_episode_steps": None})
            tolerance = FaultToleranceSection(episode_timeout_s=timeout_s)
        settings = self._settings.model_copy(
            update={
                "environment": section.model_copy(update={"env": _factory(wrapper), "env_kwargs": env_kwargs}),
                "runners": RunnersSection(runner=selected, num_envs_per_runner=lanes),
                "evaluation": evaluation,
                "fault_tolerance": tolerance,
            }
        )
        built = selected(settings, 0)
        try:
            if self._weights is not None:
                built.set_weights(self._weights)
            yield built
        finally:
            built.stop()

    def _expect_reference(self, rows: npt.NDArray[np.void], what: str) -> None:
        wrong = self._reference.mismatches(rows)
        if wrong:
            row = rows[rows["index"] == wrong[0]][0]
            raise AssertionError(
                f"{what}: rows {wrong} differ from those of the reference loop; episode {wrong[0]} is {row}, and "
                f"should be {self._reference.rows[wrong[0]]}, in index, seed, return, length, terminated, truncated "
                "and success"
            )


class _Endless(gym.Wrapper[Any, Any, Any, Any]):
    """Stands still after the reset."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._start = self.env.reset(**kwargs)
        return self._start

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._start[0], 0.0, False, False, {}


class _Counted(gym.Wrapper[Any, Any, Any, Any]):
    """Is in a list until it is closed."""

    def __init__(self, open_envs: list[_Counted], env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._open_envs = open_envs
        open_envs.append(self)

    def close(self) -> None:
        self._open_envs[:] = [env for env in self._open_envs if env is not self]
        super().close()


def _factory(wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None) -> Callable[[EnvContext], Any]:
    return faulty if wrapper is None else lambda context: wrapper(faulty(context))


def _leases(count: int) -> list[Lease]:
    return [Lease(index, int(seed), 1, 0) for index, seed in enumerate(EpisodePlan(count).seeds)]


def _some_weights() -> WeightsSnapshot:
    import torch

    return snapshot_weights({"weight": torch.zeros(1)}, 1)


def _play(
    runner: Runner,
    leases: Sequence[Lease],
    budget_s: float = _PLENTY_S,
    *,
    begun: Sequence[RunReport] = (),
    count: int | None = None,
    calls: int = 100_000,
) -> _Played:
    """Run to the end, and once more; what fails runs again as long as it has attempts, and has no row then.

    Args:
        runner: Runs.
        leases: Are given with the first call.
        budget_s: Of every call.
        begun: Reports of earlier calls, to be counted in.
        count: Number of episodes that must end; by default as many as leases.
        calls: At most so many.
    """
    count = len(leases) if count is None else count
    reports = [*begun, runner.run(leases, budget_s)]
    idle = failed = 0
    while sum(len(report.rows) for report in reports) + failed < count and idle < _PATIENCE and len(reports) < calls:
        faults = reports[-1].faults
        again = [Lease(at.index, at.seed, at.attempt + 1, 0) for at in faults if at.attempt < _ATTEMPTS]
        failed += len(faults) - len(again)
        reports.append(runner.run(again, budget_s))
        idle = 0 if reports[-1].env_steps or len(reports[-1].rows) or reports[-1].faults else idle + 1
    reports.append(runner.run((), 0.0))
    rows = np.concatenate([report.rows for report in reports])
    failed = sum(fault.attempt >= _ATTEMPTS for report in reports for fault in report.faults)
    indices = sorted(rows["index"].tolist())
    if len(rows) + failed != count or len(set(indices)) != len(rows):
        raise AssertionError(
            f"{count} leases must give {count - failed} rows, once each, but after {len(reports)} calls of "
            f"run(budget_s={budget_s}) there were rows {indices}"
        )
    faults = tuple(fault for report in reports for fault in report.faults)
    return _Played(rows, faults, sum(report.env_steps for report in reports))


def _expect(got: Any, due: Any, what: str) -> None:
    if got != due:
        raise AssertionError(f"{what}: {got!r}, but should be {due!r}")

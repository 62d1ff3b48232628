"""Contract of a runner: one row per lease, equal rows for any number of lanes, control calls, and calls to observers.

The reference is a plain loop without a runner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np

from rl_eval.config.references import named_factories
from rl_eval.errors import EvalError
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.records.plain import canonical_digest
from rl_eval.runners import runner_class
from rl_eval.testing.contracts.suite import (
    MAX_ATTEMPTS,
    PATIENCE,
    RunnerSuite,
    built_policy,
    expect,
    leases_of,
    play,
)
from rl_eval.weights import snapshot_weights


class _Seen(NamedTuple):
    """Artifact of :class:`_Diary` for one episode."""

    episode: int
    seed: int
    attempt: int
    steps: tuple[bytes, ...]
    """Digest of the first observation, and a digest of the action and the results of each step."""


class _Diary:
    """Observer that records digests of the values that it gets."""

    def __init__(self, env: Any) -> None:
        self.steps: list[bytes] = [b"the start was not shown"]

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        self.start = (spec.index, spec.seed, attempt)
        self.steps = [canonical_digest(observation)]

    def on_step(self, observation: Any, action: Any, *results: Any) -> None:
        # Without the policy's additional outputs, which depend on the batch by rounding.
        self.steps.append(canonical_digest((observation, action, *results[:-1])))

    def on_episode_end(self, record: EpisodeRecord) -> _Seen:
        expect((record.index, record.seed, record.attempts), self.start, "record and start of an observed episode")
        return _Seen(*self.start, tuple(self.steps))


_FEW: Final = 4
"""Number of episodes of a test."""
_DIARY: Final = _Diary.__qualname__
_METHODS: Final = ("on_episode_start", "on_step", "on_episode_end")


def _fail(*_: Any) -> Any:
    raise OSError("disk full")


def _raising(where: str) -> Callable[[Any], Any]:
    """Return a factory of an observer that raises an error in ``where``, which is ``factory`` or a method."""

    def broken(env: Any) -> Any:
        if where == "factory":
            _fail()
        observer: Any = _Diary(env)
        setattr(observer, where, _fail)
        return observer

    return broken


class ObserverContract(RunnerSuite):
    """Tests of the calls to observers; a part of :class:`EvalRunnerContract`."""

    def test_an_observer_sees_every_step_of_each_episode_in_order(self) -> None:
        """Artifacts are bitwise equal to those of the reference loop."""
        for lanes, runner in self.runners(observers=(_Diary,)):
            played = play(runner, leases_of(_FEW), budget_s=0.0)
            self._expect_seen(played.artifacts, {}, f"{lanes} slots")
            self.expect_reference(played.rows, f"{lanes} slots, observed")
            expect(played.notes, (), f"notes, {lanes} slots")

    def test_an_observer_sees_a_new_attempt_from_its_start(self) -> None:
        """Artifacts come from the completed attempt. Failed attempts do not call ``on_episode_end``."""
        fault = {"kind": "raise", "step": 2, "episodes": [1, 3], "attempts": [1, 2]}
        for lanes, runner in self.runners(fault, observers=(_Diary,)):
            self._expect_seen(play(runner, leases_of(_FEW)).artifacts, {1: 3, 3: 3}, f"{lanes} slots, with faults")

    def test_what_an_observer_raises_is_its_own(self) -> None:
        """A note names the observer that raised an error.

        The error causes no fault. Rows and the artifacts of other observers do not change.
        """
        for where in ("factory", *_METHODS):
            broken = _raising(where)
            (name,) = named_factories("evaluation.observers", [broken])
            for lanes, runner in self.runners(observers=(broken, _Diary)):
                played, what = play(runner, leases_of(_FEW)), f"{lanes} slots, an observer raises in {where}"
                expect(played.faults, (), f"faults, {what}")
                self.expect_reference(played.rows, what)
                self._expect_seen(played.artifacts, {}, what)
                if not any(name in note and "disk full" in note for note in played.notes):
                    raise AssertionError(
                        f"{what}: no note has the observer's name {name!r} and the error; the notes are {played.notes}"
                    )

    def test_an_episode_that_runs_to_be_compared_is_not_observed(self) -> None:
        """Leases with ``again`` belong to the determinism check, so their episodes call no observers.

        They run in new environments (``fresh``) or in used ones.
        """
        for fresh in (True, False):
            leases = [lease.with_how(again=True, fresh=fresh) for lease in leases_of(3)]
            for lanes, runner in self.runners(observers=(_Diary,)):
                played, what = play(runner, leases), f"{lanes} slots, fresh={fresh}"
                self.expect_reference(played.rows, what)
                expect(played.artifacts, {}, f"artifacts, {what}")

    def _expect_seen(self, artifacts: dict[int, Any], attempts: dict[int, int], what: str) -> None:
        """Assert that the artifact of :class:`_Diary` for each episode equals that of the reference loop.

        Args:
            artifacts: Artifacts by index and observer.
            attempts: Number of the completed attempt, by index; 1 by default.
            what: Description of the run for the message.
        """
        kept = [(index, name) for index in sorted(artifacts) for name in artifacts[index]]
        expect(kept, [(index, _DIARY) for index in range(_FEW)], f"episodes and observers of artifacts, {what}")
        for lease, due in zip(leases_of(_FEW), self.reference.steps, strict=False):
            seen, start = artifacts[lease.index][_DIARY], (lease.index, lease.seed, attempts.get(lease.index, 1))
            expect(seen[:3], start, f"index, seed and attempt of an artifact, {what}")
            if seen.steps != due:
                raise AssertionError(
                    f"{what}: the {len(seen.steps) - 1} steps that the observer of episode {lease.index} got differ "
                    f"from the {len(due) - 1} steps of the plain loop. Call the observer once after the reset and "
                    "once after each step, in order, with the values of the environment."
                )


_TIMEOUT_S: Final = 0.1


class EvalRunnerContract(ObserverContract):
    """Tests of a runner class, for a pytest class to inherit.

    Example:
        >>> class TestMyRunner(EvalRunnerContract):
        ...     runner = "my_pkg.runners:MyRunner"

    You can also replace the environment, the policy, the evaluation settings and the numbers of lanes. An episode of
    the environment must have at least a few steps. Runners are built in the process of the tests.
    """

    # ------------------------------------------------------------------ rows

    def test_every_lease_gets_exactly_one_row(self) -> None:
        """Rows have the indices and seeds of the leases, for any number of lanes."""
        for count in (1, self.num_episodes):
            leases = leases_of(count)
            for lanes, runner in self.runners():
                got = sorted((int(row["index"]), int(row["seed"])) for row in play(runner, leases).rows)
                expect(got, [(lease.index, lease.seed) for lease in leases], f"(index, seed) of rows, {lanes} slots")

    def test_rows_are_those_of_the_reference_loop(self) -> None:
        """Rows are bitwise equal for every number of lanes and every order of leases."""
        leases = leases_of(self.num_episodes)
        for order in (leases, leases[::-1], leases[::2] + leases[1::2]):
            for lanes, runner in self.runners():
                self.expect_reference(play(runner, order).rows, f"{lanes} slots")

    def test_any_number_of_slots_gives_the_same_rows(self) -> None:
        """One of the tested numbers of slots is greater than the number of episodes, if ``max_lanes`` allows this.

        Each call makes at most one step per slot. There are never more live episodes than slots.
        """
        facts = runner_class(self.runner).facts
        default, limit = facts.default_lanes, facts.max_lanes
        most = self.num_episodes + 3 if limit is None else min(limit, self.num_episodes + 3)
        if not 1 <= default <= (limit or default):
            raise AssertionError(f"default_lanes is {default}, but must be from 1 to {limit}")
        for slots in sorted({1, (most + 1) // 2, most, *self.lane_counts}):
            with self.make_runner(slots) as runner:
                played = play(runner, leases_of(self.num_episodes), budget_s=0.0)
            self.expect_reference(played.rows, f"{slots} slots, budgets of 0 s")
            expect(played.most_live <= slots, True, f"at most {slots} episodes are live at once")
            expect(played.env_steps, int(played.rows["length"].sum()), f"env_steps without faults, {slots} slots")

    def test_leases_may_come_one_by_one(self) -> None:
        """Rows do not change if each call passes only one lease, while other episodes are live."""
        for lanes, runner in self.runners():
            reports = [runner.run([lease], 0.0) for lease in leases_of(self.num_episodes)]
            rows = play(runner, (), budget_s=0.0, begun=reports, count=self.num_episodes).rows
            self.expect_reference(rows, f"{lanes} slots, one lease per call")
            names = type(runner).columns(getattr(runner, "settings", self.settings))
            for report in reports:
                expect(report.infos.shape, (len(report.rows), len(names)), f"shape of infos, whose columns are {names}")

    def test_sums_and_infos_are_those_of_the_reference_loop(self) -> None:
        """Rows have the discounted return, success, info scalars and limit of their own episode."""
        others: dict[str, Any] = {"gamma": 0.9, "info_keys": (_TOLD,), "success_key": None, "metrics": {}}
        others |= {"max_episode_steps": _LIMIT, "wrapper": _Telling}
        reference = self.reference_of(**others)
        for lanes, runner in self.runners(**others):
            played, what = play(runner, leases_of(self.num_episodes)), f"{lanes} slots, with infos"
            self.expect_reference(played.rows, what, reference)
            column = [*type(runner).columns(self.settings_of(lanes, **others))].index(_TOLD)
            got, due = played.infos[:, column], reference.infos[played.rows["index"], 0]
            expect(str(got), str(due), f"info scalars, {what}")

    def test_the_numerics_key_is_the_references(self) -> None:
        """A runner without leases reports only its numerics key.

        The key equals that of the plain loop, for any number of lanes.
        """
        key = self.reference.numerics
        for lanes, runner in self.runners():
            report = runner.run()
            expect(dict(report.numerics), dict(key), f"numerics key, {lanes} slots")
            found = len(report.rows), report.faults, len(report.progress), report.returned
            expect(found, (0, (), 0, ()), "idle report")

    # ------------------------------------------------------------------ faults

    def test_a_fault_is_retried_with_the_same_seed(self) -> None:
        """An exception in reset or step uses up an attempt, and its environment is not used again.

        The fault has the number of the attempt, and no outcome changes.
        """
        faulty_ones, leases = {1, 3}, leases_of(self.num_episodes)
        for phase in ("reset", "step"):
            fault = {"kind": "raise", "phase": phase, "episodes": sorted(faulty_ones), "attempts": [1, 2]}
            for lanes, runner in self.runners(fault, wrapper=_Fragile):
                played, what = play(runner, leases), f"{lanes} slots, faults in {phase}"
                self.expect_reference(played.rows, what)
                attempts = {int(row["index"]): int(row["attempts"]) for row in played.rows}
                expect(attempts, {at.index: 3 if at.index in faulty_ones else 1 for at in leases}, f"attempts, {what}")
                reported = sorted((at.index, at.seed, at.attempt, at.cause, at.phase) for at in played.faults)
                due = [(at.index, at.seed, n, "env", phase) for at in leases if at.index in faulty_ones for n in (1, 2)]
                expect(reported, due, f"faults, {what}")

    def test_a_nan_observation_is_the_environments_fault(self) -> None:
        """The policy never gets an observation with NaN, and the fault uses up an attempt."""
        for phase in ("reset", "step"):
            for lanes, runner in self.runners(
                {"kind": "nan_observation", "phase": phase, "episodes": [0, 2], "attempts": [1]}
            ):
                played, what = play(runner, leases_of(self.num_episodes)), f"{lanes} slots, NaN in {phase}"
                self.expect_reference(played.rows, what)
                reported = sorted((at.index, at.attempt, at.cause) for at in played.faults)
                expect(reported, [(0, 1, "env"), (2, 1, "env")], f"faults, {what}")

    def test_an_error_of_the_policy_is_its_own_fault(self) -> None:
        """An exception in ``act`` uses up an attempt. The fault's cause is the policy."""
        for lanes in self.lane_counts:
            policy: Any = built_policy(self.settings).policy
            with self.make_runner(lanes, policy=policy) as runner:
                runner.run()  # The probe.
                act, policy.act = policy.act, _fail
                faults = {(fault.cause, fault.phase, fault.step) for fault in play(runner, leases_of(_FEW)).faults}
                expect(faults, {("policy", "act", 0)}, f"cause, phase and step of faults, {lanes} slots")
                policy.act = act
                self.expect_reference(play(runner, leases_of(_FEW)).rows, f"{lanes} slots, after faults of the policy")

    def test_a_failed_attempt_is_reported_and_frees_its_lane(self) -> None:
        """A failed attempt has a fault and no row, because the group decides on another attempt.

        Other episodes complete.
        """
        for lanes, runner in self.runners({"kind": "raise", "episodes": [1]}):
            played = play(runner, leases_of(self.num_episodes))
            expect(1 in played.rows["index"], False, f"a row of the episode that fails, {lanes} slots")
            expect([fault.attempt for fault in played.faults], [*range(1, MAX_ATTEMPTS + 1)], "attempts of the faults")
            expect(len(played.rows), self.num_episodes - 1, f"rows of the other episodes, {lanes} slots")
            self.expect_reference(played.rows, f"{lanes} slots")

    def test_a_lease_may_begin_at_a_later_attempt(self) -> None:
        """The row has the number of the lease's attempt, because earlier attempts may have run on other runners."""
        leases = [lease._replace(attempt=2) for lease in leases_of(3)]
        for lanes, runner in self.runners({"kind": "raise", "episodes": [1], "attempts": [2]}):
            played = play(runner, leases)
            attempts = {int(row["index"]): int(row["attempts"]) for row in played.rows}
            expect(attempts, {0: 2, 1: 3, 2: 2}, f"attempts, {lanes} slots")
            expect([fault.attempt for fault in played.faults], [2], f"attempt of each fault, {lanes} slots")

    def test_an_endless_episode_runs_into_its_timeout(self) -> None:
        """``episode_timeout_s`` ends the episode between two steps."""
        for lanes, runner in self.runners(wrapper=_Endless, timeout_s=_TIMEOUT_S):
            played = play(runner, leases_of(lanes), budget_s=_TIMEOUT_S / 2, calls=20 * lanes)
            expect(len(played.rows), 0, f"rows, {lanes} slots")
            expect({fault.cause for fault in played.faults}, {"timeout"}, f"causes, {lanes} slots")

    # ------------------------------------------------------------------ control

    def test_a_spent_budget_ends_the_call(self) -> None:
        """With a budget of 0 s, a call takes at most one step per lane."""
        for lanes, runner in self.runners():
            reports = [runner.run(leases_of(lanes + self.num_episodes), 0.0)]
            while not reports[-1].env_steps and len(reports) < PATIENCE:
                reports.append(runner.run((), 0.0))
            if not 0 < (steps := reports[-1].env_steps) <= lanes:
                raise AssertionError(
                    f"call {len(reports)} of run() with budget_s=0 took {steps} steps in {lanes} slots. Check the "
                    "budget after every reset and step, return, and continue unfinished episodes in the next call."
                )

    def test_reclaim_gives_back_only_what_has_not_started(self) -> None:
        """With ``reclaim``, live episodes continue. Returned leases have no row and can run later."""
        for lanes, runner in self.runners():
            leases = leases_of(lanes + self.num_episodes)
            first = runner.run(leases, 0.0)
            second = runner.run((), 0.0, reclaim=[lease.index for lease in leases])
            started = {int(index) for index in first.rows["index"]} | set(first.progress["index"].tolist())
            given_back = [lease for lease in leases if lease.index not in started]
            expect(sorted(second.returned), [at.index for at in given_back], f"returned leases, {lanes} slots")
            rest = play(runner, (), begun=[first, second], count=len(started))
            again = play(runner, given_back)
            self.expect_reference(np.concatenate([rest.rows, again.rows]), f"{lanes} slots, after reclaim")

    def test_abort_gives_everything_back(self) -> None:
        """With ``abort``, live episodes are dropped, and unfinished leases are returned.

        Steps of dropped episodes count, and later episodes do not change.
        """
        for lanes, runner in self.runners():
            leases = leases_of(lanes + self.num_episodes)
            reports = [runner.run(leases, 0.0), *(runner.run((), 0.0) for _ in range(3 * lanes))]
            finished = {int(index) for report in reports for index in report.rows["index"]}
            unfinished = [lease for lease in leases if lease.index not in finished]
            report = runner.run((), 0.0, abort=True)
            expect(sorted(report.returned), [at.index for at in unfinished], f"returned leases, {lanes} slots")
            expect((len(report.progress), len(report.rows)), (0, 0), f"live slots and rows after abort, {lanes} slots")
            taken = [sum(int(at.rows["length"].sum()) for at in reports), int(reports[-1].progress["step"].sum())]
            expect(sum(at.env_steps for at in (*reports, report)), sum(taken), f"env_steps after abort, {lanes} slots")
            self.expect_reference(play(runner, unfinished).rows, f"{lanes} slots, after abort")

    def test_leases_that_come_with_an_abort_are_run(self) -> None:
        """The runner first drops earlier leases and episodes, and then runs the new leases."""
        leases = leases_of(self.num_episodes)
        for lanes, runner in self.runners():
            runner.run(leases, 0.0)
            report = runner.run(leases[:2], 0.0, abort=True)
            rows = play(runner, (), begun=[report], count=2).rows
            expect(sorted(rows["index"].tolist()), [0, 1], f"rows after abort, {lanes} slots")

    def test_weights_are_refused_while_an_episode_is_live(self) -> None:
        """``set_weights`` raises an error, because an evaluation must not use two versions of the weights."""
        for _, runner in self.runners(wrapper=_Endless):
            expect(len(runner.run(leases_of(2), 0.0).progress) > 0, True, "an episode is live after the first call")
            error: Exception | None = None
            try:
                runner.set_weights(self.weights or snapshot_weights({}, 1))
            except EvalError as raised:
                error = raised
            expect(type(error), EvalError, "error of set_weights() while an episode is live")

    def test_rows_carry_the_version_of_the_weights(self) -> None:
        """Rows have the version that was set before the first lease."""
        for _, runner in self.runners():
            if self.weights is None:
                break
            expect(runner.set_weights(dataclasses.replace(self.weights, version=7)), 7, "set_weights()")
            rows = play(runner, leases_of(3)).rows
            expect(set(rows["weights_version"].tolist()), {7}, "versions of the rows")
            expect(runner.weights_version, 7, "weights_version")

    def test_stop_closes_every_environment(self) -> None:
        """Environments that had a fault and environments of live episodes are closed, too."""
        open_envs: list[_Counted] = []
        fault = {"kind": "raise", "episodes": [0, 2], "attempts": [1]}
        for lanes, runner in self.runners(fault, wrapper=functools.partial(_Counted, open_envs)):
            play(runner, leases_of(3))
            runner.run(leases_of(lanes), 0.0)
            expect(0 < len(open_envs) <= lanes, True, f"1 to {lanes} environments are open during a run")
        expect(len(open_envs), 0, "environments open after stop()")


_LIMIT: Final = 5
_TOLD: Final = "told"


class _Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper whose seeds decide whether steps report infos, and whether step ``_LIMIT`` truncates the episode."""

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._seed, self._steps = int(seed or 0), 0
        return self.env.reset(seed=seed, **kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._seed & 1 and self._steps % 4:
            info = {"is_success": self._steps % 3 == 0, _TOLD: self._steps}
        return observation, reward, terminated, truncated or bool(self._seed & 2 and self._steps == _LIMIT), info


class _Fragile(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that raises again after an error."""

    _broken = False

    def reset(self, **kwargs: Any) -> Any:
        return self._call(self.env.reset, **kwargs)

    def step(self, action: Any) -> Any:
        return self._call(self.env.step, action)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._broken:
            raise RuntimeError("an environment is used again after an error")
        self._broken = True
        result = function(*args, **kwargs)
        self._broken = False
        return result


class _Endless(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper with endless episodes: each step returns the first observation."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._start = self.env.reset(**kwargs)
        return self._start

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._start[0], 0.0, False, False, {}


class _Counted(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that is a member of a list until it is closed."""

    def __init__(self, open_envs: list[_Counted], env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._open_envs = open_envs
        open_envs.append(self)

    def close(self) -> None:
        self._open_envs[:] = [env for env in self._open_envs if env is not self]
        super().close()

"""How leases become records, through every fault and within every budget.

What every runner owes (one row per lease, bit by bit that of the reference in every layout; reclaim, abort, weights) is
tested by ``rl_eval.testing.EvalRunnerContract``, in ``tests/contracts/test_runner_contract.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from torch import nn

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError, EnvError, EvalError, PolicyError, WeightsError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.policies.mlp import make_mlp
from rl_eval.protocols import EnvContext
from rl_eval.records.episode import EpisodeSpec, EpisodeTable, Lease, RunReport, failed_row
from rl_eval.runners import (
    EvalRunner,
    SingleAgentEvalRunner,
    VectorEvalRunner,
    base,
    core,
    lane,
    runner_class,
    vector,
)
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing import impure
from rl_eval.weights import load_weights_file, snapshot_weights
from tests.refused import refused

Array = npt.NDArray[Any]

LAYOUTS = [("single_agent", 1), ("vector", 1), ("vector", 3), ("vector", 8)]
QUICK = [("single_agent", 1), ("vector", 3)]
layouts = pytest.mark.parametrize(
    ("kind", "lanes"),
    [layout if layout in QUICK else pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS],
)
kinds = pytest.mark.parametrize(("kind", "lanes"), QUICK)

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights"
EPISODES = 20


# ------------------------------------------------------------------------------ a small world


class Walk(gym.Env[Any, Any]):
    """Episodes of 2 to 24 steps; every number in them depends on the seed and on the actions so far.

    Args:
        action_space: Of any kind.
        length: Steps of every episode, instead.
    """

    def __init__(self, action_space: gym.Space[Any] | None = None, length: int | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(3)
        self.fixed = length
        self.steps = self.length = 0
        self.position = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.position = 0, 0.0
        self.length = self.fixed or int(self.np_random.integers(2, 25))
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        self.position += float(self.np_random.normal()) * (float(np.ravel(action)[0]) - 1)
        over = self.steps >= self.length
        kind = self.length % 3
        info = {"speed": self.position / self.steps, "is_success": self.position > 0}
        return self.observation(), self.position, over and kind != 1, over and kind != 0, info

    def observation(self) -> Array:
        return np.array([self.steps, self.position, self.np_random.normal()], np.float32)


def walk(context: EnvContext) -> Walk:
    return Walk()


def steer(observations: Array) -> Array:
    """Choose actions for Walk, from its random part; what an environment spoiled is in no row."""
    assert not np.isnan(observations).any()
    return (np.abs(observations[:, 2]) * 7).astype(np.int64) % 3


class Endless(Walk):
    """Never ends, except for seeds that it is told."""

    def __init__(self, short: Sequence[int] = ()) -> None:
        super().__init__(length=10**9)
        self.short = set(short)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed)
        self.length = 2 if seed in self.short else self.length
        return result


class Ticking(gym.Wrapper[Any, Any, Any, Any]):
    """Moves a clock by so many seconds per step and reset."""

    def __init__(self, env: gym.Env[Any, Any], clock: list[float], step: float = 0.01, reset: float = 0.0) -> None:
        super().__init__(env)
        self.clock = clock
        self.seconds = step, reset

    def reset(self, **kwargs: Any) -> Any:
        self.clock[0] += self.seconds[1]
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.clock[0] += self.seconds[0]
        return super().step(action)


Trouble = Callable[[int, int], "tuple[str, int] | None"]


class Troubled(gym.Wrapper[Any, Any, Any, Any]):
    """Does something wrong at a step that depends on (episode, attempt); step 0 is the reset."""

    def __init__(self, env: gym.Env[Any, Any], trouble: Trouble, log: list[Any] | None = None) -> None:
        super().__init__(env)
        self.trouble = trouble
        self.log = [] if log is None else log
        self.log.append(("construct", id(self)))
        self.due: tuple[str, int] | None = None
        self.steps = 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.due = self.trouble(index, attempt)
        self.log.append(("begin", index, seed, attempt))

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        observation, info = self.env.reset(**kwargs)
        self.log.append(("reset", id(self), kwargs.get("seed")))
        if self.due is not None and self.due[1] == 0:
            return self.spoil(observation, 0.0, False, False, info)[:2]
        return observation, info

    def step(self, action: Any) -> Any:
        self.steps += 1
        result = self.env.step(action)
        if self.due is not None and self.due[1] == self.steps:
            return self.spoil(*result)
        return result

    def spoil(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
        what = self.due[0] if self.due else ""
        if what == "raise":
            raise ZeroDivisionError(f"step {self.steps} went wrong")
        if what == "exit":
            raise SystemExit(3)
        if what == "interrupt":
            raise KeyboardInterrupt
        changes = {
            "nan observation": np.full_like(observation, np.nan),
            "long observation": np.zeros(9),
            "no observation": None,
        }
        return changes[what], reward, terminated, truncated, info

    def close(self) -> None:
        self.log.append(("close", id(self)))
        super().close()


def troubled(trouble: Trouble, log: list[Any] | None = None) -> Callable[[EnvContext], gym.Env[Any, Any]]:
    return lambda context: Troubled(Walk(), trouble, log)


def calm(index: int, attempt: int) -> None:
    return None


def raising(step: int = 1, every: int = 1) -> Trouble:
    """Each so manieth episode raises at a step of its first attempt."""
    return lambda index, attempt: ("raise", step) if index % every == 0 and attempt == 1 else None


def make(
    env: Any = walk, policy: Any = steer, kind: Any = "vector", lanes: int = 1, index: int = 0, **changes: Any
) -> EvalRunner:
    """Build a runner; changes are dotted keys with ``__`` for the dot."""
    config = EvalConfig().environment(env).policy(policy).runners(runner=kind, num_envs_per_runner=lanes)
    for key, value in changes.items():
        config.set(key.replace("__", "."), value)
    settings = config.build()
    return runner_class(settings.runners.runner)(settings, index, None)


def leases_of(count: int, seed: int = 0, runner: int = 0) -> list[Lease]:
    return [Lease(spec, 1, runner) for spec in EpisodePlan(count, seed)]


def play(
    runner: EvalRunner,
    count: int = EPISODES,
    *,
    seed: int = 0,
    budget_s: float = 10.0,
    calls: int = 1000,
    abort: bool = False,
    reports: list[RunReport] | None = None,
) -> EpisodeTable:
    """Run episodes to their end, in at most so many calls; each index must be recorded exactly once.

    What has failed is given again, as a group would to its only runner. Reports are put into a list as they come.
    """
    most = runner.settings.fault_tolerance.max_attempts_per_episode
    table = EpisodeTable(count, runner.settings.evaluation.info_keys)
    reports = [] if reports is None else reports
    recorded: list[int] = []
    leases = leases_of(count, seed)
    for _ in range(calls):
        report = runner.run(leases, budget_s, (), abort and not reports)
        reports.append(report)
        table.fill(report.rows, report.infos)
        recorded += report.rows["index"].tolist()
        leases = []
        for fault in report.faults:
            table.add_fault(fault)
            if fault.attempt < most:
                leases.append(Lease(EpisodeSpec(fault.index, fault.seed), fault.attempt + 1))
            else:
                recorded.append(fault.index)
                table.fill(failed_row(fault.index, fault.seed, fault.attempt, 0))
        if len(recorded) >= count:
            break
    assert sorted(recorded) == list(range(count))
    return table


def undisturbed(**changes: Any) -> str:
    return play(make(**changes)).fingerprint()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replace the runners' clock by one that the test moves."""
    now = [1000.0]
    for module in (base, core, vector, lane):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now  # type: ignore[return-value]


# ------------------------------------------------------------------------------ exactly N, and the same everywhere


@cache
def cartpole_policy() -> nn.Module:
    """Return a trained network."""
    env = gym.make("CartPole-v1")
    module = make_mlp(env.observation_space, env.action_space)
    module.load_state_dict(load_weights_file(WEIGHTS / "cartpole_ppo_early.safetensors"))
    return module


def greedy(observations: Array) -> Array:
    with torch.inference_mode():
        actions: Array = cartpole_policy()(torch.from_numpy(observations)).argmax(1).numpy()
    return actions


@layouts
@pytest.mark.parametrize(
    ("env", "policy", "act", "gamma"),
    [*((walk, steer, steer, gamma) for gamma in (0.0, 0.9, 1.0)), ("CartPole-v1", cartpole_policy(), greedy, 1.0)],
    ids=["0.0", "0.9", "1.0", "CartPole"],
)
def test_records_are_those_of_a_plain_loop(kind: str, lanes: int, env: Any, policy: Any, act: Any, gamma: Any) -> None:
    """Anyone can replay an episode: reset with its seed, act, sum. Every column comes out the same."""
    table = play(make(env, policy, kind, lanes, evaluation__gamma=gamma), 20 if env is walk else 6, seed=5)
    plain = Walk() if env is walk else gym.make(env)
    for record in table:
        observation, _ = plain.reset(seed=record.seed)
        rewards, info, terminated, truncated, successes = [], {}, False, False, []
        while not (terminated or truncated):
            action = np.int64(act(observation[None])[0])
            observation, reward, terminated, truncated, info = plain.step(action)
            rewards.append(reward)
            successes.append(info.get("is_success"))
        assert record.episode_return == np.cumsum(rewards)[-1]
        assert record.discounted_return == pytest.approx(
            float(np.sum(gamma ** np.arange(len(rewards)) * rewards)), rel=1e-12, abs=1e-12
        )
        assert gamma < 1 or record.discounted_return == record.episode_return
        assert (record.length, record.terminated, record.truncated) == (len(rewards), terminated, truncated)
        assert (record.success_once, record.success_at_end) == (
            (any(successes) if env is walk else None),
            successes[-1],
        )
    assert len({record.length for record in table}) > 1


@pytest.mark.process  # MuJoCo looks for its libraries with a program.
def test_hopper_with_sampled_actions_is_the_same_in_every_layout() -> None:
    """MuJoCo, a frozen normalizer and a sampled Gaussian: the floats have the same bits in every layout."""
    pytest.importorskip("mujoco")
    weights = snapshot_weights(load_weights_file(WEIGHTS / "hopper_ppo_final.safetensors"), 0)
    fingerprints = set()
    for kind, lanes in [("single_agent", 1), ("vector", 3)]:
        runner = make(
            "Hopper-v5",
            "rl_eval.policies.mlp:make_mlp",
            kind,
            lanes,
            policy__policy_kwargs={"normalize_observations": True},
            policy__deterministic=False,
            evaluation__max_episode_steps=100,
        )
        runner.set_weights(weights)
        fingerprints.add(play(runner, 4).fingerprint())
    assert len(fingerprints) == 1


def test_an_impure_environment_is_not_the_same_in_every_layout() -> None:
    """State that leaks across resets shows in the fingerprint, unless nothing is reused."""

    def fingerprints(reuse: str) -> set[str]:
        options = {"env": impure, "policy": cartpole_policy(), "environment__env_reuse": reuse}
        limit = {"evaluation__max_episode_steps": 20}
        return {
            play(make(kind=k, lanes=n, **options, **limit)).fingerprint() for k, n in [("vector", 1), ("vector", 3)]
        }

    assert len(fingerprints("lane")) == 2
    assert len(fingerprints("episode")) == 1


# ------------------------------------------------------------------------------ faults of the environment


def seeded(what: str) -> Trouble:
    """Half of first and a quarter of second attempts go wrong, at a step (0 is the reset) of their own."""

    def trouble(index: int, attempt: int) -> tuple[str, int] | None:
        rng = np.random.default_rng((index, attempt))
        rate = {1: 0.5, 2: 0.25}.get(attempt, 0.0)
        return (what, int(rng.integers(0, 2))) if rng.random() < rate else None

    return trouble


@layouts
@pytest.mark.parametrize(
    ("what", "error_type"),
    [
        ("raise", "ZeroDivisionError"),
        ("exit", "SystemExit"),
        ("nan observation", "EnvError"),
        ("long observation", "EnvError"),
        ("no observation", "EnvError"),
    ],
)
def test_a_fault_repeats_the_same_episode(kind: str, lanes: int, what: str, error_type: str) -> None:
    """Whatever the environment does wrong, the episode is retried with its seed, and the table is as if nothing was."""
    trouble = seeded(what)
    table = play(make(troubled(trouble), kind=kind, lanes=lanes))
    assert table.fingerprint() == undisturbed()
    for record in table:
        due = list(takewhile(lambda one: one is not None, (trouble(record.index, attempt) for attempt in (1, 2, 3))))
        assert record.attempts == len(due) + 1
        assert [fault.attempt for fault in record.faults] == list(range(1, len(due) + 1))
        assert [fault.step for fault in record.faults] == [0 if what in ("raise", "exit") else one[1] for one in due]
        assert [(fault.cause, fault.error_type, fault.phase) for fault in record.faults] == [
            ("env", error_type, "step" if one[1] else "reset") for one in due
        ]
    assert {record.attempts for record in table} == {1, 2, 3}


@layouts
def test_the_original_error_survives(kind: str, lanes: int) -> None:
    """A fault tells episode, seed, attempt, place, step, runner, type, message and the end of the traceback."""

    def trouble(index: int, attempt: int) -> tuple[str, int] | None:
        return ("raise", 2) if (index, attempt) == (4, 1) else ("raise", 0) if (index, attempt) == (4, 2) else None

    table = play(make(troubled(trouble), kind=kind, lanes=lanes, index=7))
    first, second = table.record(4).faults
    assert set(table.faults) == {4}
    for fault in (first, second):
        assert (fault.index, fault.seed, fault.cause) == (4, EpisodePlan(EPISODES)[4].seed, "env")
        assert (fault.error_type, fault.runner) == ("ZeroDivisionError", 7)
        assert fault.node
        assert fault.seconds >= 0
        assert "raise ZeroDivisionError(" in fault.traceback
    assert (first.attempt, first.phase, first.step, first.message) == (1, "step", 1, "step 2 went wrong")
    assert (second.attempt, second.phase, second.step, second.message) == (2, "reset", 0, "step 0 went wrong")
    assert str(first).startswith(
        f"episode 4 (seed {first.seed}), attempt 1, runner 7: env failed in step after 1 steps"
    )
    assert table.record(4).attempts == 3


@layouts
def test_only_the_environment_that_failed_is_rebuilt(kind: str, lanes: int) -> None:
    """One fault closes one environment and builds one; the others live on, until a stop closes each once."""
    log: list[Any] = []
    runner = make(troubled(raising(every=4), log), kind=kind, lanes=lanes)
    table = play(runner)
    built = [entry[1] for entry in log if entry[0] == "construct"]
    faults = sum(len(record.faults) for record in table)
    assert faults == EPISODES / 4
    # The last ones to fail need not be replaced.
    assert max(lanes, faults) < len(built) <= lanes + faults
    assert sum(entry[0] == "close" for entry in log) == len(built) - lanes
    for _ in range(2):
        runner.stop()
        assert sorted(entry[1] for entry in log if entry[0] == "close") == sorted(built)


@layouts
@pytest.mark.parametrize("env_reuse", ["lane", "episode"])
def test_nothing_unreported_is_at_stake_when_an_environment_closes(kind: str, lanes: int, env_reuse: str) -> None:
    """Before an environment closes, which may kill the process, the group has heard of its last attempt."""
    reports: list[RunReport] = []
    ended: set[int] = set()

    class Watched(Troubled):
        last: int | None = None

        def begin_episode(self, index: int, seed: int, attempt: int) -> None:
            super().begin_episode(index, seed, attempt)
            self.last = index

        def close(self) -> None:
            if self.last is not None:
                assert any(
                    self.last in [*report.rows["index"], *(at.index for at in report.faults)] for report in reports
                )
                ended.add(self.last)

    environment = lambda context: Watched(gym.make("CartPole-v1"), raising(every=3))  # noqa: E731
    runner = make(environment, kind=kind, lanes=lanes, environment__env_reuse=env_reuse)
    play(runner, 12, budget_s=0.05, reports=reports)
    assert runner.metrics()["close_errors"] == 0
    if env_reuse == "episode":
        assert len(ended) >= 12 - lanes


class Unreliable:
    """Builds environments; some constructions raise."""

    def __init__(self, fails: Callable[[int], bool], error: Callable[[str], BaseException] = OSError) -> None:
        self.calls = 0
        self.fails = fails
        self.error = error

    def __call__(self, context: EnvContext) -> gym.Env[Any, Any]:
        self.calls += 1
        if self.fails(self.calls):
            raise self.error("the port is taken")
        return Walk()


@layouts
@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_constructor_that_raises_sometimes_is_survived(kind: str, lanes: int, error: type[BaseException]) -> None:
    """Construction is part of the attempt: it is charged, told, and tried again."""
    factory = Unreliable(lambda call: call % 3 != 0, error)
    options = {"environment__env_reuse": "episode", "fault_tolerance__max_attempts_per_episode": 50}
    table = play(make(factory, kind=kind, lanes=lanes, **options))
    assert table.fingerprint() == undisturbed()
    faults = [fault for record in table for fault in record.faults]
    assert {(fault.phase, fault.cause, fault.step) for fault in faults} == {("construct", "env", 0)}
    assert {(fault.error_type, fault.message) for fault in faults} == {(error.__name__, "the port is taken")}
    assert len(faults) >= EPISODES


def test_a_constructor_that_always_raises_is_told_with_its_error() -> None:
    """The runner itself cannot be built: the error names the environment, the attempts and the cause."""
    factory = Unreliable(lambda call: True)
    with refused(EnvError, "environment.env", runner=0) as caught:
        make(factory, fault_tolerance__max_attempts_per_episode=4)
    assert factory.calls == 4
    assert isinstance(caught.value.__cause__, OSError)
    assert "Unreliable" in str(caught.value)


def test_a_configuration_error_is_not_tried_again() -> None:
    """What trying again cannot cure is told at once, as it is."""
    factory = Unreliable(lambda call: True, partial(ConfigError, key="port"))
    with refused(ConfigError, "port"):
        make(factory)
    assert factory.calls == 1


@layouts
def test_a_close_that_raises_is_survived(kind: str, lanes: int) -> None:
    """No episode pays for a broken close(); it is counted."""

    class Clinging(Troubled):
        def close(self) -> None:
            raise SystemExit(1)

    runner = make(lambda context: Clinging(Walk(), raising()), kind=kind, lanes=lanes)
    table = play(runner)
    assert table.fingerprint() == undisturbed()
    assert {len(record.faults) for record in table} == {1}
    assert runner.metrics()["close_errors"] == EPISODES
    runner.stop()
    assert runner.metrics()["close_errors"] == EPISODES + min(lanes, EPISODES)


@layouts
@pytest.mark.parametrize("step", [0, 1])
def test_an_interrupt_is_not_swallowed(kind: str, lanes: int, step: int) -> None:
    """Ctrl-C is the user's, not the environment's fault: it passes at once and no attempt is charged."""
    runner = make(troubled(lambda index, attempt: ("interrupt", step)), kind=kind, lanes=lanes)
    with pytest.raises(KeyboardInterrupt):
        runner.run(leases_of(5), 10.0)
    with pytest.raises(KeyboardInterrupt):
        make(Unreliable(lambda call: True, KeyboardInterrupt), kind=kind, lanes=lanes)
    assert runner.metrics()["faults"] == 0


# ------------------------------------------------------------------------------ faults of the policy


def spoiled(what: Any) -> Callable[[Array], Array]:
    """Return a policy that acts like ``steer``, but wrongly wherever Walk's position is beyond 3."""

    def act(observations: Array) -> Array:
        actions = steer(observations).astype(float if isinstance(what, float) else int)
        actions[observations[:, 1] > 3] = what
        return actions

    return act


@layouts
@pytest.mark.parametrize(("what", "message"), [(3, "action 3, which is outside Discrete(3)"), (-1, "action -1, which")])
def test_an_action_outside_the_space_is_the_policys_fault(kind: str, lanes: int, what: int, message: str) -> None:
    """It costs that episode an attempt, the same in every layout, and the environment is not rebuilt for it."""
    log: list[Any] = []
    table = play(make(troubled(calm, log), spoiled(what), kind, lanes))
    clean = play(make())
    failed = {record.index for record in table if record.outcome == "failed"}
    assert 0 < len(failed) < EPISODES
    for record in table:
        if record.index in failed:
            assert {(fault.cause, fault.phase, fault.error_type) for fault in record.faults} == {
                ("policy", "act", "PolicyError")
            }
            assert message in record.faults[0].message
            assert [fault.attempt for fault in record.faults] == [1, 2, 3]
            assert len({fault.step for fault in record.faults}) == 1
        else:
            assert record.episode_return == clean.record(record.index).episode_return
            assert not record.faults
    assert sum(entry[0] == "construct" for entry in log) == lanes


@layouts
def test_a_nan_action_is_the_policys_fault(kind: str, lanes: int) -> None:
    """A Box action that is not a number costs its episode the attempts, and no other one."""
    boxed = lambda context: Walk(spaces.Box(-1, 1, (1,), np.float64))  # noqa: E731

    def act(observations: Array) -> Array:
        return np.where(observations[:, 1:2] > 3, np.nan, np.sign(observations[:, 2:3])).astype(np.float64)

    tables = [play(make(boxed, act, k, n)) for k, n in {(kind, lanes), ("vector", 1)}]
    faults = [fault for record in tables[0] for fault in record.faults]
    assert faults
    assert {(fault.cause, fault.error_type) for fault in faults} == {("policy", "PolicyError")}
    assert all("nan" in fault.message for fault in faults)
    assert tables[0].fingerprint() == tables[-1].fingerprint()
    assert {record.outcome for record in tables[0]} == {"completed", "failed"}


@layouts
def test_an_exception_of_the_policy_is_told_as_its_own(kind: str, lanes: int) -> None:
    """The policy's error keeps its type and message, and hits the episodes that it would hit alone."""

    def act(observations: Array) -> Array:
        walked = (observations[:, 0] >= 1) & (observations[:, 0] == np.round(observations[:, 0]))
        if (walked & (observations[:, 1] > 3)).any():
            raise ZeroDivisionError("too far")
        return steer(observations)

    table = play(make(walk, act, kind, lanes))
    alone = play(make(walk, act, "single_agent"))
    assert [record.outcome for record in table] == [record.outcome for record in alone]
    assert table.fingerprint() == alone.fingerprint()
    faults = [fault for record in table for fault in record.faults]
    assert {(fault.cause, fault.error_type, fault.message) for fault in faults} == {
        ("policy", "ZeroDivisionError", "too far")
    }
    assert {record.outcome for record in table} == {"completed", "failed"}


@kinds
@pytest.mark.parametrize(
    ("space", "policy", "error", "key"),
    [
        (spaces.Discrete(3), lambda seen: np.zeros((len(seen), 2), int), PolicyError, "action"),
        (spaces.Box(-1, 1, (1,)), nn.Linear(3, 1), ConfigError, "policy.deterministic"),
    ],
)
def test_a_policy_that_cannot_act_is_told_before_any_episode_runs(
    kind: str, lanes: int, space: Any, policy: Any, error: type[EvalError], key: str
) -> None:
    """Actions that can fit no observation, and sampling without a distribution, are no fault per episode."""
    log: list[Any] = []
    environment = lambda context: Troubled(Walk(space), calm, log)  # noqa: E731
    runner = make(environment, policy, kind, lanes, policy__deterministic=not isinstance(policy, nn.Module))
    with refused(error, key):
        runner.run(leases_of(3))
    assert not [entry for entry in log if entry[0] == "reset"]


# ------------------------------------------------------------------------------ what a record holds


class Ending(Walk):
    """Ends at its last step with certain flags."""

    def __init__(self, length: int, terminated: bool, truncated: bool) -> None:
        super().__init__(length=length)
        self.flags = np.array([terminated, truncated])

    def step(self, action: Any) -> Any:
        observation, reward, *_, info = super().step(action)
        return observation, reward, *(self.flags & (self.steps == self.length)).tolist(), info


@kinds
@pytest.mark.parametrize(
    ("ends", "limit", "recorded"),
    [
        ((7, False, True), None, (7, False, True, "environment")),
        ((7, False, True), 5, (5, False, True, "max_episode_steps")),
        ((5, False, True), 5, (5, False, True, "environment")),
        ((5, False, True), 7, (5, False, True, "environment")),
        ((1, False, True), 1, (1, False, True, "environment")),
        ((9, False, True), 1, (1, False, True, "max_episode_steps")),
        *(((3, True, False), limit, (3, True, False, None)) for limit in (None, 3, 100)),
        *(((3, True, True), limit, (3, True, True, "environment")) for limit in (None, 3, 100)),
    ],
)
def test_who_ended_an_episode(kind: str, lanes: int, ends: Any, limit: int | None, recorded: Any) -> None:
    """Our limit marks episodes truncated by us; when both fall on one step, the environment's flags win.

    Terminated, truncated, and both at once are told apart.
    """
    runner = make(lambda context: Ending(*ends), kind=kind, lanes=lanes, evaluation__max_episode_steps=limit)
    for record in play(runner, 4):
        assert (record.length, record.terminated, record.truncated, record.truncated_by) == recorded


@pytest.mark.process
@pytest.mark.parametrize("runner", ["single_agent", "vector", "subprocess"])
@pytest.mark.parametrize(
    ("env_kwargs", "wrappers", "limit", "noted"),
    [
        ({}, [], 501, True),
        ({}, [], 500, False),
        ({}, [], None, False),
        ({"max_episode_steps": 900}, [], 900, False),
        ({}, [{"wrapper": "gymnasium.wrappers:TimeLimit", "max_episode_steps": 7}], 8, True),
    ],
)
def test_a_limit_above_that_of_the_environment_is_a_note_of_every_result(
    runner: str, env_kwargs: dict[str, Any], wrappers: list[Any], limit: int | None, noted: bool
) -> None:
    """Episodes end earlier than asked, so the number is not the one that was asked for."""
    config = (
        EvalConfig()
        .environment("CartPole-v1", env_kwargs=env_kwargs, wrappers=wrappers)
        .policy("random")
        .runners(runner=runner)
        .evaluation(num_episodes=2, max_episode_steps=limit)
    )
    with EvalRunnerGroup(config) as group:
        for _ in range(2):
            notes = group.evaluate().notes
            assert ["max_episode_steps" in note and str(limit) in note for note in notes] == [True] * noted


class Reporting(Walk):
    """Reports the infos that a test gives it, one per step."""

    def __init__(self, infos: list[dict[str, Any]]) -> None:
        super().__init__()
        self.infos = infos

    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, self.steps == len(self.infos), False, self.infos[self.steps - 1]


@kinds
@pytest.mark.parametrize(
    ("infos", "once", "at_end"),
    [
        ([{}, {}], None, None),
        ([{"is_success": False}, {"is_success": False}], False, False),
        ([{"is_success": True}, {"is_success": False}], True, False),
        ([{"is_success": False}, {"is_success": True}], True, True),
        ([{"is_success": True}, {}], True, True),
        ([{"success": np.bool_(True)}, {"success": 0.0}], True, False),
        ([{"success": 1}, {"success": 1}], True, True),
        ([{}, {"is_success": False, "success": True}], False, False),
        ([{"is_success": None}, {"is_success": None}], None, None),
    ],
)
def test_success_is_recorded_once_and_at_the_end(
    kind: str, lanes: int, infos: list[dict[str, Any]], once: bool | None, at_end: bool | None
) -> None:
    """``is_success`` or ``success``: whether it was ever true, and its last value; None if it was never reported."""
    for record in play(make(lambda context: Reporting(infos), kind=kind, lanes=lanes), 4):
        assert (record.success_once, record.success_at_end) == (once, at_end)


@layouts
def test_info_scalars_are_recorded_on_request(kind: str, lanes: int) -> None:
    """The last value of each key as a float, NaN where it was never reported, whatever the order of finishing."""
    infos: list[dict[str, Any]] = [{"a": 1, "b": np.float32(0.5)}, {"a": np.array(7)}, {"other": "text"}]
    runner = make(lambda context: Reporting(infos), kind=kind, lanes=lanes, evaluation__info_keys=("a", "b", "c"))
    for record in play(runner, 9):
        assert list(record.info) == ["a", "b", "c"]
        assert (record.info["a"], record.info["b"]) == (7.0, 0.5)
        assert math.isnan(record.info["c"])
    speeds = play(make(kind=kind, lanes=lanes, evaluation__info_keys=("speed",)))
    alone = play(make(evaluation__info_keys=("speed",)))
    assert speeds.infos.tobytes() == alone.infos.tobytes()
    assert len(set(speeds.infos[:, 0])) == EPISODES


@kinds
def test_info_belongs_to_the_attempt_that_counts(kind: str, lanes: int) -> None:
    """What a failed attempt reported is forgotten: info, success and sums start anew."""

    class Once(Troubled):
        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return *result, {"is_success": True, "a": 1.0} if self.due else {}

    runner = make(lambda context: Once(Walk(), raising(2)), kind=kind, lanes=lanes, evaluation__info_keys=("a",))
    for record in play(runner):
        assert record.success_once is None
        assert math.isnan(record.info["a"])
        assert len(record.faults) == 1


@layouts
def test_seconds_and_steps_are_counted(kind: str, lanes: int, clock: list[float]) -> None:
    """Reset, step and inference seconds add up to what the environment and the policy took."""

    def environment(context: EnvContext) -> gym.Env[Any, Any]:
        clock[0] += 4.0  # A constructor is no part of a reset.
        return Ticking(Walk(), clock, step=0.25, reset=0.5)

    def slow(observations: Array) -> Array:
        clock[0] += 0.125
        return steer(observations)

    reports: list[RunReport] = []
    table = play(make(environment, slow, kind, lanes), budget_s=1e9, reports=reports)
    for record in table:
        assert record.reset_seconds == pytest.approx(0.5)
        assert record.step_seconds == pytest.approx(0.25 * record.length)
        assert record.inference_seconds > 0
    steps = sum(report.env_steps for report in reports)
    assert steps == table.rows["length"].sum()
    assert sum(report.reset_seconds for report in reports) == pytest.approx(0.5 * EPISODES)
    assert sum(report.step_seconds for report in reports) == pytest.approx(0.25 * steps)
    inference = float(table.rows["inference_seconds"].sum())
    assert sum(report.inference_seconds for report in reports) == pytest.approx(inference, rel=1e-5)


@layouts
def test_wasted_steps_are_counted_as_executed(kind: str, lanes: int) -> None:
    """Steps of failed attempts are in the report's steps and in no record's length."""
    runner = make(troubled(raising(2)), kind=kind, lanes=lanes)
    reports: list[RunReport] = []
    table = play(runner, reports=reports)
    steps = sum(report.env_steps for report in reports)
    assert steps == table.rows["length"].sum() + EPISODES
    assert runner.metrics() == {"episodes": EPISODES, "faults": EPISODES, "env_steps": steps, "close_errors": 0}


# ------------------------------------------------------------------------------ budgets


@layouts
def test_faults_between_small_budgets_change_nothing(kind: str, lanes: int) -> None:
    """However small the budget, every call makes progress; a sweep that is left in the middle goes on where it was."""
    runner = make(troubled(seeded("raise")), kind=kind, lanes=lanes)
    assert play(runner, budget_s=1e-5, calls=5000).fingerprint() == undisturbed()


@layouts
def test_slow_resets_count_against_the_budget(kind: str, lanes: int, clock: list[float]) -> None:
    """A reset that outlives the budget ends the call; the next one goes on, until every lane runs."""
    runner = make(lambda context: Ticking(Endless(), clock, step=0.0, reset=1.0), kind=kind, lanes=lanes)
    live = []
    report = runner.run(leases_of(20), 0.1)
    for _ in range(lanes):
        live.append(len(report.progress))
        clock[0] += 1e-6
        report = runner.run((), 1e-6 if kind == "single_agent" else 0.1) if len(report.progress) < lanes else report
    assert live == list(range(1, lanes + 1))


@layouts
def test_slow_steps_end_a_call_in_the_middle_of_a_sweep(kind: str, lanes: int, clock: list[float]) -> None:
    """With steps longer than the budget, every call does one: lanes take turns, none starves."""

    runner = make(lambda context: Ticking(Endless(), clock, 1.0), kind=kind, lanes=lanes)
    report = runner.run(leases_of(20), 0.1)
    for _ in range(3 * lanes):
        report = runner.run((), 0.1)
    steps = report.progress["step"].tolist()
    assert len(steps) == lanes
    assert max(steps) - min(steps) <= 1
    assert sum(steps) == 3 * lanes + 1


def test_half_the_lanes_idle_is_reason_to_report_early(clock: list[float]) -> None:
    """A runner that finished half of its lanes' episodes asks for more before its budget ends."""
    plan = EpisodePlan(4)
    runner = make(lambda context: Ticking(Endless(plan.seeds[:2].tolist()), clock), lanes=4)
    report = runner.run(leases_of(4), 1.0)
    assert report.env_steps == 4 * 2
    assert sorted(report.rows["index"].tolist()) == [0, 1]
    assert sorted(report.progress["index"].tolist()) == [2, 3]


@layouts
def test_progress_names_every_live_lane(kind: str, lanes: int, clock: list[float]) -> None:
    """Index, attempt and step of each live episode, so that a silent one can be named."""
    runner = make(lambda context: Ticking(Endless(), clock), kind=kind, lanes=lanes)
    first, *others = leases_of(20)
    steps = runner.run([first._replace(attempt=2), *others], 0.005 + 0.02 * lanes).env_steps
    report = runner.run((), 0.005 + 0.02 * lanes)
    steps += report.env_steps
    assert sorted(report.progress["index"].tolist()) == list(range(lanes))
    attempts = dict(report.progress[["index", "attempt"]].tolist())
    assert attempts == {index: 2 if index == 0 else 1 for index in range(lanes)}
    assert report.progress["step"].sum() == steps


# ------------------------------------------------------------------------------ time limits of an attempt


@layouts
def test_an_attempt_that_outlives_its_limit_is_charged(kind: str, lanes: int, clock: list[float]) -> None:
    """``episode_timeout_s`` is checked between steps; the fault's cause is the timeout, and others go on."""
    seeds = EpisodePlan(EPISODES).seeds.tolist()

    short = [seed for index, seed in enumerate(seeds) if index != 3]
    log: list[Any] = []
    options = {"fault_tolerance__episode_timeout_s": 5.0, "fault_tolerance__max_attempts_per_episode": 2}
    runner = make(
        lambda context: Troubled(Ticking(Endless(short), clock), calm, log), kind=kind, lanes=lanes, **options
    )
    table = play(runner)
    assert [record.index for record in table if record.outcome == "failed"] == [3]
    assert [fault.attempt for fault in table.record(3).faults] == [1, 2]
    for fault in table.record(3).faults:
        assert (fault.cause, fault.phase, fault.error_type) == ("timeout", "run", "EpisodeTimeout")
        assert "fault_tolerance.episode_timeout_s=5" in fault.message
        assert 5.0 < fault.seconds < 5.0 + 0.1 + 0.01 * (lanes + 1)
        assert fault.step > 0
    assert set(table.faults) == {3}
    runner.stop()
    assert sum(entry[0] == "close" for entry in log) == sum(entry[0] == "construct" for entry in log) <= lanes + 2


@kinds
def test_without_a_limit_an_attempt_may_take_its_time(kind: str, lanes: int, clock: list[float]) -> None:
    """None switches the limit off."""

    environment = lambda context: Ticking(Walk(), clock, 1e6)  # noqa: E731
    runner = make(environment, kind=kind, lanes=lanes, fault_tolerance__episode_timeout_s=None)
    assert play(runner).fingerprint() == undisturbed()


# ------------------------------------------------------------------------------ reclaim, abort, weights


@layouts
def test_an_abort_in_the_middle_of_a_sweep_leaves_nothing_behind(kind: str, lanes: int, clock: list[float]) -> None:
    """Actions chosen before the abort are not taken after it."""

    runner = make(lambda context: Ticking(Walk(), clock, 1.0), kind=kind, lanes=lanes)
    runner.run(leases_of(EPISODES, seed=9), 0.1)
    for _ in range(lanes // 2):
        assert len(runner.run((), 0.1).progress)
    assert play(runner, budget_s=1e9, abort=True).fingerprint() == undisturbed()


def weighted(bias: list[float]) -> nn.Module:
    """A policy for Walk that always prefers the same action."""
    module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor(bias))
    return module


@layouts
def test_weights_decide_and_their_version_is_on_every_record(kind: str, lanes: int) -> None:
    """After ``set_weights`` the policy acts with them, and the records say so; those that do not fit change nothing.

    The probe is repeated, since its outputs are part of the numerics key.
    """
    runner = make(walk, weighted([1.0, 0.0, 0.0]), kind, lanes)
    played = []
    for version in (0, 12, 12):
        reports: list[RunReport] = []
        played.append((play(runner, reports=reports), dict(reports[-1].numerics)))
        assert {record.weights_version for record in played[-1][0]} == {runner.weights_version} == {version}
        if not version:
            assert runner.set_weights(snapshot_weights(weighted([0.0, 0.0, 1.0]), 12)) == 12
        with refused(WeightsError, "bias"):
            runner.set_weights(snapshot_weights({"other": torch.zeros(3)}, 5))
    (first, before), (second, after), (third, _) = played
    assert [r.episode_return for r in second] == [-r.episode_return for r in first]
    assert second.fingerprint() == third.fingerprint()
    assert before["outputs"] != after["outputs"]
    assert {**before, "outputs": 0} == {**after, "outputs": 0}
    assert before["device"] == "cpu"


def test_a_policy_without_weights_says_so() -> None:
    """A plain function has nothing to set."""
    with refused(WeightsError, "policy", value="CallablePolicy"):
        make().set_weights(snapshot_weights({"a": torch.zeros(1)}, 1))


# ------------------------------------------------------------------------------ environments and their episodes


@layouts
def test_env_reuse_episode_builds_one_environment_per_episode(kind: str, lanes: int) -> None:
    """No environment object is reset twice, and each but the last is closed before the next is built."""
    log: list[Any] = []
    runner = make(troubled(seeded("raise"), log), kind=kind, lanes=lanes, environment__env_reuse="episode")
    table = play(runner)
    assert table.fingerprint() == undisturbed()
    alive: set[int] = set()
    resets: dict[int, int] = {}
    for entry in log:
        if entry[0] == "construct":
            alive.add(entry[1])
            resets[entry[1]] = 0
            assert len(alive) <= lanes
        elif entry[0] == "reset":
            resets[entry[1]] += 1
            assert resets[entry[1]] == 1
        elif entry[0] == "close":
            alive.remove(entry[1])
    runner.stop()


@layouts
def test_an_episode_aware_environment_is_told_before_each_reset(kind: str, lanes: int) -> None:
    """``begin_episode`` gets index, seed and attempt, also under gymnasium's wrappers."""
    log: list[Any] = []
    trouble: Trouble = lambda index, attempt: ("raise", 1) if (index, attempt) == (3, 1) else None  # noqa: E731

    def environment(context: EnvContext) -> gym.Env[Any, Any]:
        return TimeLimit(gym.wrappers.OrderEnforcing(Troubled(Walk(), trouble, log)), 100)

    play(make(environment, kind=kind, lanes=lanes))
    plan = EpisodePlan(EPISODES)
    told = [entry[1:] for entry in log if entry[0] == "begin"]
    assert sorted(told) == sorted([(spec.index, spec.seed, 1) for spec in plan] + [(3, plan[3].seed, 2)])
    pairs = [(entry, following) for entry, following in pairwise(log) if entry[0] == "begin"]
    assert all(following[0] == "reset" and following[2] == entry[2] for entry, following in pairs)


@layouts
def test_lanes_know_where_they_are(kind: str, lanes: int) -> None:
    """Each lane builds one environment; the context holds runner, lane and number of runners, for ports and folders."""
    seen = []

    def environment(context: EnvContext) -> Walk:
        seen.append((context.runner_index, context.lane_index, context.num_runners, dict(context)))
        return Walk()

    config = {"environment__env_kwargs": {"port": 3}, "runners__num_runners": 4}
    play(make(environment, kind=kind, lanes=lanes, index=2, **config))
    assert seen == [(2, number, 4, {"port": 3}) for number in range(lanes)]


@layouts
def test_actions_reach_the_environment_inside_its_space(kind: str, lanes: int) -> None:
    """A Box action arrives with the space's dtype and inside its bounds; the policy's batch stays its own."""
    received: list[Array] = []

    class Spoiling(Walk):
        def step(self, action: Any) -> Any:
            result = super().step(action)
            received.append(action.copy())
            action[:] = 77
            return result

    constant = np.tile(np.array([5.0, -0.25], np.float32), (64, 1))
    environment = lambda context: Spoiling(spaces.Box(-1, 1, (2,), np.float32))  # noqa: E731
    play(make(environment, lambda observations: constant[: len(observations)], kind, lanes))
    assert all(action.tolist() == [1.0, -0.25] for action in received)
    assert (constant == np.array([5.0, -0.25], np.float32)).all()


# ------------------------------------------------------------------------------ the class


class Unfinished(EvalRunner):
    """Lacks ``run``."""


@pytest.mark.parametrize(
    ("selected", "named"),
    [
        ("vectr", "'vector'"),
        ("x", "multi_agent, single_agent, subprocess, vector"),
        ("no_such_module:Runner", "no_such_module"),
        (f"{__name__}:NoSuchRunner", "NoSuchRunner"),
        (f"{__name__}:Unfinished", "rl_eval.EvalRunner"),
        (EvalRunner, "rl_eval.EvalRunner"),
        (f"{__name__}:Walk", "facts"),
        (f"{__name__}:walk", "rl_eval.EvalRunner"),
        (int, "facts"),
    ],
)
def test_a_runner_that_cannot_be_is_a_config_error(selected: Any, named: str) -> None:
    """An unknown name suggests the nearest; what is no concrete runner is refused by name."""
    with refused(ConfigError, "runners.runner") as caught:
        runner_class(selected)
    assert named in str(caught.value)


def test_the_built_in_runners_have_names() -> None:
    """``vector`` and ``single_agent`` select the classes that the package exports."""
    assert runner_class("vector") is VectorEvalRunner
    assert runner_class("single_agent") is SingleAgentEvalRunner
    assert runner_class("rl_eval:VectorEvalRunner") is VectorEvalRunner

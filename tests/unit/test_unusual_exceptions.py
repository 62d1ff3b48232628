"""Exceptions that are not errors, and forked processes: one episode fails, and all others complete."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from agents_world import Crowd, crowd_config

from rl_eval import EvalConfig, evaluate, load
from rl_eval.errors import EnvError, EvalError
from rl_eval.scheduling.plan import EpisodePlan
from tests.unit.vector_world import Walk, follow, walks

EPISODES, GUILTY = 6, 3


class Own(BaseException):
    """An exception of a library, as those of cancelled tasks are."""


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "cancelled": asyncio.CancelledError,
    "generator": lambda: GeneratorExit("from a generator"),
    "own": lambda: Own("mine"),
    "exit": lambda: SystemExit(3),
}


def exception(kind: str) -> BaseException:
    return EXCEPTIONS[kind]()


class Strikes(gym.Env[Any, Any]):
    """Four steps; the guilty episode calls a function at one place, or in ``close`` after it."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, place: str, strike: Callable[[], Any]) -> None:
        self.place, self.strike = place, strike
        self.guilty = False

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.guilty = index == GUILTY

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if self.place == "reset" and self.guilty:
            self.strike()
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.place == "step" and self.guilty and self.steps == 2:
            self.strike()
        return self._observation(), float(self.np_random.normal()), self.steps == 4, False, {}

    def close(self) -> None:
        if self.place == "close":
            self.strike()

    def _observation(self) -> Any:
        return np.array([float(self.guilty and self.steps == 1), self.np_random.uniform(-0.5, 0.5)])


def config(
    runner: str, place: str, strike: Callable[[], Any], attempts: int = 2, act: Callable[[], Any] | None = None
) -> EvalConfig:
    def policy(observations: Any) -> Any:
        if act is not None and (observations[:, 0] == 1.0).any():
            act()
        return np.zeros(len(observations), np.int64)

    return (
        EvalConfig()
        .environment(lambda context: Strikes(place, strike))
        .policy(policy)
        .runners(num_envs_per_runner=1 if runner == "single_agent" else 2, runner=runner)
        .evaluation(num_episodes=EPISODES, determinism_check=0)
        .fault_tolerance(max_attempts_per_episode=attempts)
    )


def raising(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def strike() -> None:
        raise make()

    return strike


@pytest.fixture(autouse=True)
def _children_are_ended() -> Iterator[None]:
    """No process of a test may go on as a second run of the tests."""
    ours = os.getpid()
    yield
    if os.getpid() != ours:
        traceback.print_stack()
        os._exit(99)


# Exceptions


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "runner", "kind"),
    [*product(["reset", "step"], ["single_agent", "vector"], EXCEPTIONS), ("step", "subprocess", "own")],
)
def test_an_episode_that_raises_any_exception_fails_alone(place: str, runner: str, kind: str) -> None:
    expected = evaluate(config(runner, "nowhere", int))
    result = evaluate(config(runner, place, raising(EXCEPTIONS[kind])))
    assert (result.status, result.num_failed) == ("partial", 1)
    for record, undisturbed in zip(result.episodes, expected.episodes, strict=True):
        assert (record.outcome == "failed") == (record.index == GUILTY)
        if record.outcome != "failed":
            assert record.episode_return == undisturbed.episode_return
    assert {(fault.index, fault.phase, fault.charged) for fault in result.faults} == {(GUILTY, place, True)}
    assert len(result.faults) == 2


@pytest.mark.process
@pytest.mark.parametrize("text", ["\x1b[31mred\x1b[0m", "one\r\ntwo", "x" * 100_001], ids=["color", "lines", "long"])
def test_an_error_keeps_its_class_on_the_way_from_another_process(text: str) -> None:
    """Whatever its text consists of, unless this contains a secret."""
    result = evaluate(config("subprocess", "step", raising(lambda: ValueError(text))))
    assert {fault.error_type for fault in result.faults} == {"ValueError"}


@pytest.mark.parametrize("kind", EXCEPTIONS)
@pytest.mark.parametrize("runner", ["single_agent", "vector"])
def test_a_policy_that_raises_any_exception_fails_one_episode(runner: str, kind: str) -> None:
    result = evaluate(config(runner, "nowhere", int, act=raising(EXCEPTIONS[kind])))
    assert (result.status, result.num_failed) == ("partial", 1)
    assert {(fault.index, fault.cause, fault.error_type) for fault in result.faults} == {
        (GUILTY, "policy", type(EXCEPTIONS[kind]()).__name__)
    }


@pytest.mark.process
@pytest.mark.parametrize("runner", ["vector", "subprocess"])
def test_close_may_raise_any_exception(runner: str) -> None:
    expected = evaluate(config(runner, "nowhere", int))
    assert evaluate(config(runner, "close", raising(Own))).fingerprint == expected.fingerprint


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_a_simulator_that_raises_any_exception_fails_one_episode(kind: str) -> None:
    """A batched runner finds the episode whose step raises."""
    guilty = EpisodePlan(EPISODES, 0)[GUILTY].seed

    def strike(walk: Walk) -> None:
        if walk.seed == guilty:
            raise exception(kind)

    simulator = (
        EvalConfig().environment(partial(walks, on_step=strike)).policy(follow).evaluation(num_episodes=EPISODES)
    )
    result = evaluate(simulator.runners(runner="batched", num_envs_per_runner=3))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [GUILTY]


class Wrestling(Crowd):
    """The first step of the process raises."""

    raised = False

    def step(self, actions: Any) -> Any:
        if not Wrestling.raised:
            Wrestling.raised = True
            raise Own("mine")
        return super().step(actions)


def test_an_environment_of_several_agents_may_raise_any_exception() -> None:
    result = evaluate(crowd_config().environment(Wrestling))
    assert result.status == "complete"
    assert result.fault_counts == {"Own": 1}


@pytest.mark.process
@pytest.mark.parametrize(
    ("runner", "kind"), [*product(["single_agent", "vector"], EXCEPTIONS), ("subprocess", "cancelled")]
)
def test_a_constructor_that_always_raises_ends_the_evaluation_with_an_error_of_ours(runner: str, kind: str) -> None:
    def construct(context: Any) -> Any:
        raise exception(kind)

    with pytest.raises(EnvError) as caught:
        evaluate(config(runner, "nowhere", int).environment(construct))
    assert caught.value.key == "environment.env"


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_a_policy_whose_construction_raises_any_exception_ends_the_evaluation_with_an_error(kind: str) -> None:
    def factory() -> Any:
        raise exception(kind)

    with pytest.raises(EvalError):
        evaluate(config("vector", "nowhere", int).policy(factory))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_what_the_handler_of_a_signal_raises_is_not_a_fault(number: signal.Signals) -> None:
    """Whoever asks for the end of the process gets it, whatever the exception is."""

    def leave(*_: Any) -> None:
        raise Own("stop")

    former = signal.signal(number, leave)
    try:
        with pytest.raises(Own):
            evaluate(config("vector", "step", lambda: signal.raise_signal(number)))
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, former)


# Forks


def forking(child: Callable[[], object], statuses: Path) -> Callable[[], None]:
    """Fork, let the child do something, and write its exit code to a file of the parent's."""

    def strike() -> None:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            child()
            return
        with statuses.open("a") as file:
            file.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")

    return strike


def raise_own() -> None:
    raise Own("mine")


CHILDREN: dict[str, tuple[Callable[[], object], int]] = {
    "exits": (lambda: sys.exit(0), 0),
    "exits with a code": (lambda: sys.exit(7), 7),
    "raises": (raise_own, 1),
    "interrupts": (raising(KeyboardInterrupt), 1),
    "returns": (lambda: None, 1),
}


FORKS = [
    *product(["step"], ["vector"], CHILDREN),
    *product(["reset", "close"], ["vector"], ["exits with a code", "returns"]),
    *product(["step"], ["subprocess"], ["exits", "raises", "returns"]),
]


@pytest.mark.process
@pytest.mark.parametrize(("place", "runner", "child"), FORKS)
def test_a_forked_child_never_continues_as_an_evaluator(runner: str, child: str, place: str, tmp_path: Path) -> None:
    """It ends with its own exit code; the evaluation and its files belong to the parent."""
    function, code = CHILDREN[child]
    expected = evaluate(config(runner, "nowhere", int))
    folder, statuses = tmp_path / "run", tmp_path / "statuses"
    result = evaluate(config(runner, place, forking(function, statuses)), output=folder)
    assert (result.fingerprint, len(result.faults)) == (expected.fingerprint, 0)
    assert {int(line) for line in statuses.read_text().split()} == {code}
    assert load(folder).fingerprint == expected.fingerprint


@pytest.mark.process
@pytest.mark.parametrize("child", ["exits", "returns"])
def test_a_child_that_a_policy_forks_does_not_continue_either(child: str, tmp_path: Path) -> None:
    function, code = CHILDREN[child]
    statuses = tmp_path / "statuses"
    result = evaluate(config("vector", "nowhere", int, act=forking(function, statuses)))
    assert (result.status, len(result.faults)) == ("complete", 0)
    assert {int(line) for line in statuses.read_text().split()} == {code}


@pytest.mark.process
def test_a_fork_outside_the_calls_of_a_runner_may_evaluate() -> None:
    evaluator_config = config("vector", "step", raising(Own))
    expected = evaluate(evaluator_config).fingerprint
    child = os.fork()
    if not child:
        os._exit(evaluate(evaluator_config).fingerprint != expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def evaluate_in_a_child(expected: str, runner: str, statuses: Path) -> Callable[[], None]:
    """Evaluate in a process of ``multiprocessing``, and write its exit code to a file."""

    def inner() -> None:
        sys.exit(40 + (evaluate(config(runner, "nowhere", int)).fingerprint == expected))

    def strike() -> None:
        child = multiprocessing.get_context("fork").Process(target=inner)
        child.start()
        child.join(60)
        with statuses.open("a") as file:
            file.write(f"{child.exitcode}\n")

    return strike


@pytest.mark.process
@pytest.mark.parametrize("outer", ["vector", "subprocess"])
@pytest.mark.parametrize("inner", ["vector", "subprocess"])
def test_a_worker_that_an_environment_forks_may_evaluate(outer: str, inner: str, tmp_path: Path) -> None:
    expected, statuses = evaluate(config(inner, "nowhere", int)).fingerprint, tmp_path / "statuses"
    result = evaluate(config(outer, "step", evaluate_in_a_child(expected, inner, statuses)))
    assert (result.status, len(result.faults)) == ("complete", 0)
    assert {int(line) for line in statuses.read_text().split()} == {41}


@pytest.mark.process
def test_a_worker_that_a_policy_forks_may_evaluate(tmp_path: Path) -> None:
    expected, statuses = evaluate(config("vector", "nowhere", int)).fingerprint, tmp_path / "statuses"
    strike = evaluate_in_a_child(expected, "vector", statuses)
    assert evaluate(config("vector", "nowhere", int, act=strike)).status == "complete"
    assert {int(line) for line in statuses.read_text().split()} == {41}

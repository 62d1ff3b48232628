"""Runners of this process work in the caller's own thread, and a KeyboardInterrupt is ascribed to whom it is due."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, Evaluator, evaluate
from rl_eval.supervision.caller import signals_noted, survivable
from tests.unit.cli_world import call, environment, make_folder

EPISODES = 4


class Count(gym.Env[Any, Any]):
    """Three steps; calls a function in its constructor, each reset and each step."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, act: Any) -> None:
        self.act = act
        act("construct")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.act("reset")
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.act("step")
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 3, False, {}


def config(act: Any) -> EvalConfig:
    def policy(observations: Any) -> Any:
        return np.zeros(len(observations), np.int64)

    return (
        EvalConfig()
        .environment(lambda context: Count(act))
        .policy(policy)
        .runners(num_envs_per_runner=2)
        .evaluation(num_episodes=EPISODES)
    )


def of_the_main_thread(place: str) -> None:
    """What simulators do that were written for a script."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    asyncio.get_event_loop_policy().get_event_loop()


@pytest.fixture
def main_loop() -> Any:
    """The main thread has an event loop; no other thread has one of itself."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


# Whose thread


@pytest.mark.usefixtures("main_loop")
def test_an_environment_may_need_the_main_thread() -> None:
    """It installs signal handlers and takes the thread's event loop, in constructor, reset and step."""
    result = evaluate(config(of_the_main_thread))
    assert result.status == "complete", result.faults[:1]


@pytest.mark.usefixtures("main_loop")
def test_inline_evaluators_and_groups_without_a_thread_do_so_too() -> None:
    with Evaluator(config(of_the_main_thread), backend="inline") as ev:
        assert ev.evaluate().status == "complete"
    with EvalRunnerGroup(config(of_the_main_thread), threaded=False) as group:
        assert group.evaluate().status == "complete"


def test_the_caller_may_be_any_thread() -> None:
    """The environment lives from its constructor on where ``evaluate`` was called."""
    seen = set()

    def call_it() -> None:
        evaluate(config(lambda place: seen.add(threading.current_thread().name)))

    thread = threading.Thread(target=call_it, name="the caller")
    thread.start()
    thread.join(60)
    assert seen == {"the caller"}


def test_the_command_line_runs_in_the_main_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that installs a signal handler completes every episode."""
    make_folder(tmp_path, monkeypatch)
    with Path("cli_toys.py").open("a") as module:
        module.write("""
import signal

class Handles(Count):
    def reset(self, **kwargs):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return super().reset(**kwargs)

def handles(context):
    return Handles()
""")
    outcome = call("run", "toy.yaml", "--set", "environment.env=cli_toys:handles", "--quiet")
    assert outcome.stdout.startswith("complete"), outcome.output


def test_whoever_submits_may_watch_before_the_work_begins() -> None:
    """In a group without a thread ``submit`` returns when all is done; until then there is the handle."""
    handles = []

    def began(handle: Any) -> None:
        assert not handle.done()
        handles.append(handle)

    def cancel(place: str) -> None:
        if place == "step":
            handles[0].cancel("seen enough")

    with EvalRunnerGroup(config(cancel), threaded=False) as group:
        returned = group.submit(num_episodes=1_000_000, on_submitted=began)
    assert handles == [returned]
    assert "seen enough" in returned.result().reason


def test_what_was_queued_before_an_abort_is_not_played_afterwards() -> None:
    """Two calls are always in flight; after a cancellation the next evaluation finds an idle runner."""
    handles: list[Any] = []
    steps: list[str] = []

    def act(place: str) -> None:
        steps.append(place)
        if place == "step" and handles:
            handles.pop().cancel("enough")

    endless = config(act).evaluation(num_episodes=1_000_000, determinism_check=0)
    with EvalRunnerGroup(endless, threaded=False) as group:
        group.submit(on_submitted=handles.append)
        steps.clear()
        assert group.evaluate(num_episodes=1).status == "complete"
    assert steps == ["reset", "step", "step", "step"]


# Whose interrupt


def raise_at(place: str) -> Any:
    """Raise once in each of the places that an environment has, then never again."""
    left = [place]

    def act(here: str) -> None:
        if here in left:
            left.remove(here)
            raise KeyboardInterrupt

    return act


@pytest.mark.parametrize("place", ["construct", "reset", "step"])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_keyboard_interrupt_of_an_environment_is_its_fault(place: str, threaded: bool) -> None:
    """Nobody pressed Ctrl-C: the attempt is charged, the episode runs again, and the evaluation goes on."""
    with EvalRunnerGroup(config(raise_at(place)), threaded=threaded) as group:
        result = group.evaluate()
    assert result.status == "complete"
    # The first environment is built before there is an episode to charge.
    assert result.fault_counts == ({} if place == "construct" else {"KeyboardInterrupt": 1})


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_nothing_turns_ctrl_c_into_an_error_an_interrupt_is_the_environments(handler: Any) -> None:
    """A job in the background ignores Ctrl-C."""
    former = signal.signal(signal.SIGINT, handler)
    try:
        result = evaluate(config(raise_at("step")))
    finally:
        signal.signal(signal.SIGINT, former)
    assert result.status == "complete"
    assert result.fault_counts == {"KeyboardInterrupt": 1}


def test_ctrl_c_stays_one() -> None:
    """It ends the evaluation and reaches the caller; the handler is the one that was there."""
    before = signal.getsignal(signal.SIGINT)

    def press(place: str) -> None:
        if place == "step":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        evaluate(config(press))
    assert signal.getsignal(signal.SIGINT) is before


def test_after_ctrl_c_another_evaluation_runs() -> None:
    """And tells the two from each other as the first did."""
    test_ctrl_c_stays_one()
    assert evaluate(config(raise_at("step"))).fault_counts == {"KeyboardInterrupt": 1}


def test_a_handler_of_the_callers_is_asked_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only takes note of Ctrl-C lets the evaluation go on."""
    noted = []
    former = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        left = [1]

        def press(place: str) -> None:
            if left and place == "step":
                left.clear()
                os.kill(os.getpid(), signal.SIGINT)
                raise KeyboardInterrupt

        result = evaluate(config(press))
    finally:
        signal.signal(signal.SIGINT, former)
    assert noted == [signal.SIGINT]
    assert result.fault_counts == {"KeyboardInterrupt": 1}


class Late(BaseException):
    """What the handler of an alarm raises."""


def late(*_: object) -> None:
    raise Late


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("mine", [False, True], ids=["of the caller", "of the environment"])
def test_the_alarm_of_a_time_limit_leaves_later_exceptions_to_the_environment(
    mine: bool, kind: type[BaseException]
) -> None:
    """Only what a handler raised itself ends the evaluation, whoever installed the handler."""
    steps = []

    def limit(place: str) -> None:
        steps.extend([place] * (place == "step"))
        if mine:
            signal.signal(signal.SIGALRM, late)
        if place == "step" and len(steps) == 1:
            with pytest.raises(Late):
                signal.raise_signal(signal.SIGALRM)
        if place == "step" and len(steps) == 3:
            raise kind("the simulator's own")

    former = signal.signal(signal.SIGALRM, late)
    try:
        result = evaluate(config(limit))
    finally:
        signal.signal(signal.SIGALRM, former)
    assert (result.status, result.fault_counts) == ("complete", {kind.__name__: 1})


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_handler_of_a_time_limit_raised_ends_the_evaluation(wrapped: bool) -> None:
    """Also as the cause of another exception that is no error."""

    def limit(place: str) -> None:
        if place == "step" and wrapped:
            try:
                signal.raise_signal(signal.SIGALRM)
            except Late:
                raise SystemExit("too late") from None
        elif place == "step":
            signal.raise_signal(signal.SIGALRM)

    former = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(SystemExit if wrapped else Late):
            evaluate(config(limit))
    finally:
        signal.signal(signal.SIGALRM, former)


def test_where_an_environment_took_the_handler_over_any_interrupt_counts_as_ctrl_c() -> None:
    """Nothing tells them apart then, and a user who wants out must get out."""

    def take_over(place: str) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if place == "step":
            raise KeyboardInterrupt

    former = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            evaluate(config(take_over))
    finally:
        signal.signal(signal.SIGINT, former)


def test_without_the_note_an_interrupt_counts_as_ctrl_c() -> None:
    """As for whoever steps a runner by hand; in another thread than the main one there is no Ctrl-C."""
    assert not issubclass(KeyboardInterrupt, survivable())
    with signals_noted():
        assert issubclass(KeyboardInterrupt, survivable())
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(survivable()))
    thread.start()
    thread.join(60)
    assert issubclass(KeyboardInterrupt, found[0])


@pytest.mark.process
def test_what_had_finished_before_ctrl_c_is_in_the_log(tmp_path: Path) -> None:
    """In a process of its own, as at a prompt."""
    code = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_in_this_thread import config
from rl_eval import evaluate

steps = []
def act(place):
    steps.append(place)
    if len(steps) > 20_000:
        os.kill(os.getpid(), signal.SIGINT)
evaluate(config(act).evaluation(num_episodes=1_000_000), output=sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "KeyboardInterrupt" in done.stderr
    from rl_eval.log import read_log

    assert len(read_log(tmp_path / "run").rows) > 1_000

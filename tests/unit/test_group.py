"""A group in this process: what its caller can rely on while things go wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ClusterError, ConfigError, EvalError
from rl_eval.policies.mlp import MLPActor
from tests.refused import refused, result_of, untold


def cartpole() -> EvalConfig:
    return EvalConfig().environment("CartPole-v1").policy("rl_eval.policies.mlp:make_mlp").evaluation(num_episodes=5)


class _Hangs(gym.Wrapper[Any, Any, Any, Any]):
    """Its first step returns when it is told to; it notes who closes it."""

    entered = threading.Event()
    go = threading.Event()
    closed_by: ClassVar[list[str]] = []

    def step(self, action: Any) -> Any:
        self.entered.set()
        self.go.wait()
        return self.env.step(action)

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)
        super().close()


@pytest.fixture
def hanging() -> Iterator[EvalConfig]:
    """An environment whose steps return from when :attr:`_Hangs.go` is set, which is at the end at the latest."""
    _Hangs.entered.clear()
    _Hangs.go.clear()
    _Hangs.closed_by.clear()
    yield cartpole().environment(lambda context: _Hangs(gym.make("CartPole-v1"))).runners(num_envs_per_runner=1)
    _Hangs.go.set()


def test_a_queued_evaluation_is_cancelled_at_once_while_an_environment_hangs(hanging: EvalConfig) -> None:
    """However many are cancelled, those that cancel them do the work, so the evaluation that runs is not held up."""
    with EvalRunnerGroup(hanging) as group:
        first = group.submit()
        assert _Hangs.entered.wait(30)
        queued = [group.submit(weights=MLPActor(4, 2)) for _ in range(3)]
        for number, handle in enumerate(queued[:-1]):
            handle.cancel(f"replaced by {number + 1}", unless_started=True)
            assert handle.done()
            assert f"replaced by {number + 1}" in handle.result().reason
            assert (handle.result().status, len(handle.result().episodes)) == ("failed", 0)
        _Hangs.go.set()
        assert first.result(timeout=30).status == "complete"
        assert queued[-1].result(timeout=30).status == "complete"
        assert queued[-1].result().episodes[0].weights_version == 3
        queued[-1].cancel("too late")


def test_ctrl_c_while_a_queued_evaluation_is_cancelled_ends_it(
    hanging: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an error, since it was to have a result, and those after it have their turn."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with EvalRunnerGroup(hanging) as group:
        first = group.submit()
        assert _Hangs.entered.wait(30)
        second, third = group.submit(), group.submit()
        with monkeypatch.context() as patch:
            patch.setattr("rl_eval.execution.aspects.provenance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                second.cancel("not needed")
        with refused(EvalError) as caught:
            second.result(timeout=30)
        assert all(named in str(caught.value) for named in ("not needed", "KeyboardInterrupt"))
        _Hangs.go.set()
        assert [handle.result(timeout=30).status for handle in (first, third)] == ["complete", "complete"]


def test_a_queued_evaluation_is_cancelled_or_runs_whoever_is_first() -> None:
    """It has one result, whatever its turn coming, its cancellation and the end of its group have in common."""
    for _ in range(50):
        group = EvalRunnerGroup(cartpole())
        handles = [group.submit(num_episodes=1) for _ in range(4)]
        threads = [threading.Thread(target=handle.cancel, args=("not needed",)) for handle in handles]
        threads.append(threading.Thread(target=group.stop))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for handle in handles:
            assert handle.done()
            error = handle.exception()
            assert isinstance(error, ClusterError) or len(handle.result().episodes) in (0, 1)


def test_stop_does_not_wait_for_ever_nor_close_under_a_step(
    hanging: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung step delays stop() by its limit; the handle fails, and the environment is closed where it was stepped."""
    monkeypatch.setattr("rl_eval.execution.loop._STOP_TIMEOUT_S", 0.2)
    group = EvalRunnerGroup(hanging)
    handle = group.submit()
    assert _Hangs.entered.wait(30)
    group.stop()
    with refused(ClusterError, "stop"):
        handle.result(timeout=30)
    assert _Hangs.closed_by == []
    _Hangs.go.set()
    eventually(lambda: _Hangs.closed_by)
    assert _Hangs.closed_by == ["rl_eval control loop"]


def test_a_live_module_has_a_digest() -> None:
    """Two checkpoints can be told apart by their results, and a module by its own."""
    module, other = MLPActor(4, 2), MLPActor(4, 2)
    digests = [evaluate(cartpole(), policy=p).provenance["weights"]["digest"] for p in (module, module, other)]
    assert digests[0] == digests[1] != digests[2]


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_be_read_is_a_fault_like_any_other() -> None:
    """An exception whose text raises costs its attempt and no more."""

    class Breaks(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise _Mute

    result = evaluate(cartpole().environment(lambda context: Breaks(gym.make("CartPole-v1"))))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {"_Mute"}
    assert all("_Mute" in fault.message for fault in result.faults)


def test_a_code_change_is_accepted_in_a_log_only() -> None:
    """Without one nothing is continued, and the word would be lost in silence."""
    with refused(ConfigError, "accept_code_change", value=True):
        evaluate(cartpole(), accept_code_change=True)


def test_bounds_must_be_finite_before_anything_runs() -> None:
    """A bound that no interval can use is refused at once, not after the last episode."""
    with refused(ConfigError, "evaluation.return_bounds"):
        evaluate(cartpole().evaluation(return_bounds=(0.0, float("inf"))))


def test_integers_that_do_not_fit_are_the_environments_fault() -> None:
    """An observation that would wrap around is an error."""

    class Wraps(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, **kwargs: Any) -> Any:
            return np.array([300, -1]), {}

        def step(self, action: Any) -> Any:
            raise AssertionError

    result = result_of(evaluate, cartpole().environment(Wraps), policy=lambda x: np.zeros(len(x), int))
    assert (result.faults[0].cause, result.faults[0].error_type) == ("env", "EnvError")
    assert untold(result.faults[0].message, -1, 300) == []


def test_a_continued_evaluation_counts_the_steps_and_episodes_of_this_session(tmp_path: Path) -> None:
    """Speed and time left are said by what happens now; the result goes over both."""
    steps = [0]

    class Counts(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            steps[0] += 1
            return self.env.step(action)

    config = cartpole().environment(lambda context: Counts(gym.make("CartPole-v1")))
    handles: list[Any] = []

    def stop_soon(handle: Any) -> None:
        handles.append(handle)
        threading.Thread(target=lambda: _cancel_when(handle, lambda: steps[0] > 2_000)).start()

    with EvalRunnerGroup(config, threaded=False) as group:
        group.submit(num_episodes=4_000, output=tmp_path / "run", on_submitted=stop_soon)
        earlier = len(handles[0].result().episodes)
        assert earlier
        steps[0] = 0
        handle = group.submit(num_episodes=4_000, output=tmp_path / "run")
    progress = handle.progress()
    assert progress.num_earlier == earlier
    assert progress.num_finished == 4_000
    assert 0 < progress.env_steps <= steps[0]
    assert handle.result().timing.env_steps > progress.env_steps


def _cancel_when(handle: Any, condition: Any) -> None:
    eventually(condition)
    handle.cancel()

"""The early end of an evaluation whose first attempts all fail alike."""

from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_eval import EvalConfig, evaluate
from rl_eval.execution import session
from rl_eval.execution.mistakes import FailFast
from rl_eval.records.episode import Fault
from tests.refused import result_of, untold

OURS = [str(Path(session.__file__).with_name(name)) for name in ("one.py", "two.py")]


def fault(kind: str = "OSError", line: int = 3, phase: str = "reset") -> Fault:
    text = f'Traceback\n  File "a.py", line 1, in f\n  File "b.py", line {line}, in g\n{kind}: no licence\n'
    return Fault(0, 0, 1, "env", phase, 0, kind, "no licence", text, 0, "", 0.0)


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(1, 64))
def test_it_ends_at_the_limit_and_not_before(batches, lanes) -> None:
    """Twenty attempts, or four for each lane, counted over all reports."""
    counter, count = FailFast(lanes), 0
    for size in batches:
        count += size
        told = counter.failed([fault()] * size, alone=True)
        assert bool(told) == (count >= max(20, 4 * lanes))
        assert not told or told.startswith("OSError: no licence")


@given(
    st.integers(0, 50),
    st.sampled_from([fault("KeyError"), fault(line=4), fault(phase="step")]),
    st.integers(0, 100),
)
def test_another_error_keeps_it_going(before, other, after) -> None:
    """One fault of another kind, or from another place, is enough."""
    counter = FailFast(64)
    counter.failed([fault()] * before, alone=True)
    counter.failed([other], alone=True)
    assert counter.failed([fault()] * after, alone=True) == "" or before == 0


def test_one_runner_of_several_does_not_end_an_evaluation() -> None:
    """It may be the broken one; the first failure of a second runner ends it."""
    counter = FailFast(4)
    assert counter.failed([fault()] * 100, alone=False) == ""
    assert counter.failed([replace(fault(), runner=1)], alone=False)


def test_frames_of_this_package_are_no_other_place() -> None:
    """Some episodes are recorded for the determinism check, by a frame of ours."""
    ours = [replace(fault(), traceback=f'{fault().traceback}  File "{file}", line 5, in h\n') for file in OURS]
    assert FailFast(1).failed([*ours] * 10, alone=True)


class Unlicensed(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed=None, options=None):
        type(self).resets += 1
        raise OSError("no licence")

    def step(self, action):
        raise AssertionError("never reached")


def config(**faults) -> EvalConfig:
    built = EvalConfig().environment(Unlicensed).policy(lambda o: np.zeros(len(o), int))
    return built.evaluation(num_episodes=20_000).fault_tolerance(**faults)


def test_a_broken_environment_ends_the_evaluation_with_its_error_first() -> None:
    """Instead of sixty thousand faults."""
    result = evaluate(config())
    assert result.status == "failed"
    assert result.reason.startswith("OSError: no licence")
    assert len(result.faults) < 100
    assert "fault_tolerance.fail_fast=false" in result.reason
    shown = str(result).splitlines()
    assert shown[2].startswith("failed "), "before any number"
    assert "OSError: no licence" in shown[2]


class Unrewarding(Unlicensed):
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), "much", True, False, {}


def test_the_place_is_a_line_of_the_caller() -> None:
    """An error that the runner raises about a value has no such line, so the reason names no place."""
    assert untold(evaluate(config()).reason, "reset", f"{__file__}") == []
    reason = result_of(evaluate, config().environment(Unrewarding)).reason
    assert untold(reason, "step", "env") == []
    assert __file__ not in reason


def test_it_can_be_switched_off() -> None:
    """Then every episode is tried as often as it may be."""
    Unlicensed.resets = 0
    result = evaluate(config(fail_fast=False, max_attempts_per_episode=2).evaluation(num_episodes=30))
    assert result.status == "failed"
    assert Unlicensed.resets == 60


@pytest.mark.parametrize("lanes", [1, 16])
def test_first_attempts_that_all_fail_are_no_reason_to_end(lanes: int) -> None:
    """The second attempt of each lane tells."""

    class SecondTry(Unlicensed):
        def begin_episode(self, index: int, seed: int, attempt: int) -> None:
            self.attempt = attempt

        def reset(self, *, seed=None, options=None):
            if self.attempt == 1:
                raise OSError("no licence")
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), 1.0, True, False, {}

    result = evaluate(config().environment(SecondTry).runners(num_envs_per_runner=lanes).evaluation(num_episodes=60))
    assert result.status == "complete"
    assert len(result.faults) == 60

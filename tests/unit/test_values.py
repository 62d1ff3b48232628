"""Values are what they claim: what an environment may return, what is refused, and what a result says about it."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.execution.record_store import RecordStore
from rl_eval.records.episode import Fault, first_seen
from tests.refused import result_of, untold

ACROSS = pytest.mark.parametrize(("runner", "lanes"), [("single_agent", 1), ("vector", 3)])

STEPS = 4


class Scripted(gym.Env[Any, Any]):
    """Ends after four steps; anything that it returns can be replaced from its second step on."""

    def __init__(self, observation_space: gym.Space[Any] | None = None, **returned: Any) -> None:
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.returned = returned
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.returned.get("reset", (self.first(), self.returned.get("reset_info", {})))

    def first(self) -> Any:
        return self.returned.get("first", np.zeros(2, np.float32))

    def step(self, action: Any) -> Any:
        self.steps += 1
        ended = self.steps == STEPS
        result = {"observation": self.first(), "reward": 1.0, "terminated": ended, "truncated": False, "info": {}}
        if self.steps > 1:
            if "step" in self.returned:
                return self.returned["step"]
            made = {name: value(ended) if callable(value) else value for name, value in self.returned.items()}
            result |= {name: value for name, value in made.items() if name in result}
        return tuple(result.values())


def run(runner: str = "vector", lanes: int = 3, episodes: int = 6, **returned: Any) -> EvalResult:
    """Evaluate the scripted environment; every episode has one attempt."""
    keys = returned.pop("info_keys", ())
    return run_env(lambda context: Scripted(**returned), runner, lanes, num_episodes=episodes, info_keys=keys)


def run_env(env: Any, runner: str = "vector", lanes: int = 3, **evaluation: Any) -> EvalResult:
    return result_of(evaluate, config_of(env, runner, lanes).evaluation(**({"num_episodes": 1} | evaluation)))


def config_of(env: Any, runner: str, lanes: int) -> EvalConfig:
    return (
        EvalConfig()
        .environment(env)
        .policy(lambda observations: np.zeros(len(next(iter(_leaves(observations)))), int))
        .runners(num_runners=0, runner=runner, num_envs_per_runner=lanes)
        .evaluation(max_episode_steps=20, determinism_check=0)
        .fault_tolerance(max_attempts_per_episode=1)
    )


def _leaves(observations: Any) -> list[Any]:
    return list(observations.values()) if isinstance(observations, dict) else [observations]


def the_fault(result: EvalResult) -> Fault:
    """Return the fault of the first episode; all episodes failed."""
    assert result.num_failed == len(result.plan)
    return result.episodes[0].faults[0]


# ------------------------------------------------------------------------------ rewards and flags


REFUSED = {
    "text reward": ({"reward": "0.3"}, ["reward", "'0.3'", "str", "number"]),
    "no reward": ({"reward": None}, ["reward", "None", "number"]),
    "two rewards": ({"reward": np.array([0.25, 0.5])}, ["reward", "(2,)", "number"]),
    "no rewards": ({"reward": np.array([])}, ["reward", "(0,)"]),
    "tensor of rewards": ({"reward": torch.zeros(3)}, ["reward", "(3,)"]),
    "reward in a list": ({"reward": [0.5]}, ["reward", "list"]),
    "text in an array": ({"reward": np.array(["0.3"])}, ["reward", "number"]),
    "numpy's text": ({"reward": np.str_("0.3")}, ["reward", "'0.3'"]),
    "complex reward": ({"reward": 1j}, ["reward", "complex"]),
    "masked reward": ({"reward": np.ma.masked}, ["reward", "masked", "number"]),
    "masked array": ({"reward": np.ma.array([1.0])}, ["reward", "masked_array"]),
    "time as reward": ({"reward": np.timedelta64(3)}, ["reward", "timedelta64"]),
    "date as reward": ({"reward": np.datetime64(3, "ns")}, ["reward", "datetime64"]),
    "times in an array": ({"reward": np.array([3], "m8[ns]")}, ["reward", "number"]),
    "structured reward": ({"reward": np.zeros(1, [("a", "f8")])[0]}, ["reward", "void"]),
    "bytes as reward": ({"reward": np.bytes_(b"1")}, ["reward", "bytes"]),
    "masked terminated": ({"terminated": np.ma.masked}, ["terminated", "masked"]),
    "time as truncated": ({"truncated": np.timedelta64(0)}, ["truncated", "timedelta64"]),
    "masked observation": ({"observation": np.ma.zeros(2, np.float32)}, ["observation", "MaskedArray"]),
    "text as terminated": ({"terminated": "False"}, ["terminated", "'False'", "str", "True or False"]),
    "no terminated": ({"terminated": None}, ["terminated", "None"]),
    "empty text as terminated": ({"terminated": ""}, ["terminated", "''"]),
    "text as truncated": ({"truncated": "False"}, ["truncated", "'False'"]),
    "two flags": ({"terminated": np.zeros(2, bool)}, ["terminated", "(2,)"]),
    "a list as truncated": ({"truncated": []}, ["truncated", "[]"]),
    "a share as terminated": ({"terminated": 0.5}, ["terminated", "0.5"]),
    "NaN as terminated": ({"terminated": float("nan")}, ["terminated", "nan"]),
    "an object as truncated": ({"truncated": object()}, ["truncated", "object"]),
}


@ACROSS
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_or_flag_is_refused_by_name(name: str, runner: str, lanes: int) -> None:
    """Text, nothing, several values and objects are an error of the environment: field, value and what is due."""
    returned, words = REFUSED[name]
    fault = the_fault(run(runner, lanes, **returned))
    assert (fault.error_type, fault.cause, fault.phase, fault.step) == ("EnvError", "env", "step", 2)
    assert [word for word in words if word not in fault.message] == []


SCALARS: dict[str, Any] = {
    "int": int,
    "bool": bool,
    "float": float,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "numpy bool": np.bool_,
    "tensor": torch.tensor,
    "tensor with a gradient": lambda value: torch.tensor(float(value), requires_grad=True),
    "array without dimensions": np.array,
}


@ACROSS
@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_every_make_are_rewards_and_flags(name: str, runner: str, lanes: int) -> None:
    """Those of Python, numpy and torch are read as what they are, without a word.

    An episode ends where its flag is true, and the record says which it was; one is success, and zero is none.
    """
    make = SCALARS[name]
    for field in ("terminated", "truncated"):
        result = run(runner, lanes, **{"reward": make(1.0), "terminated": False, field: make})
        assert (result.status, result.notes) == ("complete", [])
        ends = {(r.episode_return, r.length, r.terminated, r.truncated) for r in result.episodes}
        assert ends == {(float(STEPS), STEPS, field == "terminated", field == "truncated")}
    for value in (True, False):
        result = run(runner, lanes, info={"is_success": make(value)})
        assert (result.success_rate, result.notes) == (float(value), [])


@ACROSS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", np.array([1.0])),
        ("reward", torch.ones(1, 1)),
        ("terminated", lambda ended: np.array([ended])),
        ("truncated", lambda ended: torch.tensor([ended])),
    ],
)
def test_an_array_of_one_value_is_that_value_with_one_note(field: str, value: Any, runner: str, lanes: int) -> None:
    """Legacy environments go on, and the result says once what they return."""
    result = run(runner, lanes, **{field: value})
    assert result.status == "complete"
    assert {record.length for record in result.episodes} == {STEPS}
    assert {record.episode_return for record in result.episodes} == {float(STEPS)}
    (note,) = result.notes
    assert field in note
    assert "array" in note


@ACROSS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("-inf"), torch.tensor(float("nan"))])
def test_a_reward_that_is_not_finite_is_refused_at_its_step(value: Any, runner: str, lanes: int) -> None:
    """The fault says at which step the reward was no finite number."""
    fault = the_fault(run(runner, lanes, reward=value))
    assert (fault.error_type, fault.phase, fault.step) == ("EnvError", "step", 2)
    assert untold(fault.message, "reward", 2) == []


def test_finite_rewards_whose_sum_is_not_are_refused() -> None:
    """A sum that overflows is no return either."""
    fault = the_fault(run(reward=1.7e308))
    assert (fault.error_type, fault.phase) == ("EnvError", "step")
    assert untold(fault.message, "rewards", "inf") == []


# ------------------------------------------------------------------------------ the shape of step and reset


FOUR = (np.zeros(2, np.float32), 1.0, False, {})


@ACROSS
@pytest.mark.parametrize(
    ("phase", "returned"),
    [("step", returned) for returned in (FOUR, FOUR[:3], (*FOUR[:3], False, {}, 0), None, 0.5)]
    + [("reset", returned) for returned in (np.zeros(2, np.float32), np.zeros(4), {"a": 1, "b": 2}, None, FOUR)],
)
def test_what_has_another_shape_is_told_with_the_contract(phase: str, returned: Any, runner: str, lanes: int) -> None:
    """Of gym before 0.26 too: a bare observation of two numbers could be unpacked into two."""
    fault = the_fault(run(runner, lanes, **{phase: returned}))
    assert (fault.error_type, fault.phase) == ("EnvError", phase)
    assert f"{phase}()" in fault.message
    assert "(observation, " in fault.message


@ACROSS
@pytest.mark.parametrize("phase", ["reset", "step"])
@pytest.mark.parametrize("info", [None, [], "info", 0])
def test_an_info_that_is_no_mapping_is_the_environments_fault(phase: str, info: Any, runner: str, lanes: int) -> None:
    """None and other things that are no dict are refused, from ``reset`` as well as ``step``."""
    fault = the_fault(run(runner, lanes, **{"info" if phase == "step" else "reset_info": info}))
    assert (fault.error_type, fault.phase) == ("EnvError", phase)
    assert all(named in fault.message for named in (f"{phase}()", repr(info), "info", "dict"))


def test_any_mapping_is_an_info() -> None:
    """An info need not be a dict."""
    info = MappingProxyType({"success": True, "speed": np.float32(2)})
    result = run(info=info, reset_info=info, info_keys=("speed",))
    assert (result.status, result.notes, result.success_rate) == ("complete", [], 1.0)
    assert result.episodes[0].info == {"speed": 2.0}


# ------------------------------------------------------------------------------ what info reports


@ACROSS
@pytest.mark.parametrize("key", ["success", "is_success"])
@pytest.mark.parametrize("value", ["False", np.zeros(2, bool), [True], {}, 0.5, float("nan")])
def test_a_success_that_is_no_flag_is_one_note(key: str, value: Any, runner: str, lanes: int) -> None:
    """It fails no episode and is no success; one note names key and value."""
    result = run(runner, lanes, info={key: value})
    assert result.status == "complete"
    assert {(record.success_once, record.success_at_end) for record in result.episodes} == {(None, None)}
    (note,) = result.notes
    assert f"info[{key!r}]" in note
    assert "episode " in note


@ACROSS
def test_a_step_without_a_success_leaves_those_before(runner: str, lanes: int) -> None:
    """Only the step whose success cannot be read reports none."""
    result = run(runner, lanes, info=lambda ended: {"success": "yes" if ended else True})
    assert {(record.success_once, record.success_at_end) for record in result.episodes} == {(True, True)}
    assert len(result.notes) == 1


@ACROSS
@pytest.mark.parametrize("value", ["0.3", None, [1.0], np.zeros(2), np.ma.masked, np.timedelta64(3, "s")])
def test_an_info_scalar_that_was_asked_for_must_be_one(value: Any, runner: str, lanes: int) -> None:
    """Text that looks like a number is text."""
    fault = the_fault(run(runner, lanes, info={"speed": value}, info_keys=("speed",)))
    assert fault.error_type == "EnvError"
    assert all(part in fault.message for part in ("info['speed']", "evaluation.info_keys", repr(value)))


def test_an_info_key_that_no_episode_reported_is_a_note() -> None:
    """A misspelt key would be a column of NaN without a word."""
    result = run(info={"distance": 2.0}, info_keys=("distance", "distence"))
    (note,) = result.notes
    assert "'distence'" in note
    assert "'distance'" not in note
    assert "evaluation.info_keys" in note


def test_an_info_key_that_some_episodes_reported_is_no_note() -> None:
    """An info of rare events is as it should be; so is no completed episode at all, which is told otherwise."""
    assert run(info=lambda ended: {"crash": 1.0} if ended else {}, info_keys=("crash",)).notes == []
    assert not any("info_keys" in note for note in run(reward=None, info_keys=("crash",)).notes)


# ------------------------------------------------------------------------------ observations


@ACROSS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_infinite_observation_is_refused_as_nan_is(dtype: Any, runner: str, lanes: int) -> None:
    """An infinity poisons a network as a NaN does; the policy never sees either."""
    space = spaces.Box(-np.inf, np.inf, (2,), dtype)
    for value, word in ((np.inf, "infinite"), (-np.inf, "infinite"), (np.nan, "NaN")):
        fault = the_fault(run(runner, lanes, observation_space=space, observation=np.array([0, value], dtype)))
        assert (fault.error_type, fault.phase, fault.step) == ("EnvError", "step", 2)
        assert word in fault.message
        fault = the_fault(run(runner, lanes, observation_space=space, first=np.array([0, value], dtype)))
        assert (fault.phase, fault.step) == ("reset", 0)

    wide = run(runner, lanes, observation_space=space, observation=np.array([0, 1e300]))
    if dtype is np.float32:  # A float64 of 1e300 overflows it.
        assert untold(the_fault(wide).message, "float32") == []


NESTED = spaces.Dict({"far": spaces.Box(-1, 1, (2,), np.float32), "near": spaces.Box(-9, 9, (2,), np.float32)})


def nested(far: Any, near: Any = (0.0, 0.0)) -> dict[str, Any]:
    return {"far": np.array(far, np.float32), "near": np.array(near, np.float32)}


@ACROSS
def test_an_observation_outside_of_its_space_is_one_note(runner: str, lanes: int) -> None:
    """Which part, where it was first seen, its value and its bounds; the episodes count all the same."""
    outside = nested([0, 1.5], [5, -5])
    result = run(runner, lanes, observation_space=NESTED, first=outside, observation=outside)
    assert result.status == "complete"
    (note,) = result.notes
    assert "observation['far']" in note
    assert re.search(r"episode 0\b.*\bstep 0\b.*\b1\.5\b", note)
    assert untold(note, -1.0, 1.0) == []


@ACROSS
def test_an_observation_that_leaves_its_space_later_is_noticed(runner: str, lanes: int) -> None:
    """Only the first observations are inside: looking at some of all batches is enough."""
    far, near = nested([0, -1.5]), nested([0, 0])
    result = run(runner, lanes, episodes=40, observation_space=NESTED, first=near, observation=far)
    (note,) = result.notes
    assert "observation['far']" in note
    assert ": -1.5" in note


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), np.array([1, -1], np.float32)),
        (spaces.Box(-np.pi, np.pi, (2,), np.float32), np.array([np.pi, -np.pi], np.float32)),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), np.array([3e38, -3e38], np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 255], np.uint8)),
        (spaces.Box(1, 2, (2,), np.float64), np.array([1, 2], np.float32)),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 1]),
        (spaces.Box(-1, 1, (), np.float32), 0.5),
        (spaces.Discrete(3, start=2), 4),
        (spaces.Discrete(3, start=2), np.int8(2)),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2])),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
)
def test_what_the_space_allows_is_no_note(space: gym.Space[Any], observation: Any) -> None:
    """Bounds belong to the space, padding rows to nobody, and a number that fits may have another width."""
    result = run(lanes=2, observation_space=space, first=observation, observation=observation)
    assert (result.status, result.notes) == ("complete", [])


FLOATS = spaces.Box(-9, 9, (2,), np.float32)


@ACROSS
@pytest.mark.parametrize(
    ("space", "observation", "said"),
    [
        (spaces.Discrete(3, start=2), 5, "outside"),
        (spaces.MultiDiscrete([2, 3]), np.array([0, 3]), "outside"),
        (spaces.MultiBinary(2), np.array([0, 2], np.int8), "outside"),
        (spaces.Box(0, 10, (2,), np.int32), np.array([0, -1], np.int32), "outside"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 4]), "another dtype"),
        (FLOATS, np.array([3, 4]), "another dtype"),
        (FLOATS, np.array([0.1, 0.2]), "another dtype"),
        (spaces.Box(-9, 9, (), np.float32), np.float64(0.5), "another dtype"),
        (FLOATS, torch.zeros(2, dtype=torch.float64), "another dtype"),
    ],
)
def test_what_the_space_does_not_contain_is_one_note(
    space: gym.Space[Any], observation: Any, said: str, runner: str, lanes: int
) -> None:
    """Every space has bounds; what ``Box.contains`` refuses for its dtype is told, even where the values survive."""
    result = run(runner, lanes, observation_space=space, first=observation, observation=observation)
    (note,) = result.notes
    assert result.status == "complete"
    assert said in note
    assert re.search(r"episode 0\b.*\bstep 0\b", note)


def test_notes_that_differ_in_their_place_alone_are_one() -> None:
    """Every runner reports the first place that it saw; the result tells one."""
    records = RecordStore(1, (), None, {})
    for index in (3, 5):
        records.note(first_seen("it is odd", index, 1, str(index)))
        records.note("something else")
    assert list(records.notes) == ["it is odd; first seen in episode 3 at step 1: 3", "something else"]


def test_every_evaluation_of_a_group_has_its_notes() -> None:
    """A warm runner says it again: the second result is read by itself."""
    from rl_eval import EvalRunnerGroup

    outside = np.array([0, 1.5])
    config = config_of(lambda c: Scripted(first=outside, observation=outside, reward=np.array([1.0])), "vector", 2)
    config.evaluation(num_episodes=30)
    with EvalRunnerGroup(config) as group:
        notes = [len(group.evaluate().notes) for _ in range(2)]
    assert notes == [3, 3]


# ------------------------------------------------------------------------------ errors without a text


class Unspoken(Scripted):
    """Its step raises an error without a text."""

    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error = error

    def step(self, action: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [AssertionError, AssertionError(), AssertionError("AssertionError"), SystemExit()])
def test_a_fault_without_a_text_is_told_with_its_line(error: Any) -> None:
    """A bare assertion says nothing; its file, line, function and source do, also in the reason of the result."""
    result = run_env(lambda context: Unspoken(error))
    assert all(named in the_fault(result).message for named in ("step", "raise self.error"))
    assert "test_values.py:" in result.reason


def test_what_an_environment_raises_keeps_its_own_words() -> None:
    """Also where they could be taken for a wrong number of values; without a traceback there is no line to tell."""
    for error in (KeyError("speed"), ValueError("too many values to unpack (expected 2)")):
        fault = the_fault(run_env(lambda context, error=error: Unspoken(error)))  # type: ignore[misc]
        assert (fault.error_type, fault.message) == (type(error).__name__, str(error))
    assert Fault.describe(AssertionError())[:2] == ("AssertionError", "AssertionError")

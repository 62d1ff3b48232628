"""Probe of a policy before its first episode."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces

from benchmarks.policy_kinds import Acting, build
from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.policies import CallablePolicy, adapt_policy
from rl_eval.policies.inference.inference import BLOCK, RowInference
from rl_eval.records.generators import generator_states
from tests.refused import refused, untold
from tests.unit.test_inference import ACTIONS, DEPENDENT, NESTED, OBSERVATIONS, total

Array = npt.NDArray[Any]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")

PENDULUM = gym.make("Pendulum-v1")


def probed(
    policy: Any, observations: gym.Space[Any] = OBSERVATIONS, lanes: int = 3, *, allow: bool = False
) -> RowInference:
    """Probe a policy, a function among them."""
    policy = policy if hasattr(policy, "act") else CallablePolicy(policy)
    section = PolicySection(actions="none", allow_nondeterministic=allow)
    inference = RowInference(policy, observations, ACTIONS, lanes, section)
    inference.probe()
    return inference


def of_kind(name: str, *, allow: bool = False, lanes: int = 3) -> RowInference:
    """Probe a policy of the benchmark in Pendulum-v1."""
    observations, actions = PENDULUM.observation_space, PENDULUM.action_space
    section = PolicySection(
        policy="benchmarks.policy_kinds:build",
        policy_kwargs={"name": name},
        deterministic=name != "declared_noise",
        allow_nondeterministic=allow,
    )
    inference = RowInference(adapt_policy(section, observations, actions), observations, actions, lanes, section)
    inference.probe()
    return inference


# ------------------------------------------------------------------------------ a policy that does not repeat itself

UNREPEATABLE = {
    "dropout_in_training_mode": "torch's global generator",
    "torchscript_with_dropout": "torch's global generator",
    "forced_dropout": "torch's global generator",
    "torch_rand_in_forward": "torch's global generator",
    "global_numpy_generator": "numpy's global generator",
    "global_python_generator": "Python's global generator",
    "own_numpy_generator": "",
    "own_torch_generator": "",
    "own_python_generator": "",
    "samples_the_action_space": "",
    "epsilon_greedy": "",
    "systems_randomness": "",
    "reads_a_clock": "",
    "counts_its_calls": "",
    "counts_its_calls_in_a_global": "",
    "frame_difference": "",
    "running_normalizer": "",
    "running_statistics_in_a_buffer": "",
    "hidden_lstm_state": "",
}
"""Global generator from which each policy draws."""


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_a_policy_that_does_not_repeat_itself_is_refused(name: str) -> None:
    """Before the first episode, in every layout; the error names a global generator that changed."""
    for lanes in (1, 24):
        with refused(ConfigError, "policy.allow_nondeterministic") as caught:
            of_kind(name, lanes=lanes)
        drawn = [generator for generator in generator_states() if generator in str(caught.value)]
        assert drawn == ([UNREPEATABLE[name]] if UNREPEATABLE[name] else [])


@pytest.mark.parametrize("name", ["forced_dropout", "counts_its_calls", "systems_randomness"])
def test_allowed_it_is_labelled_and_every_build_has_the_same_key(name: str) -> None:
    """The setting turns the error into a note, and outputs that repeat nowhere are not compared between runners."""
    first, second = of_kind(name, allow=True), of_kind(name, allow=True)
    assert first.numerics["outputs"] == ""
    assert first.numerics == second.numerics
    (note,) = first.notes
    assert "policy.allow_nondeterministic" in note


def test_a_single_event_in_the_reference_is_no_batch_dependence() -> None:
    """A draw that strikes once, in the reference, is seen when the same batch is computed again."""

    class Once:
        calls = 0

        def act(self, observations: Array, state: Any, live: Any, noise: Any) -> tuple[Array, None]:
            Once.calls += 1
            return total(observations) + (Once.calls == 4), None

    with refused(ConfigError, "policy.allow_nondeterministic"):
        probed(Once())


# ------------------------------------------------------------------------------ one that does

RIGHT = (
    "network",
    "numpy_function",
    "dropout_in_evaluation_mode",
    "batch_norm_in_evaluation_mode",
    "layer_norm",
    "frozen_normalizer",
    "bfloat16",
    "float64",
    "torchscript",
    "declared_noise",
    "overwrites_arrays",
    "overwrites_tensors",
    "remembers_answers",
    "keeps_its_last_logits",
)


@pytest.mark.parametrize("name", RIGHT)
def test_a_function_of_its_observations_passes_without_a_note(name: str) -> None:
    """And allow_nondeterministic changes nothing for it."""
    inference = of_kind(name, allow=True)
    assert inference.notes == ()
    assert inference.numerics["reference"] == f"block of {BLOCK}"
    assert inference.numerics["outputs"]
    assert inference.numerics == of_kind(name).numerics


EXACT: dict[str, tuple[gym.Space[Any], Callable[[Any], Array], str, str]] = {
    "vector": (OBSERVATIONS, total, f"block of {BLOCK}", "5d284d9f24c9c547"),
    "bounded": (spaces.Box(-1, 2, (3,), np.float64), total, f"block of {BLOCK}", "7b9b9216169158df"),
    "image": (spaces.Box(0, 255, (84, 84, 4), np.uint8), total, f"block of {BLOCK}", "65833eb680b09115"),
    "nested": (
        NESTED,
        lambda x: np.stack([x["a"][:, 0].astype(np.float64), x["b"][0] + x["b"][1].max((1, 2))], 1),
        f"block of {BLOCK}",
        "b6598df63a1efc53",
    ),
    "row": (OBSERVATIONS, lambda x: total(x) + np.arange(len(x))[:, None], "row", "c1afdbf074eb9913"),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_key_of_earlier_evaluations_stays(name: str) -> None:
    """Their logs hold it, and are continued and replayed by comparing it; these functions have no rounding."""
    observations, function, reference, outputs = EXACT[name]
    numerics = probed(function, observations).numerics
    assert (numerics["reference"], numerics["outputs"]) == (reference, outputs)


# ------------------------------------------------------------------------------ notes


def test_a_row_that_depends_on_its_batch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row is exact but slow, so the result says so, and that MKL may be the reason where that may be."""
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    (note,) = of_kind("normalizes_across_rows").notes
    assert untold(note, "batch") == []
    assert "MKL_CBWR" not in note
    monkeypatch.delenv("MKL_CBWR")
    (note,) = of_kind("normalizes_across_rows").notes
    assert "MKL_CBWR" in note


def test_batch_norm_in_training_mode_is_refused() -> None:
    """It depends on its batch, and has no result for a row alone: there is no definition that could be kept."""
    with refused(ConfigError, "policy.policy"):
        of_kind("batch_norm_in_training_mode")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("batch_norm_in_training_mode", "policy.policy"),
        ("running_statistics_in_a_buffer", "policy.allow_nondeterministic"),
    ],
)
def test_statistics_are_afterwards_what_they_were(name: str, key: str) -> None:
    """A live policy is its trainer's: made-up observations do not get into its running statistics."""
    policy = build(name, PENDULUM.observation_space, PENDULUM.action_space)
    module = policy.net if isinstance(policy, Acting) else policy
    before = {key: value.clone() for key, value in module.state_dict().items()}
    section = PolicySection(policy=policy)
    spaces = PENDULUM.observation_space, PENDULUM.action_space
    inference = RowInference(adapt_policy(section, *spaces), *spaces, 3, section)
    with refused(ConfigError, key):
        inference.probe()
    assert {part: value.tolist() for part, value in module.state_dict().items()} == {
        part: value.tolist() for part, value in before.items()
    }


# ------------------------------------------------------------------------------ large observations

LARGE = spaces.Box(-np.inf, np.inf, (600, 1000), np.float32)
ROW_BYTES = 600 * 1000 * 4


class Counted:
    """Counts the rows that a function computed."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function
        self.rows = 0

    def act(self, observations: Array, state: Any, live: Any, noise: Any) -> tuple[Array, None]:
        self.rows += len(observations)
        return self.function(observations), None


IMAGE = spaces.Box(0, 255, (1000, 2000, 3), np.uint8)


@pytest.mark.parametrize(("space", "row_bytes"), [(LARGE, ROW_BYTES), (IMAGE, 6_000_000)])
def test_the_probe_of_large_observations_is_bounded(space: spaces.Box, row_bytes: int) -> None:
    """In rows that it computes and in bytes that it holds, whatever the number of lanes.

    A pass over a block needs the bytes of a block, and the probe at most twice as much.
    """

    def first(observations: Array) -> Array:
        return observations[:, 0, :2].reshape(len(observations), -1)[:, :2].astype(float)

    policy = Counted(first)
    inference = RowInference(policy, space, ACTIONS, 40, PolicySection(actions="none"))
    tracemalloc.start()
    inference.probe()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert policy.rows <= 8 * BLOCK
    assert peak <= 2 * BLOCK * row_bytes
    assert inference.numerics["reference"] == f"block of {BLOCK}"
    assert inference.numerics == probed(first, space, 1).numerics


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependence_on_the_batch_is_found_in_large_observations_too(name: str) -> None:
    """Few rows and rounds are enough for what depends on position, neighbours or the whole."""
    assert probed(DEPENDENT[name], LARGE).numerics["reference"] == "row"


@pytest.mark.parametrize("pair", [(0, 1), (3, 12), (15, 14), (7, 0)])
def test_one_row_that_leaks_into_another_is_found_in_large_observations_too(pair: tuple[int, int]) -> None:
    """A single pair of positions is seen, in either direction."""
    source, target = pair

    def function(x: Array) -> Array:
        result = total(x)
        if len(x) > max(pair):
            result[target] += 1e-6 * total(x)[source]
        return result

    assert probed(function, LARGE).numerics["reference"] == "row"


# ------------------------------------------------------------------------------ a policy that overwrites its input


@pytest.mark.parametrize("lanes", [3, 20])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_overwritten_observations_do_not_reach_the_other_lanes(kind: str, lanes: int) -> None:
    """When one row fails, the others are computed again from what the environment gave."""

    def halve(x: Array) -> Array:
        if kind == "tensor":
            torch.from_numpy(x).mul_(0.5)
        else:
            x *= 0.5
        if (x == 333).any():
            raise ZeroDivisionError("666 is in the batch")
        return total(x)

    inference = probed(halve, lanes=lanes)
    for lane in range(lanes):
        inference.begin(lane, lane)
        inference.observations.write(lane, np.full(4, 666 if lane == 1 else lane, np.float32))
    actions, errors = inference.act()
    assert list(errors) == [1]
    assert [actions[lane].tolist() for lane in range(lanes) if lane != 1] == [
        [lane / 2] * 2 for lane in range(lanes) if lane != 1
    ]


def test_observations_that_are_left_alone_are_not_copied() -> None:
    """The usual policy gets the batch itself."""
    seen: list[Array] = []

    def function(x: Array) -> Array:
        seen.append(x)
        return total(x)

    inference = probed(function)
    inference.begin(0, 0)
    inference.act()
    assert np.shares_memory(seen[-1], inference.observations.arrays)


# ------------------------------------------------------------------------------ in an evaluation


def pendulum(name: str) -> EvalConfig:
    return (
        EvalConfig()
        .environment("Pendulum-v1")
        .policy("benchmarks.policy_kinds:build", policy_kwargs={"name": name})
        .evaluation(num_episodes=3, max_episode_steps=5)
    )


def test_every_result_of_a_group_has_the_note() -> None:
    """The probe runs once per weights, and each evaluation with them says what it found."""
    with EvalRunnerGroup(pendulum("forced_dropout").policy(allow_nondeterministic=True)) as group:
        for result in (group.evaluate(), group.evaluate(seed=1)):
            assert result.status == "complete"
            assert sum("policy.allow_nondeterministic" in note for note in result.notes) == 1


def test_the_setting_is_not_part_of_what_is_evaluated() -> None:
    """It decides whether an evaluation starts, not what an episode is: logs are continued with and without it."""
    config = pendulum("network")
    assert config.build().identity() == config.policy(allow_nondeterministic=True).build().identity()

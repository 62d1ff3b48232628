"""Texts as observations: an instruction per episode reaches the policy, equal for any runner, and is never cut."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, EnvError
from rl_eval.policies.inference.device_observations import DeviceObservations
from rl_eval.policies.inference.spaces import ObservationBatch
from rl_eval.wrappers import InfoKeys
from tests.refused import refused

TASKS = {"go left": 0, "go right": 1, "stay where you are, please": 2}
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,"
EPISODES = 20


class Obeys(gym.Env[Any, Any]):
    """An instruction for each episode, and a reward of 1 for each step that follows it."""

    instruction = spaces.Text(30, charset=CHARACTERS)
    observation_space: gym.Space[Any] = spaces.Dict({"instruction": instruction, "place": spaces.Box(-9, 9, (2,))})
    action_space = spaces.Discrete(3)
    condition_keys = ("task",)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        drawn = list(TASKS)[self.np_random.integers(3)]
        self.task, self.left = (options or {}).get("task", drawn), int(self.np_random.integers(3, 9))
        return self.seen(), {"task": self.task}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.seen(), float(action == TASKS[self.task]), self.left == 0, False, {"task": self.task}

    def seen(self) -> Any:
        return {"instruction": self.task, "place": self.np_random.uniform(-1, 1, 2).astype(np.float32)}


class Alone(Obeys):
    """The observation is the instruction."""

    observation_space = Obeys.instruction

    def seen(self) -> Any:
        return self.task


class InTuple(Obeys):
    """The instruction is in a tuple in a dict."""

    observation_space = spaces.Dict({"told": spaces.Tuple([spaces.Discrete(5), Obeys.instruction])})

    def seen(self) -> Any:
        return {"told": (3, self.task)}


class InInfo(Obeys):
    """Only ``info`` has the instruction."""

    observation_space = spaces.Dict({"place": spaces.Box(-9, 9, (2,))})

    def seen(self) -> Any:
        return {"place": np.zeros(2, np.float32)}


def obey(observations: Any) -> Any:
    """Look up the instructions. Any other text is an error, as in a tokenizer with fixed texts."""
    texts = observations
    if isinstance(observations, dict):
        texts = observations["told"][1] if "told" in observations else observations.get("instruction")
        texts = observations["task"] if texts is None else texts
    return np.array([TASKS[text] for text in texts])


def slots(num_envs: int, env: Any = Obeys, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([env] * num_envs, autoreset_mode=mode)


def config(env: Any = Obeys, policy: Any = obey, **runners: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(policy).evaluation(num_episodes=EPISODES, seed=3)
    return made.runners(**runners)


LAYOUTS: dict[str, Any] = {
    "1 slot": config(num_envs_per_runner=1),
    "8 slots": config(num_envs_per_runner=8),
    "one after the other": config(runner="single_agent"),
    "processes": config(runner="subprocess", num_envs_per_runner=3),
    "alone": config(Alone),
    "in a tuple": config(InTuple),
    "batched": config(slots, runner="batched", num_envs_per_runner=3),
    "batched alone": config(partial(slots, env=Alone), runner="batched"),
    "batched in a tuple": config(partial(slots, env=InTuple), runner="batched"),
    "restarts in the step": config(partial(slots, mode=AutoresetMode.SAME_STEP), runner="batched"),
    "info": config(InInfo).environment(wrappers=[{"wrapper": InfoKeys, "keys": {"task": Obeys.instruction}}]),
    "batched info": config(partial(slots, env=InInfo), runner="batched").environment(
        wrappers=[{"wrapper": InfoKeys, "keys": {"task": Obeys.instruction}}]
    ),
}


def returns(result: EvalResult) -> list[tuple[int, float, int]]:
    return [(one.seed, one.episode_return, one.length) for one in result.episodes]


@pytest.fixture(scope="module")
def by_hand() -> Callable[[list[int]], list[tuple[int, float, int]]]:
    def run(seeds: list[int]) -> list[tuple[int, float, int]]:
        rows = []
        for seed in seeds:
            env, total, length, ended = Obeys(), 0.0, 0, False
            seen, _ = env.reset(seed=seed)
            while not ended:
                seen, reward, ended, _, _ = env.step(TASKS[seen["instruction"]])
                total, length = total + reward, length + 1
            rows.append((seed, total, length))
        return rows

    return run


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.process) if one == "processes" else one for one in LAYOUTS]
)
def test_the_instruction_of_an_episode_reaches_the_policy(layout: str, by_hand: Any) -> None:
    result = evaluate(LAYOUTS[layout])
    rows = returns(result)
    assert all(total == length for _, total, length in rows)
    if not layout.endswith(("alone", "tuple", "info")):  # These draw other numbers.
        assert rows == by_hand([seed for seed, _, _ in rows])
    assert result.determinism.passed
    assert not result.notes or layout.startswith(("batched", "restarts"))


class Hangs(Obeys):
    """Never returns from its first reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(3600)


@pytest.mark.process
def test_a_first_reset_that_hangs_ends_with_its_process() -> None:
    made = config(Hangs, runner="subprocess").fault_tolerance(reset_timeout_s=1, max_attempts_per_episode=1)
    with refused(EnvError, "environment.env"):
        evaluate(made)


@pytest.mark.process
def test_another_interpreter_sends_texts_and_gets_its_wrappers() -> None:
    tells = {"wrapper": "rl_eval.wrappers:InfoKeys", "keys": {"task": Obeys.instruction}}
    for env, wrappers in ((Obeys, ()), (InInfo, (tells,))):
        here = config(f"{__name__}:{env.__name__}").environment(wrappers=wrappers).evaluation(num_episodes=2)
        there = here.copy().environment(python=sys.executable).runners(runner="subprocess", num_envs_per_runner=1)
        assert returns(evaluate(there)) == returns(evaluate(here))


def test_the_texts_of_the_probe_do_not_depend_on_the_plan() -> None:
    """So runs of different lengths and seeds have one numerics key, and can be continued and compared."""
    plans = [config().evaluation(num_episodes=count, seed=seed) for count, seed in ((1, 3), (9, 3), (2, 8))]
    first, *others = [evaluate(plan).provenance["numerics"] for plan in plans]
    assert first["outputs"]
    assert others == [first, first]


def test_conditions_give_the_instruction() -> None:
    rows = [{"id": str(number), "task": task} for task, number in TASKS.items()]
    result = evaluate(config().evaluation(num_episodes=6, conditions=rows))
    assert {one.condition for one in result.episodes} == {*result.plan.condition_ids}
    assert all(one.episode_return == one.length for one in result.episodes)


def pad_to_longest(observations: Any) -> Any:
    """Let a row depend on the longest text of its batch, as careless tokenizers do."""
    longest = max(map(len, observations["instruction"]))
    return (observations["place"][:, 0] * 50 + longest).astype(int) % 3


def test_a_policy_that_pads_to_the_longest_text_is_computed_row_by_row() -> None:
    results = [evaluate(config(policy=pad_to_longest, num_envs_per_runner=width)) for width in (1, 8)]
    assert results[0].fingerprint == results[1].fingerprint
    assert all(any("alone" in note for note in result.notes) for result in results)


@pytest.mark.parametrize(
    ("text", "says"), [("x" * 31, "31"), ("cut\0", "NUL"), (b"bytes", "bytes"), (["a"], "list"), (None, "NoneType")]
)
@pytest.mark.parametrize("space", ["alone", "in a dict"])
def test_a_text_that_numpy_would_change_is_an_error(text: Any, says: str, space: str) -> None:
    nested = spaces.Dict({"a": Obeys.instruction}) if space == "in a dict" else Obeys.instruction
    batch = ObservationBatch(nested, 2)
    for write in (batch.write, lambda row, value: batch.adopt(np.array([row]), value)):
        given = text if write == batch.write else [text]
        with refused(EnvError, "observation['a']" if space == "in a dict" else "observation") as caught:
            write(0, {"a": given} if space == "in a dict" else given)
        assert says in str(caught.value)
    batch.write(0, {"a": "fits"} if space == "in a dict" else "fits")
    assert batch.row(0) == ({"a": "fits"} if space == "in a dict" else "fits")


def test_other_characters_and_lengths_are_noted_once() -> None:
    class Shouts(Obeys):
        observation_space = spaces.Dict(
            {"instruction": spaces.Text(30, min_length=2), "place": spaces.Box(-9, 9, (2,))}
        )

    result = evaluate(config(Shouts, num_envs_per_runner=1).evaluation(num_episodes=3, determinism_check=0))
    assert len([note for note in result.notes if "instruction" in note]) == 1
    notes: list[Any] = []
    for least in (0, 1):
        batch = ObservationBatch(spaces.Text(3, min_length=least), 1)
        batch.note = lambda *note: notes.append(note)
        batch.look_outside(np.ones(1, bool))
        assert len(notes) == least


def test_batches_on_a_device_refuse_texts() -> None:
    with refused(ConfigError, "policy.inference"):
        DeviceObservations(Obeys.observation_space, 16)


@pytest.mark.process
def test_texts_in_shared_memory_are_refused() -> None:
    def make(num_envs: int) -> AsyncVectorEnv:
        return AsyncVectorEnv([Obeys] * num_envs)

    with refused(ConfigError, "environment.env", value="AsyncVectorEnv"):
        evaluate(config(make, runner="batched", num_envs_per_runner=2))


class Reads(torch.nn.Module):
    """A module that looks up the instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Embedding.from_pretrained(torch.eye(3))

    def forward(self, observations: Any) -> torch.Tensor:
        assert observations["place"].dtype is torch.float32
        return self.logits(torch.tensor([TASKS[text] for text in observations["instruction"].tolist()]))  # type: ignore[no-any-return]


def test_modules_get_texts_as_they_are() -> None:
    for width in (1, 8):
        result = evaluate(config(policy=Reads(), num_envs_per_runner=width))
        assert all(one.episode_return == one.length for one in result.episodes)


class Pair:
    """Two agents with an instruction each."""

    possible_agents = ("one", "two")

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Obeys.instruction

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Obeys.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.left = list(self.possible_agents), 3
        self.tasks = dict(zip(self.agents, np.random.default_rng(seed).permutation(list(TASKS)), strict=False))
        return {agent: str(task) for agent, task in self.tasks.items()}, {}

    def step(self, actions: Any) -> Any:
        self.left -= 1
        rewards = {agent: float(actions[agent] == TASKS[task]) for agent, task in self.tasks.items()}
        ends = dict.fromkeys(self.agents, self.left == 0)
        self.agents = self.agents if self.left else []
        return {agent: str(task) for agent, task in self.tasks.items()}, rewards, ends, dict.fromkeys(ends, False), {}

    def close(self) -> None:
        pass


def test_each_agent_has_its_instruction() -> None:
    config = EvalConfig().environment(Pair).policy(policies={"one": obey, "two": obey}).evaluation(num_episodes=6)
    results = [evaluate(config.copy().runners(num_envs_per_runner=width)) for width in (1, 4)]
    assert {one.episode_return for one in results[0].episodes} == {6.0}
    assert results[0].fingerprint == results[1].fingerprint
    assert not results[0].notes


def test_texts_are_in_trajectories() -> None:
    for env, key in ((Obeys, "instruction"), (Alone, "observation")):
        for layout in ({}, {"runner": "single_agent"}):
            with EvalRunnerGroup(config(env, **layout), threaded=False) as group:
                arrays = group.sample(4, as_arrays=True)
                with refused(ConfigError, key):
                    group.sample(1)
            texts = arrays[key]
            assert {*texts.tolist()} <= TASKS.keys()
            assert [TASKS[text] for text in texts] == arrays["action"].tolist()
            assert (arrays[f"next.{key}"] == texts).all()

"""Wrappers that add to the observation: a policy sees what a hand loop gives it, with any runner."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError, EnvError
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.wrappers import InfoKeys, LastAction, LastReward
from tests.gpu_simulator import GpuAdapter
from tests.refused import refused

WRAPPERS = (
    "rl_eval.wrappers:LastAction",
    LastReward,
    {"wrapper": "rl_eval.wrappers:InfoKeys", "keys": ["goal"]},
)
EPISODES = 20


class Chase(gym.Env[Any, Any]):
    """Follow a goal that only ``info`` has, which moves by the last action; pays for being near."""

    observation_space: gym.Space[Any] = spaces.Box(-10, 10, (2,), np.float32)
    action_space: gym.Space[Any] = spaces.Box(0.5, 2, (2,), np.float32)
    goals = ("goal",)
    condition_keys = ("goal",)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 9))
        self.place, drawn = self.np_random.uniform(-1, 1, 2).astype("f"), float(self.np_random.uniform(-1, 1))
        self.goal = (options or {}).get("goal", drawn)
        return self.place, dict.fromkeys(self.goals, self.goal)

    def step(self, action: Any) -> Any:
        self.left -= 1
        self.place = self.place * np.float32(0.9) + action * np.float32(0.1)
        self.goal += float(self.np_random.uniform(-0.1, 0.1))
        reward = -abs(float(self.place.sum()) - self.goal)
        return self.place, reward, self.left == 0, False, dict.fromkeys(self.goals, self.goal)


class Forgets(Chase):
    """Reports its goal only at first."""

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


class Named(Chase):
    """Observations are dicts already."""

    observation_space = spaces.Dict({"observation": Chase.observation_space})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        place, info = super().reset(seed=seed)
        return {"observation": place}, info

    def step(self, action: Any) -> Any:
        place, *others = super().step(action)
        return {"observation": place}, *others


def follow(observations: Any) -> Any:
    """Act on all that the wrappers add."""
    wanted = observations["goal"] - observations["observation"] + observations["last_reward"] * np.float32(0.5)
    return (wanted + observations["last_action"] * np.float32(0.25)).astype(np.float32)


def slots(num_envs: int, env: Any = Chase, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    return SyncVectorEnv([env] * num_envs, autoreset_mode=mode)


class OwnSimulator(BatchSimulator):
    """Single environments behind a simulator's own interface, which keeps no infos of a restart."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.envs = num_envs, [Chase() for _ in range(num_envs)]
        self.observation_space, self.action_space = Chase.observation_space, Chase.action_space

    def restart(self, slots: Any, specs: Any) -> Any:
        pairs = zip(slots, specs, strict=True)
        return np.stack([self.envs[slot].reset(seed=spec.seed)[0] for slot, spec in pairs])

    def step(self, actions: Any) -> BatchStep:
        for env in self.envs:
            if not hasattr(env, "left"):
                env.reset(seed=0)
        rows = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        places, rewards, ended, cut, _ = (list(part) for part in zip(*rows, strict=True))
        return BatchStep(np.stack(places), np.array(rewards), np.array(ended), np.array(cut))

    def close(self) -> None:
        pass


def config(env: Any = Chase, *wrappers: Any, **runners: Any) -> EvalConfig:
    made = EvalConfig().environment(env, wrappers=wrappers or WRAPPERS).runners(**runners)
    return made.evaluation(num_episodes=EPISODES, seed=5).policy(follow)


def by_hand(seeds: list[int]) -> list[float]:
    """Run the episodes in a loop of a few lines, without the wrappers."""
    returns = []
    for seed in seeds:
        env, total, ended = Chase(), 0.0, False
        place, info = env.reset(seed=seed)
        action, reward = np.full(2, 0.5, np.float32), np.zeros(1, np.float32)
        while not ended:
            seen = {"observation": place, "goal": np.float32([info["goal"]])}
            action = np.clip(follow(seen | {"last_action": action, "last_reward": reward}), 0.5, 2)
            place, paid, ended, _, info = env.step(action)
            reward = np.float32([paid])
            total += paid
        returns.append(total)
    return returns


LAYOUTS: dict[str, Any] = {
    "1 slot": config(num_envs_per_runner=1),
    "8 slots": config(num_envs_per_runner=8),
    "Dict": config(Named),
    "processes": config(runner="subprocess", num_envs_per_runner=3),
    "batched": config(slots, runner="batched", num_envs_per_runner=7),
    "batched Dict": config(partial(slots, env=Named), runner="batched", num_envs_per_runner=3),
    "restarts in the step": config(partial(slots, mode=AutoresetMode.SAME_STEP), runner="batched"),
    "no restarts": config(partial(slots, mode=AutoresetMode.DISABLED), runner="batched"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.process) if one == "processes" else one for one in LAYOUTS]
)
def test_a_policy_sees_what_a_hand_loop_gives_it(layout: str) -> None:
    result = evaluate(LAYOUTS[layout])
    assert [episode.episode_return for episode in result.episodes] == by_hand([one.seed for one in result.episodes])
    assert result.determinism.passed


def test_wrappers_apply_to_own_simulators_and_to_live_objects() -> None:
    wrappers = (LastAction, LastReward)

    def act(observations: Any) -> Any:
        return follow({"goal": observations["last_reward"], **observations})

    single = evaluate(config(Chase, *wrappers), act)
    assert evaluate(config(OwnSimulator, *wrappers, runner="batched"), act).fingerprint == single.fingerprint


def test_first_infos_are_those_of_the_condition() -> None:
    rows = [{"id": str(goal), "goal": goal} for goal in (-1.0, 0.0, 0.5)]
    made = (config(), config(slots, runner="batched"))
    single, batched = (evaluate(one.evaluation(num_episodes=9, conditions=rows)) for one in made)
    assert single.fingerprint == batched.fingerprint


class Mixes(torch.nn.Module):
    """Choose an action from all that is observed, without sums whose bits depend on the batch."""

    def forward(self, observations: Any) -> torch.Tensor:
        seen = observations["observation"][:, 0] + observations["last_reward"][:, 0]
        turned = torch.where(seen > 0, 1, 2) + observations["last_action"]
        return torch.nn.functional.one_hot(turned % 3, 3).float()


def test_arrays_of_a_simulator_stay_where_they_are() -> None:
    made = config(GpuAdapter, LastAction, LastReward, runner="batched", num_envs_per_runner=5)
    results = [evaluate(made.copy().policy(inference=one), Mixes()) for one in ("exact", "batched")]
    assert len({tuple(one.episode_return for one in result.episodes) for result in results}) == 1


def test_a_live_environment_is_built_again_with_its_wrappers() -> None:
    env = InfoKeys(LastAction(gym.make("Pendulum-v1", max_episode_steps=9)), [])
    made = EvalConfig().environment("Pendulum-v1", env_kwargs={"max_episode_steps": 9}, wrappers=[LastAction])
    again = [evaluate(one, swing, num_episodes=2, seed=5).episodes for one in (env, made)]
    assert [one.episode_return for one in again[0]] == [one.episode_return for one in again[1]]


def swing(observations: Any) -> Any:
    return observations["observation"][:, :1] - observations["last_action"] / 4


SEEN: list[Any] = []


class TwoParts(Chase):
    """Actions are dicts."""

    action_space = spaces.Dict({"move": spaces.Box(-2, 2, (2,), np.float32), "kind": spaces.Discrete(3, start=2)})

    def step(self, action: Any) -> Any:
        assert action["kind"] == 3
        return super().step(action["move"])


def move(observations: Any) -> Any:
    last = observations["last_action"]
    SEEN.append((int(last["kind"][0]), last["move"][0].tolist()))
    return {"move": np.ones((len(last["kind"]), 2), np.float32), "kind": np.full(len(last["kind"]), 3)}


@pytest.mark.parametrize("runner", ["single_agent", "batched"])
def test_a_nested_action_is_added_in_its_structure(runner: str) -> None:
    env = TwoParts if runner == "single_agent" else partial(slots, env=TwoParts)
    one = config(env, LastAction, runner=runner).evaluation(num_episodes=1, determinism_check=0)
    length = evaluate(one, move).episodes[0].length
    begun, later = (2, [0.0, 0.0]), (3, [1.0, 1.0])
    assert [one for one in SEEN if one in (begun, later)] == [begun, *[later] * (length - 1)]
    SEEN.clear()


@pytest.mark.parametrize("runner", ["vector", "batched"])
def test_a_key_that_a_step_lacks_is_an_error(runner: str) -> None:
    env = Forgets if runner == "vector" else partial(slots, env=Forgets)
    with refused(EnvError, "environment"):
        evaluate(config(env, *WRAPPERS, runner=runner).evaluation(num_episodes=2))


def test_what_cannot_be_added_is_refused() -> None:
    with refused(ConfigError, "environment.wrappers", value="last_action"):
        evaluate(config(Chase, LastAction, LastAction))
    with refused(ConfigError, "environment.wrappers", value="last_action"):
        evaluate(config(slots, LastAction, LastAction, runner="batched"))
    with refused(ConfigError, "environment.wrappers"):
        evaluate(config(slots, gym.wrappers.ClipReward, runner="batched"))
    with refused(ConfigError, "environment.wrappers[0]"):
        evaluate(config(slots, {"wrapper": LastAction, "size": 3}, runner="batched"))
    with refused(ConfigError, "environment.wrappers"):
        evaluate(config(slots, LastAction, runner="batched", block=4))

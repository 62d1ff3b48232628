"""The note on distinct seeds that give identical episodes: when the episodes are identical, and only then."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_eval import EvalConfig, evaluate


class Starts(gym.Env[Any, Any]):
    """Takes the next of its stored starts at each reset, and no seed."""

    observation_space = spaces.Box(-100, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)
    condition_keys = ("start",)

    def __init__(self) -> None:
        self.next = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.start, self.left = (options or {}).get("start", self.next), 5
        self.next += 1
        return np.full(1, self.start, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.full(1, self.start, np.float32), 1.0, self.left == 0, False, {}


class OfSeed(Starts):
    """Has equal returns and lengths, from starts that depend on the seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.start = float(self.np_random.random())
        return np.full(1, self.start, np.float32), {}


def notes(env: Any, num_episodes: int = 10, *, conditions: Any = None, check: Any = "auto", **environment: Any) -> int:
    made = EvalConfig().environment(env, **environment).runners(num_envs_per_runner=2)
    made = made.policy(lambda observations: np.zeros(len(observations), np.int64))
    made = made.evaluation(num_episodes=num_episodes, determinism_check=check, conditions=conditions)
    result = evaluate(made)
    assert result.status == "complete"
    return len(result.notes)


@pytest.mark.parametrize("check", ["auto", 1.0])
def test_copies_of_one_episode_are_a_note(check: Any) -> None:
    """Each new environment begins with its first start: the interval would be one of copies."""
    assert notes(Starts, env_reuse="episode", check=check) == 1


@pytest.mark.parametrize("env", [OfSeed, "CartPole-v1"])
def test_equal_returns_are_no_equal_episodes(env: Any) -> None:
    """The observations tell."""
    assert notes(env) == 0


def test_one_episode_and_a_table_of_starts_have_no_note() -> None:
    """Whoever wants a single start asks for a single episode, or for conditions."""
    assert notes(Starts, 1, env_reuse="episode") == 0
    assert notes(Starts, conditions=[{"id": "left", "start": 3}], env_reuse="episode") == 0


def test_without_traces_there_is_no_evidence() -> None:
    """The check that records them is switched off."""
    assert notes(Starts, env_reuse="episode", check=0) == 0

"""Episodes of a hand-written loop, one environment and one observation at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig, evaluate

EPISODES = 20
LIMIT = {"max_episode_steps": 100}


def loop(env_id: str, act: Callable[[Any], Any], seeds: list[int]) -> list[tuple[float, int]]:
    """Return the return and the length of each episode."""
    env, found = gym.make(env_id, **LIMIT), []
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        total, length, over = 0.0, 0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total, length, over = total + float(reward), length + 1, terminated or truncated
        found.append((total, length))
    return found


def check_equal_to_loop(env_id: str, policies: list[Any], act: Callable[[Any], Any]) -> None:
    """Check that policies have one fingerprint for one and eight slots, and the episodes of a loop."""
    config = EvalConfig().environment(env_id, env_kwargs=LIMIT).evaluation(num_episodes=EPISODES)
    results = [
        evaluate(config.copy().runners(num_envs_per_runner=slots), policy) for policy in policies for slots in (1, 8)
    ]
    assert len({result.fingerprint for result in results}) == 1
    episodes = results[0].episodes
    expected = loop(env_id, act, [int(episode.seed) for episode in episodes])
    assert [episode.length for episode in episodes] == [length for _, length in expected]
    np.testing.assert_allclose(
        [episode.episode_return for episode in episodes], [one for one, _ in expected], rtol=1e-4
    )

"""A small environment for policies of other libraries, and plain loops of their own calls on the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig, EvalResult

EPISODES = 20
SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "box": gym.spaces.Box(np.array([-0.3, -2.0], np.float32), np.array([0.4, 5.0], np.float32)),
}
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)


class World(gym.Env[Any, Any]):
    """Rewards depend on every action and observation, and so does the length."""

    observation_space = OBSERVATIONS

    def __init__(self, action: str) -> None:
        self.action_space = SPACES[action]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        self._last = self.np_random.normal(0.0, 2.0, 5)
        return self._last, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        acted = float(np.dot(np.ravel(action).astype(np.float64), np.arange(1, np.size(action) + 1)))
        reward = float(np.cos(self._last.mean() + acted * 1.7) + acted * 1e-3)
        self._steps += 1
        self._last = self.np_random.normal(0.0, 2.0, 5)
        return self._last, reward, bool(self._steps > 5 and reward > 0.9), self._steps >= 12, {}


def config_of(action: str, **policy: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment(World, env_kwargs={"action": action})
        .policy(**policy)
        .runners(num_envs_per_runner=7)
        .evaluation(num_episodes=EPISODES, seed=5)
    )


def ours(result: EvalResult) -> list[tuple[int, float, int]]:
    assert result.status == "complete", result.reason
    return [(record.seed, record.episode_return, record.length) for record in result.episodes]


def play(result: EvalResult, env: gym.Env[Any, Any], act: Callable[[Any, int, int], Any]) -> list[Any]:
    """Play the episodes of a result: ``act(block, seed, step)`` chooses for copies of each observation.

    A runner defines a row as that of a block of so many rows.
    """
    copies = 1 if result.provenance["numerics"]["reference"] == "row" else 16
    played = []
    for seed in (record.seed for record in result.episodes):
        (observation, _), rewards, over = env.reset(seed=seed), [], False
        while not over:
            action = act(np.repeat(observation[None], copies, 0), seed, len(rewards))
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            over = terminated or truncated
        played.append((seed, np.cumsum(rewards)[-1], len(rewards)))
    assert len({total for _, total, _ in played}) == EPISODES
    return played

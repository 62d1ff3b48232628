"""An environment in which a slip of any action shows, and the loop that a policy's own library would run in it."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import tree

from rl_eval import EvalConfig, EvalResult

EPISODES = 12


class Rewards(gym.Env):
    """Rewards depend on every action and observation, and so does the length: a slip anywhere changes the return."""

    def __init__(self, observation: str = "vector", action: str = "discrete") -> None:
        self.observation_space = OBSERVATIONS[observation]
        self.action_space = ACTIONS[action]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        self._last = self._observe()
        return self._last, {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        seen = sum(float(np.mean(part)) for part in _leaves(self._last))
        acted = float(np.dot(np.ravel(action).astype(np.float64), np.arange(1, np.size(action) + 1)))
        self._steps += 1
        self._last = self._observe()
        reward = np.cos(seen + acted * 1.7) + acted * 1e-3
        return self._last, reward, bool(self._steps > 5 and reward > 0.9), self._steps >= 12, {}

    def _observe(self):
        return drawn(self.observation_space, self.np_random)


def _leaves(observation: Any) -> list[Any]:
    return list(observation.values()) if isinstance(observation, dict) else [observation]


def drawn(space: gym.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: drawn(part, rng) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Discrete):
        return np.int64(rng.integers(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return rng.integers(space.nvec)
    if isinstance(space, gym.spaces.MultiBinary):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    if space.dtype == np.uint8:
        return rng.integers(0, 256, space.shape, np.uint8)
    return rng.normal(1.0, 3.0, space.shape).astype(space.dtype)


def _box(*shape: int, dtype: Any = np.float32) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf, np.inf, shape, dtype)


def _image(*shape: int) -> gym.spaces.Box:
    return gym.spaces.Box(0, 255, shape, np.uint8)


OBSERVATIONS = {
    "vector": _box(5),
    "double": _box(5, dtype=np.float64),
    "matrix": _box(2, 3),
    "discrete": gym.spaces.Discrete(7),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 4]),
    "multi_binary": gym.spaces.MultiBinary(4),
    "image": _image(40, 36, 1),
    "color": _image(40, 36, 3),
    "image_first": _image(2, 40, 36),
    "floats": gym.spaces.Box(0, 255, (2, 40, 36), np.float32),
    "dict": gym.spaces.Dict({"b": _box(4), "a": _image(40, 36, 1), "c": gym.spaces.Discrete(3)}),
    "dict_of_boxes": gym.spaces.Dict({"speed": _box(3), "camera": _image(40, 36, 1)}),
}
ACTIONS = {
    "discrete": gym.spaces.Discrete(4),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 5]),
    "multi_binary": gym.spaces.MultiBinary(3),
    "box": gym.spaces.Box(np.array([-0.3, -2.0], np.float32), np.array([0.4, 5.0], np.float32)),
}


def config_of(
    observation: str = "vector", action: str = "discrete", env: Any = Rewards, masks: bool = False, **policy: Any
) -> EvalConfig:
    return (
        EvalConfig()
        .environment(env, env_kwargs={"observation": observation, "action": action}, action_masks=masks)
        .policy(**policy)
        .runners(num_envs_per_runner=5)
        .evaluation(num_episodes=EPISODES, seed=5)
    )


def ours(result: EvalResult) -> list[tuple[int, float, int]]:
    assert result.status == "complete", result.reason
    return [(record.seed, record.episode_return, record.length) for record in result.episodes]


def play(result: EvalResult, env: gym.Env, act: Callable[[Any, int, int], Any]) -> list[tuple[int, float, int]]:
    """Play the episodes of a result: ``act(block, seed, step)`` chooses for copies of each observation.

    A runner defines a row as that of a block of so many rows.
    """
    copies = 1 if result.provenance["numerics"]["reference"] == "row" else 16
    played = []
    for seed in (record.seed for record in result.episodes):
        (observation, _), rewards, over = env.reset(seed=seed), [], False
        while not over:
            block = tree.map_structure(lambda part: copied(np.asarray(part), copies), observation)
            observation, reward, terminated, truncated, _ = env.step(act(block, seed, len(rewards)))
            rewards.append(float(reward))
            over = terminated or truncated
        played.append((seed, float(np.cumsum(rewards)[-1]), len(rewards)))
    assert len({total for _, total, _ in played}) > 3
    return played


def copied(array: np.ndarray, copies: int) -> np.ndarray:
    """Return copies that are laid out as the original is: convolutions have other last bits in another layout."""
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return np.repeat(array.transpose(order)[None], copies, 0).transpose(0, *(1 + np.argsort(order)))

"""Small environments for models of Stable-Baselines3, and what its own evaluation makes of the same seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

DATA = Path(__file__).parent / "data"
reads_data = pytest.mark.skipif(np.__version__ < "2", reason="models in data/ were saved with NumPy 2")


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
        return self._last, reward, bool(self._steps > 5 and reward > 0.9), self._steps >= 40, {}

    def _observe(self):
        return _drawn(self.observation_space, self.np_random)


def _leaves(observation: Any) -> list[Any]:
    return list(observation.values()) if isinstance(observation, dict) else [observation]


def _drawn(space: gym.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _drawn(part, rng) for key, part in space.spaces.items()}
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
    "dict": gym.spaces.Dict({"b": _box(4), "a": _image(40, 36, 1), "c": gym.spaces.Discrete(3)}),
    "dict_of_boxes": gym.spaces.Dict({"speed": _box(3), "camera": _image(40, 36, 1)}),
}
ACTIONS = {
    "discrete": gym.spaces.Discrete(4),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 5]),
    "multi_binary": gym.spaces.MultiBinary(3),
    "box": gym.spaces.Box(np.array([-0.3, -2.0], np.float32), np.array([0.4, 5.0], np.float32)),
}


class Episodes(gym.Wrapper):
    """Gives each reset the next seed of a list, and keeps the exact rewards."""

    def __init__(self, env: gym.Env, seeds: Sequence[int]) -> None:
        super().__init__(env)
        self._seeds = [int(seed) for seed in seeds]
        self.played: list[list[float]] = []

    def reset(self, *, seed=None, options=None):
        place = len(self.played)
        self.played.append([])
        return self.env.reset(seed=self._seeds[place] if place < len(self._seeds) else 0)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.played[-1].append(float(reward))
        return observation, reward, terminated, truncated, info


class InBlocks:
    """A model that predicts on so many copies of its one observation, as a runner's block of rows does.

    Convolutions have other last bits in another memory layout, so copies are laid out as the original is; with
    ``channels_last``, as ``VecTransposeImage`` lays out images when it is the last wrapper.
    """

    def __init__(self, model: Any, copies: int, channels_last: bool) -> None:
        self._model, self._copies, self._channels_last = model, copies, channels_last

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        copied = (
            {key: self._copied(part) for key, part in observation.items()}
            if isinstance(observation, dict)
            else self._copied(observation)
        )
        actions, _ = self._model.predict(copied, deterministic=deterministic)
        return actions[:1], None

    def _copied(self, array: np.ndarray) -> np.ndarray:
        if self._channels_last and array.ndim == 4:
            return np.repeat(array.transpose(0, 2, 3, 1), self._copies, 0).transpose(0, 3, 1, 2)
        copied = np.empty_like(array, order="K", shape=(self._copies, *array.shape[1:]))
        copied[:] = array
        return copied


def their_returns(
    model: Any,
    make_env: Callable[[], gym.Env],
    seeds: Sequence[int],
    wrap: Callable[[VecEnv], VecEnv] = lambda venv: venv,
    copies: int = 1,
    channels_last: bool = False,
) -> list[tuple[float, int]]:
    """Evaluate with SB3's ``evaluate_policy`` on given seeds; return exact return and length of each episode."""
    episodes = Episodes(make_env(), seeds)
    venv = wrap(DummyVecEnv([lambda: Monitor(episodes)]))
    told, lengths = evaluate_policy(
        InBlocks(model, copies, channels_last), venv, len(seeds), deterministic=True, return_episode_rewards=True
    )
    played = episodes.played[: len(seeds)]
    assert lengths == [len(rewards) for rewards in played]
    exact = [float(np.cumsum(rewards)[-1]) for rewards in played]
    assert told == [round(total, 6) for total in exact]
    return list(zip(exact, lengths, strict=True))

"""Vector environments with one trap each, over a small environment whose episodes are functions of their seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Walk(gym.Env[Any, Any]):
    """A walk of 1 to 12 steps; its length, rewards, success and ``height`` follow from the seed and the actions."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,))
    action_space: gym.Space[Any] = gym.spaces.Discrete(3)

    def __init__(self, on_step: Callable[[Walk], None] = lambda walk: None) -> None:
        self.on_step = on_step

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed = seed
        self.steps, self.place = 0, float(self.np_random.normal())
        self.length = int(self.np_random.integers(1, 13))
        return self.seen(), {}

    def seen(self) -> Any:
        return np.array([self.place, self.steps, self.length], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.on_step(self)
        self.place += float(action) - 1 + float(self.np_random.normal())
        info = {"is_success": self.place > 0, "height": self.place}
        done = self.steps >= self.length
        return self.seen(), self.place, done and self.length % 2 == 0, done and self.length % 2 == 1, info


class Parts(gym.ObservationWrapper[Any, Any, Any]):
    """Observations with parts of two dtypes."""

    observation_space = gym.spaces.Dict({"place": gym.spaces.Box(-1e9, 1e9, (2,)), "step": gym.spaces.Discrete(100)})

    def observation(self, observation: Any) -> Any:
        return {"place": observation[[0, 2]], "step": np.int64(observation[1])}


def follow(observations: Any) -> Any:
    """Policy that acts on the sign of the place."""
    place = observations["place"] if isinstance(observations, dict) else observations
    return (place[:, 0] > 0).astype(np.int64) + 1


def walks(
    num_envs: int,
    mode: str = "NextStep",
    wrap: Callable[[Any], Any] = lambda env: env,
    on_step: Callable[[Walk], None] = lambda walk: None,
) -> SyncVectorEnv:
    """Return walks that are stepped together."""
    made = [lambda: wrap(Walk(on_step)) for _ in range(num_envs)]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode(mode), copy=False)


class IgnoresMask(SyncVectorEnv):
    """Resets all slots, whatever the mask says."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed)


class Unseeded(SyncVectorEnv):
    """Ignores all seeds."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=[None] * self.num_envs, options=options)


class StartsOther(SyncVectorEnv):
    """Adds one to the seed of a slot that starts alone."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        alone = int(options["reset_mask"].sum() == 1)
        return super().reset(seed=[one if one is None else one + alone for one in seed], options=options)


class OneSeed(SyncVectorEnv):
    """Takes one seed for all slots."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if isinstance(seed, list):
            raise TypeError("one seed, please")
        return super().reset(seed=seed, options=options)


class LosesFinalObservations(SyncVectorEnv):
    """Resets slots in the step that ends them, and does not return their last observations."""

    def step(self, actions: Any) -> Any:
        *result, infos = super().step(actions)
        return (*result, {key: value for key, value in infos.items() if "final" not in key})


class OwnClass(SyncVectorEnv):
    """A class that is not known, so its resets are tried first."""


def as_class(cls: type[SyncVectorEnv], mode: str = "NextStep", walk: type[Walk] = Walk) -> Callable[..., SyncVectorEnv]:
    """Return a factory of walks in a class of vector environments."""

    def make(num_envs: int) -> SyncVectorEnv:
        return cls([walk] * num_envs, autoreset_mode=AutoresetMode(mode))

    return make

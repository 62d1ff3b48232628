"""The evaluations whose result must not depend on the layout."""

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights"
MLP = "rl_eval.policies.mlp:make_mlp"


def cartpole(**faults: Any) -> EvalConfig:
    """CartPole with the early policy, whose returns vary."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", **faults})
        .policy(MLP, weights=WEIGHTS / "cartpole_ppo_early.safetensors")
        .evaluation(num_episodes=60)
    )


def hopper(**faults: Any) -> EvalConfig:
    """Hopper with sampled actions behind a frozen normalizer."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "Hopper-v5", **faults})
        .policy(
            MLP,
            policy_kwargs={"normalize_observations": True},
            weights=WEIGHTS / "hopper_ppo_final.safetensors",
            deterministic=False,
        )
        .evaluation(num_episodes=20, max_episode_steps=200)
    )


def dict_observation(**faults: Any) -> EvalConfig:
    """A nested Dict observation and a policy of plain numpy."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:dict_observation", env_kwargs={"env": "CartPole-v1", **faults})
        .policy("rl_eval.testing:make_dict_policy")
        .evaluation(num_episodes=60)
    )


def recurrent(**faults: Any) -> EvalConfig:
    """A GRU whose actions are sampled."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", **faults})
        .policy("rl_eval.testing:make_gru", deterministic=False)
        .evaluation(num_episodes=60)
    )


WORKLOADS = {f.__name__: f for f in (cartpole, hopper, dict_observation, recurrent)}


class OwnProcess(gym.Env):
    """An environment whose rewards depend on the process it lives in."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, depends: bool) -> None:
        self._value = float(os.getpid()) if depends else 1.0

    def reset(self, *, seed=None, options=None):
        self._left = 5
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._left -= 1
        return np.zeros(2, np.float32), self._value, self._left == 0, False, {}


def zeros():
    """Return a policy that takes action 0."""
    return lambda observations: np.zeros(len(observations), int)

"""What the lines on normalizers need."""

import gymnasium as gym
import lines_first
import numpy as np
from gymnasium.wrappers import NormalizeObservation

from rl_eval.wrappers import Normalized, frozen


def trained():
    env = NormalizeObservation(gym.make("CartPole-v1"))
    for seed in range(9):
        env.reset(seed=seed)
    return env


def file():
    lines_first.weights()
    np.savez("norm.npz", **frozen(trained()))
    return {}


def objects():
    policy = lambda observations: (observations[:, 3] > 0).astype(int)  # noqa: E731
    return {"Normalized": Normalized, "frozen": frozen, "policy": policy, "env": trained()}


BEFORE = {
    "rl-eval run --env CartPole-v1 --policy torch:my_net:make@net.pt --set policy.normalizer=norm.npz": file,
    'evaluate("CartPole-v1", Normalized(policy, **frozen(env)))': objects,
}

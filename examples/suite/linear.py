"""Linear policies for the suite ``linear.yaml``, and their search: ``python linear.py`` writes ``weights/``.

Two methods search for the matrix of a linear policy, with the same number of episodes: ``random`` draws matrices and
keeps the best, ``climb`` perturbs the best matrix so far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml

CANDIDATES, EPISODES, SEEDS = 120, 3, (0, 1, 2)
HERE = Path(__file__).parent


class Linear:
    """Actions from a matrix of shape (outputs, observations + 1), whose last column is the bias."""

    def __init__(self, weights: np.ndarray, action_space: gym.Space) -> None:
        self.weights, self.discrete = weights, isinstance(action_space, gym.spaces.Discrete)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Return the actions for a batch of observations."""
        outputs = np.asarray(observations, np.float64) @ self.weights[:, :-1].T + self.weights[:, -1]
        return outputs.argmax(axis=1) if self.discrete else outputs.astype(np.float32)


def load(path: str, action_space: gym.Space) -> Linear:
    """Load the policy of a cell; the suite names this function."""
    return Linear(np.load(path), action_space)


def search(env: gym.Env[Any, Any], method: str, seed: int) -> np.ndarray:
    """Return the best matrix of a search."""
    rng = np.random.default_rng(seed)
    size = env.action_space.n if isinstance(env.action_space, gym.spaces.Discrete) else env.action_space.shape[0]
    best, best_score = np.zeros((int(size), env.observation_space.shape[0] + 1)), -np.inf
    for _ in range(CANDIDATES):
        noise = rng.normal(size=best.shape)
        weights = noise if method == "random" else best + 0.5 * noise
        score = np.mean([play(env, weights, int(rng.integers(2**31))) for _ in range(EPISODES)])
        if score > best_score:
            best, best_score = weights, score
    return best


def play(env: gym.Env[Any, Any], weights: np.ndarray, seed: int) -> float:
    """Return the return of an episode."""
    policy, total, over = Linear(weights, env.action_space), 0.0, False
    observation, _ = env.reset(seed=seed)
    while not over:
        action = policy(observation[None])[0]
        if not policy.discrete:
            action = np.clip(action, env.action_space.low, env.action_space.high)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


def main() -> None:
    """Search for all policies of the suite."""
    suite = yaml.safe_load((HERE / "linear.yaml").read_text())
    for task, values in suite["tasks"].items():
        env = gym.make(values["environment"]["env"])
        for method in suite["policies"]:
            for seed in SEEDS:
                path = HERE / "weights" / task / f"{method}-{seed}.npy"
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, search(env, method, seed))
                print(path.relative_to(HERE))


if __name__ == "__main__":
    main()

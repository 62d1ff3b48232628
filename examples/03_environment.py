"""Evaluate the random policy in your own environment, which is a class of gymnasium."""

from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig, evaluate


class Sign(gym.Env[Any, Any]):
    """Game of one step: the action guesses whether a number is positive."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Draw the number from the seed."""
        super().reset(seed=seed)
        self.number = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self.number, {}

    def step(self, action: Any) -> Any:
        """Return the observation, the reward, and that the episode ends."""
        return self.number, float(action == (self.number[0] > 0)), True, False, {}


print(evaluate(EvalConfig().environment(Sign).policy("random").evaluation(num_episodes=100)))

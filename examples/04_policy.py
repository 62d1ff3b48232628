"""Evaluate your own policy, which remembers its last action and draws random numbers."""

from typing import Any

import numpy as np

from rl_eval import EvalConfig, evaluate


class Sticky:
    """Repeats its last action with a probability of one quarter."""

    def initial_state(self, batch_size: int) -> Any:
        """Return the state at the start of an episode, one row per environment."""
        return np.zeros(batch_size, np.int64)

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        """Return the actions and the next state; ``noise`` belongs to the episode."""
        action = (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)
        if noise is not None:  # It is None with deterministic=True.
            action = np.where(noise.uniform(1)[:, 0] < 0.25, state, action)
        return action, action


config = EvalConfig().environment("CartPole-v1").policy(deterministic=False).evaluation(return_bounds=(0, 500))
print(evaluate(config, Sticky()))

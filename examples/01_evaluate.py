"""Evaluate a policy, a function of a batch of observations, on 100 episodes of CartPole."""

from typing import Any

from rl_eval import EvalConfig, evaluate


def policy(observations: Any) -> Any:
    """Push to the side to which the pole leans."""
    return (observations[:, 2] > 0).astype(int)


config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=100, seed=0, return_bounds=(0, 500))
result = evaluate(config, policy)
print(result)
print(result.mean_return, result.interval, result.episodes[17].episode_return)

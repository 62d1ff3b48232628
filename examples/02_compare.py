"""Compare two policies on the same 100 episodes, and save both results."""

from typing import Any

from rl_eval import EvalConfig, compare, evaluate, load


def follow_angle(observations: Any) -> Any:
    """Push to the side to which the pole leans."""
    return (observations[:, 2] > 0).astype(int)


def follow_speed(observations: Any) -> Any:
    """Push to the side to which the pole falls."""
    return (observations[:, 3] > 0).astype(int)


config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=100, seed=0, return_bounds=(0, 500))
angle, speed = evaluate(config, follow_angle), evaluate(config, follow_speed)
comparison = compare(angle, speed)
print(comparison)
print(comparison.difference.mean, comparison.difference.interval, comparison.difference.p_value)

angle.save("runs/angle")
speed.save("runs/speed")
print(compare(load("runs/angle"), load("runs/speed")).verdict == comparison.verdict)

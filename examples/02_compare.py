"""Compare two policies on the same 100 episodes, and save both results."""

from rl_eval import EvalConfig, compare, evaluate, load

config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=100, seed=0)
angle = evaluate(config, policy=lambda observations: (observations[:, 2] > 0).astype(int))
speed = evaluate(config, policy=lambda observations: (observations[:, 3] > 0).astype(int))
comparison = compare(angle, speed)
print(comparison)
print(comparison.difference.mean, comparison.difference.interval, comparison.difference.p_value)

angle.save("runs/angle")  # rl-eval compare runs/angle runs/speed
speed.save("runs/speed")
print(compare(load("runs/angle"), load("runs/speed")).verdict)

"""Evaluate during training, and write the learning curve with your own logger."""

from torch import nn

from rl_eval import EvalConfig, EvalPoint, Evaluator
from rl_eval.training.loggers import Logger


class Lines(Logger):
    """Prints a line for each point of the curve."""

    def log(self, point: EvalPoint) -> None:
        """Print the training step and the mean return with its interval."""
        interval = point.result.interval
        print(point.step, point.result.mean_return, interval.low, interval.high)


config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=20, return_bounds=(0, 500))
module = nn.Linear(4, 2)
with Evaluator(config, module, busy_policy="queue", loggers=Lines()) as evaluator:
    for step in range(0, 300, 100):
        nn.init.normal_(module.weight)  # In place of training.
        evaluator.submit(module, step)  # Copies the weights, and returns at once.
    evaluator.evaluate(module, step=300)

"""Evaluate with your own runner, for a simulator that needs a port for each of its environments."""

from typing import Any

from rl_eval import EvalConfig, VectorEvalRunner, evaluate


class PortRunner(VectorEvalRunner):
    """Runner of at most two environments, each with its port."""

    facts = VectorEvalRunner.facts._replace(default_lanes=2, max_lanes=2)

    def make_env(self, lane_index: int) -> Any:
        """Build the environment with this index in this runner."""
        env = super().make_env(lane_index)
        env.unwrapped.port = 9000 + 2 * self.runner_index + lane_index
        return env


config = EvalConfig().environment("CartPole-v1").policy("random").evaluation(num_episodes=20, return_bounds=(0, 500))
plain = evaluate(config)
own = evaluate(config.runners(runner=PortRunner))  # num_runners=2 would run it on Ray actors.
print(own)
print("the same episodes:", own.fingerprint == plain.fingerprint)

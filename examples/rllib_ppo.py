"""Train PPO of RLlib on CartPole for about a minute, and evaluate it beside the training.

Run it with ``python examples/rllib_ppo.py``; it needs ``pip install "ray[rllib]"``. Training never waits for an
evaluation: that happens in a process of its own, and each line says which weights its numbers are about. When training
is over the final policy is evaluated, saved, and tested on episodes that no evaluation has seen.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter

from rl_eval import evaluate
from rl_eval.integrations.rllib import eval_config_of, evaluation_function, load_policy
from rl_eval.results.result import EvalPoint

EPISODES = 100


def main() -> None:
    """Train, evaluate beside it, print the learning curve, and test what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--runners", type=int, default=1, help="processes that evaluate; 0 is a thread of this one")
    arguments = parser.parse_args()

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=8,
            env_to_module_connector=lambda *_: MeanStdFilter(),
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64]})
        .training(train_batch_size=2000, minibatch_size=250, num_epochs=6, lr=3e-4)
        .evaluation(
            evaluation_interval=1,
            evaluation_duration=EPISODES,
            evaluation_config={"explore": False, "num_envs_per_env_runner": 16},
        )
        .debugging(seed=0)
    )
    evaluated = eval_config_of(config).runners(num_runners=arguments.runners).evaluation(return_bounds=(0, 500))
    config.evaluation(custom_evaluation_function=evaluation_function(evaluated, parallel=True, on_result=print_point))

    algorithm = config.build_algo()
    started = time.perf_counter()
    while time.perf_counter() - started < arguments.seconds:
        algorithm.train()
    print(f"\n{algorithm.iteration} iterations in {time.perf_counter() - started:.0f} s; the final policy:\n")
    with tempfile.TemporaryDirectory() as folder:
        path = algorithm.save_to_path(folder)
        algorithm.stop()
        held_out = evaluate(evaluated.copy().runners(num_runners=0).evaluation(first_index=EPISODES), load_policy(path))
    print(f"\nsaved and loaded: {held_out.mean_return:.1f} on {EPISODES} held-out episodes")


def print_point(point: EvalPoint) -> None:
    """Print one evaluation: training steps and number of its weights, mean return, its 95 % interval, and a bar."""
    result = point.result
    interval = f"[{result.interval.low:6.1f}, {result.interval.high:6.1f}]"
    bar = "#" * round(result.mean_return / 10)
    line = f"{point.step:>8}  weights {point.weights_version:>3}  {result.mean_return:6.1f}  {interval}  {bar}"
    print(line, flush=True)


if __name__ == "__main__":
    main()

"""Train PPO of Stable-Baselines3 on Pendulum for about a minute, and evaluate it beside the training.

Run it with ``python examples/sb3_ppo.py``; it needs ``pip install stable-baselines3``. Evaluations run in a process of
their own; training waits only if two of them wait already. Afterwards the best model is tested on episodes that no
evaluation has seen, since the best of many evaluations is better than its policy: it was chosen for its luck as well.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from rl_eval import EvalConfig, evaluate
from rl_eval.integrations.sb3 import EvalCallback, load_policy

EPISODES = 100


def main() -> None:
    """Train, evaluate beside it, print the learning curve, and test the best model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="training steps")
    parser.add_argument("--every", type=int, default=10_000, help="training steps between evaluations")
    parser.add_argument("--runners", type=int, default=1, help="processes that evaluate; 0 is a thread of this one")
    arguments = parser.parse_args()

    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=EPISODES, seed=1)
    venv = VecNormalize(make_vec_env("Pendulum-v1", n_envs=4, seed=0))
    torch.set_num_threads(1)  # A small network gains nothing by more, and they take the runner's core.
    model = PPO("MlpPolicy", venv, learning_rate=1e-3, n_steps=1024, gamma=0.9, seed=0, device="cpu")

    with tempfile.TemporaryDirectory() as folder:
        callback = EvalCallback(
            config.copy().runners(num_runners=arguments.runners, num_envs_per_runner=16),
            every_steps=arguments.every,
            best_model_save_path=folder,
        )
        started = time.perf_counter()
        model.learn(arguments.steps, callback=callback)
        print(f"\n{model.num_timesteps} steps of training in {time.perf_counter() - started:.0f} s\n")
        print_curve(callback)
        best = load_policy(Path(folder, "best_model.zip"), Path(folder, "best_model_vecnormalize.pkl"))
        held_out = evaluate(config.copy().evaluation(first_index=EPISODES), best)
    print(
        f"\nbest model: {callback.best_mean_reward:.1f} when it was chosen, "
        f"{held_out.mean_return:.1f} on {EPISODES} held-out episodes"
    )


def print_curve(callback: EvalCallback) -> None:
    """Print one line per evaluation: training step, mean return, its 95 % interval, and a bar."""
    print(f"{len(callback.results)} evaluations\n")
    for step, result in callback.results:
        low, high = result.interval.low, result.interval.high
        bar = "#" * round(50 + result.mean_return / 32)  # Returns go from about -1600 up to 0.
        print(f"{step:>8}  {result.mean_return:6.1f}  [{low:6.1f}, {high:6.1f}]  {bar}")


if __name__ == "__main__":
    main()

"""Train PPO of TorchRL on CartPole for about a minute, and evaluate it beside the training.

Run it with ``python examples/torchrl_ppo.py``; it needs ``pip install torchrl``. The evaluator has the signature of
``torchrl.collectors.Evaluator``, so that one import line is what an existing script changes. Training never waits for
it: weights are copied when an evaluation is triggered, and a request is skipped while one still runs. The final policy
is evaluated in any case, and afterwards TorchRL's own rollout runs the same episodes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import Compose, EnvBase, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from rl_eval import EpisodePlan
from rl_eval.integrations.torchrl import Evaluator  # Instead of: from torchrl.collectors import Evaluator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Importing the collectors warns of deprecations inside TorchRL.
    from torchrl.collectors import Collector

EPISODES = 50
FRAMES = 1024
"""Steps between two updates."""


def make_env() -> EnvBase:
    """Build the environment, for training and for evaluation."""
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))


def make_network(outputs: int) -> nn.Module:
    """Build a small network on CartPole's four numbers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def make_policy(env: EnvBase | None = None) -> ProbabilisticActor:
    """Build the policy; a factory, so that an evaluator in another process can build its own."""
    return ProbabilisticActor(
        TensorDictModule(make_network(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def main() -> None:
    """Train, evaluate beside it, print the learning curve, and compare the last point with TorchRL's rollout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40_000, help="training steps")
    parser.add_argument("--every", type=int, default=5_000, help="training steps between evaluations")
    parser.add_argument("--backend", default="process", choices=["thread", "process", "ray"], help="where to evaluate")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    policy = make_policy()
    evaluator = Evaluator(
        make_env, policy_factory=make_policy, num_trajectories=EPISODES, backend=arguments.backend, seed=1, num_envs=16
    )
    curve: list[dict[str, Any]] = []
    started = time.perf_counter()
    due = 0
    for trained in train(policy, arguments.steps):
        if trained >= due and evaluator.trigger_eval(policy, step=trained):
            due = trained + arguments.every
        if (result := evaluator.poll()) is not None:
            curve.append(result)
    print(f"\n{trained} steps of training in {time.perf_counter() - started:.0f} s\n")
    while (result := evaluator.wait(timeout=120.0)) is not None:
        curve.append(result)
    curve.append(evaluator.evaluate(policy, step=trained))
    evaluator.shutdown()
    print_curve(curve)
    mine, theirs = curve[-1]["eval/reward"], rollout_mean(policy)
    print(f"\nfinal policy: {mine:.2f} here, {theirs:.2f} by env.rollout on the same {EPISODES} seeds")


def train(policy: ProbabilisticActor, steps: int) -> Any:
    """Train with PPO; yield the number of training steps after every update."""
    value = ValueOperator(make_network(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    loss = ClipPPOLoss(policy, value, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    collector = Collector(
        make_env,
        policy,
        frames_per_batch=FRAMES,
        total_frames=-(-steps // FRAMES) * FRAMES,
    )
    done = 0
    for batch in collector:
        for _ in range(6):
            advantage(batch)
            for indices in torch.randperm(batch.numel()).split(128):
                terms = loss(batch.reshape(-1)[indices])
                total = sum(term for name, term in terms.items() if name.startswith("loss_"))
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
        collector.update_policy_weights_()
        done += batch.numel()
        yield done
    collector.shutdown()


def print_curve(curve: list[dict[str, Any]]) -> None:
    """Print one line per evaluation: training step, mean return, 95 % interval, version of the weights, and a bar."""
    for point in curve:
        low, high = point["eval/episode_return_ci_low"], point["eval/episode_return_ci_high"]
        bar = "#" * round(point["eval/reward"] / 10)
        version = point["eval/weights_version"]
        print(f"{point['eval/step']:>8}  {point['eval/reward']:6.1f}  [{low:6.1f}, {high:6.1f}]  v{version:<3} {bar}")


def rollout_mean(policy: ProbabilisticActor) -> float:
    """Run the evaluator's episodes by TorchRL alone and return their mean return."""
    env, total = make_env(), 0.0
    for seed in EpisodePlan(EPISODES, 1).seeds:
        env.set_seed(int(seed), static_seed=True)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            total += env.rollout(1000, policy)["next", "reward"].sum().item()
    return total / EPISODES


if __name__ == "__main__":
    main()

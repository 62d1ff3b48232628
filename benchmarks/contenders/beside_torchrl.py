"""TorchRL: PPO with a collector in this process, evaluated beside."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.contenders import base
from benchmarks.contenders.beside import beside, second_core

_FRAMES = 1024


def _network(outputs: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def _env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


def _policy() -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    return ProbabilisticActor(
        TensorDictModule(_network(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def _iterations(policy: Any) -> Iterator[int]:
    """Train for ever; the number of environment steps after every iteration."""
    import torch
    from torchrl.collectors import Collector
    from torchrl.modules import ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    value = ValueOperator(_network(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    loss = ClipPPOLoss(policy, value, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    collector = Collector(
        _env, policy, frames_per_batch=_FRAMES, total_frames=-1, auto_register_policy_transforms=False
    )
    for number, batch in enumerate(collector, start=1):
        for _ in range(4):
            advantage(batch)
            for rows in torch.randperm(batch.numel()).split(128):
                terms = loss(batch.reshape(-1)[rows])
                optimizer.zero_grad()
                sum(term for name, term in terms.items() if name.startswith("loss_")).backward()
                optimizer.step()
        collector.update_policy_weights_()
        yield number * _FRAMES


def training(params: base.Params) -> dict[str, Any]:
    """PPO on CartPole, asking for an evaluation after every iteration."""
    warnings.simplefilter("ignore")
    import torch

    from rl_eval import EvalConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = EvalConfig().environment("CartPole-v1").runners(num_envs_per_runner=16).evaluation(num_episodes=100)
    policy = _policy()
    with second_core() as core, beside(params, core, config, policy) as measured:
        for steps in _iterations(policy):
            measured.iterated(policy, steps)
            if measured.over:
                return measured.finish(policy, steps)
    raise AssertionError


if __name__ == "__main__":
    base.run({"beside": training})

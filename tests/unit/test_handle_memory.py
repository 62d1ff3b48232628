"""What a kept handle keeps: the result, and nothing of the evaluation that made it."""

import gc

import torch
from torch import nn

from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.weights import WeightsSnapshot


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.padding = nn.Parameter(torch.zeros(100_003))

    def forward(self, observations):
        return self.linear(observations)


def snapshots() -> int:
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is WeightsSnapshot and o.buffer.nbytes > 400_000]
    return len({id(snapshot.buffer) for snapshot in found})


def test_kept_handles_release_weights() -> None:
    """A training script may keep the handle of every evaluation; only the group's own weights stay."""
    net = Net()
    config = EvalConfig().environment("CartPole-v1").runners(num_envs_per_runner=2).evaluation(num_episodes=2)
    before = snapshots()
    with EvalRunnerGroup(config, net) as group:
        handles = [group.submit(weights=net) for _ in range(4)]
        returns = [handle.result().mean_return for handle in handles]
        assert snapshots() - before <= 1
        assert [handle.progress().num_finished for handle in handles] == [2] * 4
        assert len(set(returns)) == 1
        for handle in handles:
            handle.cancel()
            handle.flush()
            assert handle.result().status == "complete"

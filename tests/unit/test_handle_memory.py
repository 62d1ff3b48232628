"""Memory of a kept handle: it holds the result and the last events, and no other part of the evaluation."""

import gc

import torch
from torch import nn

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.execution.jobs import Job
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import RunnerPool
from rl_eval.scheduling.schedule import Schedule
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
    return uncollected_snapshots()


def uncollected_snapshots() -> int:
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


def test_a_kept_handle_releases_jobs_schedule_and_pool() -> None:
    """When the evaluation is done, and when it could not run."""
    parts = (Job, EvalOutcome, RunnerPool, Schedule)

    def kept() -> list[object]:
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), parts)]

    before = len(kept())
    config = EvalConfig().environment("CartPole-v1").runners(num_envs_per_runner=2).evaluation(num_episodes=2)
    with EvalRunnerGroup(config, lambda o: [0] * len(o)) as group:
        handles = [group.submit(), group.submit()]
        handles[0].result()
    del group
    assert [handle.done() for handle in handles] == [True, True]
    assert handles[0].story(1)[1].kind == "granted"
    assert len(kept()) <= before


def test_a_call_drops_its_copies_without_the_garbage_collector() -> None:
    """They may have gigabytes, and cycles would keep them until it runs."""
    net = Net()
    config = EvalConfig().environment("CartPole-v1").runners(num_envs_per_runner=2).evaluation(num_episodes=2)
    before = snapshots()
    gc.disable()
    try:
        result = evaluate(config, net)
        left = uncollected_snapshots() - before
        policies = [found for found in gc.get_objects() if type(found) is Net and found is not net]
    finally:
        gc.enable()
    assert result.status == "complete"
    assert left == 0
    assert policies == []

"""TorchRL ``RayEvalWorker``: Ray actors that run one rollout at a time; as many workers as runners.

A worker reports the mean reward of a step and no length, so the length of an episode is taken from
one rollout of the same policy in this process, which must last as long as the episode limit.
rl_eval's class of the same name takes the same calls.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.contenders import base, torchrl_parts

_LIMIT = 500


def _checked_length(params: base.Params) -> int:
    import torch

    policy = torchrl_parts.policy_maker("throughput")
    with torch.no_grad():
        length = torchrl_parts.one_env("throughput", params).rollout(_LIMIT + 1, policy).shape[0]
    if length != _LIMIT:
        raise RuntimeError(f"an episode lasted {length} steps instead of {_LIMIT}")
    return _LIMIT


def _rounds(workers: Sequence[Any], count: int) -> list[float]:
    """Run ``count`` rollouts on every worker, each starting its next as soon as it is free; their rewards."""
    for worker in workers:
        worker.submit(None, max_steps=_LIMIT)
    left, rewards = dict.fromkeys(workers, count), []
    while left:
        for worker in list(left):
            result = worker.poll(timeout=0.005)
            if result is None:
                continue
            rewards.append(result["reward"])
            left[worker] -= 1
            if left[worker]:
                worker.submit(None, max_steps=_LIMIT)
            else:
                del left[worker]
    return rewards


def throughput(params: base.Params) -> dict[str, Any]:
    """One rollout per worker to warm up, then ``episodes`` shared out equally."""
    from torchrl.collectors.distributed import RayEvalWorker

    length = _checked_length(params)
    make_env = functools.partial(torchrl_parts.one_env, "throughput", params)
    make_policy = functools.partial(torchrl_parts.policy_maker, "throughput")
    with base.ray_cluster(num_cpus=params["runners"]):
        workers = [RayEvalWorker(None, make_env, make_policy, num_gpus=0, num_cpus=1) for _ in range(params["runners"])]
        _rounds(workers, 1)
        rewards, seconds = base.timed(lambda: _rounds(workers, params["episodes"] // len(workers)))
        for worker in workers:
            worker.shutdown()
    returns = [reward * length for reward in rewards]
    return base.steps_row(length * len(rewards), seconds, len(rewards), sum(returns) / len(returns))


def drop_in(params: base.Params) -> dict[str, Any]:
    """The same calls on rl_eval's class of that name: one request warms up, one is measured."""
    from rl_eval.integrations.torchrl import RayEvalWorker

    make_env = functools.partial(torchrl_parts.one_env, "throughput", params)
    make_policy = functools.partial(torchrl_parts.policy_maker, "throughput")
    with base.ray_cluster(num_cpus=params["runners"]):
        worker = RayEvalWorker(
            None,
            make_env,
            make_policy,
            num_cpus=1,
            num_episodes=params["episodes"],
            num_envs=params["envs"],
            num_runners=params["runners"],
        )

        def evaluate() -> dict[str, Any]:
            worker.submit(None, max_steps=_LIMIT)
            result = worker.poll(timeout=None)
            assert result is not None
            return result

        evaluate()
        result, seconds = base.timed(evaluate)
        worker.shutdown()
    if result["length"] != _LIMIT:
        raise RuntimeError(f"an episode lasted {result['length']} steps on average instead of {_LIMIT}")
    return base.steps_row(_LIMIT * result["count"], seconds, result["count"], result["reward"])


def _seeded_env(params: base.Params) -> Any:
    env = torchrl_parts.one_env("faults", params)
    env.set_seed(0)
    return env


def faults(params: base.Params) -> dict[str, Any]:
    """One rollout per episode, shared out equally, and shut down.

    A rollout reports the mean reward of a step; what a two-length episode returned is whether that is above 0.
    """
    from torchrl.collectors.distributed import RayEvalWorker

    params["strike"]["spare"] = os.getpid()
    make_env = functools.partial(_seeded_env, params)
    make_policy = functools.partial(torchrl_parts.policy_maker, "faults")
    with base.ray_cluster(num_cpus=params["runners"]):
        workers = [RayEvalWorker(None, make_env, make_policy, num_gpus=0, num_cpus=1) for _ in range(params["runners"])]
        rewards = _rounds(workers, params["episodes"] // len(workers))
        row = base.evaluated(len(rewards), sum(reward > 0 for reward in rewards) / len(rewards))
        for worker in workers:
            worker.shutdown()
    return row


if __name__ == "__main__":
    base.run({"throughput": throughput, "drop_in": drop_in, "faults": faults})

"""TorchRL ``Evaluator``: one collector over a batch of environments, in this process (thread backend).

For faults it gets the process backend, which puts environments and policy into a child.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contenders import base, torchrl_parts


@contextmanager
def _evaluator(scenario: str, params: base.Params) -> Iterator[Any]:
    import torch
    from torchrl.collectors import Evaluator

    torch.set_num_threads(1)
    evaluator = Evaluator(
        torchrl_parts.env_maker(scenario, params),
        policy_factory=functools.partial(torchrl_parts.policy_maker, scenario),
        num_trajectories=params["episodes"],
        collector_kwargs={"traj_format": "cat"},
        backend=params.get("backend", "thread"),
    )
    try:
        yield evaluator
    finally:
        evaluator.shutdown()


def throughput(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row; steps are episodes times their mean length."""
    with _evaluator("throughput", params) as evaluator:
        evaluator.evaluate()
        found, seconds = base.timed(evaluator.evaluate)
    episodes = int(found["eval/num_episodes"])
    steps = episodes * float(found["eval/episode_length"])
    return base.steps_row(steps, seconds, episodes, float(found["eval/reward"]))


def correctness(params: base.Params) -> dict[str, Any]:
    """Evaluate repeatedly; a raising environment ends the first evaluation and with it the row."""
    parts = []
    with _evaluator("correctness", params) as evaluator:
        for _ in range(params["evaluations"]):
            found = evaluator.evaluate()
            parts.append((float(found["eval/reward"]), int(found["eval/num_episodes"])))
    return base.pooled(parts)


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate once, and shut down."""
    params["strike"]["spare"] = os.getpid()
    with _evaluator("faults", {**params, "backend": "process"}) as evaluator:
        found = evaluator.evaluate()
        return base.evaluated(int(found["eval/num_episodes"]), float(found["eval/reward"]))


if __name__ == "__main__":
    base.run({"throughput": throughput, "correctness": correctness, "faults": faults})

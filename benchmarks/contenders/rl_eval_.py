"""rl_eval: an ``EvalRunnerGroup`` on Ray actors, warm between evaluations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks import scenarios
from benchmarks.contenders import base

if TYPE_CHECKING:
    from rl_eval import EvalConfig, EvalRunnerGroup

_ATTEMPTS = 20
_ON_CARTPOLE = ("throughput", "broadcast")
_START_S = 120.0
_POLICIES = {
    "throughput": "benchmarks.scenarios:cartpole_policy",
    "correctness": "benchmarks.scenarios:idle_policy",
    "broadcast": "benchmarks.scenarios:wide_policy",
    "simulators": "benchmarks.worlds:make_policy",
}


def make_config(scenario: str, params: base.Params) -> EvalConfig:
    """The configuration of a scenario: nothing in it that the scenario does not name."""
    from rl_eval import EvalConfig

    env: Any = "CartPole-v1" if scenario in _ON_CARTPOLE else scenarios.env_factory(scenario, params)
    return (
        EvalConfig()
        .environment(env)
        .policy(_POLICIES[scenario], policy_kwargs={"name": params["world"]} if scenario == "simulators" else {})
        .runners(num_runners=params["runners"], num_envs_per_runner=params["envs"], num_cpus_per_runner=1)
        .runners(runner="subprocess" if params.get("processes") else "vector")
        .evaluation(num_episodes=params["episodes"], seed=0, max_episode_steps=params.get("episode_steps"))
        .fault_tolerance(max_attempts_per_episode=_ATTEMPTS)
    )


@contextmanager
def warm_group(config: EvalConfig, params: base.Params) -> Iterator[EvalRunnerGroup]:
    """A group on a cluster of its own, once all its runners are up: it would work, and acknowledge, with fewer."""
    from rl_eval import EvalRunnerGroup

    cluster = base.ray_cluster(num_cpus=params["runners"], object_store_gb=params.get("object_store_gb", 0.5))
    with cluster, EvalRunnerGroup(config) as group:
        deadline = time.monotonic() + _START_S
        while len(group.healthy_runner_ids) < params["runners"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(group.healthy_runner_ids)} of {params['runners']} runners are up")
            time.sleep(0.02)
        yield group


def throughput(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row, on the same actors."""
    slots = params["runners"] * params["envs"]
    with warm_group(make_config(params["scenario"], params), params) as group:
        group.evaluate(num_episodes=slots, seed=1)
        result, seconds = base.timed(lambda: group.evaluate(num_episodes=params["episodes"], seed=0))
    lengths = result.table.rows["length"]
    row = base.steps_row(int(lengths.sum()), seconds, len(lengths), float(result.mean_return))
    return {**row, "fingerprint": result.fingerprint}


def correctness(params: base.Params) -> dict[str, Any]:
    """Evaluate with the seeds 0, 1, 2, ...; the fingerprints tell whether layout or faults changed anything."""
    parts, prints = [], []
    with warm_group(make_config("correctness", params), params) as group:
        for seed in range(params["evaluations"]):
            result = group.evaluate(num_episodes=params["episodes"], seed=seed)
            parts.append((float(result.mean_return), len(result.table.rows["length"])))
            prints.append(result.fingerprint)
    return {**base.pooled(parts), "fingerprints": prints}


def broadcast(params: base.Params) -> dict[str, Any]:
    """Time ``sync_weights`` until every runner has acknowledged, next to one memcpy of the same bytes."""
    import ray

    config = make_config("broadcast", {**params, "envs": 1, "episodes": 1})
    config.policy(policy_kwargs={"num_params": params["num_params"]})
    module = scenarios.wide_policy(params["num_params"])
    with warm_group(config, params) as group:
        base.touch_store(ray, params["object_store_gb"])
        return base.broadcast_row(module, lambda: group.sync_weights(module), params["rounds"])


if __name__ == "__main__":
    base.run({"throughput": throughput, "simulators": throughput, "correctness": correctness, "broadcast": broadcast})

"""rl_eval: an ``EvalRunnerGroup`` on Ray actors, warm between evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import scenarios
from benchmarks.contenders import base

if TYPE_CHECKING:
    from rl_eval import EvalConfig

_ATTEMPTS = 20
_POLICIES = {
    "throughput": "benchmarks.scenarios:cartpole_policy",
    "correctness": "benchmarks.scenarios:idle_policy",
    "broadcast": "benchmarks.scenarios:wide_policy",
}


def _config(scenario: str, params: base.Params) -> EvalConfig:
    from rl_eval import EvalConfig

    env: Any = scenarios.env_factory(scenario, params) if scenario == "correctness" else "CartPole-v1"
    return (
        EvalConfig()
        .environment(env)
        .policy(_POLICIES[scenario])
        .runners(num_runners=params["runners"], num_envs_per_runner=params["envs"], num_cpus_per_runner=1)
        .evaluation(num_episodes=params["episodes"], seed=0, max_episode_steps=params.get("episode_steps"))
        .fault_tolerance(max_attempts_per_episode=_ATTEMPTS)
    )


def throughput(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row, on the same actors."""
    from rl_eval import EvalRunnerGroup

    slots = params["runners"] * params["envs"]
    with base.ray_cluster(num_cpus=params["runners"]), EvalRunnerGroup(_config("throughput", params)) as group:
        group.evaluate(num_episodes=slots, seed=1)
        result, seconds = base.timed(lambda: group.evaluate(num_episodes=params["episodes"], seed=0))
    lengths = result.table.rows["length"]
    row = base.steps_row(int(lengths.sum()), seconds, len(lengths), float(result.mean_return))
    return {**row, "fingerprint": result.fingerprint}


def correctness(params: base.Params) -> dict[str, Any]:
    """Evaluate with the seeds 0, 1, 2, ...; the fingerprints tell whether layout or faults changed anything."""
    from rl_eval import EvalRunnerGroup

    parts, prints = [], []
    with base.ray_cluster(num_cpus=params["runners"]), EvalRunnerGroup(_config("correctness", params)) as group:
        for seed in range(params["evaluations"]):
            result = group.evaluate(num_episodes=params["episodes"], seed=seed)
            parts.append((float(result.mean_return), len(result.table.rows["length"])))
            prints.append(result.fingerprint)
    return {**base.pooled(parts), "fingerprints": prints}


def broadcast(params: base.Params) -> dict[str, Any]:
    """Time ``sync_weights`` until every runner has acknowledged, next to one memcpy of the same bytes."""
    from rl_eval import EvalRunnerGroup

    config = _config("broadcast", {**params, "envs": 1, "episodes": 1})
    config.policy(policy_kwargs={"num_params": params["num_params"]})
    module = scenarios.wide_policy(params["num_params"])
    cluster = base.ray_cluster(num_cpus=params["runners"], object_store_gb=params["object_store_gb"])
    with cluster, EvalRunnerGroup(config) as group:
        version = iter(range(1, params["rounds"] + 2))
        return base.broadcast_row(module, lambda: group.sync_weights(module, version=next(version)), params["rounds"])


if __name__ == "__main__":
    base.run({"throughput": throughput, "correctness": correctness, "broadcast": broadcast})

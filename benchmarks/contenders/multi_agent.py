"""CartPole with four agents: rl_eval's runner of several agents and RLlib's, in turn, in one process.

Both step RLlib's own ``make_multi_agent("CartPole-v1")`` with one network for all agents. RLlib's module returns
actions, which skips its action distribution: the fastest that RLlib goes. Steps are those of complete episodes, and
seconds are the process's CPU seconds, so that other work on the machine counts for neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import scenarios
from benchmarks.contenders import base, rllib

_ID = "everybody"


def throughput(params: base.Params) -> dict[str, Any]:
    """Measure both in turn; the row has the best round of each, and the ratio."""
    import torch
    from ray.rllib.env.multi_agent_env import make_multi_agent

    torch.set_num_threads(1)  # As in runners; threads that wait for work would count as CPU seconds.
    env = make_multi_agent("CartPole-v1")
    kwargs = {"config": {"num_agents": params["agents"]}}
    contenders = {"rl_eval": _ours(env, kwargs, params), "RLlib": _theirs(env, kwargs, params)}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(params["rounds"] + 1):
        for name, play in contenders.items():
            started = time.process_time()
            steps = play()
            seconds = time.process_time() - started
            if round_:  # The first one warms up.
                found[name].append(steps / seconds)
    best = {name: max(rates) for name, rates in found.items()}
    return {"rates": best, "ratio": best["rl_eval"] / best["RLlib"], "rounds": found}


def _ours(env: Any, kwargs: dict[str, Any], params: base.Params) -> Callable[[], int]:
    from rl_eval import EvalConfig, EvalRunnerGroup

    config = (
        EvalConfig()
        .environment(env, env_kwargs=kwargs)
        .policy(policies={_ID: scenarios.cartpole_policy()}, policy_mapping_fn=_everybody)
        .runners(num_envs_per_runner=params["slots"])
        .evaluation(num_episodes=params["episodes"], determinism_check=0)
    )
    group = EvalRunnerGroup(config, threaded=False)
    return lambda: int(group.evaluate().counted_rows["length"].sum())


def _everybody(agent: Any, *_: Any, **__: Any) -> str:
    return _ID


def _theirs(env: Any, kwargs: dict[str, Any], params: base.Params) -> Callable[[], int]:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

    spec = RLModuleSpec(module_class=rllib._module_class(), model_config={"scenario": "throughput"})
    config = (
        PPOConfig()
        .environment(env, env_config=kwargs["config"])
        .multi_agent(policies={_ID}, policy_mapping_fn=_everybody)
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={_ID: spec}))
        .env_runners(num_env_runners=0, num_envs_per_env_runner=params["slots"], explore=False)
    )
    runner = MultiAgentEnvRunner(config=config, worker_index=0)

    def play() -> int:
        episodes = runner.sample(num_episodes=params["episodes"], explore=False)
        runner.get_metrics()
        return sum(len(episode) for episode in episodes if episode.is_done)

    return play


if __name__ == "__main__":
    base.run({"throughput": throughput})

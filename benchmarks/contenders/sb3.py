"""Stable-Baselines3 ``evaluate_policy`` on a ``DummyVecEnv`` or, also for faults, a ``SubprocVecEnv``, without Ray.

The environments go without ``Monitor`` (faster, and nothing here changes rewards or lengths).
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.contenders import base
from benchmarks.scenarios import CARTPOLE_WEIGHTS, env_factory, read_safetensors
from benchmarks.worlds import Actor

_LAYERS = {"mlp_extractor.policy_net.0": "body.0", "mlp_extractor.policy_net.2": "body.2", "action_net": "head"}


def _envs(scenario: str, params: base.Params) -> Any:
    import torch
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    torch.set_num_threads(1)
    vectorized = SubprocVecEnv if params.get("processes") else DummyVecEnv
    return vectorized([env_factory(scenario, params)] * params["envs"])


def _model(scenario: str, params: base.Params) -> Any:
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", _envs(scenario, params), policy_kwargs={"net_arch": [64, 64]}, device="cpu")


def _load_cartpole(model: Any) -> None:
    import torch

    arrays = read_safetensors(CARTPOLE_WEIGHTS)
    own = dict(model.policy.named_parameters())
    with torch.no_grad():
        for target, source in _LAYERS.items():
            for half in ("weight", "bias"):
                own[f"{target}.{half}"].copy_(torch.from_numpy(arrays[f"{source}.{half}"]))


def _evaluate(model: Any, envs: Any, episodes: int) -> tuple[list[float], list[int]]:
    from stable_baselines3.common.evaluation import evaluate_policy

    returns, lengths = evaluate_policy(
        model, envs, n_eval_episodes=episodes, deterministic=True, return_episode_rewards=True, warn=False
    )
    return returns, lengths


def throughput(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row."""
    model = _model("throughput", params)
    _load_cartpole(model)
    return _timed(model, model.get_env(), params)


def simulators(params: base.Params) -> dict[str, Any]:
    """The same with a network that is no model of SB3's: ``evaluate_policy`` asks for ``predict`` alone."""
    return _timed(Actor(params["world"]), _envs("simulators", params), params)


def _timed(model: Any, envs: Any, params: base.Params) -> dict[str, Any]:
    _evaluate(model, envs, params["envs"])
    (returns, lengths), seconds = base.timed(lambda: _evaluate(model, envs, params["episodes"]))
    envs.close()
    return base.steps_row(sum(lengths), seconds, len(lengths), sum(returns) / len(returns))


def correctness(params: base.Params) -> dict[str, Any]:
    """Evaluate repeatedly; a raising environment ends the first evaluation and with it the row."""
    model = _model("correctness", params)
    parts = []
    for _ in range(params["evaluations"]):
        returns, _ = _evaluate(model, model.get_env(), params["episodes"])
        parts.append((sum(returns) / len(returns), len(returns)))
    return base.pooled(parts)


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate once on environments in processes of their own, and close them."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(1)
    params["strike"]["spare"] = os.getpid()
    envs = SubprocVecEnv([env_factory("faults", params)] * params["envs"])
    envs.seed(0)
    returns, _ = _evaluate(PPO("MlpPolicy", envs, device="cpu"), envs, params["episodes"])
    row = base.evaluated(len(returns), sum(returns) / len(returns))
    envs.close()
    return row


if __name__ == "__main__":
    base.run({"throughput": throughput, "simulators": simulators, "correctness": correctness, "faults": faults})

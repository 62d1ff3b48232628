"""RLlib ``Algorithm.evaluate``: new API stack, evaluation runners as Ray actors, no training runners.

With ``module: default`` the policy is PPO's own RLModule with the scenario's weights, as RLlib's users
run it. With ``module: actions`` it is the scenario's network in an RLModule that returns actions, which
skips RLlib's action distribution: the fastest that RLlib goes. Metrics get a window that covers all
episodes; the default keeps the last 100.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import scenarios, worlds
from benchmarks.contenders import base

_POLICIES = {
    "throughput": scenarios.cartpole_policy,
    "correctness": scenarios.idle_policy,
    "faults": scenarios.idle_policy,
}


def _module_class() -> type:
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.apis import ValueFunctionAPI
    from ray.rllib.core.rl_module.torch import TorchRLModule

    class SharedPolicy(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
        """The scenario's network as an RLModule; the value function is there because PPO asks for one."""

        def setup(self) -> None:
            """Build the network with its weights; RLlib syncs the learner's copy, which is the same."""
            world = self.model_config.get("world")
            self.net = worlds.make_policy(name=world) if world else _POLICIES[self.model_config["scenario"]]()
            self.discrete = not world or worlds.WORLDS[world].discrete

        def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
            outputs = self.net(batch[Columns.OBS])
            return {Columns.ACTIONS: outputs.argmax(-1) if self.discrete else outputs}

        def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
            """Nothing trains here."""
            raise NotImplementedError

    return SharedPolicy


def _module_settings(scenario: str, params: base.Params) -> dict[str, Any]:
    """Arguments of ``AlgorithmConfig.rl_module``."""
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    if params.get("module") == "default":
        config = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        return {"model_config": config}
    chosen = {"scenario": scenario, "world": params.get("world")}
    return {"rl_module_spec": RLModuleSpec(module_class=_module_class(), model_config=chosen)}


def _load_weights(algorithm: Any, scenario: str) -> None:
    """Put the scenario's weights into PPO's own module, in the learner, from which evaluations sync."""
    import torch

    module = algorithm.learner_group._learner.module["default_policy"]
    theirs = dict(module.named_parameters())
    ours = _POLICIES[scenario]().state_dict()
    places = {"body.0": "encoder.actor_encoder.net.mlp.0", "body.2": "encoder.actor_encoder.net.mlp.2"}
    with torch.no_grad():
        for name, place in {**places, "head": "pi.net.mlp.0"}.items():
            for part in ("weight", "bias"):
                theirs[f"{place}.{part}"].copy_(ours[f"{name}.{part}"])


def _config(scenario: str, params: base.Params) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env

    register_env("benchmark", scenarios.env_factory(scenario, params))
    return (
        PPOConfig()
        .environment("benchmark")
        .rl_module(**_module_settings(scenario, params))
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=params["envs"],
            gym_env_vectorize_mode="async" if params.get("processes") else "sync",
        )
        .learners(num_learners=0, num_gpus_per_learner=0)
        .evaluation(
            evaluation_num_env_runners=params["runners"],
            evaluation_duration=params["episodes"],
            evaluation_duration_unit="episodes",
            evaluation_sample_timeout_s=params.get("sample_timeout_s", 600),
            evaluation_config={"explore": False},
        )
        .fault_tolerance(restart_failed_env_runners=True, restart_failed_sub_environments=True)
        .debugging(seed=params.get("seed"))
        .reporting(metrics_num_episodes_for_smoothing=params["episodes"])
    )


@contextmanager
def _algorithm(scenario: str, params: base.Params) -> Iterator[Any]:
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with base.ray_cluster(num_cpus=params["runners"] + 1):
        algorithm = _config(scenario, params).build_algo()
        try:
            if params.get("module") == "default":
                _load_weights(algorithm, scenario)
            yield algorithm
        finally:
            algorithm.stop()


def throughput(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row.

    Steps are episodes times their mean length: RLlib's own step counter holds the steps of the
    environments that it keeps stepping, and then drops, while others finish.
    """
    with _algorithm(params["scenario"], params) as algorithm:
        algorithm.evaluate()
        result, seconds = base.timed(algorithm.evaluate)
    found = result["env_runners"]
    episodes = int(found["num_episodes"])
    return base.steps_row(episodes * found["episode_len_mean"], seconds, episodes, float(found["episode_return_mean"]))


def correctness(params: base.Params) -> dict[str, Any]:
    """Evaluate repeatedly and take the mean return that RLlib reports for each evaluation."""
    parts = []
    with _algorithm("correctness", params) as algorithm:
        for _ in range(params["evaluations"]):
            found = algorithm.evaluate().get("env_runners", {})
            if found.get("num_episodes"):
                parts.append((float(found["episode_return_mean"]), int(found["num_episodes"])))
    return base.pooled(parts)


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate once, and stop."""
    params["strike"]["spare"] = os.getpid()
    with _algorithm("faults", params) as algorithm:
        found = algorithm.evaluate().get("env_runners", {})
        return base.evaluated(int(found.get("num_episodes", 0)), float(found.get("episode_return_mean", float("nan"))))


if __name__ == "__main__":
    base.run({"throughput": throughput, "simulators": throughput, "correctness": correctness, "faults": faults})

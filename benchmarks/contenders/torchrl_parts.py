"""What both TorchRL contenders share: the environment and the policy in TorchRL's own terms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks import scenarios
from benchmarks.contenders import base

__all__ = ["env_maker", "one_env", "policy_maker"]


def one_env(scenario: str, params: base.Params) -> Any:
    """One environment; actions are integers, not one-hot vectors, which saves a conversion."""
    from torchrl.envs import GymEnv, GymWrapper

    if scenario == "throughput":
        return GymEnv("CartPole-v1", categorical_action_encoding=True)
    return GymWrapper(scenarios.env_factory(scenario, params)(), categorical_action_encoding=True)


def env_maker(scenario: str, params: base.Params) -> Callable[[], Any]:
    """``params["envs"]`` environments in the batching of ``params["batching"]``, with summed rewards."""
    return functools.partial(_batched, scenario, params)


def _batched(scenario: str, params: base.Params) -> Any:
    from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv

    if params["envs"] == 1:
        env = one_env(scenario, params)
    elif params.get("batching") == "gym":
        env = GymEnv("CartPole-v1", num_envs=params["envs"], categorical_action_encoding=True)
    else:
        env = SerialEnv(params["envs"], functools.partial(one_env, scenario, params))
    env = TransformedEnv(env, RewardSum())
    if scenario == "faults":
        env.set_seed(0)
    return env


def policy_maker(scenario: str, env: Any = None) -> Any:
    """The scenario's network as a TensorDictModule that writes its argmax: no distribution is built."""
    del env
    from tensordict.nn import TensorDictModule
    from torch import nn

    class Argmax(nn.Module):
        """Logits to actions."""

        def forward(self, logits: Any) -> Any:
            return logits.argmax(-1)

    network = nn.Sequential(
        (scenarios.cartpole_policy if scenario == "throughput" else scenarios.idle_policy)(), Argmax()
    )
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])

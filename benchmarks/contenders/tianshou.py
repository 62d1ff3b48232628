"""Tianshou's ``Collector`` on a ``DummyVectorEnv`` or a ``SubprocVectorEnv``, acting greedily, without Ray."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import base
from benchmarks.scenarios import cartpole_policy, env_factory


def throughput(params: base.Params) -> dict[str, Any]:
    """Collect once to warm up and once for the row."""
    import torch
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.data import Collector
    from tianshou.env import DummyVectorEnv, SubprocVectorEnv

    class Actor(torch.nn.Module):
        """The scenario's network with the answer that Tianshou's policies expect: logits, and a state."""

        def __init__(self) -> None:
            super().__init__()
            self.net = cartpole_policy()

        def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
            return self.net(torch.as_tensor(obs)), state

    torch.set_num_threads(1)
    made = [env_factory("throughput", params)] * params["envs"]
    envs = (SubprocVectorEnv if params["processes"] else DummyVectorEnv)(made)
    policy = DiscreteActorPolicy(actor=Actor(), action_space=envs.action_space[0], deterministic_eval=True)
    collector = Collector(policy.eval(), envs)
    collector.collect(n_episode=params["envs"], reset_before_collect=True)
    found, seconds = base.timed(lambda: collector.collect(n_episode=params["episodes"], reset_before_collect=True))
    envs.close()
    return base.steps_row(int(found.lens.sum()), seconds, len(found.lens), float(found.returns.mean()))


if __name__ == "__main__":
    base.run({"throughput": throughput})

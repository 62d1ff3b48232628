"""Integration of TorchRL: its policies, environments and evaluators.

====================================  ======================================================================
TorchRL                               here
====================================  ======================================================================
``TensorDictModule`` and subclasses   :func:`as_policy` (called for you): a :class:`rl_eval.Policy`
``EnvBase``                           :func:`as_env` (called for you): a :class:`gymnasium.Env`
``EnvBase`` with groups of agents     :func:`as_agents_env` (called for you): agents that act in turns
``torchrl.collectors.Evaluator``      :class:`Evaluator`, with the same arguments and result keys
``RayEvalWorker``                     :class:`RayEvalWorker`, with the same arguments and result keys
``RayCollector``                      :class:`RayCollector`, with the same arguments and layout of batches
====================================  ======================================================================

A plain ``TensorDictModule`` needs only tensordict. Everything else needs torchrl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_eval.integrations import lazy_names

if TYPE_CHECKING:
    from rl_eval.integrations.torchrl.agents import as_agents_env as as_agents_env
    from rl_eval.integrations.torchrl.env import as_env as as_env
    from rl_eval.integrations.torchrl.evaluator import Evaluator as Evaluator
    from rl_eval.integrations.torchrl.evaluator import RayEvalWorker as RayEvalWorker
    from rl_eval.integrations.torchrl.policy import as_policy as as_policy
    from rl_eval.integrations.torchrl.policy import portable as portable
    from rl_eval.integrations.torchrl.ray_collector import RayCollector as RayCollector

__getattr__ = lazy_names(
    __name__,
    {
        "agents": ("as_agents_env",),
        "env": ("as_env",),
        "evaluator": ("Evaluator", "RayEvalWorker"),
        "policy": ("as_policy", "portable"),
        "ray_collector": ("RayCollector",),
    },
)

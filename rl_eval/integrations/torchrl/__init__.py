"""Integration of TorchRL: its policies, environments and evaluators.

====================================  ======================================================================
TorchRL                               here
====================================  ======================================================================
``TensorDictModule`` and subclasses   :func:`as_policy` (called for you): a :class:`rl_eval.Policy`
``EnvBase``                           :func:`as_env` (called for you): a :class:`gymnasium.Env`
``EnvBase`` with groups of agents     :func:`as_agents_env` (called for you): agents that act in turns
``torchrl.collectors.Evaluator``      :class:`Evaluator`, with the same arguments and result keys
``RayEvalWorker``                     :class:`RayEvalWorker`, likewise
``RayCollector``                      :class:`RayCollector`, likewise, with batches in the same layout
====================================  ======================================================================

A plain ``TensorDictModule`` needs tensordict only; the rest needs torchrl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rl_eval.integrations.torchrl.agents import as_agents_env
    from rl_eval.integrations.torchrl.env import as_env
    from rl_eval.integrations.torchrl.evaluator import Evaluator, RayEvalWorker
    from rl_eval.integrations.torchrl.policy import as_policy, portable
    from rl_eval.integrations.torchrl.ray_collector import RayCollector

__all__ = ["Evaluator", "RayCollector", "RayEvalWorker", "as_agents_env", "as_env", "as_policy", "portable"]

_HOMES: Final = {
    "Evaluator": "evaluator",
    "RayCollector": "ray_collector",
    "RayEvalWorker": "evaluator",
    "as_agents_env": "agents",
    "as_env": "env",
    "as_policy": "policy",
    "portable": "policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

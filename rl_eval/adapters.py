"""Registry of framework adapters, looked up by the packages of an object's classes.

Nothing is imported to find that out. An integration is a module with some of these functions:

- ``portable(value)``: what can be pickled in the trainer's process in its place, and shares nothing with it;
- ``as_policy(value, section, observation_space, action_space)``: the :class:`rl_eval.Policy` that it is;
- ``as_policies(value, names)``: the policies of these ids that it is, for an object that holds several;
- ``as_weights(value)``: the weights that it has, as :func:`rl_eval.weights.snapshot_weights` takes them;
- ``for_environment(value, env)``: the policy with what a live environment of its framework knows about observations;
- ``as_env(value)``: the :class:`gymnasium.Env` that it is;
- ``as_agents_env(value)``: the environment of several agents that it is, or None.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

__all__ = ["integration_for"]

_ADAPTERS: Final = {
    "stable_baselines3": "sb3",
    "sb3_contrib": "sb3",
    "torchrl": "torchrl",
    "tensordict.nn": "torchrl",
    "ray.rllib": "rllib",
    "rl_eval.integrations.rllib.filters": "rllib.filters",
    "tianshou": "tianshou",
}


def integration_for(value: Any, function: str) -> Any:
    """Return a function of the adapter for an object, or None."""
    for base in type(value).__mro__:
        for package, name in _ADAPTERS.items():
            if f"{base.__module__}.".startswith(f"{package}."):
                return getattr(importlib.import_module(f"rl_eval.integrations.{name}"), function, None)
    return None

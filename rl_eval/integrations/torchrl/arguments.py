"""Arguments of TorchRL's evaluation classes in the terms of rl_eval; one that has no meaning here is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from rl_eval.errors import ConfigError, WeightsError, nearest
from rl_eval.integrations.torchrl.keys import Key
from rl_eval.integrations.torchrl.policy import portable
from rl_eval.integrations.torchrl.scope import Rules, statistics_of

__all__ = [
    "BACKENDS",
    "ArgumentError",
    "check",
    "copy_of",
    "is_env",
    "mode_of",
    "own_policy",
    "plain_key",
    "refuse",
    "runner_settings",
    "with_rules",
]

BACKENDS: Final = {"thread": "thread", "process": "ray", "ray": "ray"}
_BUSY: Final = ("skip", "error", "queue")
_MODES: Final = ("deterministic", "mode", "mean", "median", "random")
_RAY_KWARGS: Final = {
    "num_cpus": "num_cpus_per_runner",
    "resources": "custom_resources_per_runner",
    "label_selector": "label_selector",
    "runtime_env": "runtime_env",
    "memory": "custom_resources_per_runner",
}


class ArgumentError(ConfigError, ValueError):
    """An argument is wrong, or cannot be honoured; it is named. Also a ``ValueError``, as in TorchRL."""


def with_rules(
    weights: Any, weights_dict: Mapping[str, Any] | None = None, max_steps: int | None = None, mode: str | None = None
) -> dict[str, Any] | None:
    """Return what to send for a request; None when everything stays as it is.

    Args:
        weights: The policy's, unless ``weights_dict`` has them.
        weights_dict: Models by name.
        max_steps: Step limit of the episodes.
        mode: How actions are taken.

    Raises:
        WeightsError: A name is none that could be sent, or a transform has no statistics.
    """
    models = dict(weights_dict or {})
    policy = models.pop("policy", weights)
    if unknown := [name for name in models if not name.startswith("env.")]:
        raise WeightsError(
            f"weights_dict has {unknown}: known are 'policy', and transforms of the environment, as 'env.transform[0]'"
        )
    statistics = {name.removeprefix("env."): statistics_of(name, model) for name, model in models.items()}
    if policy is None and not statistics and max_steps is None and mode is None:
        return None
    sent = {} if policy is None else {"policy": policy}
    rules = Rules(None if policy is None else _count_tensors(policy), statistics, max_steps, mode)
    return {**sent, "_extra_state": rules}


def plain_key(name: str, key: Key, default: str) -> Key | None:
    """Return a key of TorchRL's step data as the environment's specs have it; None for the default one.

    Raises:
        ArgumentError: It is no key of what a step returns.
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    if path in {("next", default), (default,)}:
        return None
    if path[0] != "next" or len(path) < 2:
        raise ArgumentError(f"{name} is {key!r}: give the key that a step writes, such as ('next', {default!r})")
    return path[1:] if len(path) > 2 else path[1]


def runner_settings(
    num_runners: int,
    num_gpus: float,
    init_fn: Callable[[], object] | None,
    ray_kwargs: Mapping[str, Any] | None,
    argument: str = "ray_kwargs",
) -> dict[str, Any]:
    """Translate Ray's options of an actor into those of runners.

    Raises:
        ArgumentError: One has no counterpart, or is given twice.
    """
    given = dict(ray_kwargs or {})
    if "num_gpus" in given:
        raise ArgumentError(f"{argument} has 'num_gpus': give it as the argument num_gpus, once")
    if unknown := sorted(set(given) - set(_RAY_KWARGS)):
        raise ArgumentError(
            f"{argument} has {unknown}: {nearest(unknown[0], _RAY_KWARGS)}. Runners are spread over the nodes, "
            "and one that dies is replaced and its episodes run again, so Ray's restarts and retries are not needed"
        )
    if "memory" in given:
        given["resources"] = {**given.get("resources", {}), "memory": given.pop("memory")}
    settings = {_RAY_KWARGS[name]: value for name, value in given.items()}
    if init_fn is not None:
        settings["init_fn"] = init_fn
    return {"num_runners": num_runners, "num_gpus_per_runner": num_gpus, **settings}


def check(
    env: Any,
    policy: Any,
    policy_factory: Any,
    backend: str,
    busy_policy: str,
    init_fn: Any,
    num_gpus: float,
    ray_kwargs: Any,
) -> None:
    """Raise where arguments contradict each other.

    Raises:
        ArgumentError: It names the one that is wrong.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"Unknown backend {backend!r}: {nearest(str(backend), BACKENDS)}")
    if busy_policy not in _BUSY:
        raise ArgumentError(f"Unknown busy_policy {busy_policy!r}: {nearest(str(busy_policy), _BUSY)}")
    if policy is None and policy_factory is None:
        raise ArgumentError("a policy or a policy_factory must be provided")
    if policy is not None and policy_factory is not None:
        raise ArgumentError("policy and policy_factory are given: pass one of them, not both")
    if backend == "thread":
        for name, value in {"init_fn": init_fn, "num_gpus": num_gpus, "ray_kwargs": ray_kwargs}.items():
            if value:
                raise ArgumentError(
                    f'{name} is {value!r}, but backend="thread" starts no process: use "process" or "ray"'
                )
    elif not callable(env) or is_env(env):
        raise ArgumentError(
            f'env is a {type(env).__name__}, but backend="{backend}" builds it in another process: give a callable'
        )


def refuse(why: str, **given: Any) -> None:
    """Raise for what is given and has no meaning here.

    Raises:
        ArgumentError: It names the argument.
    """
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(f"{name} is {value!r}, which cannot be honoured: {why}. Leave it out")


def is_env(value: Any) -> bool:
    """Return whether a value is a live environment."""
    import gymnasium as gym
    from torchrl.envs import EnvBase

    return isinstance(value, (EnvBase, gym.Env))


def copy_of(env: Any) -> Any:
    """Copy a live environment, which stays the caller's."""
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ArgumentError(
            f"env is an environment that cannot be copied ({error}): give a callable that builds one"
        ) from error


def own_policy(policy: Any) -> Any:
    """Copy a module, which stays the caller's."""
    return portable(policy) if isinstance(policy, torch.nn.Module) else policy


def mode_of(exploration_type: Any) -> str:
    """Return the name of an exploration type.

    Raises:
        ArgumentError: There is no such type.
    """
    name = str(getattr(exploration_type, "name", exploration_type)).lower()
    if name not in _MODES:
        raise ArgumentError(f"exploration_type is {exploration_type!r}: {nearest(name, _MODES)}")
    return name


def _count_tensors(weights: Any) -> int:
    if isinstance(weights, torch.nn.Module):
        parameters, buffers = (
            weights.named_parameters(remove_duplicate=False),
            weights.named_buffers(remove_duplicate=False),
        )
        return sum(1 for _ in parameters) + sum(1 for _ in buffers)
    if isinstance(weights, torch.Tensor):
        return 1
    if isinstance(weights, Mapping) or hasattr(weights, "flatten_keys"):
        return sum(_count_tensors(value) for name, value in weights.items() if not str(name).endswith("_extra_state"))
    return 0

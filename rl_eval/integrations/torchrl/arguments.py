"""Translation of the arguments of TorchRL's three evaluation classes.

The docstring of each class explains the supported arguments. :data:`ABSENT` lists the arguments without a counterpart
in rl_eval.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import RandomPolicy

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError, WeightsError, nearest
from rl_eval.integrations.torchrl.making import EnvMaker, PolicySource, Rules
from rl_eval.integrations.torchrl.normalizers import statistics_of
from rl_eval.integrations.torchrl.policy import Key, portable
from rl_eval.integrations.torchrl.stages import MODES

_NO_COLLECTOR: Final = "runners step the environments, without an inner collector"
_ONE_WAY: Final = "weights are always sent once, to all runners"

ABSENT: Final[Mapping[str, Mapping[str, str | None]]] = {
    "Evaluator": {
        **dict.fromkeys(("frames_per_batch", "collector_cls", "collector_kwargs"), _NO_COLLECTOR),
        "weight_sync_schemes": _ONE_WAY,
    },
    "RayCollector": {
        **dict.fromkeys(("weight_updater", "weight_recv_schemes"), _ONE_WAY),
        **dict.fromkeys(("trust_policy", "collector_class", "sync"), None),
        **dict.fromkeys(("weight_sync_schemes", "use_env_creator", "no_cuda_sync"), None),
    },
}
"""Arguments without a counterpart, by class. The value is the reason to reject the argument, or None if the argument is
accepted and has no effect."""

_ACTOR_OPTIONS: Final = {
    "num_cpus": "num_cpus_per_runner",
    "resources": "custom_resources_per_runner",
    "label_selector": "label_selector",
    "runtime_env": "runtime_env",
    "memory": "custom_resources_per_runner",
}


class ArgumentError(ConfigError, ValueError):
    """An argument is wrong or not supported; the message names the argument.

    The error is a ``ValueError``, as in TorchRL.
    """


def take_rest(owner: str, given: Mapping[str, Any]) -> None:
    """Check the arguments of a class that are not in its signature.

    Raises:
        ArgumentError: An argument is not supported.
        TypeError: An argument does not exist in TorchRL's class.
    """
    for name, value in given.items():
        if name not in ABSENT[owner]:
            raise TypeError(f"{owner}() has no argument {name!r}")
        if (why := ABSENT[owner][name]) is not None:
            refuse(name, value, why)


def refuse(name: str, value: Any, why: str, *, unless: Any = None) -> None:
    """Reject an argument, unless its value is None or the only supported value.

    Raises:
        ArgumentError: The argument has another value.
    """
    if value is not None and str(value) != str(unless):
        raise ArgumentError(f"{name} is {value!r}, but {why}", key=name, value=value, fix=f"Omit {name}.")


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Return ``value``, after a check that it is one of the known values.

    Raises:
        ArgumentError: The value is unknown.
    """
    if value not in known:
        problem = f"unknown {name} {value!r}: {nearest(str(value), known)}"
        raise ArgumentError(problem, key=name, value=value)
    return value


def same(name: str, given: Any) -> Any:
    """Return the value of an argument. TorchRL accepts the value itself, or a list with one value per collector.

    Raises:
        ArgumentError: The list is empty, or has different values.
    """
    values = given if isinstance(given, (list, tuple)) else [given]
    if not values or any(one is not values[0] and one != values[0] for one in values):
        raise ArgumentError(f"{name} is {given!r}", key=name, value=given, fix="Pass one value for all workers.")
    return values[0]


def mode_of(exploration_type: Any) -> str:
    """Return the name of an exploration type in lower case, such as ``random``.

    Raises:
        ArgumentError: The type is unknown.
    """
    name = str(getattr(exploration_type, "name", exploration_type)).lower()
    return one_of("exploration_type", name, (*MODES, "random"))


def config_of(
    env: Any,
    policy: Any,
    policy_factory: Callable[..., Any] | None,
    mode: str,
    device: Any = None,
    reward_keys: Key = ("next", "reward"),
    done_keys: Key = ("next", "done"),
    *,
    as_recorded: bool = False,
) -> EvalConfig:
    """Build a config from the environment and the policy of one of TorchRL's classes, with copies of both.

    Args:
        env: An environment, which is copied, or a callable that builds an environment.
        policy: The policy, which is copied.
        policy_factory: Factory of the policy, instead of ``policy``.
        mode: Mode of the policy; see :class:`PolicySource`.
        device: Device of the policy; by default, the CPU.
        reward_keys: Key of the reward.
        done_keys: Key of the done flag that ends an episode.
        as_recorded: Whether a collector uses the frames; see :class:`EnvMaker`.

    Raises:
        ArgumentError: An argument is wrong.
    """
    if policy is not None and policy_factory is not None:
        raise ArgumentError("both policy and policy_factory are set", key="policy_factory", fix="Pass one of the two.")
    if not callable(env):
        fix = "Pass a callable that builds a TorchRL environment."
        raise ArgumentError(f"env is {env!r}", key="env", value=env, fix=fix)
    if isinstance(env, EnvBase):
        try:
            env = copy.deepcopy(env)
        except Exception as error:
            fix = "Pass a callable that builds the environment."
            raise ArgumentError(f"env cannot be copied ({error})", key="env", fix=fix) from error
    token, device = uuid.uuid4().hex, str(device or "cpu")
    keys = _plain_key("reward_keys", reward_keys, "reward"), _plain_key("done_keys", done_keys, "done")
    policy = portable(policy) if isinstance(policy, torch.nn.Module) else policy
    return (
        EvalConfig()
        .environment(EnvMaker(env, token, *keys, as_recorded))
        .policy(
            "rl_eval.integrations.torchrl.making:ScopedPolicy",
            policy_kwargs={"source": PolicySource(policy, policy_factory, token, mode, device)},
            # A RandomPolicy needs noise, and a factory may build a RandomPolicy. Other policies ignore the noise.
            deterministic=mode in MODES and policy_factory is None and not isinstance(policy, RandomPolicy),
            device=device,
            actions="none" if as_recorded else "clip",
        )
    )


def _plain_key(name: str, key: Key, default: str) -> Key | None:
    """Convert a key of TorchRL's step data to a key of the environment's specs; None for the default key."""
    path = (key,) if isinstance(key, str) else tuple(key)
    if path in {("next", default), (default,)}:
        return None
    if path[0] != "next" or len(path) < 2:
        fix = f"Pass the key that a step writes, such as ('next', {default!r})."
        raise ArgumentError(f"{name} is {key!r}", key=name, value=key, fix=fix)
    return path[1:] if len(path) > 2 else path[1]


def runner_settings(
    argument: str, options: Mapping[str, Any] | None, num_runners: int, num_gpus: float, init_fn: Any = None
) -> dict[str, Any]:
    """Convert Ray's options of an actor to settings of runners.

    Args:
        argument: Name of the argument with the options, for messages.
        options: Ray's options by name; None for no options.
        num_runners: Number of runners.
        num_gpus: Number of GPUs per runner.
        init_fn: Function that is called first in each runner's process; None for no function.

    Raises:
        ArgumentError: An option has no counterpart, or ``resources`` is not a mapping.
    """
    given = dict(options or {})
    if unknown := sorted(set(given) - set(_ACTOR_OPTIONS)):
        hint = "pass num_gpus as a separate argument; omit max_restarts, because dead runners are always replaced"
        problem = f"{argument} has {unknown}: {nearest(unknown[0], _ACTOR_OPTIONS)} ({hint})"
        raise ArgumentError(problem, key=argument, value=unknown[0])
    if "memory" in given:
        if not isinstance(resources := given.get("resources", {}), Mapping):
            fix = "Pass a mapping of names to amounts, or omit the option."
            raise ArgumentError(f"{argument} has resources={resources!r}", key=argument, value=resources, fix=fix)
        given["resources"] = {**resources, "memory": given.pop("memory")}
    settings = {_ACTOR_OPTIONS[name]: value for name, value in given.items()}
    first = {} if init_fn is None else {"init_fn": init_fn}
    return {"num_runners": num_runners, "num_gpus_per_runner": num_gpus, **settings, **first}


def with_rules(
    weights: Any, weights_dict: Mapping[str, Any] | None = None, max_steps: int | None = None, mode: str | None = None
) -> dict[str, Any] | None:
    """Return the weights to send for a request, together with its rules; None if nothing changes.

    Args:
        weights: Weights of the policy, unless ``weights_dict`` contains them.
        weights_dict: Models by name.
        max_steps: Step limit of the episodes; None for no change.
        mode: Mode of the policy; None for no change.

    Raises:
        WeightsError: A name is unknown, or a transform has no statistics.
    """
    models = dict(weights_dict or {})
    policy = models.pop("policy", weights)
    if unknown := [name for name in models if not name.startswith("env.")]:
        fix = "Use 'policy', and for transforms 'env.transform[0]'."
        raise WeightsError(f"weights_dict has the unknown names {unknown}", key="weights_dict", value=unknown, fix=fix)
    statistics = {name.removeprefix("env."): statistics_of(name, model) for name, model in models.items()}
    if policy is None and not statistics and max_steps is None and mode is None:
        return None
    rules = Rules(None if policy is None else _count_tensors(policy), statistics, max_steps, mode)
    return {**({} if policy is None else {"policy": policy}), "_extra_state": rules}


def _count_tensors(weights: Any) -> int:
    if isinstance(weights, torch.Tensor):
        return 1
    if isinstance(weights, torch.nn.Module):
        named = (weights.named_parameters(remove_duplicate=False), weights.named_buffers(remove_duplicate=False))
        weights = {name: tensor for tensors in named for name, tensor in tensors}
    items = weights.items() if hasattr(weights, "items") else ()
    return sum(_count_tensors(value) for name, value in items if not str(name).endswith("_extra_state"))

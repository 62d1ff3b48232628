"""Split of a tensordict module into stages, which compute an action without exploration.

In TorchRL, a process-wide switch selects whether an action is the mode of a distribution or a draw, and draws use
torch's global generator. The trainer uses this switch and this generator, perhaps in another thread of this process.
So this module uses neither of them. It splits a policy into stages. A stage with a distribution chooses a value, or
draws the value from the episode's own stream. A module that reads the switch and cannot be split is rejected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import DETERMINISTIC_REGISTER
from torch.distributions import Independent, constraints

from rl_eval.errors import ConfigError
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource

MODES: Final = ("deterministic", "mode", "mean", "median")
"""Deterministic values of a distribution, by the names of tensordict's ``InteractionType``."""

_EXPLORATION: Final = "torchrl.modules.tensordict_module.exploration"
"""Module of TorchRL with only exploration classes."""

_SWITCHES: Final = frozenset({"exploration_type", "interaction_type"})
"""Names of the functions that read the switch of the process."""

_SEQUENCES: Final = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


class Chance(NamedTuple):
    """Randomness of a batch of episodes."""

    live: npt.NDArray[np.bool_]
    """Mask of lanes that run an episode, shape (batch,)."""
    noise: NoiseSource | None
    """Random numbers of each lane's step; None for deterministic actions."""


Stage: TypeAlias = Callable[[TensorDictBase, Chance], TensorDictBase]
"""One step of the computation of an action. It changes a batch in place."""


def stages_of(module: Any, mode: str) -> Iterator[Stage]:
    """Split a policy into stages.

    Args:
        module: A tensordict module.
        mode: ``random``, or one of :data:`MODES`.

    Raises:
        ConfigError: The policy explores, and its exploration can neither be removed nor use the episodes' own noise.
    """
    if hasattr(module, "draw_from_noise"):
        yield lambda batch, chance: module.draw_from_noise(batch, chance.noise)
    elif any(base.__module__ == _EXPLORATION for base in type(module).__mro__):
        if mode == "random":
            name, fix = type(module).__name__, "Remove this module, or set policy.deterministic."
            raise ConfigError(f"{name} adds its own noise", key="policy.deterministic", value=name, fix=fix)
        if hasattr(module, "td_module"):
            yield from stages_of(module.td_module, mode)
        return
    elif isinstance(module, ProbabilisticTensorDictModule):
        yield _value_of(module, mode)
    elif (
        isinstance(module, TensorDictSequential)
        and type(module).forward in _SEQUENCES
        and not module.partial_tolerant  # A module with partial_tolerant itself decides which children it skips.
    ):
        for child in module._module_iter():
            yield from stages_of(child, mode)
    elif isinstance(module, TensorDictModuleWrapper) and type(module).forward is TensorDictModuleWrapper.forward:
        yield from stages_of(module.td_module, mode)
    else:
        _check_switches(module)
        # Decorators of tensordict's forward() set a process-global switch (skip_existing) and restore it. In a thread,
        # this may undo a change by the trainer. The function under them does all the work.
        forward = inspect.unwrap(type(module).forward)
        # Keep the results of earlier stages, also if a module returns only its outputs.
        yield lambda batch, _: batch.update(forward(module, batch))
    yield from _hooks_of(module)


def _value_of(module: ProbabilisticTensorDictModule, mode: str) -> Stage:
    """Return a stage that chooses or draws a value of the module's distribution, and writes it to the module's keys."""
    if module.num_samples is not None:
        problem = f"the policy draws num_samples={module.num_samples} actions per observation"
        raise ConfigError(problem, key="policy", value=module.num_samples, fix="Draw one action.")
    keys = module.dist_sample_keys

    def run(batch: TensorDictBase, chance: Chance) -> TensorDictBase:
        distribution = module.get_dist(batch)
        value = _draw(distribution, chance) if mode == "random" else _choose(distribution, mode)
        if module.return_log_prob and mode == "random" and isinstance(value, torch.Tensor):
            batch.set(module.log_prob_keys[0], distribution.log_prob(value))
        if isinstance(value, TensorDictBase):
            return batch.update(value)
        if isinstance(value, dict):
            # A composite names its parts by their last key.
            value = tuple(value[key if key in value or not isinstance(key, tuple) else key[-1]] for key in keys)
        for key, tensor in zip(keys, value if isinstance(value, tuple) else (value,), strict=False):
            batch.set(key, tensor)
        return batch

    return run


def _choose(distribution: Any, mode: str) -> Any:
    """Return a deterministic value of a distribution.

    ``mode`` is one of :data:`MODES`. For ``deterministic``, return the distribution's ``deterministic_sample``, if it
    has one. Otherwise, return the mode or the mean, as TorchRL's ``ExplorationType.DETERMINISTIC`` does.

    Raises:
        ConfigError: The distribution has no such value.
    """
    parts = getattr(distribution, "dists", None)
    if isinstance(parts, dict):  # A composite distribution.
        return {name: _choose(part, mode) for name, part in parts.items()}
    attribute, kind = mode, type(distribution).__name__
    if mode == "deterministic":
        if hasattr(type(distribution), "deterministic_sample"):
            return distribution.deterministic_sample
        attribute = _attribute(distribution)
    try:
        return getattr(distribution, attribute)
    except (AttributeError, NotImplementedError) as error:
        problem, fix = f"{kind} has no {attribute}", "Add a property deterministic_sample to the distribution."
        raise ConfigError(problem, key="policy.deterministic", value=str(kind), fix=fix) from error


def _attribute(distribution: Any) -> str:
    """Return the name of a distribution's deterministic value, by the rules of ``tensordict.nn.probabilistic``."""
    inside = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if (registered := DETERMINISTIC_REGISTER.get(type(inside))) is not None:
        return str(registered.name).lower()
    try:
        return "mean" if isinstance(distribution.support, constraints._Real) else "mode"  # noqa: SLF001
    except NotImplementedError:
        return "mean"


def _draw(distribution: Any, chance: Chance) -> Any:
    """Sample a distribution with the noise of each episode, one row per slot.

    Raises:
        ConfigError: There is no noise, or the distribution needs torch's global generator.
    """
    if chance.noise is None:
        problem, fix = (
            "the policy samples its actions, but policy.deterministic is True",
            "Set policy.deterministic to False.",
        )
        raise ConfigError(problem, key="policy.deterministic", value=True, fix=fix)
    with EpisodeDraws(*chance):
        return distribution.sample()


def _hooks_of(module: torch.nn.Module) -> Iterator[Stage]:
    """Yield stages for the forward hooks of a module, such as the projection of ``safe=True``."""
    for hook in module._forward_hooks.values():
        if type(hook).__name__ == "_OutKeysSelect":
            continue  # It only removes keys that rl_eval does not read.

        def run(batch: TensorDictBase, _: Chance, hook: Any = hook) -> TensorDictBase:
            result = hook(module, (batch,), batch)
            return batch if result is None else result

        yield run


def _check_switches(module: torch.nn.Module) -> None:
    """Reject submodules that read TorchRL's exploration type, because the trainer's collectors change this type."""
    for part in module.modules():
        if hasattr(part, "_use_exploration_type"):
            vars(part)["_use_exploration_type"] = False  # NoisyLinear then depends on train() and eval().
        elif isinstance(part, ProbabilisticTensorDictModule) or _reads_switch(type(part)):
            name = type(part).__name__
            problem = f"{name} in a {type(module).__name__} depends on a process-global setting"
            raise ConfigError(problem, key="policy", value=name, fix="Remove this module.")


def _reads_switch(kind: type) -> bool:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in {"torch", "builtins", "typing"}:
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if inspect.isfunction(member) else getattr(member, "fget", None)
            code = getattr(function, "__code__", None)
            if code is not None and _SWITCHES & set(code.co_names):
                return True
    return False

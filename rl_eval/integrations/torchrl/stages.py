"""Stages in which a tensordict module computes an action, without the parts that explore.

A policy is taken apart into stages, so that each distribution's value is chosen here (:mod:`.distributions`) and no
exploration happens, whatever the process-global exploration type is: it belongs to the trainer's collectors. A part
that reads that switch itself and cannot be taken apart is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
)

from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl.distributions import choose, draw
from rl_eval.protocols import NoiseSource

__all__ = ["Stage", "stages_of"]

_EXPLORATION: Final = frozenset(
    {
        "EGreedyModule",
        "AdditiveGaussianModule",
        "OrnsteinUhlenbeckProcessModule",
        "EGreedyWrapper",
        "AdditiveGaussianWrapper",
        "OrnsteinUhlenbeckProcessWrapper",
    }
)
"""Modules of TorchRL that do nothing but explore."""

_SWITCHES: Final = frozenset({"exploration_type", "interaction_type"})
"""Functions that read the process-global switch."""

_SEQUENCES: Final = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


Stage: TypeAlias = Callable[[TensorDictBase, NoiseSource | None], TensorDictBase]
"""One step of the computation, applied to a batch in place."""


def stages_of(module: Any, mode: str) -> Iterator[Stage]:
    """Take a policy apart.

    Args:
        module: A tensordict module.
        mode: ``random``, or one of :data:`~.distributions.MODES`.

    Raises:
        ConfigError: It explores in a way that cannot be left out, or cannot be done with the episodes' own noise.
    """
    names = {base.__name__ for base in type(module).__mro__}
    if "RandomActions" in names:
        yield module.draw
    elif names & _EXPLORATION:
        if mode == "random":
            raise ConfigError(
                f"policy.deterministic is False, but the policy explores with {type(module).__name__}, which draws "
                "from torch's global generator: take it out of the policy, or set policy.deterministic to True"
            )
        inner = getattr(module, "td_module", None)
        if inner is not None:
            yield from stages_of(inner, mode)
    elif isinstance(module, ProbabilisticTensorDictModule):
        yield _value_of(module, mode)
        yield from _hooks_of(module)
    elif isinstance(module, TensorDictSequential) and type(module).forward in _SEQUENCES:
        for child in module._module_iter():
            yield from _tolerant(module, child, stages_of(child, mode))
        yield from _hooks_of(module)
    elif isinstance(module, TensorDictModuleWrapper) and type(module).forward is TensorDictModuleWrapper.forward:
        yield from stages_of(module.td_module, mode)
        yield from _hooks_of(module)
    else:
        _check_switches(module)
        # Decorators of tensordict's forward() write a process-global switch (skip_existing) and put it back, which in a
        # thread may undo what the trainer sets meanwhile; the function under them does all the work.
        forward = inspect.unwrap(type(module).forward)
        yield lambda batch, _: _merge(batch, forward(module, batch))
        yield from _hooks_of(module)


def _merge(batch: TensorDictBase, output: TensorDictBase) -> TensorDictBase:
    """Keep what earlier stages wrote, also if a module returns its outputs alone."""
    return batch if output is batch else batch.update(output)


def _tolerant(sequence: Any, child: Any, stages: Iterator[Stage]) -> Iterator[Stage]:
    """Leave a child out when its inputs are missing, if its sequence is ``partial_tolerant``."""
    if not sequence.partial_tolerant:
        yield from stages
        return
    for stage in stages:

        def run(batch: TensorDictBase, noise: NoiseSource | None, stage: Stage = stage) -> TensorDictBase:
            present = batch.keys(include_nested=True)
            return stage(batch, noise) if all(key in present for key in child.in_keys) else batch

        yield run


def _value_of(module: ProbabilisticTensorDictModule, mode: str) -> Stage:
    """Write the chosen or drawn value of a distribution where the module would write its sample."""
    if module.num_samples is not None:
        raise ConfigError(f"the policy draws num_samples={module.num_samples} actions per observation: draw one")
    keys = module.dist_sample_keys

    def run(batch: TensorDictBase, noise: NoiseSource | None) -> TensorDictBase:
        distribution = module.get_dist(batch)
        if mode != "random":
            value = choose(distribution, mode)
        elif noise is None:
            raise ConfigError("the policy samples its actions, but policy.deterministic is True: set it to False")
        else:
            value = draw(distribution, noise)
        if module.return_log_prob and mode == "random" and isinstance(value, torch.Tensor):
            batch.set(module.log_prob_keys[0], distribution.log_prob(value))
        if isinstance(value, TensorDictBase):
            return batch.update(value)
        if isinstance(value, dict):
            # A composite names its parts by their last key.
            for key in keys:
                batch.set(key, value[key if key in value or not isinstance(key, tuple) else key[-1]])
            return batch
        values = value if isinstance(value, tuple) else (value,)
        for key, tensor in zip(keys, values, strict=False):
            batch.set(key, tensor)
        return batch

    return run


def _hooks_of(module: torch.nn.Module) -> Iterator[Stage]:
    """Apply forward hooks, such as the projection of ``safe=True``, as calling the whole would."""
    for hook in module._forward_hooks.values():
        if type(hook).__name__ == "_OutKeysSelect":
            continue  # It only removes what nobody reads here.

        def run(batch: TensorDictBase, _: NoiseSource | None, hook: Any = hook) -> TensorDictBase:
            result = hook(module, (batch,), batch)
            return batch if result is None else result

        yield run


def _check_switches(module: torch.nn.Module) -> None:
    """Refuse parts whose actions would depend on what the trainer's collectors do meanwhile."""
    for part in module.modules():
        if hasattr(part, "_use_exploration_type"):
            vars(part)["_use_exploration_type"] = False  # NoisyLinear: then it goes by train() and eval().
        elif not isinstance(part, ProbabilisticTensorDictModule) and _reads_switch(type(part)):
            raise ConfigError(
                f"the policy has a {type(part).__name__}, which reads TorchRL's process-global exploration type: the "
                "training's collectors change it at any time, so the actions would depend on them. Give the policy as "
                "a TensorDictSequential without it, or with a distribution in its place"
            )
        elif isinstance(part, ProbabilisticTensorDictModule):
            raise ConfigError(
                f"the policy has a {type(part).__name__} inside a {type(module).__name__} with a forward() of its own, "
                "so its samples cannot be replaced by the mode: give the policy as a TensorDictSequential"
            )


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

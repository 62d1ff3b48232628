"""Running statistics of TorchRL's normalizers. An evaluation checks and freezes them; a trainer sends them.

TorchRL keeps these statistics in transforms (``VecNormV2``, and the older ``VecNorm``) of an environment or a policy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch

from rl_eval.errors import ConfigError, EvalError, WeightsError


def normalizers_of(module: torch.nn.Module) -> list[Any]:
    """Return the normalizers among a module's submodules."""
    kinds = {"VecNormV2", "VecNorm"}
    return [part for part in module.modules() if kinds & {base.__name__ for base in type(part).__mro__}]


def freeze_normalizers(module: torch.nn.Module) -> None:
    """Freeze the statistics of a module's normalizers."""
    for part in normalizers_of(module):
        part.freeze()


def check_initialized(module: torch.nn.Module, owner: str, key: str, error: type[EvalError] = ConfigError) -> None:
    """Check that every normalizer has statistics.

    Raises:
        ConfigError: A normalizer has no statistics. If ``error`` is another class, this class is raised instead.
    """
    for part in normalizers_of(module):
        if not _has_statistics(part):
            name, fix = type(part).__name__, "Collect some frames first, or send the statistics of the normalizer."
            raise error(f"{owner} has an uninitialized {name}", key=key, value=name, fix=fix)


def _has_statistics(normalizer: Any) -> bool:
    """Whether a normalizer has seen a value. Always true for a normalizer that stores its statistics in the data."""
    if not getattr(normalizer, "stateful", True):
        return True
    state = normalizer.get_extra_state() if getattr(normalizer, "initialized", True) else None
    return any(
        bool((number > 0).any())
        for name, number in (state or {}).items()
        if name.startswith("count") or name.endswith("_count")
    )


def statistics_of(path: str, source: Any) -> dict[str, Any]:
    """Return a copy of a transform's state, which a trainer sends to the runners.

    Args:
        path: Name of the transform in ``weights_dict``, for messages.
        source: The transform, or its state dict.

    Raises:
        WeightsError: The transform has no statistics yet, or ``source`` has another type.
    """
    if isinstance(source, torch.nn.Module):
        check_initialized(source, f"weights_dict[{path!r}]", "weights_dict", WeightsError)
    elif not isinstance(source, Mapping) and not hasattr(source, "flatten_keys"):
        problem, fix = f"weights_dict[{path!r}] is a {type(source).__name__}", "Pass the transform or its state dict."
        raise WeightsError(problem, key="weights_dict", value=path, fix=fix)
    return state_of(source)


def state_of(source: Any) -> dict[str, Any]:
    """Return a copy of the state of a module, of a ``TensorDict`` or of a state dict, on the CPU."""
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    elif hasattr(source, "flatten_keys"):
        source = source.flatten_keys(".").to_dict()
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in source.items()
    }


def load_statistics(env: Any, path: str, state: Mapping[str, Any]) -> None:
    """Load a state into a transform of an environment.

    Args:
        env: The environment.
        path: Path of the transform in the environment, such as ``transform[0]``.
        state: Result of :func:`statistics_of`.

    Raises:
        WeightsError: The state does not fit the transform.
    """
    try:
        part = env
        for name in re.findall(r"\w+", path):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        part.load_state_dict(state)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        problem = (
            f"weights_dict['env.{path}'] does not fit the evaluation environment ({type(error).__name__}: {error})"
        )
        fix = "Use the path of the transform in the evaluation environment."
        raise WeightsError(problem, key="weights_dict", value=f"env.{path}", fix=fix) from error

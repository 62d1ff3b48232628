"""Gymnasium spaces of TorchRL specs, and actions of these spaces as tensors.

=====================================  ===================================================
spec                                   space
=====================================  ===================================================
``Bounded``, ``Unbounded``             ``Box`` of its shape and dtype
``Categorical`` / ``OneHot`` action    ``Discrete``
``MultiCategorical`` / ``MultiOneHot`` ``MultiDiscrete``
``Binary`` action                      ``MultiBinary``
discrete observations                  ``Box`` of the tensor as the policy gets it
``Composite``                          ``Dict``
=====================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

from rl_eval.errors import ConfigError

__all__ = ["action_space", "action_writer", "observation_space", "unbounded"]


def observation_space(spec: TensorSpec) -> gym.spaces.Box:
    """Return the space of one leaf of the observations: numbers of its shape and dtype.

    Raises:
        ConfigError: The spec holds no tensors of fixed shape.
    """
    if any(size < 0 for size in spec.shape) or not hasattr(spec, "dtype") or spec.dtype is None:
        raise ConfigError(
            f"the observation spec {spec} is not of tensors of one fixed shape, which rl_eval cannot batch"
        )
    dtype = _numpy_dtype(spec.dtype)
    if isinstance(spec, Bounded):
        return _box(spec, dtype)
    return gym.spaces.Box(*_all_numbers(dtype), tuple(spec.shape), dtype)


def action_space(spec: TensorSpec) -> gym.Space[Any]:
    """Return the space that a policy's actions are read by.

    Raises:
        ConfigError: Actions of this spec have no space.
    """
    if isinstance(spec, Composite):
        return gym.spaces.Dict({key: action_space(part) for key, part in spec.items()})
    if isinstance(spec, Binary):
        return gym.spaces.MultiBinary(tuple(spec.shape))
    if (sizes := _choices(spec)) is not None:
        return gym.spaces.MultiDiscrete(sizes) if sizes.shape else gym.spaces.Discrete(int(sizes))
    if isinstance(spec, Bounded):
        return _box(spec, _numpy_dtype(spec.dtype))
    if isinstance(spec, Unbounded):
        dtype = _numpy_dtype(spec.dtype)
        return gym.spaces.Box(*_all_numbers(dtype), tuple(spec.shape), dtype)
    raise ConfigError(f"actions of the spec {type(spec).__name__} have no gymnasium space")


def unbounded(spec: TensorSpec) -> TensorSpec:
    """Return the spec of any tensors of the same shapes and dtypes."""
    if isinstance(spec, Composite):
        return Composite({key: unbounded(part) for key, part in spec.items()})
    return Unbounded(shape=spec.shape, device=spec.device, dtype=spec.dtype)


def _choices(spec: TensorSpec) -> Any:
    """Return how many values each part of a discrete action has; a scalar for a single one, None for other actions."""
    if isinstance(spec, MultiOneHot):
        return np.asarray(spec.nvec)
    if isinstance(spec, MultiCategorical):
        return np.asarray(spec.nvec.cpu()).reshape(tuple(spec.shape))
    if isinstance(spec, OneHot):
        return np.asarray(int(spec.n))
    if isinstance(spec, Categorical):
        return np.full(() if spec.shape.numel() == 1 else tuple(spec.shape), int(spec.n))
    return None


def action_writer(spec: TensorSpec) -> Callable[[Any], Any]:
    """Return the function that turns an action of the space into what the environment steps by."""
    if isinstance(spec, Composite):
        writers = {key: action_writer(part) for key, part in spec.items()}
        return lambda action: {key: write(action[key]) for key, write in writers.items()}
    shape, dtype, device = spec.shape, spec.dtype, spec.device
    if isinstance(spec, MultiOneHot):
        sizes = list(spec.nvec)

        def write_parts(action: Any) -> torch.Tensor:
            parts = [_one_hot(int(index), size) for index, size in zip(np.ravel(action), sizes, strict=True)]
            return torch.cat(parts).to(dtype).reshape(shape).to(device)

        return write_parts
    if isinstance(spec, OneHot):
        return lambda action: _one_hot(int(action), int(spec.n)).to(dtype).reshape(shape).to(device)
    return lambda action: torch.as_tensor(np.asarray(action), dtype=dtype).reshape(shape).to(device)


def _one_hot(index: int, size: int) -> torch.Tensor:
    vector = torch.zeros(size, dtype=torch.int64)
    vector[index] = 1
    return vector


def _box(spec: Any, dtype: Any) -> gym.spaces.Box:
    low, high = (
        np.broadcast_to(bound.cpu().numpy(), tuple(spec.shape)).astype(dtype)
        for bound in (spec.space.low, spec.space.high)
    )
    return gym.spaces.Box(low, high, tuple(spec.shape), dtype)


def _all_numbers(dtype: Any) -> tuple[Any, Any]:
    if dtype == np.bool_:
        return 0, 1
    if np.issubdtype(dtype, np.integer):
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return -np.inf, np.inf


def _numpy_dtype(dtype: torch.dtype) -> Any:
    if dtype is torch.bfloat16:
        raise ConfigError("an environment's spec is bfloat16, which numpy has not: give it a DTypeCastTransform")
    return torch.empty((), dtype=dtype).numpy().dtype.type

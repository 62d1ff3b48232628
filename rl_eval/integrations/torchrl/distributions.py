"""Actions from a distribution: its mode, or a draw from the episode's own stream.

TorchRL asks a process-global switch which of them it is, and draws from torch's global generator. Neither is touched
here: both belong to the trainer, whose collectors may run in another thread of this process.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import distributions as dist_lib

from rl_eval.errors import ConfigError
from rl_eval.protocols import NoiseSource

__all__ = ["MODES", "choose", "draw"]

MODES: Final = ("deterministic", "mode", "mean", "median")
"""What can be taken of a distribution without chance, by the names of tensordict's ``InteractionType``."""

_ONE_HOT: Final = frozenset({"OneHotCategorical", "MaskedOneHotCategorical", "OneHotOrdinal"})


def choose(distribution: Any, mode: str) -> Any:
    """Take a value of a distribution without chance.

    Args:
        distribution: Batch of distributions, batch shape (batch, ...).
        mode: One of :data:`MODES`. ``deterministic`` is what TorchRL takes under ``ExplorationType.DETERMINISTIC``: the
            distribution's own ``deterministic_sample``, or else its mode if it is discrete and its mean if it is not.

    Returns:
        A tensor, or nested dicts of tensors for a composite distribution.

    Raises:
        ConfigError: The distribution has no such value.
    """
    if (parts := _parts(distribution)) is not None:
        return {name: choose(part, mode) for name, part in parts.items()}
    if mode == "deterministic" and hasattr(type(distribution), "deterministic_sample"):
        return distribution.deterministic_sample
    attribute = _natural(distribution) if mode == "deterministic" else mode
    try:
        value = getattr(distribution, attribute)
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"the policy's distribution {type(distribution).__name__} has no {attribute}, so no {mode} action: "
            "give it a deterministic_sample property, or set policy.deterministic to False"
        ) from error
    return value


def draw(distribution: Any, noise: NoiseSource) -> Any:
    """Sample a distribution with the episodes' own noise, one row per lane.

    Args:
        distribution: Batch of distributions, batch shape (batch, ...).
        noise: Numbers of each lane's step.

    Raises:
        ConfigError: It is of a kind whose sampling only torch's global generator could do.
    """
    if (parts := _parts(distribution)) is not None:
        return {name: draw(part, noise) for name, part in parts.items()}
    if isinstance(distribution, (dist_lib.Categorical, dist_lib.OneHotCategorical)):
        return _categorical(distribution, noise)
    if isinstance(distribution, dist_lib.Independent):
        return draw(distribution.base_dist, noise)
    if isinstance(distribution, dist_lib.TransformedDistribution):
        value = draw(distribution.base_dist, noise)
        for transform in distribution.transforms:
            value = transform(value)
        return value
    return _numbers(distribution, noise)


def _parts(distribution: Any) -> dict[str, Any] | None:
    """Return the parts of a composite distribution by key."""
    parts = getattr(distribution, "dists", None)
    return parts if isinstance(parts, dict) else None


def _natural(distribution: Any) -> str:
    """Say which statistic stands for a distribution that does not say it itself, as tensordict has it."""
    while isinstance(distribution, dist_lib.Independent):
        distribution = distribution.base_dist
    if getattr(distribution, "has_enumerate_support", False):
        return "mode"
    return "mean"


def _uniform(like: torch.Tensor, noise: NoiseSource) -> torch.Tensor:
    return torch.from_numpy(noise.uniform(like[0].numel()).reshape(like.shape)).to(like)


def _numbers(distribution: Any, noise: NoiseSource) -> torch.Tensor:
    """Sample independent numbers."""
    if isinstance(distribution, dist_lib.Normal):
        loc = distribution.loc
        normal = noise.normal(loc[0].numel()).reshape(loc.shape)
        return loc + distribution.scale * torch.from_numpy(normal).to(loc)
    if isinstance(distribution, dist_lib.Bernoulli):
        return (_uniform(distribution.probs, noise) < distribution.probs).to(distribution.probs.dtype)
    if _names(distribution) & {"Delta", "TanhDelta"}:
        certain: torch.Tensor = choose(distribution, "deterministic")
        return certain
    return _by_quantile(distribution, noise)


def _names(distribution: Any) -> set[str]:
    return {base.__name__ for base in type(distribution).__mro__}


def _categorical(distribution: Any, noise: NoiseSource) -> torch.Tensor:
    """Sample by inverse CDF in float64; one-hot if the distribution is."""
    if getattr(distribution, "_sparse_mask", False):
        raise ConfigError(
            "the policy's MaskedCategorical has a sparse mask, whose samples rl_eval does not draw: give it a dense "
            "mask, or set policy.deterministic to True"
        )
    logits = distribution.logits.detach().cpu().to(torch.float64)
    count = int(logits.shape[-1])
    cdf = torch.exp(logits - logits.amax(-1, keepdim=True)).numpy().cumsum(-1)
    uniform = noise.uniform(int(np.prod(cdf.shape[1:-1], dtype=int))).reshape(*cdf.shape[:-1], 1)
    index = torch.from_numpy(np.minimum((cdf < uniform * cdf[..., -1:]).sum(-1), count - 1))
    if isinstance(distribution, dist_lib.OneHotCategorical) or _names(distribution) & _ONE_HOT:
        return torch.nn.functional.one_hot(index, count)
    return index


def _by_quantile(distribution: Any, noise: NoiseSource) -> torch.Tensor:
    like = torch.empty(distribution.batch_shape + distribution.event_shape)
    try:
        value: torch.Tensor = distribution.icdf(_uniform(like, noise))
    except (NotImplementedError, AttributeError) as error:
        raise ConfigError(
            f"policy.deterministic is False, but the policy's distribution {type(distribution).__name__} can only be "
            "sampled with torch's global generator, which belongs to the training: give it an icdf method, or set "
            "policy.deterministic to True"
        ) from error
    return value

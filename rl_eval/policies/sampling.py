"""Actions from logits: the most likely one, or a draw from an episode's own noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval.errors import PolicyError
from rl_eval.protocols import NoiseSource

__all__ = ["bernoulli", "categorical", "gaussian"]

Array = npt.NDArray[Any]


def categorical(logits: Array, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> npt.NDArray[np.int64]:
    """Index per row: the first greatest logit, or where the CDF passes a uniform number."""
    if noise is None:
        return np.asarray(logits.argmax(1), np.int64)
    wide = logits.astype(np.float64)
    top = wide.max(1, keepdims=True)
    if not np.isfinite(top[live]).all():
        raise PolicyError(f"the module's logits are no distribution: {logits[live][~np.isfinite(top[live, 0])][0]}")
    with np.errstate(invalid="ignore"):
        weights = np.exp(wide - top)
    cdf = weights.cumsum(1)
    passed = (cdf < noise.uniform(1) * cdf[:, -1:]).sum(1)
    return np.asarray(np.minimum(passed, logits.shape[1] - 1), np.int64)


def bernoulli(logits: Array, noise: NoiseSource | None) -> npt.NDArray[np.int8]:
    """0 or 1 per logit: whether it is positive, or whether a uniform number is below its sigmoid."""
    if noise is None:
        return (logits > 0).astype(np.int8)
    with np.errstate(over="ignore"):
        probability = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    return (noise.uniform(logits.shape[1]) < probability).astype(np.int8)


def gaussian(mean: Array, std: Array, noise: NoiseSource) -> npt.NDArray[np.float64]:
    """Draw of a diagonal Gaussian per row, in float64, with the shape of ``mean``."""
    draws = noise.normal(mean.size // len(mean)).reshape(mean.shape)
    return np.asarray(mean.astype(np.float64) + std.astype(np.float64) * draws, np.float64)

"""Actions from logits: the most likely one, or a draw from the episode's own noise."""

from __future__ import annotations

import math
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import PolicyError
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]
_NAN: Final = "Check the weights, which may have NaN values: training may have diverged."


def categorical(logits: Array, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> npt.NDArray[np.int64]:
    """Return an index per row, shape (batch,).

    Without noise, it is the first index of the highest logit. With noise, it is the first index at which the CDF
    reaches a uniform number.

    Raises:
        PolicyError: With noise, the highest logit of a live row is not finite.
    """
    if noise is None:
        return np.asarray(logits.argmax(1), np.int64)
    wide = logits.astype(np.float64)
    top = wide.max(1, keepdims=True)
    if not np.isfinite(top[live]).all():
        wrong = logits[live][~np.isfinite(top[live, 0])][0]
        raise PolicyError(f"the module's logits are not a distribution: {wrong}", key="logits", value=str(wrong))
    with np.errstate(invalid="ignore"):
        weights = np.exp(wide - top)
    cdf = weights.cumsum(1)
    passed = (cdf < noise.uniform(1) * cdf[:, -1:]).sum(1)
    return np.asarray(np.minimum(passed, logits.shape[1] - 1), np.int64)


def refuse_nan(numbers: Array, live: npt.NDArray[np.bool_], what: str) -> None:
    """Raise :class:`PolicyError` if the output of a policy is NaN in a live row."""
    absent = np.isnan(numbers)
    if absent.any() and absent[live].any():
        row = int(np.flatnonzero(live & absent.reshape(len(numbers), -1).any(1))[0])
        raise PolicyError(f"{what} is NaN: {numbers[row]}", key="output", value=str(numbers[row]), fix=_NAN)


def bernoulli(logits: Array, noise: NoiseSource | None) -> npt.NDArray[np.int8]:
    """Return 0 or 1 per logit.

    Without noise, it is 1 if the logit is positive. With noise, it is 1 if a uniform number is below the sigmoid of the
    logit.
    """
    if noise is None:
        return (logits > 0).astype(np.int8)
    with np.errstate(over="ignore"):
        probability = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    return (noise.uniform(logits.shape[1]) < probability).astype(np.int8)


def gaussian(mean: Array, std: Array, noise: NoiseSource) -> npt.NDArray[np.float64]:
    """Draw from one diagonal Gaussian per row; return float64 values in the shape of ``mean``."""
    draws = noise.normal(mean.size // len(mean)).reshape(mean.shape)
    return np.asarray(mean.astype(np.float64) + std.astype(np.float64) * draws, np.float64)


def log_probability(
    space: gym.Space[Any], output: Array, log_std: Array | None, actions: Array
) -> npt.NDArray[np.float64]:
    """Return the logarithm of the probability of each action, or of its density, shape (batch,).

    Args:
        space: Discrete, MultiDiscrete, MultiBinary or Box.
        output: Logits, or the means of a diagonal Gaussian, shape (batch, ...).
        log_std: Logarithms of the Gaussian's standard deviations, shape (batch, ...); None for logits.
        actions: Drawn actions, shape (batch, ...).
    """
    batch = len(actions)
    if isinstance(space, gym.spaces.Discrete):
        return _log_categorical(output, actions - int(space.start))
    if isinstance(space, gym.spaces.MultiDiscrete):
        chosen = (actions - space.start).reshape(batch, -1)
        parts = np.split(output, np.cumsum(space.nvec.ravel())[:-1], axis=1)
        each = [_log_categorical(part, column) for part, column in zip(parts, chosen.T, strict=True)]
        return np.asarray(np.sum(each, axis=0), np.float64)
    if isinstance(space, gym.spaces.MultiBinary):
        signed = np.where(actions.reshape(batch, -1) > 0, 1.0, -1.0) * output.reshape(batch, -1).astype(np.float64)
        return np.asarray(-np.logaddexp(0.0, -signed).sum(1), np.float64)
    assert log_std is not None
    means, widths = (values.reshape(batch, -1).astype(np.float64) for values in (output, log_std))
    distances = (actions.reshape(batch, -1) - means) * np.exp(-widths)
    return np.asarray(-(0.5 * distances**2 + widths + 0.5 * math.log(2 * math.pi)).sum(1), np.float64)


def _log_categorical(logits: Array, chosen: Array) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = wide - wide.max(1, keepdims=True)
        normalized = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return np.asarray(normalized[np.arange(len(wide)), chosen.astype(np.intp)], np.float64)

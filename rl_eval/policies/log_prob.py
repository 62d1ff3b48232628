"""Log-probabilities of given actions under the distributions that modules return, in float64."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, UsageError

__all__ = ["action_log_prob"]

Array = npt.NDArray[Any]


def action_log_prob(
    space: gym.Space[Any], output: Array, log_std: Array | None, actions: Array, *, deterministic: bool
) -> npt.NDArray[np.float64]:
    r"""Return the log-probability of each action, summed over its dimensions, shape (batch,).

    Args:
        space: The action space, one that a module's output is read by.
        output: Logits, or for a Box the means, shape (batch, ...).
        log_std: Logarithms of a Gaussian's standard deviations, shape of ``output``; None without one.
        actions: The actions, shape (batch, \\*space.shape).
        deterministic: Whether the policy takes the mode: its actions have log-probability 0, all others -inf.

    Raises:
        UsageError: The actions are not of the space.
        ConfigError: The policy has no density.
    """
    batch = len(output)
    if actions.shape != (batch, *(space.shape or ())):
        raise UsageError(
            f"actions of shape {actions.shape} are not {batch} actions of {space}: give them as the environment takes "
            "them, not one-hot"
        )
    if isinstance(space, gym.spaces.Box):
        return _gaussian(output.reshape(batch, -1), log_std, actions.reshape(batch, -1), deterministic)
    if isinstance(space, gym.spaces.MultiBinary):
        logits, chosen = output.reshape(batch, -1), actions.reshape(batch, -1)
        parts = [np.stack([np.zeros(batch), column], axis=1) for column in logits.T.astype(np.float64)]
    elif isinstance(space, gym.spaces.MultiDiscrete):
        parts = np.split(output, np.cumsum(space.nvec.ravel())[:-1], axis=1)
        chosen = (actions - space.start).reshape(batch, -1)
    else:
        assert isinstance(space, gym.spaces.Discrete)
        parts, chosen = [output], (actions - space.start).reshape(batch, 1)
    of_parts = [_categorical(part, column, deterministic) for part, column in zip(parts, chosen.T, strict=True)]
    return np.asarray(np.sum(of_parts, axis=0), np.float64)


def _categorical(logits: Array, chosen: Array, deterministic: bool) -> npt.NDArray[np.float64]:
    outside = (chosen < 0) | (chosen >= logits.shape[1])
    if outside.any():
        raise UsageError(
            f"action {chosen[outside][0]} (from 0) is none of the policy's {logits.shape[1]}: it is for another "
            "action space"
        )
    if deterministic:
        return np.where(logits.argmax(1) == chosen, 0.0, -np.inf)
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    log_probs: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return log_probs[np.arange(len(chosen)), chosen.astype(np.int64)]


def _gaussian(mean: Array, log_std: Array | None, actions: Array, deterministic: bool) -> npt.NDArray[np.float64]:
    if deterministic or log_std is None:
        raise ConfigError(
            "the policy takes one action per observation in a continuous space, so no other action has a probability: "
            "set policy.deterministic to False, and return (mean, log_std)"
        )
    log_std = log_std.reshape(mean.shape).astype(np.float64)
    scaled = (actions.astype(np.float64) - mean) / np.exp(log_std)
    return np.asarray((-0.5 * scaled**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(1), np.float64)

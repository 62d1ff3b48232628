"""Normalization of observations by the statistics of a ``VecNormalize``, which are buffers of the policy.

They travel with the weights and never change during an evaluation. Rewards are never normalized.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from rl_eval.errors import ConfigError, WeightsError

__all__ = ["ATTRIBUTE", "LACKS_STATISTICS", "NOTES", "Normalizer", "normalizers_of", "refuse_empty"]

LACKS_STATISTICS: Final = (
    "was trained with a VecNormalize, without whose statistics its policy acts on other numbers than in training"
)

ATTRIBUTE: Final = "vecnormalize"
"""Name of the policy's submodule that holds its normalizers."""

NOTES: Final = "result_notes"
"""Name of the policy's attribute that holds sentences for the reader of a result."""


@final
class Normalizer(nn.Module):
    """The statistics of one observation, or of one key of a Dict observation, all float64 buffers.

    Args:
        key: Key of the Dict observation; None for any other.
        statistics: What was observed in training.
        clip: Greatest absolute value of a normalized number.
        epsilon: Added to the variance.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor
    clip: torch.Tensor
    epsilon: torch.Tensor

    def __init__(self, key: str | None, statistics: RunningMeanStd, clip: float, epsilon: float) -> None:
        super().__init__()
        self.key = key
        values = {"mean": statistics.mean, "var": statistics.var, "count": statistics.count}
        for name, value in {**values, "clip": clip, "epsilon": epsilon}.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    @property
    def empty(self) -> bool:
        """Whether nothing has been observed: a fresh one counts less than one observation."""
        return bool(self.count < 1)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        r"""Normalize in float64, as ``VecNormalize`` does.

        Args:
            observations: Numbers of any dtype, shape (batch, \*shape).

        Returns:
            float32, of the same shape.
        """
        scaled = (observations.double() - self.mean) / torch.sqrt(self.var + self.epsilon)
        return scaled.clamp(-self.clip, self.clip).float()


def normalizers_of(wrapper: VecNormalize | None) -> nn.ModuleList:
    """Copy the observation statistics of a ``VecNormalize``; empty without one, or if it normalizes rewards only.

    Raises:
        ConfigError: It normalizes what was normalized already.
    """
    if wrapper is None or not wrapper.norm_obs:
        return nn.ModuleList()
    inner: Any = getattr(wrapper, "venv", None)
    while inner is not None:
        if isinstance(inner, VecNormalize) and inner.norm_obs:
            raise ConfigError("the training environment has two VecNormalize, one around the other: rl_eval takes one")
        inner = getattr(inner, "venv", None)
    statistics = wrapper.obs_rms if isinstance(wrapper.obs_rms, dict) else {None: wrapper.obs_rms}
    return nn.ModuleList(
        Normalizer(key, observed, wrapper.clip_obs, wrapper.epsilon) for key, observed in statistics.items()
    )


def refuse_empty(normalizers: nn.ModuleList, error: type[ConfigError | WeightsError]) -> None:
    """Raise if statistics have not seen a single observation: the policy would act on other numbers than in training.

    Raises:
        ConfigError: As asked for.
        WeightsError: As asked for.
    """
    for normalizer in normalizers:
        if normalizer.empty:
            where = "" if normalizer.key is None else f" of {normalizer.key!r}"
            raise error(
                f"the VecNormalize statistics{where} are uninitialized: they have not seen an observation. Train a few "
                "steps first, or load those that belong to the policy"
            )

"""Policy objects with frozen statistics, which are sent, saved and hashed with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch

from rl_eval.adapters import integration_for
from rl_eval.policies.normalization import ARRAYS, Statistics, by_path
from rl_eval.weights import module_of


@final
class Normalized(torch.nn.Module):
    """Policy that gets normalized observations. Pass it wherever rl_eval accepts a policy.

    A number x becomes ``(x * factor - mean) / sqrt(var + epsilon)``, computed in the dtype of ``mean``. The arguments
    after ``policy`` are those that :func:`frozen` returns for a normalizer of a training. Weights of this module are
    the statistics, and the weights of the policy with the prefix ``weights.``.

    Args:
        policy: A policy as for :func:`rl_eval.evaluate`, or the ``"module:factory"`` of a policy. A model of a library,
            such as an algorithm of Tianshou, is copied.
        mean: Means, as an array with the shape of the observation. For an observation with several parts, a mapping
            from the paths of normalized parts to arrays. A path has keys and positions, such as ``"camera/left"``.
        var: Variances, in the same form.
        clip: Maximum absolute value of a normalized number; None for no limit.
        epsilon: Small number that is added to the variance.
        inside: Whether ``epsilon`` is added to the variance; otherwise, it is added to the standard deviation.
        factor: Factors of observations, in the form of ``mean``; None for 1.
        count: Number of observations in the statistics, in the form of ``mean``; None if it is unknown. It is not used.
        dtype: Dtype of normalized numbers.
    """

    def __init__(
        self,
        policy: Any,
        mean: Any,
        var: Any,
        clip: float | None = None,
        epsilon: float = 1e-8,
        inside: bool = True,
        *,
        factor: Any = None,
        count: Any = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        if (detached := integration_for(policy, "portable")) is not None:
            policy = detached(policy)
        object.__setattr__(self, "policy", policy)  # A plain attribute would register its weights a second time.
        self.policy: Any
        self.weights = module_of(policy)
        self._given = by_path(
            mean=mean, var=var, factor=factor, count=count, clip=clip, epsilon=epsilon, inside=inside, dtype=dtype
        )
        for name, tensor in tensors_of(self._given).items():
            self.register_buffer(name, tensor)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Current statistics by path."""
        arrays: dict[str, Any] = {name: buffer.numpy(force=True) for name, buffer in self.named_buffers(recurse=False)}
        return {
            path: replace(one, **{part: arrays[name] for part in ARRAYS if (name := _name(path, part)) in arrays})
            for path, one in self._given.items()
        }


def tensors_of(statistics: Mapping[str, Statistics]) -> dict[str, torch.Tensor]:
    """Return the arrays of statistics as tensors, with their keys in the state dict of a :class:`Normalized`."""
    return {
        _name(path, part): torch.as_tensor(array)
        for path, one in statistics.items()
        for part in ARRAYS
        if (array := getattr(one, part)) is not None
    }


def _name(path: str, part: str) -> str:
    """Return the name of the buffer for one array of a Box. Torch forbids dots in such a name."""
    return f"{path}/{part}".replace(".", "_")

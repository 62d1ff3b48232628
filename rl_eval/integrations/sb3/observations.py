"""Conversion of an environment's observations into the form that the policy saw in training.

A model is trained on a vector environment with wrappers, but lanes run environments without these wrappers. This module
recognizes the wrappers by the observation spaces of the environment and the policy, and by the shape of the statistics:

====================  ===========================================  ==================================================
wrapper               recognized by                                preprocessing
====================  ===========================================  ==================================================
``VecTransposeImage`` an image (H, W, C), but the policy takes     transpose
                      (C, H, W)
``VecFrameStack``     first or last axis is an exact multiple      stack the episode's last frames, zeros before its
                                                                   first
``VecNormalize``      statistics of the frame's or stack's shape   normalize before or after stacking
====================  ===========================================  ==================================================

The statistics of a ``VecNormalize`` are buffers of the policy. They are sent with the weights and never change during
an evaluation. Rewards are never normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn
from typing_extensions import override

from rl_eval.errors import ConfigError, WeightsError

LACKS_STATISTICS: Final = (
    "was trained with a VecNormalize, but has no statistics. Its policy would get other numbers than in training"
)

ATTRIBUTE: Final = "vecnormalize"
"""Name of the policy's submodule with its normalizers."""

NOTES: Final = "result_notes"
"""Name of the policy's attribute with notes for readers of a result."""


@final
class Normalizer(nn.Module):
    """Module that normalizes an observation, or one key of a Dict observation. The statistics are float64 buffers.

    Args:
        key: Key of the Dict observation; None for any other observation.
        statistics: Statistics of the training's observations.
        clip: Maximum absolute value of a normalized number.
        epsilon: Number that is added to the variance.
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
        """Whether the statistics have not seen any observation. A new ``RunningMeanStd`` has a count below one."""
        return bool(self.count < 1)

    @override
    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        r"""Normalize in float64, as ``VecNormalize`` does.

        Args:
            observations: Numbers of any dtype, shape (batch, \*shape).

        Returns:
            Normalized numbers as float32, of the same shape.
        """
        scaled = (observations.double() - self.mean) / torch.sqrt(self.var + self.epsilon)
        return scaled.clamp(-self.clip, self.clip).float()


def normalizers_of(wrapper: VecNormalize | None) -> nn.ModuleList:
    """Return copies of the observation statistics of a ``VecNormalize``, or of a ``VecNormalize`` inside it.

    Return an empty list if no ``VecNormalize`` normalizes observations.

    Raises:
        ConfigError: The ``VecNormalize`` wraps a second ``VecNormalize`` that also normalizes observations.
    """
    found, inner = list[VecNormalize](), wrapper
    while inner is not None:
        found += [inner] if isinstance(inner, VecNormalize) and inner.norm_obs else []
        inner = getattr(inner, "venv", None)
    if len(found) > 1:
        problem = "the training environment has a VecNormalize inside a VecNormalize"
        raise ConfigError(problem, key="policy", fix="Remove one.")
    return nn.ModuleList(
        Normalizer(key, observed, one.clip_obs, one.epsilon)
        for one in found
        for key, observed in (one.obs_rms if isinstance(one.obs_rms, dict) else {None: one.obs_rms}).items()
    )


def refuse_empty(normalizers: nn.ModuleList, error: type[ConfigError | WeightsError]) -> None:
    """Raise an error if a normalizer has not seen any observation.

    Without statistics, the policy would get other numbers than in training.

    Raises:
        ConfigError: Statistics are uninitialized, and ``error`` is ConfigError.
        WeightsError: Statistics are uninitialized, and ``error`` is WeightsError.
    """
    for normalizer in normalizers:
        if normalizer.empty:
            where = "" if normalizer.key is None else f" of {normalizer.key!r}"
            problem = f"the VecNormalize statistics{where} are uninitialized: they have not seen an observation"
            fix = "Train a few steps first, or load the statistics of the policy."
            raise error(problem, key=ATTRIBUTE, value=normalizer.key, fix=fix)


# ---------------------------------------------------------------------- observations


Array = npt.NDArray[Any]
State = dict[str, torch.Tensor]

_BY_KEY: Final = gym.spaces.Dict
_WHOLE: Final = ""
"""Key of an observation that is not a Dict."""


@dataclass(frozen=True)
class _Recipe:
    """Preprocessing of an observation, or of one key of a Dict observation."""

    transposed: bool = False
    axis: int | None = None
    """Axis of a batch for stacking frames, in the environment's axis order; None without stacking."""
    stacked_shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    """Dtype of the stack."""
    before: nn.Module | None = None
    """Normalizer of frames before stacking; None if frames are not normalized."""
    after: nn.Module | None = None
    """Normalizer of stacks; None if stacks are not normalized."""

    def __call__(self, frame: torch.Tensor, former: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the observations for the policy, and the stack for the next step.

        ``former`` is the stack of the last step; None without stacking.
        """
        if self.before is not None:
            frame = self.before(frame)
        stack = None
        if self.axis is not None:
            assert former is not None
            width = frame.shape[self.axis]
            kept = former.narrow(self.axis, width, former.shape[self.axis] - width)
            frame = stack = torch.cat((kept, frame.to(self.dtype)), self.axis)
        if self.transposed:
            frame = _channels_first(frame)
        return (frame if self.after is None else self.after(frame)), stack


@final
class Preprocessor:
    """Preprocessing of a batch of observations, equal to that of the training environment's wrappers.

    Args:
        given: Observation space of the environment.
        due: Observation space of the policy.
        normalizers: Statistics of the normalized keys, one normalizer per key.

    Raises:
        ConfigError: No combination of wrappers converts the environment's space to the policy's space.
    """

    def __init__(self, given: gym.Space[Any], due: gym.Space[Any], normalizers: nn.ModuleList) -> None:
        self._by_key = isinstance(due, _BY_KEY)
        givens, dues = _parts(given), _parts(due)
        if givens.keys() != dues.keys():
            raise _unexplained(given, due, "their keys differ")
        by_key: dict[str, Any] = {getattr(each, "key", None) or _WHOLE: each for each in normalizers}
        if unknown := by_key.keys() - dues.keys():
            raise _unexplained(given, due, f"the VecNormalize has statistics of the keys {sorted(map(str, unknown))}")
        try:
            self._recipes = {key: _recipe(givens[key], dues[key], by_key.get(key)) for key in dues}
        except _Mismatch as reason:
            raise _unexplained(given, due, str(reason)) from None

    def initial_state(self, batch_size: int, device: torch.device) -> State | None:
        """Return the stacks of new episodes, which are zero; None without stacking."""
        state = {
            key: torch.zeros((batch_size, *recipe.stacked_shape), dtype=recipe.dtype, device=device)
            for key, recipe in self._recipes.items()
            if recipe.axis is not None
        }
        return state or None

    def __call__(self, observations: Any, state: State | None, device: torch.device) -> tuple[Any, State | None]:
        r"""Convert a batch of the environment's observations.

        Args:
            observations: Array of shape (batch, \*shape), or one array per key.
            state: Stacks from :meth:`initial_state` or the last call.
            device: Device of the policy.

        Returns:
            The observations for the policy, and the stacks for the next call; None without stacking.
        """
        arrays: Mapping[str, Array] = observations if self._by_key else {_WHOLE: observations}
        prepared, following = {}, {}
        for key, recipe in self._recipes.items():
            former = None if state is None else state.get(key)
            prepared[key], stack = recipe(torch.from_numpy(arrays[key]).to(device), former)
            if stack is not None:
                following[key] = stack
        return (prepared if self._by_key else prepared[_WHOLE]), following or None


class _Mismatch(Exception):
    """A part of the environment's space cannot be converted to the policy's space."""


def _parts(space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    return dict(space.spaces) if isinstance(space, _BY_KEY) else {_WHOLE: space}


def _recipe(given: gym.Space[Any], due: gym.Space[Any], normalizer: Any) -> _Recipe:
    if not isinstance(given, gym.spaces.Box) or not isinstance(due, gym.spaces.Box):
        if given != due:
            raise _Mismatch(f"{given} differs from {due}")
        return _Recipe()
    transposed, axis = _layout(given, due)
    if normalizer is None and given.dtype.kind != due.dtype.kind:
        raise _Mismatch(f"the dtype {given.dtype} differs from {due.dtype}")
    stacked_shape = _untransposed(due.shape) if transposed else due.shape
    statistics = None if normalizer is None else tuple(normalizer.mean.shape)
    if statistics not in {None, due.shape, given.shape}:
        raise _Mismatch(f"the VecNormalize statistics have shape {statistics}")
    before = normalizer if statistics != due.shape else None
    dtype = torch.from_numpy(np.empty(0, given.dtype)).dtype  # VecFrameStack cuts off decimals of normalized integers.
    return _Recipe(transposed, axis, stacked_shape, dtype, before, normalizer if before is None else None)


def _layout(given: gym.spaces.Box, due: gym.spaces.Box) -> tuple[bool, int | None]:
    """Return whether to transpose images, and the axis of a batch on which to stack frames.

    The axis is None if no stacking is needed. The result has the fewest operations that convert the shapes.
    """
    goals = {False: due.shape}
    if is_image_space(given) and len(due.shape) == 3:
        goals[True] = _untransposed(due.shape)
    for transposed, goal in goals.items():
        if given.shape == goal:
            return transposed, None
    for transposed, goal in goals.items():
        if (axis := _stacking_axis(given.shape, goal)) is not None:
            return transposed, axis + 1
    raise _Mismatch(f"stacking frames and transposing images do not convert shape {given.shape} to {due.shape}")


def _stacking_axis(shape: tuple[int, ...], stacked: tuple[int, ...]) -> int | None:
    """Return the axis, first or last, on which stacking converts ``shape`` to ``stacked``; None if there is none.

    Only the size of this axis differs, and its size in ``stacked`` is a multiple.
    """
    if len(shape) != len(stacked):
        return None
    longer = [axis for axis, (one, many) in enumerate(zip(shape, stacked, strict=True)) if one != many]
    if len(longer) != 1 or longer[0] not in {0, len(shape) - 1} or stacked[longer[0]] % shape[longer[0]]:
        return None
    return longer[0]


def _channels_first(images: torch.Tensor) -> torch.Tensor:
    """Transpose images to the same strides as in SB3, because torch chooses the convolution kernel by the strides."""
    batch, height, width, channels = images.shape
    return images.reshape(batch, 1, height, width) if channels == 1 else images.permute(0, 3, 1, 2)


def _untransposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    channels, height, width = shape
    return height, width, channels


def _unexplained(given: gym.Space[Any], due: gym.Space[Any], reason: str) -> ConfigError:
    return ConfigError(
        f"the policy was trained on observations of {due}, but the environment has {given}: {reason}",
        key="environment.env",
        value=given,
        fix="In environment.env, use the wrappers of the training, except VecFrameStack, VecTransposeImage and "
        "VecNormalize.",
    )

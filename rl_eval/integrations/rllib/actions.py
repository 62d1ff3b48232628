"""Actions from an RLModule's output: the mode of its distribution, or a sample drawn from each episode's noise.

RLlib's own distribution objects say what the numbers mean; they never draw, since they would draw from torch's global
generator. Afterwards Box actions are unsquashed or clipped by RLlib's own functions, applied to the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch import torch_distribution as distributions
from ray.rllib.utils.spaces.space_utils import clip_action, get_base_struct_from_space, unsquash_action

from rl_eval.errors import ConfigError, PolicyError
from rl_eval.policies.sampling import categorical, gaussian, refuse_nan
from rl_eval.protocols import NoiseSource

__all__ = ["Actions", "read_actions"]

_PLUMBING: Final = frozenset(
    {
        "GetActions",
        "ListifyDataForVectorEnv",
        "ModuleToAgentUnmapping",
        "RemoveSingleTsTimeRankFromBatch",
        "TensorToNumpy",
        "UnBatchToIndividualItems",
    }
)

Array = npt.NDArray[Any]
Live = npt.NDArray[np.bool_]


class Actions:
    """The pieces of one module-to-env pipeline.

    Args:
        pieces: Connector pieces in their order.
        action_space: Space of the environment.

    Raises:
        ConfigError: A piece cannot be applied to a batch; the message names it.
    """

    def __init__(self, pieces: Sequence[Any], action_space: gym.Space[Any]) -> None:
        self._structure = get_base_struct_from_space(action_space)
        self._unsquash = self._clip = False
        for piece in pieces:
            name = type(piece).__name__
            if not type(piece).__module__.startswith("ray.rllib."):
                raise ConfigError(
                    f"the connector piece {name} of the module-to-env pipeline is not RLlib's own, and cannot be "
                    "applied to a batch of actions: put it into the environment as an action wrapper"
                )
            if name == "NormalizeAndClipActions":
                self._unsquash, self._clip = piece.normalize_actions, piece.clip_actions
            elif name not in _PLUMBING:
                raise ConfigError(
                    f"the connector piece {name} of the module-to-env pipeline cannot be applied to a batch of actions"
                )

    def for_env(self, actions: Any) -> Any:
        """Map actions of the module onto those of the environment, as ``normalize_actions``/``clip_actions`` say."""
        if self._unsquash:
            return unsquash_action(actions, self._structure)
        return clip_action(actions, self._structure) if self._clip else actions


def read_actions(module: Any, outputs: Mapping[str, Any], live: Live, noise: NoiseSource | None) -> Any:
    """Choose a batch of actions by what the module put out.

    Args:
        module: The RLModule; it knows the class of its action distribution.
        outputs: What its forward pass returned, without a time dimension.
        live: Mask of the rows that count, shape (batch,).
        noise: Randomness of each row; None takes the mode.

    Raises:
        ConfigError: It samples by itself, or from a distribution that rl_eval cannot draw from.
        PolicyError: Its output is NaN.
    """
    if Columns.ACTIONS in outputs:
        if noise is not None:
            raise ConfigError(
                f"policy.deterministic is False, but {type(module).__name__} returns actions that it has drawn itself, "
                "from a generator that is not the episode's: set policy.deterministic to True (in RLlib, explore=False)"
            )
        return tree.map_structure(_numpy, outputs[Columns.ACTIONS])
    if Columns.ACTION_DIST_INPUTS not in outputs:
        raise PolicyError(f"{type(module).__name__} returned neither actions nor action_dist_inputs: {list(outputs)}")
    logits = outputs[Columns.ACTION_DIST_INPUTS]
    refuse_nan(_numpy(logits), live, "a number of the RLModule's action_dist_inputs")
    if noise is None:
        mode = module.get_inference_action_dist_cls().from_logits(logits).to_deterministic()
        return tree.map_structure(_numpy, mode.sample())
    return _sample(module.get_exploration_action_dist_cls().from_logits(logits), live, noise)


def _sample(distribution: Any, live: Live, noise: NoiseSource) -> Any:
    draw = _DRAWS.get(type(distribution))
    if draw is None:
        raise ConfigError(
            f"policy.deterministic is False, but rl_eval cannot draw from {type(distribution).__name__} reproducibly: "
            "set policy.deterministic to True (in RLlib, explore=False)"
        )
    return draw(distribution, live, noise)


def _draw_categorical(distribution: Any, live: Live, noise: NoiseSource) -> Array:
    logits = distribution.logits if distribution.logits is not None else distribution.probs.log()
    return categorical(_numpy(logits), live, noise)


def _draw_multi_categorical(distribution: Any, live: Live, noise: NoiseSource) -> Array:
    return np.stack([_draw_categorical(part, live, noise) for part in distribution._cats], axis=1)


def _draw_gaussian(distribution: Any, live: Live, noise: NoiseSource) -> Array:
    mean, scale = _numpy(distribution.loc), _numpy(distribution._dist.scale)
    return gaussian(mean, scale, noise).astype(mean.dtype)


def _draw_squashed_gaussian(distribution: Any, live: Live, noise: NoiseSource) -> Array:
    return _numpy(distribution._squash(torch.from_numpy(_draw_gaussian(distribution, live, noise))))


def _draw_deterministic(distribution: Any, live: Live, noise: NoiseSource) -> Array:
    return _numpy(distribution.loc)


def _draw_nested(distribution: Any, live: Live, noise: NoiseSource) -> Any:
    parts = [_sample(part, live, noise) for part in distribution._flat_child_distributions]
    return tree.unflatten_as(distribution._original_struct, parts)


_DRAWS: Final[Mapping[type, Callable[[Any, Live, NoiseSource], Any]]] = {
    distributions.TorchCategorical: _draw_categorical,
    distributions.TorchMultiCategorical: _draw_multi_categorical,
    distributions.TorchDiagGaussian: _draw_gaussian,
    distributions.TorchSquashedGaussian: _draw_squashed_gaussian,
    distributions.TorchDeterministic: _draw_deterministic,
    distributions.TorchMultiDistribution: _draw_nested,
}
"""By exact class: a subclass may draw in another way."""


def _numpy(value: Any) -> Array:
    return np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)

"""Common small actor network. A config can evaluate such a network with only a weights file."""

from __future__ import annotations

from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rl_eval.errors import ConfigError, check_known

_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class MLPActor(nn.Module):
    """Linear layers with an activation, and a linear head for logits or for the mean of a Gaussian.

    Tensors: ``body.0``, ``body.2``, ... and ``head``, each with a weight and a bias; ``log_std`` for a Box action
    space; ``obs_mean`` and ``obs_var`` (float64) with a normalizer. The normalizer computes
    ``clip((obs - obs_mean) / sqrt(obs_var + 1e-8), -10, 10)`` in float64. The result is cast to float32.

    Args:
        num_inputs: Length of the flattened observation.
        num_outputs: Number of logits or action dimensions.
        hidden: Widths of the hidden layers.
        activation: Name of the activation.
        gaussian: Return ``(mean, log_std)`` instead of logits.
        normalize_observations: Normalize observations with the fixed ``obs_mean`` and ``obs_var``.
    """

    observation_dtype = None
    obs_mean: torch.Tensor
    obs_var: torch.Tensor

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        hidden: tuple[int, ...] = (64, 64),
        activation: str = "tanh",
        gaussian: bool = False,
        normalize_observations: bool = False,
    ) -> None:
        super().__init__()
        check_known("policy.policy_kwargs.activation", activation, _ACTIVATIONS)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip((num_inputs, *hidden), hidden, strict=False):
            layers += [nn.Linear(fan_in, fan_out), _ACTIVATIONS[activation]()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear((num_inputs, *hidden)[-1], num_outputs)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None
        self._normalizes = normalize_observations
        if normalize_observations:
            self.register_buffer("obs_mean", torch.zeros(num_inputs, dtype=torch.float64))
            self.register_buffer("obs_var", torch.ones(num_inputs, dtype=torch.float64))

    def forward(self, observations: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Map observations of shape (batch, ...) to logits, or to (mean, log_std)."""
        flat = observations.flatten(1)
        if self._normalizes:
            scaled = (flat.double() - self.obs_mean) / torch.sqrt(self.obs_var + 1e-8)
            flat = scaled.clamp(-10.0, 10.0)
        output: torch.Tensor = self.head(self.body(flat.float()))
        return output if self.log_std is None else (output, self.log_std)


def make_mlp(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    hidden: tuple[int, ...] | list[int] = (64, 64),
    activation: str = "tanh",
    normalize_observations: bool = False,
) -> MLPActor:
    """Build an :class:`MLPActor` that fits the spaces.

    Raises:
        ConfigError: The observation space is not a Box, the action space is neither Discrete nor a Box, or the
            activation is unknown.
    """
    if not isinstance(observation_space, gym.spaces.Box):
        problem = f"make_mlp reads Box observations, not {observation_space}"
        raise ConfigError(problem, key="observation_space", value=str(observation_space), fix="Write your own module.")
    gaussian = isinstance(action_space, gym.spaces.Box)
    if isinstance(action_space, gym.spaces.Discrete):
        num_outputs = int(action_space.n)
    elif gaussian:
        num_outputs = int(np.prod(action_space.shape or ()))
    else:
        problem = f"make_mlp acts in Discrete and Box spaces, not in {action_space}"
        raise ConfigError(problem, key="action_space", value=str(action_space), fix="Write your own module.")
    return MLPActor(
        int(np.prod(observation_space.shape)),
        num_outputs,
        hidden=tuple(hidden),
        activation=activation,
        gaussian=gaussian,
        normalize_observations=normalize_observations,
    )

"""Inputs of a policy beside its observation: the state of its LSTM, or the environment's action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import gymnasium as gym
import torch
from stable_baselines3.common.policies import BasePolicy

from rl_eval.errors import ConfigError

__all__ = ["Context", "LSTMState", "Masks", "context_of"]


class Context:
    """No input beside the observation, as of policies of Stable-Baselines3 itself.

    Args:
        module: The policy.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def observed(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """Return the space of what the policy was trained on, inside of an environment's observation space.

        Raises:
            ConfigError: The environment lacks what the policy acts by.
        """
        return space

    def observation(self, observations: Any) -> Any:
        """Return the policy's part of a batch of observations."""
        return observations

    def initial_state(self, batch_size: int) -> Any:
        """Return the state of fresh episodes, rows first; None if the policy has none."""
        return None

    def arguments(self, observations: Any, state: Any) -> dict[str, Any]:
        """Return what the policy's ``_predict`` and ``get_distribution`` take beside the observation."""
        return {}

    def split(self, result: Any) -> tuple[Any, Any]:
        """Return what such a call computed, and the next state."""
        return result, None


@final
class LSTMState(Context):
    """State of a ``RecurrentPPO``: hidden and cell state of the actor's LSTM, each of shape (batch, layers, size)."""

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros, as ``predict`` begins with."""
        layers, _, size = self._module.lstm_hidden_state_shape
        zeros = torch.zeros((batch_size, layers, size), device=self._module.device)
        return zeros, zeros.clone()

    def arguments(self, observations: Any, state: Any) -> dict[str, Any]:
        """Return the state, layers first; no episode starts, for the state of a fresh one is zero already."""
        states = tuple(part.transpose(0, 1).contiguous() for part in state)
        return {"lstm_states": states, "episode_starts": torch.zeros(len(state[0]), device=self._module.device)}

    def split(self, result: Any) -> tuple[Any, Any]:
        """Return what was computed, and the next state, rows first."""
        computed, states = result
        return computed, tuple(part.transpose(0, 1).contiguous() for part in states)


@final
class Masks(Context):
    """Masks of a ``MaskablePPO``, which ``environment.action_masks`` puts beside the observation."""

    def observed(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """Return the space without the mask."""
        if not isinstance(space, gym.spaces.Dict) or set(space.spaces) != {"observation", "action_mask"}:
            raise ConfigError(
                f"{type(self._module).__name__} needs the environment's action masks: set environment.action_masks to "
                "true, and give the environment a method action_masks(), as sb3-contrib does"
            )
        return space["observation"]

    def observation(self, observations: Any) -> Any:
        """Return the observations without their masks."""
        return observations["observation"]

    def arguments(self, observations: Any, state: Any) -> dict[str, Any]:
        """Return the masks, shape (batch, choices)."""
        return {"action_masks": torch.from_numpy(observations["action_mask"]).to(self._module.device)}


_CONTEXTS: Final[Mapping[str, type[Context]]] = {
    "stable_baselines3.common.policies": Context,
    "sb3_contrib.common.recurrent.policies": LSTMState,
    "sb3_contrib.common.maskable.policies": Masks,
}
"""By the module of the ``predict`` that a policy has."""


def context_of(module: BasePolicy) -> Context:
    """Return what a policy acts by beside its observation.

    Raises:
        ConfigError: It has a ``predict`` of its own.
    """
    kind = _CONTEXTS.get(type(module).predict.__module__)
    if kind is None:
        raise ConfigError(
            f"{type(module).__name__} has a predict() of its own, which rl_eval cannot batch: implement rl_eval.Policy "
            "around it"
        )
    return kind(module)

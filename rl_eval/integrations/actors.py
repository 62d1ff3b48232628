"""Actors: networks of learners, with everything that the learner does to observations and actions."""

from __future__ import annotations

import copy
from typing import Any, TypeVar, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree

from rl_eval.config.settings import PolicySection
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource

State = tuple[torch.Tensor, ...]
Module = TypeVar("Module", bound=torch.nn.Module)


def copied(module: Module) -> Module:
    """Return a copy of a module on the CPU, without the distributions of its last step.

    Their tensors belong to a graph of gradients, so they cannot be copied.
    """
    values = [value for part in module.modules() for value in vars(part).values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    left_out = {id(part): None for part in parts if isinstance(part, torch.distributions.Distribution)}
    return copy.deepcopy(module, left_out).cpu()


class Actor(torch.nn.Module):
    """Network of a learner that chooses actions. It draws them with torch's distributions."""

    sizes: tuple[tuple[int, int], ...] = ()
    """Number of layers and units of each part of the recurrent state."""
    normalizes: bool = False
    """Whether the actor normalizes observations with statistics of its own."""

    def check(self, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Check that the actor can act as configured.

        Raises:
            ConfigError: The spaces do not fit, or the settings do not.
        """

    def step(self, observations: Any, state: State, sample: bool) -> tuple[torch.Tensor, State]:
        """Return actions, and the next state.

        Args:
            observations: Batch of tensors in the structure of the observation space.
            state: Parts of the recurrent state, each of shape (layers, batch, units).
            sample: Whether to draw from the distribution instead of using its mode.
        """
        raise NotImplementedError


@final
class ActorPolicy:
    """Policy around an actor, with the interface of :class:`rl_eval.Policy`.

    Args:
        actor: The actor.
        action_space: Action space of the environment.
    """

    def __init__(self, actor: Actor, action_space: gym.Space[Any]) -> None:
        self.module = actor.eval()
        self.normalizes = actor.normalizes
        self._space = action_space

    def initial_state(self, batch_size: int) -> State | None:
        """Return zeros of shape (batch, layers, units) for each part; None for an actor without a state."""
        device = next(self.module.parameters()).device
        return tuple(torch.zeros((batch_size, *size), device=device) for size in self.module.sizes) or None

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return the outputs of all layers that have one row per observation, in two steps with a recurrent state."""
        rows = len(tree.flatten(observations)[0])
        found: list[npt.NDArray[Any]] = []

        def keep(layer: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape[:1] == (rows,):
                found.append(output.numpy(force=True))

        hooks = [layer.register_forward_hook(keep) for layer in self.module.modules()]
        _, state = self.act(observations, self.initial_state(rows), np.ones(rows, np.bool_), None)
        if state:  # A state of zeros has matrix products of zero in every batch.
            self.act(observations, state, np.ones(rows, np.bool_), None)
        for hook in hooks:
            hook.remove()
        return found

    def act(
        self, observations: Any, state: State | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[Any], State | None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        device = next(self.module.parameters()).device
        inputs = tree.map_structure(lambda part: torch.as_tensor(part, device=device), observations)
        with torch.no_grad(), EpisodeDraws(live, noise):
            actions, following = self.module.step(inputs, _swapped(state or ()), noise is not None)
        rows = actions.numpy(force=True).reshape(len(live), *(self._space.shape or ()))
        return rows, _swapped(following) or None


def as_policy(
    value: Actor, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> ActorPolicy:
    """Build the policy of an actor for an environment with these spaces.

    Raises:
        ConfigError: The actor does not fit; see :meth:`Actor.check`.
    """
    value.check(section, observation_space, action_space)
    return ActorPolicy(value, action_space)


def _swapped(state: State) -> State:
    """Exchange the dimensions of layers and of the batch."""
    return tuple(part.transpose(0, 1).contiguous() for part in state)

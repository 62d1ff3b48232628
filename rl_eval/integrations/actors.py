"""Actors: networks of learners, with everything that the learner does to observations and actions."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree

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


class Step(NamedTuple):
    """Output of an actor for a batch."""

    actions: torch.Tensor
    numbers: tuple[torch.Tensor, ...]
    """Tensors from which the actions are chosen, such as logits."""
    state: State = ()


class Actor(torch.nn.Module):
    """Network of a learner that chooses actions. It draws them with torch's distributions."""

    sizes: tuple[tuple[int, int], ...] = ()
    """Number of layers and units of each part of the recurrent state."""

    def step(self, observations: Any, state: State, sample: bool) -> Step:
        """Choose actions.

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
        actor: An actor that no other code uses.
        action_space: Action space of the environment.
    """

    def __init__(self, actor: Actor, action_space: gym.Space[Any]) -> None:
        self.module = actor.eval()
        self._space = action_space

    def initial_state(self, batch_size: int) -> State | None:
        """Return zeros of shape (batch, layers, units) for each part; None for an actor without a state."""
        device = next(self.module.parameters()).device
        return tuple(torch.zeros((batch_size, *size), device=device) for size in self.module.sizes) or None

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return the numbers that determine the actions. With a recurrent state, these are those of the second step."""
        rows = len(tree.flatten(observations)[0])
        live = np.ones(rows, np.bool_)
        step = self._step(observations, self.initial_state(rows), live, None)
        if step.state:  # A state of zeros has matrix products of zero in every batch.
            step = self._step(observations, _swapped(step.state), live, None)
        return [numbers.numpy(force=True) for numbers in step.numbers]

    def act(
        self, observations: Any, state: State | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[Any], State | None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        step = self._step(observations, state, live, noise)
        actions = step.actions.numpy(force=True).reshape(len(live), *(self._space.shape or ()))
        return actions, _swapped(step.state) or None

    @torch.no_grad()
    def _step(
        self, observations: Any, state: State | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> Step:
        device = next(self.module.parameters()).device
        inputs = tree.map_structure(lambda part: torch.as_tensor(part, device=device), observations)
        with EpisodeDraws(live, noise):
            return self.module.step(inputs, _swapped(state or ()), noise is not None)


def _swapped(state: State) -> State:
    """Exchange the dimensions of layers and of the batch."""
    return tuple(part.transpose(0, 1).contiguous() for part in state)

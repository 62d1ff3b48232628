"""Batched simulator of an environment that consists of two pure functions of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import gymnasium as gym
import jax
import numpy as np
from typing_extensions import override

from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Slots

Init = Callable[[Any], tuple[Any, Any]]
Step = Callable[[Any, Any], tuple[Any, Any, Any, Any, Any, Mapping[str, Any]]]

_ROWS: Final = 8
"""The number of computed rows is a multiple of this. XLA sums a single row in another order than several rows, so a
simulator of one slot would compute other episodes than a simulator of several slots."""


@functools.lru_cache(maxsize=8)
def _compiled(init: Init, step: Step) -> tuple[Any, Any]:
    """Return both functions for all rows; simulators of the same environment share the compiled functions.

    The compiled ``init`` takes seeds instead of keys.
    """
    return jax.jit(jax.vmap(lambda seed: init(jax.random.PRNGKey(seed)))), jax.jit(jax.vmap(step))


def _chosen(started: Any, new: Any, old: Any) -> Any:
    """Return the new state of a row if the row starts, otherwise its old state."""
    return jax.tree.map(lambda one, other: jax.numpy.where(started, one, other), new, old)


_merged: Final = jax.jit(jax.vmap(_chosen))


@final
class FunctionalSimulator(BatchSimulator):
    """Simulator of one environment in JAX, which is vectorised and compiled for all slots.

    Both functions must be pure. They take the arrays of one slot, without a dimension for slots. Slots without an
    episode are stepped as well.

    Args:
        init: Function of a key (``jax.random.PRNGKey`` of the seed, shape (2,), dtype uint32). It returns the first
            state and observation.
        step: Function of a state and an action. It returns the next state, observation, reward, terminated, truncated
            and a dict of infos, and never starts another episode. All random numbers come from the state.
        num_envs: Number of slots.
        observation_space: Space of the observation of one slot.
        action_space: Space of the action of one slot.
        name: Name of the simulator in results.
    """

    def __init__(
        self,
        init: Init,
        step: Step,
        num_envs: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        name: str = "FunctionalSimulator",
    ) -> None:
        self.name = name
        self.num_envs, self.observation_space, self.action_space = num_envs, observation_space, action_space
        self.note = f"all slots are stepped by JAX {jax.__version__} on {jax.default_backend()}"
        rows = -(-num_envs // _ROWS) * _ROWS
        self._seeds = np.zeros(rows, np.uint32)
        self._state: Any = None
        """State of all rows; None before the first restart."""
        self._init, self._step = _compiled(init, step)
        # JAX compiles on the first call. The first calls are here, so that compilation does not count as episode time.
        self.restart(np.arange(num_envs), [EpisodeSpec(0, 0)] * num_envs)
        self.step(gym.vector.utils.create_empty_array(action_space, num_envs, np.zeros))
        self._state = None

    @override
    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        # All rows are computed, so that init is not compiled again for another number of slots.
        self._seeds[slots] = [spec.seed for spec in specs]
        state, observations = self._init(self._seeds)
        if self._state is None:
            self._state = state
        started = np.zeros(len(self._seeds), bool)
        started[slots] = True
        self._state = _merged(started, state, self._state)
        # As in step(), the observations are JAX arrays, except if there are spare rows.
        library = np if len(self._seeds) > self.num_envs else jax.numpy
        return jax.tree.map(lambda leaf: library.asarray(np.asarray(leaf)[slots]), observations)

    @override
    def step(self, actions: Any) -> BatchStep:
        spare = len(self._seeds) - self.num_envs
        if spare:
            actions = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:1].repeat(spare, 0)]), actions)
        self._state, *results = self._step(self._state, actions)
        if spare:
            results = jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_envs], results)
        observations, rewards, terminated, truncated, infos = results

        # Infos with other keys have parts, or several numbers for each slot.
        keys = [key for key, info in infos.items() if getattr(info, "shape", None) == (self.num_envs,)]

        def values(key: str) -> Any:
            return (np.asarray(infos[key]), np.ones(self.num_envs, bool)) if key in keys else None

        return BatchStep(observations, rewards, terminated, truncated, values, keys)

    @override
    def close(self) -> None:
        self._state = None

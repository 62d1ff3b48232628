"""Wrappers of :mod:`rl_eval.wrappers` around a batched simulator: their values have one row for each slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import tree
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.spaces import text_array
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Slots, checked
from rl_eval.runners.environment import wrapper_of
from rl_eval.wrappers import AddingWrapper, Read, complete, extended, joined, zeros

_KEPT: Final = (
    *("num_envs", "action_space", "min_free", "couples_slots", "restarts_idle", "trusted", "condition_keys", "note"),
    "name",
)


@final
class AddingSimulator(BatchSimulator):
    """Simulator whose observations have the values of a wrapper.

    Args:
        inner: The simulator without the wrapper.
        wrapper: Class of the wrapper.
        arguments: Arguments of the wrapper.
    """

    def __init__(self, inner: BatchSimulator, wrapper: type[AddingWrapper], arguments: Mapping[str, Any]) -> None:
        self._inner, self._wrapper = inner, wrapper
        for name in _KEPT:
            setattr(self, name, getattr(inner, name))
        self._added = wrapper.added_spaces(inner.action_space, **arguments)
        self.observation_space = extended(inner.observation_space, self._added)
        self._running = np.zeros(self.num_envs, bool)
        """Slots whose episode has begun and not ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @override
    def first_values(self, key: str) -> Any:
        return self._inner.first_values(key)

    @override
    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        if self._wrapper.reads_info and specs[0].condition is not None and len(slots) > 1:
            # The slots start one by one, and the simulator keeps only the infos of the last call.
            rows = [self.restart(slots[place : place + 1], [spec]) for place, spec in enumerate(specs)]
            return tree.map_structure(lambda *parts: np.concatenate(parts), *rows)
        observations = self._inner.restart(slots, specs)
        self._running[slots] = True
        known = self._wrapper.values(self._added, None, None, _reader(self.first_values, slots))
        return joined(self._inner.observation_space, observations, zeros(self._added, len(slots)) | known)

    @override
    def step(self, actions: Any) -> BatchStep:
        step = checked(self._inner.step(actions), self.num_envs)
        running, self._running = self._running, self._running & ~(step.terminated | step.truncated)
        every = np.arange(self.num_envs)
        values = self._wrapper.values(self._added, actions, step.rewards, _reader(step.values, every, running))
        joint = joined(self._inner.observation_space, step.observations, complete(self._added, values))
        return replace(step, observations=joint)

    @override
    def close(self) -> None:
        self._inner.close()


def _reader(values: Callable[[str], Any], slots: Slots, running: Any = False) -> Read:
    """Return a function that reads values of infos; it returns None if a slot with an episode lacks the key."""

    def read(key: str, space: gym.Space[Any]) -> Any:
        found = values(key)
        if found is None or np.any(running & ~found[1]):
            return None
        given, reported = (part[slots] for part in found)
        rows = zeros({key: space}, len(slots))[key]
        if reported.any():
            new = given[reported].tolist()
            rows[reported] = (
                text_array(new, rows.dtype, (key,))
                if rows.dtype.kind == "U"
                else np.array(new, rows.dtype).reshape(-1, *rows.shape[1:])
            )
        return rows

    return read


def with_wrappers(simulator: BatchSimulator, wrappers: Sequence[Any]) -> BatchSimulator:
    """Put wrappers around a simulator, the innermost first.

    Raises:
        ConfigError: A wrapper is not one of :mod:`rl_eval.wrappers`, or its arguments do not fit.
    """
    for place, wrapper in enumerate(wrappers):
        key = f"environment.wrappers[{place}]"
        factory, arguments = wrapper_of(wrapper, key)
        if not (isinstance(factory, type) and issubclass(factory, AddingWrapper)):
            problem = f"{key} applies to single environments, but runners.runner=batched steps all slots in one call"
            fix = "Set runners.runner: vector. Only the wrappers of rl_eval.wrappers apply to slots."
            raise ConfigError(problem, key="environment.wrappers", value=wrapper, fix=fix)
        try:
            simulator = AddingSimulator(simulator, factory, arguments)
        except TypeError as error:
            raise ConfigError(f"{key}: {wrapper!r} cannot be built: {error}", key=key, value=wrapper) from error
    return simulator

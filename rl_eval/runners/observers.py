"""Observers of episodes: they see each step where it is made, and what they raise stays their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError, summary_of
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec, first_seen

if TYPE_CHECKING:
    from rl_eval.policies.inference.sweep_log import SlotLog, SweepRecorder


@runtime_checkable
class EpisodeObserver(Protocol):
    """Sees the episodes of one environment, one after the other.

    Its factory gets the environment that it is to see, whenever a slot of a runner gets one. An attempt that fails
    or is dropped has no end: the next start begins anew. Episodes that run again for the determinism check are not
    observed.
    """

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Take note of an episode that was reset, and of its first observation."""

    def on_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
        policy_outputs: Any,
    ) -> None:
        """Take note of a step: the action, and what the environment returned for it, which must not be changed.

        Args:
            observation: The one after the action.
            action: As the environment was given it.
            reward: As it was returned.
            terminated: As it was returned.
            truncated: As it was returned.
            info: As it was returned.
            policy_outputs: Row of the policy's ``outputs``, the nested batch of what its last ``act`` computed besides
                actions, a new one at each call; None for a policy that has none.
        """

    def on_episode_end(self, record: EpisodeRecord) -> Any:
        """Return what is to be kept of a completed episode, something that can be pickled; None for nothing."""


Part = TypeVar("Part")
Factory = Callable[[Any], EpisodeObserver]


def observer_factories(configured: Sequence[Any]) -> dict[str, Factory]:
    """Return the factories of ``evaluation.observers`` by the names that artifacts have.

    Raises:
        ConfigError: One cannot be imported or called, or two have one name.
    """
    found: dict[str, Factory] = {}
    for given in configured:
        factory = import_attribute("evaluation.observers", given) if isinstance(given, str) else given
        if not callable(factory):
            raise ConfigError(f"evaluation.observers has {given!r}, which is not callable: give factories of observers")
        name = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)
        if name in found:
            raise ConfigError(
                f"evaluation.observers has {name!r} twice: each artifact is kept under its factory's name"
            )
        found[name] = factory
    return found


@final
class ObservedSlot:
    """Environment of a slot together with its observers.

    Args:
        env: What they see.
        factories: What builds them.
        idle: Called before them, so that the limits of a step are not theirs.
        outputs: Returns the policy's outputs for the slot.
        note: Takes a note, the episode's index, its step and what was raised.
        log: Returns the slot's part of the log of sweeps; None where the runner does not step all slots in turn, or
            values are nested.
    """

    def __init__(
        self,
        env: Any,
        factories: dict[str, Factory],
        idle: Callable[[], None],
        outputs: Callable[[], Any],
        note: Callable[[str], None],
        log: Callable[[], SlotLog | None] = lambda: None,
    ) -> None:
        self._idle = idle
        self._find_log = log
        self._outputs = outputs
        self._note = note
        self._index = self._steps = 0
        self._broken: set[str] = set()
        """Names of those that have raised in this episode."""
        self._steppers: dict[str, Callable[..., None]] = {}
        """What sees the steps of this episode, by name: those that have not raised in it."""
        self._observers: dict[str, EpisodeObserver] = {}
        self._observers = self._guarded("its factory", factories, lambda factory: factory(env))

    @cached_property
    def _log(self) -> SlotLog | None:
        return self._find_log()

    @cached_property
    def _recorders(self) -> dict[str, SweepRecorder]:
        """Observers that read the log of sweeps."""
        if self._log is None:
            return {}
        return {name: one for name, one in self._observers.items() if getattr(one, "reads_sweeps", False)}  # type: ignore[misc]

    @cached_property
    def _told(self) -> dict[str, EpisodeObserver]:
        """Observers that are told of every step."""
        return {name: one for name, one in self._observers.items() if name not in self._recorders}

    def begin(
        self, step: Callable[[Any], Any], spec: EpisodeSpec, attempt: int, observation: Any
    ) -> Callable[[Any], Any]:
        """Begin an attempt that was reset.

        Returns:
            What to call instead of the environment's ``step``.
        """
        self._index, self._steps = spec.index, 0
        if self._broken:
            self._broken = set()
        if self._recorders and self._log is not None:
            step = self._log.begin(step)
        return self._telling(step, spec, attempt, observation) if self._told else step

    def _telling(
        self, step: Callable[[Any], Any], spec: EpisodeSpec, attempt: int, observation: Any
    ) -> Callable[[Any], Any]:
        """Tell observers of an attempt; return what to call instead of ``step`` to tell them of its steps."""
        self._call("on_episode_start", lambda observer: observer.on_episode_start(spec, attempt, observation))
        self._steppers = {name: one.on_step for name, one in self._told.items() if name not in self._broken}

        def observed(action: Any) -> Any:
            given = _kept(action)
            result = step(action)
            self._steps += 1
            if type(result) is tuple and len(result) == 5:  # Else the runner refuses it.
                self._observe_step(given, result)
            return result

        return observed

    def _observe_step(self, action: Any, result: tuple[Any, ...]) -> None:
        self._idle()
        observation, reward, terminated, truncated, info = result
        outputs = self._outputs()
        for name, on_step in self._steppers.items():
            try:
                on_step(observation, action, reward, terminated, truncated, info, outputs)
            except Exception as error:  # noqa: PERF203 - each for itself
                self._attribute(name, "on_step", error)
                self._steppers = {other: still for other, still in self._steppers.items() if other != name}

    def end(self, row: tuple[Any, ...], record: Callable[[], EpisodeRecord]) -> dict[str, Any]:
        """Return what those that were told of a completed episode keep of it, by their names."""
        if self._recorders and self._log is not None:
            try:
                self._log.finish(row, self._recorders)
            except Exception as error:
                for name in self._recorders:
                    self._attribute(name, "a step", error)
        if not self._told:
            return {}
        made = record()
        artifacts = self._call("on_episode_end", lambda observer: observer.on_episode_end(made))
        return {name: artifact for name, artifact in artifacts.items() if artifact is not None}

    def _call(self, where: str, call: Callable[[EpisodeObserver], Any]) -> dict[str, Any]:
        self._idle()
        return self._guarded(where, self._told, call)

    def _guarded(self, where: str, parts: Mapping[str, Part], call: Callable[[Part], Any]) -> dict[str, Any]:
        """Call what has not raised in this episode; return what was returned, by name."""
        returned = {}
        for name, part in parts.items():
            if name in self._broken:
                continue
            try:
                returned[name] = call(part)
            except Exception as error:
                self._attribute(name, where, error)
        return returned

    def _attribute(self, name: str, where: str, error: Exception) -> None:
        self._broken.add(name)
        text = f"observer {name} raised in {where}, so it keeps nothing of the episode, whose record is unaffected"
        self._note(first_seen(text, self._index, self._steps, summary_of(error)))


def _kept(action: Any) -> Any:
    """Return an action that stays as it is when the environment changes what it was given."""
    if isinstance(action, np.ndarray):
        return action.copy()
    return action if isinstance(action, (np.generic, int, float)) else copy.deepcopy(action)

"""Observers of episodes. They see each step in the runner, and their exceptions never affect the episode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from rl_eval.errors import summary_of
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec, first_seen
from rl_eval.supervision.caller import survivable

if TYPE_CHECKING:
    from rl_eval.policies.inference.sweep_log import SweepLog, SweepRecorder


@runtime_checkable
class EpisodeObserver(Protocol):
    """Observer of the episodes of one environment, one after the other.

    Whenever a slot gets a new environment, the runner calls the factory with this environment. The batched runner calls
    the factory for each slot with the :class:`~rl_eval.runners.batched.simulator.BatchSimulator`, whose spaces are
    those of one slot.

    For an attempt that fails or is dropped, :meth:`on_episode_end` is not called. So :meth:`on_episode_start` must
    discard the data of the previous attempt. Episodes that run again for the determinism check are not observed.
    """

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Handle the start of an episode, with its first observation."""

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
        """Handle a step. The arguments must not be changed.

        Args:
            observation: Observation after the action.
            action: Action passed to the environment.
            reward: Reward, as a float.
            terminated: Flag, as the environment returned it.
            truncated: Flag, as the environment returned it.
            info: Info, as the environment returned it. For a batched simulator, the values that the slot reported.
            policy_outputs: The episode's row of the policy's ``outputs``: nested arrays that the last ``act`` computed
                in addition to the actions. Each call gets new arrays. None if the policy has no ``outputs``.
        """

    def on_episode_end(self, record: EpisodeRecord) -> Any:
        """Return a picklable artifact of a completed episode; None for no artifact."""


Part = TypeVar("Part")
Factory = Callable[[Any], EpisodeObserver]


@final
class ObservedSlot:
    """Observers of one slot. The runner passes each attempt in the slot to them.

    Args:
        env: Environment of the slot, or the simulator that contains the slot.
        factories: Factories of the observers, by name.
        slot: Number of the slot.
        idle: Called before the observers, so that the time limit of a step does not apply to them.
        outputs: Returns the policy's outputs for a slot.
        note: Takes a note with the episode's index, its step and the exception.
        find_log: Returns the log of sweeps. None if the runner runs blocks, has several agents or does not act in
            sweeps. Also None if observations or actions are nested, or if observations are on a device.
    """

    def __init__(
        self,
        env: Any,
        factories: dict[str, Factory],
        slot: int,
        idle: Callable[[], None],
        outputs: Callable[[int], Any],
        note: Callable[[str], None],
        find_log: Callable[[], SweepLog | None],
    ) -> None:
        self._slot = slot
        self._idle = idle
        self._find_log = find_log
        self._outputs = outputs
        self._note = note
        self._index = self._steps = 0
        self._action: Any = None
        self.last: Any = None
        """Observation after the last step, for the log of sweeps."""
        self._rewards: list[float] = []
        """Rewards of the steps, for the log of sweeps."""
        self._log: SweepLog | None = None
        """Log of sweeps, if an observer reads it."""
        self._readers: dict[str, SweepRecorder] = {}
        """Observers that read the log of sweeps."""
        self.told: dict[str, EpisodeObserver] = {}
        """Observers that receive every step."""
        self._broken: set[str] = set()
        """Names of the observers that have raised in this episode."""
        self._steppers: dict[str, Callable[..., None]] = {}
        """``on_step`` of the observers that have not raised in this episode, by name."""
        self._observers: dict[str, EpisodeObserver] = {}
        self._observers = self._guarded("its factory", factories, lambda factory: factory(env))

    def start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Start an attempt, after the reset of its environment."""
        self._index, self._steps = spec.index, 0
        if self._broken:
            self._broken = set()
        self._find_readers()
        if self._log is not None:
            self._log.begin(self._slot)
            self._rewards = []
        if self.told:
            self._call("on_episode_start", lambda observer: observer.on_episode_start(spec, attempt, observation))
            self._steppers = {name: one.on_step for name, one in self.told.items() if name not in self._broken}

    def _find_readers(self) -> None:
        """Decide which observers read the log of sweeps; the others receive every step."""
        readers: dict[str, Any] = {n: one for n, one in self._observers.items() if getattr(one, "reads_sweeps", False)}
        self._log = self._find_log() if readers else None
        self._readers = {} if self._log is None else readers
        self.told = {name: one for name, one in self._observers.items() if name not in self._readers}

    def act(self, action: Any) -> None:
        """Store a copy of the next step's action for observers, because the environment may change the action."""
        self._action = _kept(action)

    def step(self, observation: Any, reward: float, terminated: Any, truncated: Any, info: Any) -> None:
        """Add a step."""
        if self._log is not None:
            self.last = observation
            self._rewards.append(reward)
        if self.told:
            self._tell(observation, self._action, reward, terminated, truncated, info)

    def _tell(self, *step: Any) -> None:
        self._steps += 1
        self._idle()
        outputs = self._outputs(self._slot)
        for name, on_step in self._steppers.items():
            try:
                on_step(*step, outputs)
            except survivable() as error:  # noqa: PERF203 - each for itself
                self._attribute(name, "on_step", error)
                self._steppers = {other: still for other, still in self._steppers.items() if other != name}

    def complete(self, row: tuple[Any, ...], record: Callable[[], EpisodeRecord]) -> dict[str, Any]:
        """Return the artifacts of a completed episode, by observer name."""
        if self._log is not None:
            try:
                self._log.finish(self._slot, row, self._rewards, self.last, self._readers)
            except survivable() as error:
                for name in self._readers:
                    self._attribute(name, "a step", error)
        if not self.told:
            return {}
        made = record()
        artifacts = self._call("on_episode_end", lambda observer: observer.on_episode_end(made))
        return {name: artifact for name, artifact in artifacts.items() if artifact is not None}

    def end(self) -> None:
        """End the attempt, completed or not."""
        if self._log is not None:
            self._log.end(self._slot)

    def _call(self, where: str, call: Callable[[EpisodeObserver], Any]) -> dict[str, Any]:
        self._idle()
        return self._guarded(where, self.told, call)

    def _guarded(self, where: str, parts: Mapping[str, Part], call: Callable[[Part], Any]) -> dict[str, Any]:
        """Call ``call`` with each part that has not raised in this episode; return the results by name."""
        returned = {}
        for name, part in parts.items():
            if name in self._broken:
                continue
            try:
                returned[name] = call(part)
            except survivable() as error:
                self._attribute(name, where, error)
        return returned

    def _attribute(self, name: str, where: str, error: BaseException) -> None:
        self._broken.add(name)
        text = f"observer {name} raised in {where} and returns no artifact for the episode. The record is not affected"
        self._note(first_seen(text, self._index, self._steps, summary_of(error)))


def _kept(action: Any) -> Any:
    """Return a copy of an action, or the action itself if it is immutable: the environment may change its argument."""
    if isinstance(action, np.ndarray):
        return action.copy()
    return action if isinstance(action, (np.generic, int, float)) else copy.deepcopy(action)

"""Contract between the batched runner and a simulator that steps many slots in one call."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, EnvError
from rl_eval.policies.inference.device_arrays import kind_of, numpy_of, numpy_of_all
from rl_eval.records.episode import EpisodeSpec

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]
Reported = Mapping[str, tuple[npt.NDArray[Any], Flags]]
"""Values of infos and the masks of the slots that reported them, by key."""
_KINDS: Final = {"rewards": "iuf", "terminated": "biu", "truncated": "biu"}
"""Kinds of dtypes of a step's arrays, as numpy names them."""
_DIRECT: Final = {"rewards": "f", "terminated": "b", "truncated": "b"}
"""Kinds of dtypes of NumPy arrays that need no further check."""


def _no_values(key: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One step of all slots; the arrays may be reused by the next step."""

    observations: Any
    """Nested arrays of NumPy, torch or JAX, on any device, shape (num_envs, ...). In a slot whose episode ended, the
    last observation of this episode."""
    rewards: Floats
    """Rewards, shape (num_envs,), of any real dtype, in NumPy, torch or JAX. The runner adds them in float64."""
    terminated: Flags
    """Shape (num_envs,), of bools, or of integers 0 and 1."""
    truncated: Flags
    """As :attr:`terminated`."""
    values: Callable[[str], tuple[npt.NDArray[Any], Flags] | None] = _no_values
    """Returns the values of an ``info`` key, shape (num_envs,), and the mask of the slots that reported the key; None
    if no slot reported it. The runner ignores values outside of the mask."""
    keys: Collection[str] = ()
    """Keys of :attr:`values` that observers get, in addition to ``evaluation.info_keys`` and the keys of success."""
    started: tuple[Flags, Any] | None = None
    """Mask of the slots that started another episode by themselves, shape (num_envs,), and observations, shape
    (num_envs, ...). In these slots, they are the first observations of the new episodes. None if no slot started an
    episode. Only blocks use this field."""

    def reported(self, keys: Iterable[str]) -> Reported:
        """Return the values and masks of the keys that at least one slot reported, after a check.

        Raises:
            EnvError: The values have a wrong type or shape.
        """
        found = {key: one for key in keys if (one := self.values(key)) is not None}
        width = len(self.rewards)
        for key, one in found.items():
            shapes = [array.shape[:1] for array in one if isinstance(array, np.ndarray)]
            if shapes != [(width,)] * 2 or one[1].dtype != bool or one[1].ndim != 1:
                problem = f"values({key!r}) did not return a NumPy array of {width} values with a mask of bools"
                fix = "Return the pair (values, mask), or None if no slot reported the key."
                raise EnvError(problem, key="values", value=key, fix=fix)
        return found


def checked(returned: Any, num_envs: int) -> BatchStep:
    """Return a step with rewards in float64 and flags as bools.

    Raises:
        EnvError: The simulator did not return a :class:`BatchStep`, or one of its arrays has a wrong shape or dtype.
    """
    if not isinstance(returned, BatchStep):
        kind = type(returned).__name__
        raise EnvError(f"step() of the simulator returned a {kind}", key="step", value=kind, fix="Return a BatchStep.")
    step = returned
    if step.started is not None:
        step = replace(step, started=_checked_start(step.started, num_envs))
    if all(_is_direct(getattr(step, name), kind, num_envs) for name, kind in _DIRECT.items()):
        return step if step.rewards.dtype == np.float64 else replace(step, rewards=step.rewards.astype(np.float64))
    arrays = [_array_of(step, name, num_envs) for name in _KINDS]
    on_host = arrays if all(isinstance(array, np.ndarray) for array in arrays) else numpy_of_all(arrays)
    for name, array, values in zip(_KINDS, arrays, on_host, strict=True):
        if name != "rewards" and kind_of(array) != "b" and not np.isin(values, (0, 1)).all():
            raise EnvError(f"{name} of the simulator has values other than 0 and 1", key=name, fix="Return bools.")
    rewards, terminated, truncated = on_host
    return replace(
        step,
        rewards=rewards.astype(np.float64, copy=False),
        terminated=terminated.astype(bool, copy=False),
        truncated=truncated.astype(bool, copy=False),
    )


def _checked_start(started: Any, num_envs: int) -> tuple[Flags, Any]:
    """Return the mask of the slots that started another episode, as a NumPy array, and the observations.

    Raises:
        EnvError: The value is not a pair, or the mask has a wrong shape or dtype.
    """
    mask = numpy_of(started[0]) if isinstance(started, tuple) and len(started) == 2 else None
    if not isinstance(mask, np.ndarray) or mask.shape != (num_envs,) or mask.dtype != bool:
        fix = "Return the pair (mask, observations), or None if no slot started another episode."
        raise EnvError(f"BatchStep.started of the simulator has no mask of {num_envs} bools", key="started", fix=fix)
    return mask, started[1]


def _is_direct(array: Any, kind: str, num_envs: int) -> bool:
    """Whether an array is a NumPy array of the expected shape and kind of dtype, and so needs no further check."""
    return type(array) is np.ndarray and array.dtype.kind == kind and array.shape == (num_envs,)


def _array_of(step: BatchStep, name: str, num_envs: int) -> Any:
    """Return an array of a step, still in the simulator's library (NumPy, torch or JAX).

    Raises:
        EnvError: The array has a wrong shape or dtype.
    """
    given = getattr(step, name)
    array = given if hasattr(given, "dtype") else np.asarray(given)
    if array.shape != (num_envs,) or kind_of(array) not in _KINDS[name]:
        shape = tuple(array.shape)
        problem = f"{name} of the simulator has shape {shape} and dtype {array.dtype}, for {num_envs} slots"
        raise EnvError(problem, key=name, value=f"{array.dtype}{list(shape)}", fix="Return one number for each slot.")
    return array


class BatchSimulator(abc.ABC):
    """Simulator that steps all slots in one call.

    It starts episodes in single slots (:meth:`restart`) or, for blocks, in all slots together (:meth:`reset`).

    An episode must depend only on its spec. It must be the same for any number of slots, and for any episodes in the
    other slots. A simulator declares deviations from this rule in its attributes. Deviations weaken the guarantee of
    the result.

    After the end of its episode, a slot stays idle until it is restarted, or it continues by itself. The runner ignores
    the observations, rewards, flags and infos of such a slot. But if the step of such a slot raises, the call fails for
    all slots, and the episodes in the other slots must run again.
    """

    num_envs: int
    """Number of slots."""
    observation_space: gym.Space[Any]
    """Space of the observation of one slot."""
    action_space: gym.Space[Any]
    """Space of the action of one slot."""
    min_free: int = 1
    """Minimum number of slots that are restarted together while others run. Set it above 1 if restarts are slow."""
    couples_slots: bool = False
    """Whether the steps of a slot depend on the other slots, for example because all slots are in one physics scene.
    First observations must not depend on other slots. If this is true, the guarantee is ``conditions``."""
    restarts_idle: bool = False
    """Whether a slot without an episode must be restarted before the next step; :meth:`advance` does that."""
    trusted: bool = False
    """Whether the class is known to start slots alone, so that the trial before the first episode is skipped."""
    condition_keys: Sequence[str] = ()
    """Keys of :attr:`EpisodeSpec.condition` that :meth:`restart` supports."""
    note: str = ""
    """Note for readers of the result, such as settings of the simulator that change the returns."""

    @cached_property
    def name(self) -> str:
        """Name of the simulator. It is part of the numerics key if the guarantee is weaker than ``exact``."""
        return type(self).__name__

    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        """Start an episode in each of the given slots.

        Args:
            slots: Slots, shape (k,), in ascending order. The other slots keep their episodes.
            specs: Specs of the episodes, in the order of the slots.

        Returns:
            First observations of these slots: nested arrays, shape (k, ...), as in :class:`BatchStep`.

        Raises:
            ConfigError: The simulator can only restart all slots together.
        """
        problem = f"{self.name} has no restart(), so its slots cannot be started one by one"
        fix = "Set runners.block: 64, if episodes may depend on the number of environments."
        raise ConfigError(problem, key="runners.block", fix=fix)

    def first_values(self, key: str) -> tuple[npt.NDArray[Any], Flags] | None:
        """Return the values of an ``info`` key in the last :meth:`restart`; see :attr:`BatchStep.values`."""
        return None

    def reset(self, seed: int) -> Any:
        """Start an episode in every slot, from one seed, for a block; return observations of shape (num_envs, ...).

        Raises:
            ConfigError: The simulator does not support blocks.
        """
        raise ConfigError(f"{self.name} has no reset() for blocks", key="runners.block", fix="Remove runners.block.")

    @abc.abstractmethod
    def step(self, actions: Any) -> BatchStep:
        """Take a step in every slot.

        Args:
            actions: Nested NumPy arrays, shape (num_envs, ...). Slots without an episode get some valid action.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release the simulator."""

    _idle: Flags | None = None
    """With :attr:`restarts_idle`: mask of the slots that have ended, or never started; None before the first start."""
    _spare: EpisodeSpec
    """Spec for slots that must run without an episode: the first spec of the last :meth:`start`."""

    def start(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        """Start episodes as :meth:`restart` does; the runner calls this method."""
        observations = self.restart(slots, specs)
        if self.restarts_idle:
            if self._idle is None:
                self._idle = np.ones(self.num_envs, bool)
            self._idle[slots] = False
            self._spare = specs[0]
        return observations

    def advance(self, actions: Any) -> BatchStep:
        """Take a checked step, after restarting idle slots if necessary; the runner calls this method.

        Raises:
            EnvError: An array of the step has a wrong shape or dtype.
        """
        if self._idle is not None and self._idle.any():
            slots = np.flatnonzero(self._idle)
            self.restart(slots, [self._spare] * len(slots))
        if self._idle is not None:
            self._idle = np.ones(self.num_envs, bool)  # If the step raises, any slot may have ended.
        step = checked(self.step(actions), self.num_envs)
        if self._idle is not None:
            self._idle = step.terminated | step.truncated
        return step

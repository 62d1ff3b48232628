"""Action chunks: the policy returns the actions of several steps, and is asked again after ``execute`` of them.

The chunk that is asked for at step t has the actions of the steps t, t + 1, and so on. With a delay d, it is used from
step t + d on, as if the policy took d steps to answer. Until then, the actions of the former chunk are used. The first
chunk of an episode is used at once, because there is no former chunk.
"""

from __future__ import annotations

from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.settings import ChunkSection, PolicySection
from rl_eval.errors import ConfigError, PolicyError, PolicyUnavailable, summary_of
from rl_eval.policies.inference.probe import BLOCK, buffers_kept, checked_answer
from rl_eval.policies.inference.spaces import ChunkReader, ObservationBatch, assign_rows, copy_batch, no_grad, take_rows
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import NoiseSource, Policy, Probeable, Recurrent
from rl_eval.supervision.caller import survivable
from rl_eval.weights import module_of

Array = npt.NDArray[Any]

_FORWARDED: Final = (
    "connections",
    "doubt",
    "explained",
    "numerics",
    "others",
    "reconnect",
    "result_notes",
    "server",
    "speed_notes",
    "takes_device_arrays",
)
"""Optional attributes of the inner policy that also hold for the policy that executes its chunks."""


def steps_of(chunk: ChunkSection, horizon: int) -> int:
    """Return the number of actions of a chunk that are executed.

    Raises:
        ConfigError: The settings do not fit the number of actions in a chunk.
    """
    execute = horizon - chunk.delay if chunk.execute is None else chunk.execute
    if not (chunk.delay <= execute and 0 < execute + chunk.delay <= horizon):
        problem = (
            f"policy.chunk has execute={execute} and delay={chunk.delay}, but the horizon of the policy's chunks is "
            f"{horizon}"
        )
        fix = f"Set delay to at most execute, and execute + delay to at most {horizon}."
        raise ConfigError(problem, key="policy.chunk", value=chunk.model_dump(), fix=fix)
    return execute


class ChunkedPolicy:
    """Policy that executes the chunks of an inner policy. The chunk in use is part of the state of a lane.

    The inner policy gets all rows of a pass, and only the rows that need a chunk are live. A pass without such a row is
    not made. A recurrent state of the inner policy advances only in these rows.

    Args:
        policy: Policy that returns chunks: actions of shape (batch, horizon, ...).
        section: Settings ``chunk`` and ``deterministic``.
        observation_space: Space of one observation.
        action_space: Space of one action.

    Raises:
        ConfigError: ``policy.chunk`` does not fit the number of actions in a chunk, or this number is unknown because
            the policy failed on generated observations.
        PolicyError: The chunks do not fit the action space.
    """

    def __init__(
        self, policy: Policy, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        chunk = section.chunk
        assert chunk is not None
        self._policy = policy
        self._reader = ChunkReader(action_space, chunk.horizon)
        self.module = module_of(policy)
        if isinstance(policy, Probeable):
            self.probe_outputs = policy.probe_outputs
        self.horizon = chunk.horizon or self._learned_horizon(observation_space, section.deterministic)
        self.delay = chunk.delay
        self.execute = steps_of(chunk, self.horizon)

    def __getattr__(self, name: str) -> Any:
        """Return an optional attribute of the inner policy."""
        if name in _FORWARDED:
            return getattr(self._policy, name)
        raise AttributeError(name)

    @property
    def inner(self) -> Policy:
        """Policy that returns the chunks."""
        return self._policy

    def initial_state(self, batch_size: int) -> dict[str, Any]:
        """Return the state of new episodes: the step, the actions that are planned, and the inner policy's state."""

        def planned(leaf: gym.Space[Any]) -> Array:
            dtype = np.float64 if isinstance(leaf, gym.spaces.Box) else np.int64
            return np.zeros((batch_size, self.execute + self.delay, *(leaf.shape or ())), dtype)

        state = {
            "step": np.zeros(batch_size, np.int64),
            "planned": tree.map_structure(planned, self._reader.structure),
        }
        inner = self._fresh(batch_size)
        return state if inner is None else {**state, "inner": inner}

    def _fresh(self, batch_size: int) -> Any:
        """Return the inner policy's state of new episodes; None without a state."""
        return self._policy.initial_state(batch_size) if isinstance(self._policy, Recurrent) else None

    def act(
        self, observations: Any, state: dict[str, Any], live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, dict[str, Any]]:
        """Choose actions; see :class:`rl_eval.Policy`. Each is an action of the chunk in use."""
        place = state["step"] % self.execute
        due = live & (place == 0)
        if due.any() or not live.any():  # The probe checks shapes without a live row.
            self._replan(observations, state, due, noise)
        rows = np.arange(len(live))
        actions = tree.map_structure(lambda planned: planned[rows, place], state["planned"])
        return actions, {**state, "step": state["step"] + 1}

    def _replan(
        self, observations: Any, state: dict[str, Any], due: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> None:
        """Ask for new chunks, and write the planned actions of the rows that are due."""
        inner, rows = state.get("inner"), np.flatnonzero(due)
        chunk, following = self._asked(observations, copy_batch(inner), due, noise)
        first, delay, stop = rows[state["step"][rows] == 0], self.delay, self.execute + self.delay

        def write(planned: Array, given: Array) -> None:
            planned[rows, :delay] = planned[rows, self.execute :]
            planned[rows, delay:] = given[rows, delay:stop]
            planned[first, :delay] = given[first, :delay]

        tree.map_structure(write, state["planned"], chunk)
        if inner is not None:
            tree.map_structure(lambda kept, new: assign_rows(kept, rows, new), inner, take_rows(following, rows))

    def _asked(
        self, observations: Any, inner: Any, due: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Return the chunks of the inner policy, and its next state."""
        return self._read(self._policy.act(observations, inner, due, noise), inner, due)

    def _read(self, answer: Any, inner: Any, due: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Return the chunks and the next state in an answer of the inner policy."""
        chunk, following = checked_answer(self._policy, answer, inner)
        return self._reader.read(chunk, due), following

    def _learned_horizon(self, observation_space: gym.Space[Any], deterministic: bool) -> int:
        """Return the number of actions in a chunk, from one call with generated observations."""
        observations = ObservationBatch(observation_space, BLOCK).sample(BLOCK, np.random.default_rng(0))
        noise = None if deterministic else EpisodeNoise(*np.zeros((2, BLOCK), np.int64))
        with no_grad(), buffers_kept(self._policy):
            try:
                self._asked(observations, self._fresh(BLOCK), np.arange(BLOCK) == 0, noise)
            except (ConfigError, PolicyError, PolicyUnavailable):
                raise
            except survivable() as error:
                explained = getattr(self._policy, "explained", None)
                if explained is not None and isinstance(better := explained(error, observations), PolicyError):
                    raise better from error
                problem = (
                    "policy.chunk.horizon is not set, and the policy failed on generated observations, from which "
                    f"rl_eval would learn the number of actions in a chunk: {summary_of(error)}"
                )
                fix = "Set policy.chunk.horizon to this number."
                raise ConfigError(problem, key="policy.chunk.horizon", fix=fix) from error
        assert self._reader.horizon is not None
        return self._reader.horizon

"""Contract of a batched simulator: an episode depends only on its spec, for any number of slots and in any slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError
from rl_eval.policies.inference.spaces import ObservationBatch
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator
from rl_eval.runners.batched.trial import try_out
from rl_eval.runners.batched.vector_env import build_simulator
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing.contracts.suite import expect
from rl_eval.testing.simulator_checks import EPISODES, WIDTHS, Measured, measure

Specs = list[EpisodeSpec]

_MAX_STEPS = 1_000


class SimulatorContract:
    """Tests of a batched simulator, for a pytest class to inherit.

    Example:
        >>> class TestMySimulator(SimulatorContract):
        ...     config = EvalConfig().environment("my_pkg.simulators:make_simulator")

    Actions are random. The suite builds simulators of 1, 4, 7 and ``num_envs_per_runner`` slots in the process of the
    tests. A simulator that cannot start single slots fails these tests, even if it is meant for ``runners.block``.
    """

    config: EvalConfig
    """Config of the environment: a factory of simulators or of vector environments."""
    distinct_starts: int = EPISODES
    """Expected number of different first observations for eight seeds; 1 if all episodes start equally."""

    def test_episodes_are_the_same_in_every_layout(self) -> None:
        """Eight episodes are equal for every number of slots, in any order.

        If the simulator declares ``couples_slots``, only their first observations must be equal.
        """
        expect(self._measured.broken, "", f"difference that the guarantee {self._measured.promised} excludes")

    def test_seeds_give_different_starts(self) -> None:
        """The number of different starts is as expected.

        A simulator that ignores its seeds would repeat one episode.
        """
        expect(self._measured.distinct_starts, self.distinct_starts, f"distinct first observations of {EPISODES} seeds")

    def test_a_slot_is_started_alone(self) -> None:
        """A slot that is started alone has the first observation of its spec, and the other slots do not change."""
        for width in WIDTHS:
            _with_simulator(self._settings, width, _expect_trial)

    def test_arrays_have_the_shapes_and_dtypes_of_the_spaces(self) -> None:
        """Rewards and flags have shape (num_envs,), and observations fit the space."""
        _with_simulator(self._settings, 4, _expect_shapes)

    def test_a_slot_may_be_stepped_past_its_end(self) -> None:
        """Steps of a slot after the end of its episode do not affect the next episode in this slot."""
        _with_simulator(self._settings, 4, _expect_start_after_end)

    @cached_property
    def _settings(self) -> EvalSettings:
        return self.config.copy().runners(runner="batched", block=None).build()

    @cached_property
    def _measured(self) -> Measured:
        return measure(self._settings)


def _with_simulator(settings: EvalSettings, width: int, test: Callable[[BatchSimulator, Specs], None]) -> None:
    """Build a simulator, call ``test`` with the simulator and one spec per slot, and close the simulator."""
    simulator = build_simulator(settings.environment, 0, 0, width)
    plan = EpisodePlan(width, seed=1, conditions=settings.evaluation.conditions)
    try:
        test(simulator, [plan[slot] for slot in range(width)])
    finally:
        simulator.close()


def _expect_trial(simulator: BatchSimulator, specs: Specs) -> None:
    try:
        try_out(simulator, specs)
    except EvalError as error:
        raise AssertionError(str(error)) from error


def _start(simulator: BatchSimulator, specs: Specs) -> Any:
    return simulator.start(np.arange(simulator.num_envs), specs)


def _expect_shapes(simulator: BatchSimulator, specs: Specs) -> None:
    batch = ObservationBatch(simulator.observation_space, simulator.num_envs)
    batch.adopt(slice(0, simulator.num_envs), _start(simulator, specs))
    actions = gym.vector.utils.batch_space(simulator.action_space, simulator.num_envs)
    batch.adopt(slice(0, simulator.num_envs), simulator.advance(actions.sample()).observations)


def _expect_start_after_end(simulator: BatchSimulator, specs: Specs) -> None:
    width, batch = simulator.num_envs, ObservationBatch(simulator.observation_space, simulator.num_envs)
    batch.adopt(slice(0, width), _start(simulator, specs))
    before = batch.row_content(0)
    actions = gym.vector.utils.batch_space(simulator.action_space, width)
    ended = np.zeros(width, bool)
    for _ in range(_MAX_STEPS):
        step = simulator.advance(actions.sample())
        ended |= step.terminated | step.truncated
        if ended.all():
            break
    batch.adopt([0], simulator.start(np.array([0]), specs[:1]))
    expect(batch.row_content(0), before, "first observation of a slot that was stepped past its end")

"""Contract of a batched simulator: an episode depends only on its spec, for any number of slots and in any slot."""

from __future__ import annotations

from functools import cached_property

from rl_eval.config.builder import EvalConfig
from rl_eval.testing.contracts.suite import expect
from rl_eval.testing.simulator_checks import EPISODES, Measured, measure


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

    @cached_property
    def _measured(self) -> Measured:
        return measure(self.config.copy().runners(runner="batched", block=None).build())

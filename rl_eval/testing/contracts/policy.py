"""Contract of a policy: the action of a row depends only on the episode of that row."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import cloudpickle
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.policies import random_state_kept
from rl_eval.policies.inference.spaces import ActionReader, ObservationBatch, no_grad
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy
from rl_eval.records.generators import changes, generator_states
from rl_eval.testing.contracts.suite import BuiltPolicy, built_policy

_POOL: Final = 64
"""Number of sampled observations."""
_STEPS: Final = 5
_EPISODES: Final = 33

Array = npt.NDArray[Any]
Actions = list[list[Array]]
"""One batch of actions per step. A batch is a list with one array per leaf of the action space."""


class PolicyContract:
    """Tests of a policy, for a pytest class to inherit.

    Example:
        >>> class TestMyPolicy(PolicyContract):
        ...     config = EvalConfig().environment("CartPole-v1").policy("my_pkg.policies:make_policy")

    The policy acts on observations that are sampled from the environment's space. Discrete actions must be equal.
    Floats may differ by rounding, because the runner, not the policy, makes rounding independent of the batch.
    """

    config: EvalConfig
    """Config with the policy, and with an environment for which the policy can act."""
    batch_sizes: tuple[int, ...] = (1, 2, 16, 33)
    tolerance: float = 1e-4
    """Maximum relative difference of floats that counts as rounding."""

    # ------------------------------------------------------------------ rows are independent

    def test_actions_fit_the_action_space(self) -> None:
        """The shape, the dtype and the values of actions are valid."""
        reader = ActionReader(self._subject.action_space, self._settings.policy.actions)
        structure = reader.structure
        for size in self.batch_sizes:
            for leaves in self._act(range(size)):
                reader.read(tree.unflatten_as(structure, leaves), np.ones(size, bool))

    def test_a_row_does_not_depend_on_the_size_of_the_batch(self) -> None:
        """An episode gets the same actions alone and in a batch."""
        for size in self.batch_sizes:
            self._expect_alone(range(size), self._act(range(size)), f"in a batch of {size}")

    def test_a_row_does_not_depend_on_its_position(self) -> None:
        """An action depends neither on its row nor on the contents of the other rows."""
        for size in self.batch_sizes:
            for seed in range(3):
                episodes = np.random.default_rng(seed).permutation(_EPISODES)[:size].tolist()
                self._expect_alone(episodes, self._act(episodes), f"at another position in a batch of {size}")

    def test_rows_of_dead_lanes_do_not_matter(self) -> None:
        """Actions of live rows do not depend on rows of dead lanes, which contain data of earlier episodes."""
        for size in self.batch_sizes:
            live = np.arange(size) % 2 == 0
            self._expect_alone(range(size), self._act(range(size), live), "among dead rows", live)

    def test_a_lane_that_starts_over_starts_afresh(self) -> None:
        """After the state of a row is reset, its episode gets the same actions as with a new policy.

        Other rows do not change.
        """
        for size in self.batch_sizes:
            again = np.arange(size) % 2 == 0
            actions = self._act(range(size), restart=again)
            before, after = actions[: _STEPS // 2], actions[_STEPS // 2 :]
            self._expect_alone(range(size), before + after, "beside a slot that started over", ~again)
            self._expect_alone(range(size), after, "in a slot that started over", again)

    # ------------------------------------------------------------------ no hidden state

    def test_acting_leaves_nothing_behind(self) -> None:
        """Earlier evaluations with the same policy object do not change its actions."""
        first = self._act(range(8))
        self._expect_equal(self._act(range(8)), first, "when repeated")
        self._act(range(_EPISODES))
        self._expect_equal(self._act(range(8)), first, "after other episodes")

    def test_randomness_comes_from_the_noise_argument_alone(self) -> None:
        """The policy neither reads nor advances global generators, which may belong to a trainer."""
        import torch

        first = self._act(range(8))
        for seed in range(3):
            with random_state_kept():
                for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
                    seed_generator(seed)
                before = generator_states()
                actions = self._act(range(8))
                moved = changes(before, generator_states())
            if moved:
                raise AssertionError(f"act() draws from {', '.join(moved)}. Draw from `noise`.")
            self._expect_equal(actions, first, "with other seeds of the global generators")

    def test_acting_does_not_write_into_its_arguments(self) -> None:
        """The policy does not change observations and mask, which belong to the runner."""
        observations, live = self._observations(np.arange(16)), np.ones(16, bool)
        kept = tree.map_structure(np.copy, observations)
        self._call(self._subject.policy, observations, self._fresh_state(self._subject.policy, 16), live, np.arange(16))
        if not all(map(np.array_equal, tree.flatten(observations), tree.flatten(kept))):
            raise AssertionError("act() modified the observations. Copy the observations before you modify them.")
        if not live.all():
            raise AssertionError("act() modified the mask of live rows. Copy the mask before you modify it.")

    def test_a_pickled_copy_acts_alike(self) -> None:
        """A pickled copy of the policy, as runners receive it, returns the same actions."""
        first = self._act(range(8))
        twin: Policy = pickle.loads(cloudpickle.dumps(self._subject.policy))
        self._expect_equal(self._act(range(8), policy=twin), first, "of a pickled copy")

    # ------------------------------------------------------------------ steps of the tests

    @cached_property
    def _settings(self) -> EvalSettings:
        return self.config.build()

    @cached_property
    def _subject(self) -> BuiltPolicy:
        return built_policy(self._settings)

    @cached_property
    def _pool(self) -> Any:
        batch = ObservationBatch(self._subject.observation_space, 1)
        return batch.sample(_POOL, np.random.default_rng(0))

    @cached_property
    def _alone(self) -> list[Actions]:
        """Actions of every episode when the episode is alone in its batch."""
        return [self._act([episode]) for episode in range(_EPISODES)]

    def _observations(self, rows: npt.NDArray[np.int64]) -> Any:
        return tree.map_structure(lambda leaf: leaf[rows % _POOL], self._pool)

    def _fresh_state(self, policy: Policy, size: int) -> Any:
        make = getattr(policy, "initial_state", None)
        if make is None:
            return None
        with no_grad():
            return make(size)

    def _call(
        self, policy: Policy, observations: Any, state: Any, live: npt.NDArray[np.bool_], seeds: Any, steps: Any = 0
    ) -> tuple[Any, Any]:
        steps = np.broadcast_to(np.asarray(steps, np.int64), seeds.shape)
        noise = None if self._settings.policy.deterministic else EpisodeNoise(seeds, steps)
        with no_grad():
            return policy.act(observations, state, live, noise)

    def _act(
        self,
        episodes: Sequence[int],
        live: npt.NDArray[np.bool_] | None = None,
        *,
        restart: npt.NDArray[np.bool_] | None = None,
        policy: Policy | None = None,
    ) -> Actions:
        """Run episodes in one batch for a few steps, and return the actions.

        Each episode has its own observations and noise.

        Args:
            episodes: Episode of each row.
            live: Mask of the rows that run an episode; by default, all rows.
            restart: Mask of the rows in which the episode starts again after half of the steps.
            policy: Policy; by default, the tested policy.
        """
        policy = self._subject.policy if policy is None else policy
        seeds, live = np.array(episodes, np.int64), np.ones(len(episodes), bool) if live is None else live
        ages, state = np.zeros(len(seeds), np.int64), self._fresh_state(policy, len(seeds))
        actions: Actions = []
        for step in range(_STEPS):
            if restart is not None and step == _STEPS // 2:
                ages[restart] = 0
                self._reset_rows(policy, state, restart)
            # The number of the episode shifts the noise and the observations.
            observations = self._observations(seeds * 3 + ages)
            chosen, state = self._call(policy, observations, state, live.copy(), seeds, ages)
            actions.append([np.array(leaf.cpu() if hasattr(leaf, "cpu") else leaf) for leaf in tree.flatten(chosen)])
            ages += 1
        return actions

    def _reset_rows(self, policy: Policy, state: Any, rows: npt.NDArray[np.bool_]) -> None:
        if state is None:
            return
        fresh = self._fresh_state(policy, len(rows))
        with no_grad():
            for ours, new in zip(tree.flatten(state), tree.flatten(fresh), strict=True):
                ours[rows] = new[rows]

    def _expect_alone(
        self, episodes: Sequence[int], actions: Actions, where: str, mask: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Assert that each row has the same actions as its episode has when it is alone in a batch."""
        for row, episode in enumerate(episodes):
            if mask is None or mask[row]:
                alone = self._alone[episode][: len(actions)]
                mine = [[leaf[row : row + 1] for leaf in leaves] for leaves in actions]
                self._expect_equal(mine, alone, f"of one episode {where}")

    def _expect_equal(self, actions: Actions, due: Actions, where: str) -> None:
        for step, (leaves, others) in enumerate(zip(actions, due, strict=True)):
            for leaf, other in zip(leaves, others, strict=True):
                if not self._same(leaf, other):
                    raise AssertionError(
                        f"actions {where} differ at step {step}: {leaf.tolist()} instead of {other.tolist()}. The "
                        "action of a row may depend only on that row of act()'s arguments."
                    )

    def _same(self, leaf: Array, other: Array) -> bool:
        if leaf.dtype.kind == "f":
            return bool(np.allclose(leaf, other, rtol=self.tolerance, atol=self.tolerance))
        return bool(np.array_equal(leaf, other))

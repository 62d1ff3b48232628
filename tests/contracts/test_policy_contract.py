"""The project's policies keep the policies' contract, and the suite notices policies that do not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_eval import EvalConfig
from rl_eval.errors import PolicyError
from rl_eval.testing import PolicyContract
from tests.chunk_world import config as chunks

Array = npt.NDArray[Any]
WEIGHTS = Path(__file__).parents[2] / "configs" / "weights" / "cartpole_ppo_early.safetensors"


class TestTrainedNetwork(PolicyContract):
    """Discrete actions, the greatest logit of a network that was trained."""

    config = EvalConfig().environment("CartPole-v1").policy("rl_eval.policies.mlp:make_mlp", weights=WEIGHTS)


class TestSampledNetwork(PolicyContract):
    """Discrete actions, sampled."""

    config = EvalConfig().environment("CartPole-v1").policy("rl_eval.policies.mlp:make_mlp", deterministic=False)


class TestGaussianNetwork(PolicyContract):
    """Continuous actions, sampled, from normalized observations."""

    config = (
        EvalConfig()
        .environment("Pendulum-v1")
        .policy("rl_eval.policies.mlp:make_mlp", policy_kwargs={"normalize_observations": True}, deterministic=False)
    )


class TestRecurrent(PolicyContract):
    """A recurrent state, the greatest logit."""

    config = EvalConfig().environment("CartPole-v1").policy("rl_eval.testing:make_gru")


class TestRecurrentSampled(PolicyContract):
    """A recurrent state, sampled."""

    config = EvalConfig().environment("CartPole-v1").policy("rl_eval.testing:make_gru", deterministic=False)


class TestChunks(PolicyContract):
    """Chunks of actions, sampled."""

    config = chunks(4, 3).policy(policy_kwargs={"sampled": True}, deterministic=False)


class TestNested(PolicyContract):
    """Nested observations, a plain function."""

    config = EvalConfig().environment("rl_eval.testing:dict_observation").policy("rl_eval.testing:make_dict_policy")


# ------------------------------------------------------------------------------ broken policies


class Sound:
    """A policy of its own, to break: it remembers the sum of what it saw, and has a bit of noise."""

    def initial_state(self, batch_size: int) -> Array:
        return np.zeros(batch_size)

    def act(self, observations: Array, state: Array, live: Array, noise: Any) -> tuple[Array, Array]:
        state = self.remember(observations, state)
        return self.choose(self.score(observations, state, live) + self.draw(len(live), noise)), state

    def remember(self, observations: Array, state: Array) -> Array:
        return state + observations.sum(1)

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        return np.asarray(100 * (state + observations[:, 0]))

    def draw(self, rows: int, noise: Any) -> Array:
        return np.asarray(3 * noise.uniform(1)[:, 0])

    def choose(self, scores: Array) -> Array:
        return np.asarray(np.floor(scores), np.int64) % 2


class LooksAtItsNeighbours(Sound):
    """Subtracts the mean of the batch."""

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        return super().score(observations - observations.mean(0), state, live)


class CountsPositions(Sound):
    """Prefers an action by the number of the row."""

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        return super().score(observations, state, live) + np.arange(len(live))


class LooksAtTheDead(Sound):
    """Normalizes by the greatest row, only if not all are live."""

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        return super().score(observations, state, live) + (0 if live.all() else 1 + observations.max())


class HidesItsState(Sound):
    """Remembers in itself what belongs to the lanes."""

    memory: Any = 0.0

    def remember(self, observations: Array, state: Array) -> Array:
        if np.shape(self.memory) != state.shape:
            self.memory = state
        self.memory = self.memory + observations.sum(1)
        return np.asarray(self.memory)


class CountsCalls(Sound):
    """Goes by how often it was called."""

    calls = 0

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        self.calls += 1
        return super().score(observations, state, live) + self.calls


class OwnGenerator(Sound):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def draw(self, rows: int, noise: Any) -> Array:
        return 3 * self.rng.random(rows)


class GlobalGenerator(Sound):
    """Draws from numpy's global generator."""

    def draw(self, rows: int, noise: Any) -> Array:
        return 3 * np.random.random(rows)  # noqa: NPY002


class TorchGenerator(Sound):
    """Draws from torch's global generator."""

    def draw(self, rows: int, noise: Any) -> Array:
        return np.asarray(3 * torch.rand(rows).numpy())


class Reseeds(Sound):
    """Draws nothing, but moves the global generator."""

    def draw(self, rows: int, noise: Any) -> Array:
        np.random.seed(0)  # noqa: NPY002
        return super().draw(rows, noise)


class WritesObservations(Sound):
    """Normalizes in place."""

    def act(self, observations: Array, state: Array, live: Array, noise: Any) -> tuple[Array, Array]:
        observations *= 0.5
        return super().act(observations, state, live, noise)


class WritesTheMask(Sound):
    """Declares a lane dead."""

    def act(self, observations: Array, state: Array, live: Array, noise: Any) -> tuple[Array, Array]:
        result = super().act(observations, state, live, noise)
        live[0] = False
        return result


class HoldsALock(Sound):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class ForgetsInPickles(Sound):
    """Its copy is another policy."""

    offset = 0

    def __init__(self) -> None:
        self.offset = 1

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def score(self, observations: Array, state: Array, live: Array) -> Array:
        return super().score(observations, state, live) + self.offset


class OutOfItsSpace(Sound):
    """Chooses an action that there is not."""

    def choose(self, scores: Array) -> Array:
        return super().choose(scores) + 1


BROKEN: dict[type[Sound], str] = {
    LooksAtItsNeighbours: "test_a_row_does_not_depend_on_the_size_of_the_batch",
    CountsPositions: "test_a_row_does_not_depend_on_its_position",
    LooksAtTheDead: "test_rows_of_dead_lanes_do_not_matter",
    HidesItsState: "test_a_lane_that_starts_over_starts_afresh",
    CountsCalls: "test_acting_leaves_nothing_behind",
    OwnGenerator: "test_acting_leaves_nothing_behind",
    GlobalGenerator: "test_randomness_comes_from_the_noise_argument_alone",
    TorchGenerator: "test_randomness_comes_from_the_noise_argument_alone",
    Reseeds: "test_randomness_comes_from_the_noise_argument_alone",
    WritesObservations: "test_acting_does_not_write_into_its_arguments",
    WritesTheMask: "test_acting_does_not_write_into_its_arguments",
    HoldsALock: "test_a_pickled_copy_acts_alike",
    ForgetsInPickles: "test_a_pickled_copy_acts_alike",
    OutOfItsSpace: "test_actions_fit_the_action_space",
}


def suite_of(policy: Any) -> PolicyContract:
    """Build the suite of a live policy that samples."""
    config = EvalConfig().environment("CartPole-v1").policy(policy, deterministic=False)
    made: PolicyContract = type("Suite", (PolicyContract,), {"config": config})()
    return made


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_policy_is_noticed(broken: type[Sound]) -> None:
    """Each way of breaking the contract fails the test of that clause."""
    with pytest.raises((AssertionError, PolicyError, TypeError)):
        getattr(suite_of(broken()), BROKEN[broken])()


@pytest.mark.parametrize("test", sorted(name for name in dir(PolicyContract) if name.startswith("test_")))
def test_the_policy_that_was_broken_is_sound(test: str) -> None:
    """Without the break, every test passes: it is the break that they notice."""
    getattr(suite_of(Sound()), test)()

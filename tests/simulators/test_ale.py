"""ALE's vector environment: the seeds of ``gymnasium.make``, as far as it takes them."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval.config.settings import EnvironmentSection
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.vector_env import build_simulator
from rl_eval.scheduling.plan import EpisodePlan

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")

SEEDS, STEPS = 3, 40


def emulator_seed(seed: int) -> int:
    """Seed that gymnasium's environment gives to the emulator."""
    return int(np.random.SeedSequence(seed).generate_state(2)[1].astype(np.int32))


def single(game: str, seed: int, actions: Any) -> list[Any]:
    """Play one episode; the same preprocessing in gymnasium's wrappers."""
    env: Any = gym.make(f"ale_py:ALE/{game}-v5", frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=0)
    env = gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")
    seen: list[Any] = [(env.reset(seed=seed)[0], 0.0, False)]
    for action in actions:
        if not seen[-1][2]:
            observation, reward, terminated, *_ = env.step(action)
            seen.append((observation, reward, terminated))
    env.close()
    return seen


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_an_episode_is_that_of_gymnasium_if_its_seed_is_not_negative(game: str) -> None:
    positive = (spec for spec in EpisodePlan(99, 0) if emulator_seed(spec.seed) >= 0)
    specs = list(itertools.islice(positive, SEEDS))
    section = EnvironmentSection(env=f"ale_py:ALE/{game}-v5", env_kwargs={"noop_max": 0, "use_fire_reset": False})
    simulator = build_simulator(section, 0, 0, SEEDS)
    actions = np.random.default_rng(0).integers(0, simulator.action_space.n, (STEPS, SEEDS))
    first = simulator.restart(np.arange(SEEDS), specs)
    steps = [(first.copy(), np.zeros(SEEDS), np.zeros(SEEDS, bool))]
    for chosen in actions:
        step = simulator.step(chosen)
        steps.append((step.observations.copy(), step.rewards.copy(), step.terminated.copy()))
    assert "repeat_action_probability=0.25" in simulator.note
    simulator.close()
    for slot, spec in enumerate(specs):
        for ours, theirs in zip(steps, single(game, spec.seed, actions[:, slot]), strict=False):
            assert np.array_equal(ours[0][slot], theirs[0])
            assert (ours[1][slot], ours[2][slot]) == theirs[1:]


def test_every_seed_repeats() -> None:
    """Seeds that are negative for the emulator too: the same episode in another slot and beside others."""
    section = EnvironmentSection(env="ale_py:ALE/Breakout-v5", env_kwargs={"noop_max": 0, "use_fire_reset": False})
    simulator = build_simulator(section, 0, 0, 3)
    negative = next(spec for spec in EpisodePlan(99, 0) if emulator_seed(spec.seed) < 0)
    others = [EpisodeSpec(100 + place, place) for place in range(3)]
    played = []
    for slot in (0, 2):
        specs = [negative if place == slot else others[place] for place in range(3)]
        simulator.restart(np.arange(3), specs)
        played.append([simulator.step(np.full(3, step % 4)).observations[slot].copy() for step in range(STEPS)])
    simulator.close()
    assert np.array_equal(*played)

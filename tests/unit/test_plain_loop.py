"""Records of random worlds equal those of a plain loop, for any runner, number of environments, policy and fault."""

from __future__ import annotations

import math
import zlib
from random import Random
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import tree
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.scheduling.plan import EpisodePlan

WORLDS: Final = 100


def space_of(random: Random, depth: int = 0) -> gym.Space[Any]:
    """Return a random space: a leaf, or a dict or tuple of spaces."""
    kind = random.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return spaces.Dict({name: space_of(random, depth + 1) for name in random.sample("bazz", 2)})
    if kind == 7:
        return spaces.Tuple([space_of(random, depth + 1) for _ in range(random.randint(1, 2))])
    leaves: list[gym.Space[Any]] = [
        spaces.Box(-3, 3, random.choice([(2,), (2, 3), ()]), np.float32),
        spaces.Box(-np.inf, np.inf, (3,), np.float64),
        spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.Discrete(random.randint(2, 5), start=random.choice([0, -1, 3])),
        spaces.MultiDiscrete([random.randint(2, 4) for _ in range(2)]),
        spaces.MultiBinary(3),
    ]
    return leaves[kind]


def number(space: gym.Space[Any], value: Any) -> int:
    """Return a number that depends on each bit of a value."""
    return zlib.crc32(spaces.flatten(space, value).tobytes())


def value_of(space: gym.Space[Any], seed: int) -> Any:
    """Return a value of a space."""
    space.seed(seed)
    return space.sample()


class World(gym.Env[Any, Any]):
    """Environment with random spaces, rewards, ends and infos, which are functions of the seed and the actions."""

    condition_keys = ("shift",)
    struck: Final[set[int]] = set()
    """Seeds whose first attempt has already raised."""

    def __init__(self, number: int, faults: float = 0.0) -> None:
        random = Random(number)
        self.observation_space, self.action_space = space_of(random), space_of(random, 1)
        self.end, self.cut = random.choice([0.02, 0.1, 0.4, 1.0]), random.choice([0, 0.05])
        self.reward = random.choice([float, np.float32, int, lambda value: value * 1e12])
        self.success = random.choice(["", "is_success", "success", "last", "sometimes"])
        self.speed, self.faults = random.choice([0, 0.5, 1]), faults

    def seen(self) -> Any:
        return value_of(self.observation_space, int(self.drawn.integers(2**31)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.drawn = np.random.default_rng([seed or 0, int((options or {}).get("shift", 0))])
        self.steps, self.fault_at = 0, math.inf
        if seed is not None and seed not in self.struck and Random(seed).random() < self.faults:
            self.struck.add(seed)
            self.fault_at = seed % 5
        self.raise_at(0)
        return self.seen(), {"is_success": True, "speed": -1.0}  # Infos of a reset do not count.

    def raise_at(self, step: int) -> None:
        if step >= self.fault_at:
            raise RuntimeError("the simulator diverged")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.raise_at(self.steps)
        end, cut, success, reports, speaks = self.drawn.random(5)
        terminated, truncated, info = bool(end < self.end), bool(cut < self.cut), dict[str, Any]()
        due = {"last": terminated or truncated, "sometimes": reports < 0.5, "": False}
        if due.get(self.success, True):
            info["success" if self.success in ("success", "sometimes") else "is_success"] = bool(success < 0.5)
        if speaks < self.speed:
            info["speed"] = float(self.drawn.normal())
        reward = self.reward(self.drawn.normal() + number(self.action_space, action) % 17)
        return self.seen(), reward, terminated, truncated, info


class Chunk(NamedTuple):
    """Values of ``policy.chunk``."""

    execute: int = 1
    delay: int = 0
    horizon: int = 1


class Hashes:
    """Policy whose actions depend on each bit of the observation, and perhaps on a state and on noise.

    With a chunk, it returns the actions of several steps.
    """

    def __init__(self, world: World, recurrent: bool, chunk: Chunk | None) -> None:
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.chunk = chunk
        if recurrent:
            self.initial_state = lambda batch_size: np.zeros((batch_size, 1), np.int64)

    def choose(self, observation: Any, state: int, noise: float) -> tuple[list[Any], int]:
        found = (number(self.observation_space, observation) + state * 7919 + int(noise * 2**20)) % 2**31
        horizon = self.chunk.horizon if self.chunk else 1
        actions = [value_of(self.action_space, (found + 31 * later) % 2**31) for later in range(horizon)]
        return actions, (state * 3 + found) % 100_003

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        count = len(live)
        noises = np.zeros(count) if noise is None else noise.uniform(1)[:, 0]
        states = np.zeros(count, np.int64) if state is None else state[:, 0]
        rows = iterate(batch_space(self.observation_space, count), observations)
        chosen = [self.choose(*one) for one in zip(rows, states.tolist(), noises.tolist(), strict=True)]
        flat = [action for actions, _ in chosen for action in actions]
        batch = concatenate(self.action_space, flat, create_empty_array(self.action_space, len(flat)))
        if self.chunk:
            batch = tree.map_structure(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)
        return batch, None if state is None else np.array([[following] for _, following in chosen])


def plain_loop(world: World, policy: Hashes, plan: EpisodePlan, settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run the episodes of a plan one after the other."""
    rows, limit, (execute, delay, _) = [], settings["max_episode_steps"], policy.chunk or Chunk()
    for spec in (plan[index] for index in range(len(plan))):
        observation, _ = world.reset(**spec.reset_arguments)
        total, discounted, discount, steps, state, speed = 0.0, 0.0, 1.0, 0, 0, math.nan
        once = at_end = by = None
        terminated = False
        chosen: dict[int, list[Any]] = {}
        while not (terminated or by):
            if steps % execute == 0:
                noise = EpisodeNoise(np.array([spec.seed]), np.array([steps])).uniform(1)[0, 0]
                chosen[steps], following = policy.choose(observation, state, noise * (not settings["deterministic"]))
                state = following if hasattr(policy, "initial_state") else 0
            used = max((asked for asked in chosen if asked + delay <= steps), default=0)
            observation, reward, terminated, truncated, info = world.step(chosen[used][steps - used])
            total, discounted = total + float(reward), discounted + discount * float(reward)
            discount, steps, speed = discount * settings["gamma"], steps + 1, info.get("speed", speed)
            at_end = info.get("is_success", info.get("success", at_end))
            once = at_end if at_end is None else bool(once or at_end)
            by = "environment" if truncated else "max_episode_steps" if steps == limit and not terminated else None
        rows.append((spec.seed, total, discounted, steps, terminated, by, once, at_end, repr(speed)))
    return rows


def records(result: EvalResult) -> list[tuple[Any, ...]]:
    return [
        (
            *(one.seed, one.episode_return, one.discounted_return, one.length, one.terminated, one.truncated_by),
            *(one.success_once, one.success_at_end, repr(one.info["speed"])),
        )
        for one in result.episodes
    ]


@pytest.mark.parametrize("first", range(0, WORLDS, 10))
def test_records_are_those_of_a_plain_loop(first: int) -> None:
    for world in range(first, first + 10):
        check(world)


def chunk_of(world: int) -> Chunk | None:
    """Return no chunk in half of the worlds."""
    random = Random(world + WORLDS)
    execute = random.randint(1, 6)
    delay = random.randint(0, execute)
    return Chunk(execute, delay, execute + delay + random.randint(0, 2)) if random.random() < 0.5 else None


def check(world: int) -> None:
    random = Random(-world)
    settings = {"gamma": random.choice([1.0, 0.9]), "max_episode_steps": random.choice([1, 3, 30, 60])}
    deterministic, faults = random.random() < 0.6, random.choice([0, 0, 0.3])
    policy = Hashes(World(world), recurrent=random.random() < 0.4, chunk=chunk_of(world))
    mode, lanes = random.choice(list(AutoresetMode)), random.choice([1, 2, 3, 8, 20])
    made = EvalConfig().evaluation(num_episodes=random.choice([1, 3, 10, 40]), seed=random.randrange(2**40), **settings)
    made.evaluation(info_keys=["speed"], determinism_check=random.choice(["auto", 0.3, 1.0]))
    if policy.chunk is not None:
        made.policy(chunk=policy.chunk._asdict() | random.choice([{}, {"horizon": None}]))
    made.policy(deterministic=deterministic, inference=random.choice(["exact", "exact", "batched"]))
    if random.random() < 0.25:
        made.evaluation(conditions=[{"id": str(shift), "shift": shift} for shift in range(random.randint(1, 7))])
    if random.random() < 0.5:
        made.environment(lambda num_envs: SyncVectorEnv([lambda: World(world, faults)] * num_envs, autoreset_mode=mode))
        made.runners(runner="batched", num_envs_per_runner=lanes)
    else:
        made.environment(lambda: World(world, faults), env_reuse=random.choice(["lane", "episode"]))
        made.runners(num_envs_per_runner=lanes)
    World.struck.clear()
    result = evaluate(made, policy)
    assert result.determinism.passed is not False
    expected = plain_loop(World(world), policy, made.build().plan(), settings | {"deterministic": deterministic})
    assert records(result) == expected, f"world {world}"

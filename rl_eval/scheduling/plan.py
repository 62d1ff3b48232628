"""Plan of an evaluation: its episodes, and the seed of each episode.

A plan is fixed before anything runs. The seed of an episode depends only on its index and the root seed. A permutation
of the 31-bit integers, with the root seed as its key, maps the index to the seed. It maps different indices to
different seeds, so N episodes have N distinct seeds. With matchups, the episodes of one turn share a seed. The
permutations of two root seeds are unrelated. With ``root + index`` instead, neighbouring root seeds would share most
episodes. 31 bits suit every environment that converts its seed to an int32.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeSpec
from rl_eval.scheduling.conditions import Conditions
from rl_eval.scheduling.matchups import Matchups

MAX_EPISODES: Final = 2**31
"""Number of distinct seeds, which is the maximum number of episodes of a plan."""

_BITS: Final = 31
_MASK: Final = np.uint64(2**_BITS - 1)
_ROUNDS: Final = 4


def _round_keys(seed: int) -> npt.NDArray[np.uint64]:
    """Return the keys of all rounds: outputs of SplitMix64, each computed from the previous output."""
    keys = [np.array([seed], np.uint64)]
    for _ in range(2 * _ROUNDS):
        keys.append(mix(keys[-1] + GAMMA))
    return np.concatenate(keys[1:])


def episode_seeds(seed: int, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Permute indices into seeds.

    Each round adds a key, multiplies by an odd key, and adds the high bits to the low bits by XOR. All three operations
    are bijections on 31 bits, so the result is a bijection, too.

    Args:
        seed: Root seed of the evaluation, 0 <= seed < 2**64.
        indices: Episode indices, shape (n,), 0 <= index < 2**31.

    Returns:
        Seeds, shape (n,), distinct for distinct indices, 0 <= value < 2**31.
    """
    x = indices.astype(np.uint64)
    keys = _round_keys(seed) >> np.uint64(33)
    for offset, factor in zip(keys[::2], keys[1::2] | np.uint64(1), strict=True):
        x = (x + offset) & _MASK
        x = (x * factor) & _MASK
        x ^= x >> np.uint64(16)
    return x.astype(np.int64)


class EpisodePlan:
    """The ordered list of episodes to run.

    Args:
        num_episodes: Number of episodes, at least 1.
        seed: Root seed, at least 0.
        first_index: Index of the first episode in the permutation of the root seed. Episode i has the seed of episode
            ``first_index + i`` of a plan that starts at 0. So plans over ranges that do not overlap have no seed in
            common. Use one range to choose a policy, and another, held-out range to evaluate the chosen policy.
        matchups: Matchups, which assign a seating to each index of the permutation; None without seats. The seatings of
            one turn share a seed, so a plan must contain whole turns.
        conditions: Conditions, which assign an initial condition to each index of the permutation; None without
            conditions.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        num_episodes: int,
        seed: int = 0,
        first_index: int = 0,
        matchups: Matchups | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        num_episodes, seed, first_index = map(operator.index, (num_episodes, seed, first_index))
        if not 1 <= num_episodes <= MAX_EPISODES:
            problem = f"evaluation.num_episodes is {num_episodes}"
            fix = f"Set it to at least 1 and at most {MAX_EPISODES}."
            raise ConfigError(problem, key="evaluation.num_episodes", value=num_episodes, fix=fix)
        if not 0 <= seed < 2**64:
            problem, fix = f"evaluation.seed is {seed}", "Set it to an integer from 0 to 2**64 - 1."
            raise ConfigError(problem, key="evaluation.seed", value=seed, fix=fix)
        if not 0 <= first_index <= MAX_EPISODES - num_episodes:
            problem = f"evaluation.first_index is {first_index}"
            fix = f"With {num_episodes} episodes, set it to an integer from 0 to {MAX_EPISODES - num_episodes}."
            raise ConfigError(problem, key="evaluation.first_index", value=first_index, fix=fix)
        self.num_episodes = num_episodes
        self.seed = seed
        self.first_index = first_index
        self.matchups = matchups
        self.conditions = conditions
        if matchups is not None:
            _check_turns(num_episodes, first_index, matchups)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> EpisodePlan:
        """Create a plan from the output of :meth:`to_dict`. Missing keys get their default values."""
        turns, rows = described.get("matchups"), described.get("conditions")
        return cls(
            described["num_episodes"],
            described["seed"],
            described.get("first_index", 0),
            None if turns is None else Matchups.from_lists(turns),
            None if rows is None else Conditions.from_dict(rows),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the plan as plain JSON values."""
        seated = {} if self.matchups is None else {"matchups": self.matchups.to_lists()}
        starts = {} if self.conditions is None else {"conditions": self.conditions.to_dict()}
        return {"num_episodes": len(self), "seed": self.seed, "first_index": self.first_index, **seated, **starts}

    @cached_property
    def seeds(self) -> npt.NDArray[np.int64]:
        """Seed of every episode, shape (num_episodes,)."""
        positions = np.arange(self.first_index, self.first_index + self.num_episodes)
        if self.matchups is not None:
            positions = self.matchups.seed_positions(positions)
        return episode_seeds(self.seed, positions)

    @cached_property
    def seed_groups(self) -> npt.NDArray[np.int64] | None:
        """Number of each episode's seed, counted from 0, shape (num_episodes,); None if no episodes share a seed."""
        if self.matchups is None or len(self.matchups.round) == len(self.matchups.turns):
            return None
        positions = np.arange(self.first_index, self.first_index + self.num_episodes)
        numbers = self.matchups.seed_positions(positions)
        return np.asarray(numbers - numbers[0], np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over indices, seeds, seatings and conditions.

        Two plans have the same fingerprint only if they are equal.
        """
        digest = hashlib.sha256(b"rl_eval plan 1")
        digest.update(np.ascontiguousarray(self.seeds, dtype="<i8").tobytes())
        if self.matchups is not None:
            place = self.first_index % len(self.matchups.round)
            digest.update(json.dumps([place, self.matchups.to_lists()]).encode())
        if self.conditions is not None:
            place = self.first_index % len(self.conditions.ids)
            digest.update(json.dumps(["conditions", place, self.conditions.digest]).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_episodes

    def __getitem__(self, index: int) -> EpisodeSpec:
        if not 0 <= index < self.num_episodes:
            raise IndexError(f"episode {index} is outside a plan of {self.num_episodes}")
        position = self.first_index + index
        seating = None if self.matchups is None else self.matchups.seating(position)
        condition = None if self.conditions is None else self.conditions.condition(position)
        return EpisodeSpec(index, self.seeds.item(index), seating, condition, self.first_index)

    @cached_property
    def condition_ids(self) -> tuple[str, ...]:
        """Id of the condition of each episode; empty without conditions."""
        if self.conditions is None:
            return ()
        ids, positions = self.conditions.ids, range(self.first_index, self.first_index + self.num_episodes)
        return tuple(ids[position % len(ids)] for position in positions)

    def __repr__(self) -> str:
        start = f", first_index={self.first_index}" if self.first_index else ""
        seated = f", {len(self.matchups.turns)} matchups" if self.matchups else ""
        starts = f", {len(self.conditions.rows)} conditions" if self.conditions else ""
        return f"EpisodePlan(num_episodes={self.num_episodes}, seed={self.seed}{start}{seated}{starts})"


def _check_turns(num_episodes: int, first_index: int, matchups: Matchups) -> None:
    if num_episodes < len(matchups.round):
        problem = (
            f"evaluation.num_episodes is {num_episodes}, but one episode of each seating needs {len(matchups.round)}"
        )
        fix = f"Set it to at least {len(matchups.round)}."
        raise ConfigError(problem, key="evaluation.num_episodes", value=num_episodes, fix=fix)
    for key, start, position in (
        ("first_index", 0, first_index),
        ("num_episodes", first_index, first_index + num_episodes),
    ):
        if (whole := matchups.next_turn(position)) != position:
            problem = (
                f"evaluation.{key} is {position - start}, which splits a group of episodes with the same seed, one for "
                "each order of the seats"
            )
            fix = f"Set it to {whole - start}."
            raise ConfigError(problem, key=f"evaluation.{key}", value=position - start, fix=fix)


GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
"""Step of the counter of SplitMix64: 2**64 divided by the golden ratio."""


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output of the generator SplitMix64 for each value of its counter, as an array of the same shape.

    The function is a bijection on 64 bits.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)

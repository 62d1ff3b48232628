"""Plays short episodes with made-up actions and finds the first moment at which two of them differ.

An episode is played as a generator, so that a check decides when to look at the world between two steps: that is
how two environments are stepped in turn, and how global state is compared before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import tree

from rl_eval.episode import EpisodeSpec
from rl_eval.runners.lane import Lane

__all__ = ["MAX_STEPS", "Moment", "Player", "first_difference", "sample_actions"]

MAX_STEPS: Final = 100
_MAX_SECONDS: Final = 3.0


class Moment(NamedTuple):
    """What an environment returned; step 0 is the reset."""

    step: int
    observation: Any
    reward: float
    terminated: bool
    truncated: bool


@final
class Player:
    """Plays episodes in one environment.

    Args:
        env: The environment.
        actions: What to do, step by step.
    """

    def __init__(self, env: gym.Env[Any, Any], actions: Sequence[Any]) -> None:
        self.env = env
        self._lane = Lane(0, 0)
        self._lane.attach(env)
        self._actions = actions
        self.steps = 0
        self.step_seconds = 0.0

    def play(self, episode: EpisodeSpec, attempt: int) -> Iterator[Moment]:
        """Reset, then step until the episode ends, the actions are used up, or seconds have passed."""
        started = perf_counter()
        if self._lane.begin_episode is not None:
            self._lane.begin_episode(episode.index, episode.seed, attempt)
        observation, _ = self.env.reset(seed=episode.seed)
        yield Moment(0, copy.deepcopy(observation), 0.0, False, False)
        for step, action in enumerate(self._actions, 1):
            then = perf_counter()
            observation, reward, terminated, truncated, _ = self.env.step(copy.deepcopy(action))
            now = perf_counter()
            self.steps += 1
            self.step_seconds += now - then
            yield Moment(step, copy.deepcopy(observation), float(reward), bool(terminated), bool(truncated))
            if terminated or truncated or now - started > _MAX_SECONDS:
                return


def sample_actions(space: gym.Space[Any]) -> list[Any]:
    """Draw actions from a space, always the same, without touching the generator of the environment's own space."""
    space = copy.deepcopy(space)
    space.seed(0)
    return [space.sample() for _ in range(MAX_STEPS)]


def first_difference(ours: Sequence[Moment], theirs: Sequence[Moment]) -> str:
    """Name the first difference of two episodes as far as both were played; empty if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        where = f"in step {a.step}" if a.step else "after reset"
        if not _equal(a.observation, b.observation):
            return f"the observation {where}"
        if a.reward != b.reward and not (np.isnan(a.reward) and np.isnan(b.reward)):
            return f"the reward {where}: {a.reward!r} and {b.reward!r}"
        if a[3:] != b[3:]:
            return f"the end of the episode {where}"
    return ""


def _equal(ours: Any, theirs: Any) -> bool:
    a, b = tree.flatten(ours), tree.flatten(theirs)
    return len(a) == len(b) and all(_bits(x) == _bits(y) for x, y in zip(a, b, strict=True))


def _bits(leaf: Any) -> tuple[Any, ...]:
    array = np.asarray(leaf)
    return array.dtype.str, array.shape, array.tobytes()

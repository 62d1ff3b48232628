"""Plays whole episodes with made-up actions and finds the first moment at which two of them differ.

An episode is played as a generator, so that a check decides when to look at the world between two steps: that is
how two environments are stepped in turn, and how global state is compared before and after. What is kept of an
observation is a digest, so that long episodes take little memory and other processes can send theirs.
"""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree
import xxhash

from rl_eval.episode import EpisodeSpec
from rl_eval.runners.lane import Lane
from rl_eval.runners.spaces import ObservationBatch

__all__ = ["MAX_SECONDS", "MAX_STEPS", "Moment", "Player", "digest", "first_difference", "sampled_actions"]

MAX_STEPS: Final = 10_000
MAX_SECONDS: Final = 3.0


class Moment(NamedTuple):
    """What an environment returned; step 0 is the reset."""

    step: int
    observation: bytes
    """A digest."""
    reward: float
    terminated: bool
    truncated: bool


@final
class Player:
    """Plays episodes in one environment.

    Args:
        env: The environment.
        max_steps: Where an episode is cut.
    """

    def __init__(self, env: gym.Env[Any, Any], max_steps: int) -> None:
        self.env = env
        self._lane = Lane(0, 0)
        self._lane.attach(env)
        self._batch = ObservationBatch(env.observation_space, 1)
        self._max_steps = max_steps
        self.steps = 0
        self.step_seconds = 0.0
        self.lengths: list[int] = []
        """Steps of the episodes that ended by themselves."""
        self.longest = 0
        self.misfit = ""
        """How the first observation that is outside of its space is so."""
        self.info_keys: set[str] = set()

    def play(self, episode: EpisodeSpec, attempt: int) -> Iterator[Moment]:
        """Reset, then step until the episode ends, is cut, or seconds have passed."""
        started = perf_counter()
        if self._lane.begin_episode is not None:
            self._lane.begin_episode(episode.index, episode.seed, attempt)
        observation, _ = self.env.reset(seed=episode.seed)
        yield Moment(0, self._seen(observation, 0), 0.0, False, False)
        actions = sampled_actions(self.env.action_space, episode.index)
        for step in range(1, self._max_steps + 1):
            action = next(actions)
            then = perf_counter()
            observation, reward, terminated, truncated, info = self.env.step(action)
            now = perf_counter()
            self.steps += 1
            self.step_seconds += now - then
            self.longest = max(self.longest, step)
            self.info_keys.update(info)
            yield Moment(step, self._seen(observation, step), float(reward), bool(terminated), bool(truncated))
            if terminated or truncated:
                self.lengths.append(step)
                return
            if now - started > MAX_SECONDS:
                return

    def _seen(self, observation: Any, step: int) -> bytes:
        """Look at an observation as a runner does, and at its place in the space; return its digest."""
        self._batch.write(0, observation)
        if not self.misfit and (misfit := _misfit(self.env.observation_space, observation, "observation")):
            self.misfit = f"{misfit}, in step {step}" if step else f"{misfit}, after reset"
        return digest(observation)


def sampled_actions(space: gym.Space[Any], index: int) -> Iterator[Any]:
    """Draw the actions of an episode, always the same, and leave the generator of the environment's own space alone."""
    space = copy.deepcopy(space)
    space.seed(index)
    while True:
        yield space.sample()


def first_difference(ours: Sequence[Moment], theirs: Sequence[Moment]) -> str:
    """Name the first difference of two episodes as far as both were played; empty if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        where = f"in step {a.step}" if a.step else "after reset"
        if a.observation != b.observation:
            return f"the observation {where}"
        if a.reward != b.reward and not (np.isnan(a.reward) and np.isnan(b.reward)):
            return f"the reward {where}: {a.reward!r} and {b.reward!r}"
        if a[3:] != b[3:]:
            return f"the end of the episode {where}"
    return ""


def digest(observation: Any) -> bytes:
    """Return a digest of every bit of an observation, with dtypes and shapes."""
    found = xxhash.xxh3_128()
    for leaf in tree.flatten(observation):
        array = np.asarray(leaf)
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(array.tobytes())
    return found.digest()


def _misfit(space: gym.Space[Any], observation: Any, name: str) -> str:
    """Say in which way an observation is outside of its space; empty if it is inside."""
    if isinstance(space, gym.spaces.Dict) and isinstance(observation, Mapping):
        parts = (_misfit(part, observation[key], f"{name}[{key!r}]") for key, part in space.spaces.items())
        return next(filter(None, parts), "")
    if isinstance(space, gym.spaces.Tuple) and isinstance(observation, (tuple, list)):
        pairs = enumerate(zip(space.spaces, observation, strict=False))
        return next(filter(None, (_misfit(part, one, f"{name}[{place}]") for place, (part, one) in pairs)), "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of lists, which runners take as well.
        if space.contains(observation):
            return ""
    if isinstance(space, gym.spaces.Box):
        return f"the {name} {_outside(space, np.asarray(observation))}"
    return f"the {name} is {reprlib.repr(observation)}, which is not in {space}"


def _outside(space: gym.spaces.Box, array: npt.NDArray[Any]) -> str:
    if not np.can_cast(array.dtype, space.dtype or np.float64):
        return f"has dtype {array.dtype}, but its space {space.dtype}"
    place = tuple(np.argwhere(~((array >= space.low) & (array <= space.high)))[0])
    where = f" at {', '.join(map(str, place))}" if place else ""
    return f"is {array[place]:g}{where}, but its space allows {space.low[place]:g} to {space.high[place]:g}"

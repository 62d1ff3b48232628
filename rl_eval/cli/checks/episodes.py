"""Whole episodes with made-up actions, in a runner's own words, and the first moment at which two of them differ.

The player is a runner, so that whatever an evaluation would refuse or note about an environment is refused and noted
here. An episode is played as a generator, so that a check decides when to look at the world between two steps: that
is how two environments are stepped in turn, and how global state is compared before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.episode import EpisodeSpec, Lease, RunReport, Truncation, without_place
from rl_eval.errors import EnvError
from rl_eval.policies.function import CallablePolicy
from rl_eval.protocols import Policy
from rl_eval.runners import EvalRunner
from rl_eval.settings import EvalSettings, PolicySection
from rl_eval.trace import first_divergence

__all__ = ["MAX_SECONDS", "Player", "Seen", "Trace", "first_difference", "for_player", "sampled_actions"]

MAX_STEPS: Final = 10_000
MAX_SECONDS: Final = 3.0

Trace = npt.NDArray[np.void]


@dataclass
class Seen:
    """What players saw beside the traces of their episodes."""

    steps: int = 0
    step_seconds: float = 0.0
    longest: int = 0
    lengths: list[int] = field(default_factory=list)
    """Steps of the episodes that ended by themselves."""
    notes: dict[str, str] = field(default_factory=dict)
    """The runner's notes, each with the first place, by their text without it."""
    info_keys: set[Any] = field(default_factory=set)


@final
class Player(EvalRunner):
    """Runner of one environment whose actions are made up, and that looks at every observation.

    Args:
        settings: What :func:`for_player` made.
        seen: Takes what is seen.
    """

    def __init__(self, settings: EvalSettings, seen: Seen) -> None:
        super().__init__(settings, 0)
        self.lane = self._lanes[0]
        self._seen = seen

    @property
    def trace(self) -> Trace:
        """Trace of the last episode, as far as it was played."""
        return self._trace.trace

    def make_policy(self, policy: Any = None) -> Policy:
        """Build a policy that is never asked."""
        return CallablePolicy(lambda observations: None)

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.0, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Drop what is live and reset for the first lease; without one take a step, whatever the budget."""
        if leases:
            self._abort()
            self._queue.append(leases[0])
            self._begin(self.lane)
        else:
            self._turn_started = perf_counter()
            if self._try_env_step(self.lane, next(self._actions)):
                self.lane.step_seconds += perf_counter() - self._turn_started
        self._reject_nan()
        return self._report()

    def played(self, episode: EpisodeSpec, attempt: int) -> Trace:
        """Play an episode without a pause, and return its trace."""
        for _ in self.play(episode, attempt):
            pass
        return self.trace

    def play(self, episode: EpisodeSpec, attempt: int) -> Iterator[None]:
        """Reset, then step until the episode ends, is cut, or seconds have passed; pause after each.

        Raises:
            EnvError: The attempt failed.
        """
        started = perf_counter()
        self._take(self.run([Lease(*episode, attempt, 0, traced=True)]))
        assert self.lane.env is not None
        assert self.lane.trace is not None
        self._trace = self.lane.trace
        self.lane.step = self._noticing_infos(self.lane.step)
        self._actions = sampled_actions(self.lane.env.action_space, episode.index)
        yield
        while self.lane.lease is not None and perf_counter() - started <= MAX_SECONDS:
            self._take(self.run())
            yield

    def _take(self, report: RunReport) -> None:
        seen = self._seen
        seen.steps += report.env_steps
        seen.step_seconds += report.step_seconds
        seen.longest = max(seen.longest, self.lane.length)
        for text in report.notes:
            seen.notes.setdefault(without_place(text), text)
        if report.faults:
            raise EnvError(f"{report.faults[0].error_type}: {report.faults[0].message}")
        ended = report.rows[report.rows["truncated_by"] != Truncation.MAX_EPISODE_STEPS]
        seen.lengths += ended["length"].tolist()

    def _noticing_infos(self, step: Any) -> Any:
        def noticing(action: Any) -> Any:
            result = step(action)
            with suppress(TypeError, IndexError):  # Whether it is a step's result is for the runner to say.
                self._seen.info_keys.update(result[4])
            return result

        return noticing


def for_player(settings: EvalSettings) -> EvalSettings:
    """Return settings of one lane that is left as it is between episodes, without the policy, which may not pickle."""
    steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
    return settings.model_copy(
        update={
            "environment": settings.environment.model_copy(update={"env_reuse": "lane"}),
            "policy": PolicySection(actions=settings.policy.actions),
            "runners": settings.runners.model_copy(update={"num_envs_per_runner": 1}),
            "evaluation": settings.evaluation.model_copy(update={"max_episode_steps": steps}),
        }
    )


def sampled_actions(space: gym.Space[Any], index: int) -> Iterator[Any]:
    """Draw the actions of an episode, always the same, and leave the generator of the environment's own space alone."""
    space = copy.deepcopy(space)
    space.seed(index)
    while True:
        yield space.sample()


def first_difference(ours: Trace, theirs: Trace) -> str:
    """Name the first difference of two episodes as far as both were played; empty if there is none."""
    common = min(len(ours), len(theirs))
    parted = first_divergence(ours[:common], theirs[:common])
    if parted is None:
        return ""
    where = f"in step {parted.step}" if parted.step else "after reset"
    if parted.what in {"terminated", "truncated"}:
        return f"the end of the episode {where}"
    if parted.what == "reward":
        where += f": {float(ours['reward'][parted.step])!r} and {float(theirs['reward'][parted.step])!r}"
    return f"the {parted.what} {where}"

"""Whole episodes with made-up actions, in a runner's own words, and the first moment at which two of them differ.

The player is a runner, so that whatever an evaluation would refuse or note about an environment is refused and noted
here. An episode is played as a generator, so that a check decides when to look at the world between two steps: that
is how two environments are stepped in turn, and how global state is compared before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import EnvError
from rl_eval.policies.function import CallablePolicy
from rl_eval.protocols import Policy
from rl_eval.records.episode import Lease, RunReport
from rl_eval.records.trace import first_divergence
from rl_eval.runners import EvalRunner
from rl_eval.runners.action_masks import ActionMasks

__all__ = ["MAX_SECONDS", "Player", "Trace", "first_difference", "for_player", "sampled_actions"]

MAX_STEPS: Final = 10_000
MAX_SECONDS: Final = 3.0

Trace = npt.NDArray[np.void]


@final
class Player(EvalRunner):
    """Runner of one environment whose actions are made up, and that looks at every observation.

    Args:
        settings: What :func:`for_player` made.
    """

    def __init__(self, settings: EvalSettings) -> None:
        super().__init__(settings, 0)
        self.lane = self._lanes[0]
        self.info_keys: set[Any] = set()

    def make_policy(self, policy: Any = None) -> Policy:
        """Build a policy that is never asked."""
        return CallablePolicy(np.zeros_like)

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Play episodes one after the other, whatever the budget, and report what was seen since the last report."""
        for lease in leases:
            self.played(lease)
        return self._report()

    def played(self, lease: Lease) -> Trace:
        """Play an episode without a pause, and return its trace."""
        list(self.play(lease))
        return self.trace

    @property
    def trace(self) -> Trace:
        """Trace of the last episode, as far as it was played."""
        return self._recording.trace

    def play(self, lease: Lease) -> Iterator[None]:
        """Reset, then step until the episode ends, is cut, or seconds have passed; pause after each.

        Raises:
            EnvError: The attempt failed.
        """
        started, lane = perf_counter(), self.lane
        self._abort()
        self._queue.append(lease._replace(traced=True))
        self._begin(lane)
        self._look()
        assert lane.trace is not None
        self._recording = lane.trace
        lane.step = partial(self._notice_info, lane.step)
        masks = lane.env if isinstance(lane.env, ActionMasks) else None
        actions = sampled_actions(self.spaces[1], lease.index, masks)
        yield
        while lane.lease is not None and perf_counter() - started <= MAX_SECONDS:
            action = next(actions)
            self._turn_started = perf_counter()
            if self._try_env_step(lane, action):
                lane.step_seconds += perf_counter() - self._turn_started
            self._look()
            yield

    def _look(self) -> None:
        """Look at the observation, and at what went wrong before."""
        self._inference.observations.forget_notes()  # Of many observations a runner looks at a few.
        self._reject_nan()
        if faults := self._pending.faults:
            fault = faults.pop()
            raise EnvError(f"{fault.error_type}: {fault.message}")

    def _note_limit(self, environments: int | None) -> None:
        """Note nothing: ``max_episode_steps`` is that of the check."""

    def _notice_info(self, step: Any, action: Any) -> Any:
        result = step(action)
        with suppress(TypeError, IndexError):  # Whether it is a step's result is for the runner to say.
            self.info_keys.update(result[4])
        return result


def for_player(settings: EvalSettings) -> EvalSettings:
    """Return settings of one lane that is left as it is between episodes, without the policy, which may not pickle."""
    steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
    return with_values(
        settings.model_copy(update={"policy": PolicySection(actions=settings.policy.actions)}),
        environment={"env_reuse": "lane"},
        runners={"num_envs_per_runner": 1},
        evaluation={"max_episode_steps": steps},
    )


def sampled_actions(space: gym.Space[Any], index: int, masks: ActionMasks | None = None) -> Iterator[Any]:
    """Draw the actions of an episode, always the same, and leave the generator of the environment's own space alone."""
    space = copy.deepcopy(space)
    space.seed(index)
    while True:
        yield space.sample() if masks is None else space.sample(masks.sample_mask)


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

"""Verdicts on failures: who is charged, and whether a runner is replaced, excluded, or the end of its group.

Everything that can go wrong outside of an environment's call is judged here, and nowhere else, by pure functions:

=========================================  =========  =========  =========  =====
failure                                    charge     replace    exclude    end
=========================================  =========  =========  =========  =====
start or call raised a ``UsageError``                                       yes
start or call raised, on every position                                     yes
start or call raised, elsewhere it works              yes
process died, an episode is the cause      episode    yes
process died or was silent, cause unknown             yes
node was pre-empted                                   yes (free)
other floats than the group's                                    yes
=========================================  =========  =========  =========  =====

*Replace* counts against ``max_runner_restarts`` unless an episode is charged or the node was pre-empted. What an
environment or a policy raises during an episode is no failure of a runner: the schedule charges the episode, and
excludes a runner on which every attempt fails while another one completes episodes (:func:`exclusion_streak`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from typing_extensions import assert_never

from rl_eval.errors import NumericsMismatch, UsageError

__all__ = [
    "CallFailed",
    "Failure",
    "RunnerDied",
    "StartFailed",
    "Verdict",
    "exclusion_streak",
    "judge",
    "silence_limit",
    "suspicious_streak",
]

_SHORTEST_STREAK: Final = 3
_CHANCE: Final = 0.001
"""Probability below which a streak of failures is no accident."""
_SLACK_S: Final = 1.0
_FIRST_CALL_GRACE_S: Final = 30.0
"""The first call also probes the policy and builds environments."""


# ------------------------------------------------------------------------------ failures and verdicts


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A runner could not be built."""

    error: BaseException
    everywhere: bool
    """Whether no position of the group could start so far."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call on a runner raised."""

    error: BaseException
    everywhere: bool
    """Whether it raised on every position that is still there."""


@dataclass(frozen=True, slots=True)
class RunnerDied:
    """A runner's process is gone, or was ended because a deadline passed or it was silent for too long."""

    charged: bool = False
    """Whether an episode was charged with it."""
    preempted: bool = False
    """Whether its node was taken away."""


Failure = StartFailed | CallFailed | RunnerDied


class Verdict(Enum):
    """What becomes of a runner that failed, and of its group."""

    REPLACE = "replace"
    """Another one takes its place after a back-off, within the restart budget of the position."""
    REPLACE_FREE = "replace free"
    """Another one takes its place, and the budget is left alone."""
    EXCLUDE = "exclude"
    """Its position stays empty."""
    END = "end"
    """Whoever waits for the call, or for the group where nobody does, gets the error."""


def judge(failure: Failure) -> Verdict:
    """Return what becomes of a runner."""
    match failure:
        case RunnerDied(charged, preempted):
            return Verdict.REPLACE_FREE if charged or preempted else Verdict.REPLACE
        case StartFailed(error, everywhere) | CallFailed(error, everywhere):
            if isinstance(error, NumericsMismatch):
                return Verdict.EXCLUDE
            return Verdict.END if everywhere or isinstance(error, UsageError) else Verdict.REPLACE
        case _:
            assert_never(failure)


# ------------------------------------------------------------------------------ limits


def exclusion_streak(lanes: int, completed: int, failed: int) -> float:
    """Return how many attempts must fail in a row, with none completed, until a runner is excluded.

    Args:
        lanes: Of the runner.
        completed: Episodes that others have completed meanwhile.
        failed: Attempts that have failed meanwhile on runners that do complete episodes.

    Returns:
        At least 3 and at least one per lane; more where attempts fail on the others too, so that the streak is no
        accident; infinite while the others complete nothing.
    """
    rate = (failed + 1) / (completed + failed + 2)
    return max(suspicious_streak(lanes), math.log(_CHANCE) / math.log(rate)) if completed else math.inf


def suspicious_streak(lanes: int) -> int:
    """Return after how many failures in a row a runner gets nothing more until another one has ended an attempt."""
    return max(_SHORTEST_STREAK, lanes)


def silence_limit(limit_s: float, slice_s: float, *, probed: bool) -> float:
    """Return after how many seconds without an answer a runner is ended.

    Args:
        limit_s: Longest time that one step may take.
        slice_s: How long a call works.
        probed: Whether it has answered a call with the weights that it has.
    """
    return limit_s + slice_s + _SLACK_S + (0.0 if probed else _FIRST_CALL_GRACE_S)

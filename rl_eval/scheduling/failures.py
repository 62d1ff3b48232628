"""Verdicts on failures: which episode is charged, and whether the runner is replaced, excluded, or ends its group.

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
excludes a runner on which every attempt fails while another one completes episodes (:func:`chance_of_streak`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, final

from rl_eval.errors import NumericsMismatch, UsageError
from rl_eval.records.episode import MESSAGE_CAP, TRACEBACK_CAP, Fault, FaultCause, Phase
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport, LaneEntry

__all__ = [
    "ACCIDENT",
    "FailFast",
    "LossAttribution",
    "Verdict",
    "attribute_loss",
    "chance_of_streak",
    "judge",
    "silence_limit",
    "suspicious_streak",
]

ACCIDENT: Final = 0.001
"""Probability of a streak of failures below which it is no accident."""
_SHORTEST_STREAK: Final = 3
_SLACK_S: Final = 1.0
_FIRST_CALL_GRACE_S: Final = 30.0
"""The first call also probes the policy and builds environments."""


# ------------------------------------------------------------------------------ verdicts


class Verdict(Enum):
    """Consequence of an error for the runner, and for its group."""

    REPLACE = "replace"
    """Another one takes its place after a back-off, within the restart budget of the position."""
    EXCLUDE = "exclude"
    """Its position stays empty."""
    END = "end"
    """Whoever waits for the call, or for the group where nobody does, gets the error."""


def judge(error: BaseException, *, everywhere: bool) -> Verdict:
    """Return what becomes of a runner that could not be built, or on which a call raised.

    Args:
        error: What was raised.
        everywhere: Whether no position of the group could start so far, or the call raised on every one that is left.
    """
    if isinstance(error, NumericsMismatch):
        return Verdict.EXCLUDE
    return Verdict.END if everywhere or isinstance(error, UsageError) else Verdict.REPLACE


# ------------------------------------------------------------------------------ limits


def chance_of_streak(streak: int, live: int, completed: int, failed: int) -> float:
    """Return how probable it is that a sound runner has only failures to show, or a bound that is above it.

    What the other runners have come to says how often attempts fail: with a uniform prior the rate has the distribution
    ``Beta(1 + failed, 1 + completed)``, and the streak the beta-binomial one. Failures come early and completed
    episodes late, so attempts still under way may all complete: any ``streak`` of ``streak + live`` may have failed.

    Args:
        streak: Attempts that failed on the runner, with none completed.
        live: Attempts under way on it.
        completed: Episodes that others have completed meanwhile.
        failed: Attempts that have failed meanwhile on runners that do complete episodes.
    """
    if not completed:
        return 1.0
    one_way = _log_beta(1 + failed + streak, 1 + completed) - _log_beta(1 + failed, 1 + completed)
    return math.exp(min(0.0, one_way + _log_choose(streak + live, live)))


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


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


_FEWEST: Final = 20
_PER_LANE: Final = 4
"""A runner holds up to two leases per lane, and their first attempts may all fail before a retry completes."""
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_PACKAGE: Final = Path(__file__).parents[1]


@final
class FailFast:
    """Counter of the first attempts of an evaluation, as long as all of them fail with one error at one place.

    Args:
        lanes: Lanes of all runners: each may fail four times before the evaluation ends.
    """

    def __init__(self, lanes: int) -> None:
        self._limit = max(_FEWEST, _PER_LANE * lanes)
        self._first: Fault | None = None
        self._count = 0
        self._over = False

    def completed(self) -> None:
        """An episode completed: from now on nothing ends the evaluation early."""
        self._over = True

    def failed(self, faults: Iterable[Fault]) -> str:
        """Count failed attempts; return why the evaluation ends, empty if it goes on."""
        for fault in faults:
            self._first = self._first or fault
            self._over = self._over or _kind(fault) != _kind(self._first)
            self._count += 1
        if self._over or self._first is None or self._count < self._limit:
            return ""
        first = self._first
        where = f" at {':'.join(place)}" if (place := _place(first)) else ""
        return (
            f"{first.error_type}: {first.message}: all of the first {self._count} attempts failed like this in "
            f"{first.phase}{where} ({first.cause}); fault_tolerance.fail_fast=false goes on all the same"
        )


def _kind(fault: Fault) -> tuple[object, ...]:
    return fault.error_type, fault.cause, fault.phase, _place(fault)


def _place(fault: Fault) -> tuple[str, ...]:
    """Return file and line of the innermost frame that is not of this package, empty if there is none."""
    frames = [frame for frame in _FRAME.findall(fault.traceback) if _PACKAGE not in Path(frame[0]).parents]
    return frames[-1] if frames else ()


@dataclass(frozen=True, slots=True)
class LossAttribution:
    """Attribution of one lost runner; pairs are (index, attempt)."""

    charged: tuple[tuple[int, int], ...] = ()
    suspects: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    """One for each of both, and for a death in ``close``; none of them charged yet."""

    def within(self, plan: EpisodePlan) -> LossAttribution:
        """Leave out what is about episodes of another plan: a runner may still have been busy with the one before."""
        faults = tuple(
            fault for fault in self.faults if fault.index < len(plan) and fault.seed == plan.seeds[fault.index]
        )
        ours = {(fault.index, fault.attempt) for fault in faults}
        return LossAttribution(
            tuple(pair for pair in self.charged if pair in ours),
            tuple(pair for pair in self.suspects if pair in ours),
            faults,
        )


def attribute_loss(crash_report: CrashReport | None, runner: int) -> LossAttribution:
    """Attribute a loss to episodes.

    Args:
        crash_report: What the node's agent found out; None if nobody could ask, as when the node is gone.
        runner: Position of the runner, for the faults.
    """
    if crash_report is None or crash_report.moment is None:
        return LossAttribution()
    moment, phase = crash_report.moment, crash_report.moment.phase
    if phase == "idle":
        return LossAttribution()
    conclusive = crash_report.cause in ("deadline", "signal")
    if phase == "act":
        entries = [entry for entry in moment.lanes if entry.live]
        pairs = tuple((entry.index, entry.attempt) for entry in entries)
        faults = tuple(_fault(crash_report, entry, "act", runner) for entry in entries)
        return (
            LossAttribution(pairs, (), faults) if conclusive and len(pairs) == 1 else LossAttribution((), pairs, faults)
        )
    entry = moment.lanes[moment.lane]
    faults = (_fault(crash_report, entry, phase, runner),) if entry.attempt else ()
    if phase == "close" or not entry.live:
        return LossAttribution((), (), faults)
    pair = ((entry.index, entry.attempt),)
    return LossAttribution(pair, (), faults) if conclusive else LossAttribution((), pair, faults)


def _fault(crash_report: CrashReport, entry: LaneEntry, phase: Phase, runner: int) -> Fault:
    moment = crash_report.moment
    assert moment is not None
    cause, error_type, message = _wording(crash_report, phase)
    return Fault(
        index=entry.index,
        seed=entry.seed,
        attempt=entry.attempt,
        cause=cause,
        phase=phase,
        step=moment.step,
        error_type=error_type,
        message=message[:MESSAGE_CAP],
        traceback=crash_report.stack[-TRACEBACK_CAP:],
        runner=runner,
        node=crash_report.node,
        seconds=max(0.0, moment.since + crash_report.seconds - entry.started),
        charged=False,
    )


def _wording(crash_report: CrashReport, phase: Phase) -> tuple[FaultCause, str, str]:
    match crash_report.cause:
        case "deadline":
            return "timeout", "EpisodeTimeout", f"{phase} took {crash_report.seconds:.1f} s, {crash_report.detail}"
        case "signal":
            return ("policy" if phase == "act" else "env"), "FatalSignal", f"the process died: {crash_report.detail}"
        case "stopped":
            return "runner", "RunnerLost", f"no answer for {crash_report.seconds:.1f} s: {crash_report.detail}"
        case _:
            return "runner", "RunnerLost", f"the process of the runner ended during {phase}, and left no word"

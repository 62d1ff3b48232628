"""Failures of runners: the consequences for episodes, for the runner and for its group.

The functions are pure. To *charge* an episode is to count the attempt as used up. The schedule decides about retries of
episodes. It also charges an episode that may have ended a runner, if the episode was isolated and no other episode was
on this runner.

=========================================  =========  =========  =========  =====
failure                                    charge     replace    exclude    end
=========================================  =========  =========  =========  =====
start or call raised a ``UsageError``                                       yes
start or call raised, on every position                                     yes
start or call raised, elsewhere it works              yes
``PolicyUnavailable``, everywhere at the start                              yes
``PolicyUnavailable``, elsewhere or later             yes
process died, an episode is the cause      episode    yes
process died or was silent, cause unknown             yes
node was pre-empted                                   yes (free)
other floats than the group's                                    yes
=========================================  =========  =========  =========  =====

A replacement counts towards ``max_runner_restarts``, unless an episode is charged or the node was pre-empted. An error
of an environment or a policy during an episode is not a failure of a runner: it uses up an attempt of the episode. The
schedule excludes a runner on which every attempt fails while another runner completes episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from rl_eval.errors import NumericsMismatch, PolicyUnavailable, UsageError
from rl_eval.records.episode import MESSAGE_CAP, TRACEBACK_CAP, Fault, FaultCause, Phase
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport, LaneEntry

_SLACK_S: Final = 1.0
_FIRST_CALL_GRACE_S: Final = 30.0
"""Additional seconds for the first call, which also probes the policy and builds environments."""


# ------------------------------------------------------------------------------ consequences


class Consequence(Enum):
    """Consequence of an error for the runner, and for its group."""

    REPLACE = "replace"
    """After a back-off, another runner replaces the runner. This counts towards the restarts of its position."""
    EXCLUDE = "exclude"
    """The position of the runner stays empty."""
    END = "end"
    """The error is raised to the caller of the failed call. If the call has no caller, the error is raised to all users
    of the group."""


def judge(error: BaseException, *, everywhere: bool, starting: bool = False) -> Consequence:
    """Return the consequence for a runner that could not be built, or on which a call raised.

    Args:
        error: The error.
        everywhere: Whether no runner of the group could start so far, or the call raised on every remaining runner.
        starting: Whether no runner of the group has started.
    """
    if isinstance(error, NumericsMismatch):
        return Consequence.EXCLUDE
    if isinstance(error, PolicyUnavailable) and not starting:
        # A server that does not answer is missing for all runners at the same time, and may come back.
        return Consequence.REPLACE
    return Consequence.END if everywhere or isinstance(error, UsageError) else Consequence.REPLACE


# ------------------------------------------------------------------------------ limits


def silence_limit(limit_s: float, slice_s: float, *, probed: bool) -> float:
    """Return the number of seconds without an answer after which a runner is terminated.

    Args:
        limit_s: Time limit of one step, in seconds.
        slice_s: Working time of one call, in seconds.
        probed: Whether the runner has answered a call since its weights were set.
    """
    return limit_s + slice_s + _SLACK_S + (0.0 if probed else _FIRST_CALL_GRACE_S)


@dataclass(frozen=True, slots=True)
class LossAttribution:
    """Episodes that killed, or may have killed, one lost runner, as pairs (index, attempt)."""

    charged: tuple[tuple[int, int], ...] = ()
    suspects: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    """One fault for each pair in ``charged`` and ``suspects``, and one for a death in ``close``. The schedule decides
    whether the faults are charged."""

    def within(self, plan: EpisodePlan) -> LossAttribution:
        """Return a copy without the pairs and faults of another plan.

        The runner may have run episodes of the previous evaluation.
        """
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
    """Find the episodes that killed, or may have killed, a runner.

    Args:
        crash_report: Report of the node agent; None if there is no node agent, for example because the node died.
        runner: Position of the runner in its group, for the faults.
    """
    if crash_report is None or crash_report.moment is None:
        return LossAttribution()
    moment, phase = crash_report.moment, crash_report.moment.phase
    if phase == "idle":
        return LossAttribution()
    conclusive = crash_report.cause in ("deadline", "signal")
    if phase == "act" or moment.shared:
        entries = [entry for entry in moment.lanes if entry.live]
        pairs = tuple((entry.index, entry.attempt) for entry in entries)
        faults = tuple(_fault(crash_report, entry, phase, runner) for entry in entries)
        # A simulator also steps slots without an episode, so a shared call does not prove that an episode is the cause.
        certain = conclusive and len({*pairs}) == 1 and not moment.shared
        return LossAttribution(pairs, (), faults) if certain else LossAttribution((), pairs, faults)
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
            why = crash_report.detail or "without an error message"
            return "runner", "RunnerLost", f"the process of the runner ended during {phase}, {why}"

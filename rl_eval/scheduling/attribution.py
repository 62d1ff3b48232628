"""Attribution of a lost runner: the episode that it is charged to, those only suspected, and their faults.

Ray reports the same for a segmentation fault, a kill and an exit, so the evidence is the flight recorder's: after a
passed deadline or a fatal signal inside an environment's call, the episode of that call is charged. After a process
vanished, or was stopped, it is only suspected: the node may have been pre-empted as well. When the policy was running,
every live episode is suspected, unless there is only one. A death in ``close`` is charged to no episode, since its
episode is over and reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_eval.records.episode import MESSAGE_CAP, TRACEBACK_CAP, Fault, FaultCause, Phase
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport, LaneEntry

__all__ = ["LossAttribution", "attribute_loss"]


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

"""Which episodes a lost runner is charged to, which are only suspected, and what the fault says.

Ray reports the same for a segmentation fault, a kill and an exit, so the evidence is the flight recorder's: a passed
deadline or a fatal signal inside an environment's call convicts the episode of that call. A process that vanished, or
was stopped, makes it a suspect: it may have been pre-empted as well. When the policy was running, every live episode
is a suspect, unless there is only one. A death in ``close`` is no episode's fault, since its episode is over and
reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_eval.records.episode import MESSAGE_CAP, TRACEBACK_CAP, Culprit, Fault, Phase
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import Autopsy, LaneEntry

__all__ = ["Blame", "assign_blame"]


@dataclass(frozen=True, slots=True)
class Blame:
    """The verdict over one lost runner; pairs are (index, attempt)."""

    charged: tuple[tuple[int, int], ...] = ()
    suspects: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()
    """One for each of both, and for a death in ``close``; none of them charged yet."""

    def within(self, plan: EpisodePlan) -> Blame:
        """Leave out what is about episodes of another plan: a runner may still have been busy with the one before."""
        faults = tuple(
            fault for fault in self.faults if fault.index < len(plan) and fault.seed == plan.seeds[fault.index]
        )
        ours = {(fault.index, fault.attempt) for fault in faults}
        return Blame(
            tuple(pair for pair in self.charged if pair in ours),
            tuple(pair for pair in self.suspects if pair in ours),
            faults,
        )


def assign_blame(autopsy: Autopsy | None, runner: int) -> Blame:
    """Judge a loss.

    Args:
        autopsy: What the node's agent found out; None if nobody could ask, as when the node is gone.
        runner: Position of the runner, for the faults.
    """
    if autopsy is None or autopsy.moment is None:
        return Blame()
    moment, phase = autopsy.moment, autopsy.moment.phase
    if phase == "idle":
        return Blame()
    convicting = autopsy.cause in ("deadline", "signal")
    if phase == "act":
        entries = [entry for entry in moment.lanes if entry.live]
        pairs = tuple((entry.index, entry.attempt) for entry in entries)
        faults = tuple(_fault(autopsy, entry, "act", runner) for entry in entries)
        return Blame(pairs, (), faults) if convicting and len(pairs) == 1 else Blame((), pairs, faults)
    entry = moment.lanes[moment.lane]
    faults = (_fault(autopsy, entry, phase, runner),) if entry.attempt else ()
    if phase == "close" or not entry.live:
        return Blame((), (), faults)
    pair = ((entry.index, entry.attempt),)
    return Blame(pair, (), faults) if convicting else Blame((), pair, faults)


def _fault(autopsy: Autopsy, entry: LaneEntry, phase: Phase, runner: int) -> Fault:
    moment = autopsy.moment
    assert moment is not None
    culprit, error_type, message = _wording(autopsy, phase)
    return Fault(
        index=entry.index,
        seed=entry.seed,
        attempt=entry.attempt,
        culprit=culprit,
        phase=phase,
        step=moment.step,
        error_type=error_type,
        message=message[:MESSAGE_CAP],
        traceback=autopsy.stack[-TRACEBACK_CAP:],
        runner=runner,
        node=autopsy.node,
        seconds=max(0.0, moment.since + autopsy.seconds - entry.started),
        charged=False,
    )


def _wording(autopsy: Autopsy, phase: Phase) -> tuple[Culprit, str, str]:
    match autopsy.cause:
        case "deadline":
            return "timeout", "EpisodeTimeout", f"{phase} took {autopsy.seconds:.1f} s, {autopsy.detail}"
        case "signal":
            return ("policy" if phase == "act" else "env"), "FatalSignal", f"the process died: {autopsy.detail}"
        case "stopped":
            return "runner", "RunnerLost", f"no answer for {autopsy.seconds:.1f} s: {autopsy.detail}"
        case _:
            return "runner", "RunnerLost", f"the process of the runner ended during {phase}, and left no word"

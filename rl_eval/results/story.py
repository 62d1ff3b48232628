"""Story of one episode: all its recorded events, in order.

The story is a pure function of the result. It is the same for a new result, a saved result, and the log of a running
evaluation. The handle of an evaluation in this process adds the runners to which the episode was assigned, with times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rl_eval.errors import UsageError
from rl_eval.records.episode import EpisodeRecord, Fault
from rl_eval.results.result import EvalResult
from rl_eval.results.text import counted

Kind = Literal[
    "planned", "granted", "reclaimed", "returned", "fault", "lost", "excluded", "completed", "failed", "unfinished",
    "check",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an episode."""

    kind: Kind
    text: str
    """Description, in a few words."""
    attempt: int = 0
    """Number of the attempt, from 1; 0 if the event belongs to no attempt."""
    runner: int | None = None
    """Index of the runner; None if the event belongs to no runner."""
    seconds: float | None = None
    """Duration in seconds. For a fault, the age of the attempt. For the end, the time in the environment and the
    policy."""
    fault: Fault | None = None
    """The fault, with node and traceback."""
    at: float | None = None
    """Seconds since the start of the session; None if the event is known only from the log."""


def check_planned(result: EvalResult, index: int) -> None:
    """Check that the plan of a result has an episode with this index.

    Raises:
        UsageError: The plan has no such episode.
    """
    if not 0 <= index < len(result.plan):
        fix = f"Pass an index from 0 to {len(result.plan) - 1}."
        raise UsageError(f"episode {index} is not in the plan", key="episode", value=index, fix=fix)


def story(result: EvalResult, index: int, moves: Sequence[Event] = ()) -> tuple[Event, ...]:
    """Return the events of one episode, in order.

    Args:
        result: Finished or unfinished result.
        index: Index of the episode.
        moves: Events of the episode in this session: the runners to which it was assigned, with times.

    Raises:
        UsageError: The plan has no such episode.
    """
    check_planned(result, index)
    return (
        Event("planned", f"episode {index} of {len(result.plan):,}, seed {result.plan[index].seed}"),
        *_merged(moves, [_fault_event(fault) for fault in result.table.faults.get(index, ())]),
        replace(_end(result, index), at=next((move.at for move in moves if move.kind == "completed"), None)),
        *(Event("check", text) for text in _checks(result, index)),
    )


def _merged(moves: Sequence[Event], faults: list[Event]) -> Iterator[Event]:
    """Yield the moves, with each fault at the end of its attempt. Faults of attempts without moves come first."""
    ends = {_attempt(move) for move in moves if move.kind in ("fault", "lost")}
    found = {_attempt(fault): fault for fault in faults if _attempt(fault) in ends}
    yield from (fault for fault in faults if _attempt(fault) not in ends)
    for move in moves:
        fault = found.get(_attempt(move)) if move.kind in ("fault", "lost") else None
        if fault is not None:
            yield replace(fault, at=move.at)
        elif move.kind != "completed":
            yield move


def _attempt(event: Event) -> tuple[int, int | None]:
    return event.attempt, event.runner


def _fault_event(fault: Fault) -> Event:
    place = f"after {counted(fault.step, 'step')}" if fault.step else "before the first step"
    pardon = "" if fault.charged else f"; no attempt used up{f': {fault.pardon}' * bool(fault.pardon)}"
    text = f"{fault.cause} failed in {fault.phase} {place}: {fault.error_type}: {fault.message}{pardon}"
    return Event("fault", text, fault.attempt, fault.runner, fault.seconds, fault)


def _end(result: EvalResult, index: int) -> Event:
    if not result.table.filled[index]:
        behind = result.ended_by is not None and index >= result.ended_by.after
        why = f"does not count: {result.ended_by}" if behind else result.reason
        return Event("unfinished", why or "no record yet")
    record = result.table.record(index)
    runner = record.runner if record.runner >= 0 else None
    if record.outcome == "failed":
        return Event("failed", f"given up after attempt {record.attempts}", record.attempts, runner)
    seconds = record.reset_seconds + record.step_seconds + record.inference_seconds
    return Event("completed", ", ".join(_outcome(result, record)), record.attempts, runner, seconds)


def _outcome(result: EvalResult, record: EpisodeRecord) -> Iterator[str]:
    yield f"return {record.episode_return!r} in {counted(record.length, 'step')}"
    yield "terminated" if record.terminated else f"truncated by {record.truncated_by or 'an unknown limit'}"
    if record.success_at_end is not None:
        yield "success" if record.success_at_end else "no success"
    yield from (f"{key} {value:g}" for key, value in record.info.items() if not math.isnan(value))
    yield f"weights version {record.weights_version}"
    if not result.counted[record.index]:
        yield "not counted, because an earlier episode did not finish"


def _checks(result: EvalResult, index: int) -> Iterator[str]:
    """Yield texts on the outcome of a second run of the episode, if there was one."""
    if index in result.audit_mismatches:
        yield "ran twice, with different outcomes"
    determinism = result.determinism
    if index in determinism.mismatched:
        first = determinism.first
        where = f", first in {first}" if first is not None and first.episode == index else ""
        yield f"the second run of the determinism check has a different outcome{where}"
    if index in determinism.failed:
        why = f": {determinism.failure}" if index == determinism.failed[0] else ""
        yield f"the second run of the determinism check did not complete{why}"

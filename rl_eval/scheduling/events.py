"""Events of the schedule, and its decisions: a verdict on a report or a loss, and commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, NamedTuple, get_args

from rl_eval.records.episode import Lease

# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    """A runner became ready. Each runner joins once; a runner that replaces it has another number."""

    runner: int
    lanes: int


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """A runner died.

    Its episodes are granted again. Pairs (index, attempt) of episodes that the runner did not hold are ignored.
    """

    runner: int
    charged: Sequence[tuple[int, int]] = ()
    """(index, attempt) of each episode that certainly ended the runner: it exceeded a deadline or caused a fatal
    signal."""
    suspects: Sequence[tuple[int, int]] = ()
    """(index, attempt) of each episode that may have ended the runner: it was in reset or step when the process
    vanished."""


@dataclass(frozen=True, slots=True)
class RunnerReported:
    """A runner sent a report: everything that happened since its last report."""

    runner: int
    finished: Sequence[int] = ()
    """Indices of the finished episodes, in the order of the report's rows."""
    failed_attempts: Sequence[tuple[int, int]] = ()
    """(index, attempt) of every attempt that ended in a fault; the runner has dropped it."""
    returned: Sequence[int] = ()
    """Indices of the leases that the runner dropped after a reclaim or an abort."""
    live: Sequence[int] = ()
    """Indices of the episodes that the runner has started. It does not return them after a reclaim."""
    suspects: Sequence[tuple[int, int]] = ()
    """(index, attempt) of attempts that ended together, because one of them caused a fault; the runner has dropped all
    of them."""


@dataclass(frozen=True, slots=True)
class PoolSized:
    """The number of expected runners changed; it includes runners that have not joined yet."""

    runners: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The evaluation was cancelled."""


Event = RunnerJoined | RunnerLost | RunnerReported | PoolSized | Cancelled
_EVENTS: Final = {kind.__name__: kind for kind in get_args(Event)}


def to_list(event: Event) -> list[Any]:
    """Return the name and the fields of an event, for JSON."""
    return [type(event).__name__, *astuple(event)]


def from_list(written: Sequence[Any]) -> Event:
    """Return the event of which :func:`to_list` returned the name and the fields."""
    name, *fields = written
    event: Event = _EVENTS[name](*fields)
    return event


# ------------------------------------------------------------------------------ verdicts


class Verdict(NamedTuple):
    """Judgement on a report or on a loss; empty for other events."""

    record: tuple[int, ...] = ()
    """Positions of the rows of the report that become records."""
    audit: tuple[int, ...] = ()
    """Positions of the rows of the report that are compared with the records of the same episodes."""
    charge: tuple[tuple[int, int], ...] = ()
    """(index, attempt) of each attempt that is used up. All other faults of the report or the loss use up none."""


# ------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Grant:
    """Command to send leases to a runner."""

    runner: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Request to a runner to return leases that it has not started."""

    runner: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Request to a runner to drop all episodes."""

    runner: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """Command to end a runner on which all attempts fail, while other runners complete episodes.

    The failures of this runner use up no attempts.
    """

    runner: int
    failures: int
    """Number of attempts that failed on the runner."""
    pardoned: tuple[tuple[int, int], ...]
    """(index, attempt) of each attempt that failed on the runner and now counts as not used up: all, except those of
    episodes that were given up."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Command to record an episode as failed, because its attempts are used up.

    Only this command creates failed records.
    """

    index: int
    seed: int
    attempts: int


Command = Grant | Reclaim | Abort | Exclude | GiveUp


class Decision(NamedTuple):
    """Answer of the schedule to an event."""

    verdict: Verdict
    commands: tuple[Command, ...]
    """Commands, to be carried out in order, after the verdict."""

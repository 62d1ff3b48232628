"""Events of the schedule, and its commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_eval.records.episode import Lease

# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    """A runner became ready. An incarnation joins once; its replacement has another number."""

    runner: int
    lanes: int


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """A runner died. Its episodes are granted again; pairs of episodes that it did not hold are ignored."""

    runner: int
    charged: Sequence[tuple[int, int]] = ()
    """(index, attempt) of episodes that certainly ended it, by a passed deadline or a fatal signal."""
    suspects: Sequence[tuple[int, int]] = ()
    """(index, attempt) of episodes that may have ended it: they were in reset or step when the process vanished."""


@dataclass(frozen=True, slots=True)
class RunnerReported:
    """A runner reported all events since its last report."""

    runner: int
    finished: Sequence[int] = ()
    """Indices of its finished episodes, in the order of the report's rows."""
    failed_attempts: Sequence[tuple[int, int]] = ()
    """(index, attempt) of every attempt that ended in a fault; the runner has dropped it."""
    returned: Sequence[int] = ()
    """Indices that it dropped after a reclaim or an abort."""
    live: Sequence[int] = ()
    """Indices that it has started and will not return."""
    suspects: Sequence[tuple[int, int]] = ()
    """(index, attempt) of attempts that ended together in a fault of one of them; the runner has dropped all."""


@dataclass(frozen=True, slots=True)
class PoolSized:
    """The number of expected runners, including those that have not joined yet."""

    runners: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The evaluation was cancelled."""


Event = RunnerJoined | RunnerLost | RunnerReported | PoolSized | Cancelled


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
class Record:
    """Command to record the report's rows at these positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Command to compare the report's rows at these positions with the records that count."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Charge:
    """A suspected attempt, or one on a lost runner, uses up an attempt of the episode."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """Command to end a runner whose attempts fail while others complete; its failures use up no attempts."""

    runner: int
    failures: int
    """Attempts that failed on it."""
    uncharged: tuple[tuple[int, int], ...]
    """(index, attempt) of episodes that failed on no other runner and were not given up."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Command to record the episode as failed, since its attempts are used up; the only source of failed rows."""

    index: int
    seed: int
    attempts: int


Command = Grant | Reclaim | Abort | Record | Audit | Charge | Exclude | GiveUp

"""Events that the schedule takes, and commands that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_eval.records.episode import Lease

# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    """A runner is ready. An incarnation joins once; its replacement has another number."""

    runner: int
    lanes: int


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """A runner is gone. What it held is granted again; pairs whose index it did not hold mean nothing."""

    runner: int
    charged: Sequence[tuple[int, int]] = ()
    """(index, attempt) of what is proven to have ended it: a passed deadline, a fatal signal."""
    suspects: Sequence[tuple[int, int]] = ()
    """(index, attempt) of what may have ended it: it was in reset or step when the process vanished."""


@dataclass(frozen=True, slots=True)
class RunnerReported:
    """Report of a runner: all that happened on it since the last one."""

    runner: int
    finished: Sequence[int] = ()
    """Indices of its finished episodes, in the order of the report's rows."""
    failed_attempts: Sequence[tuple[int, int]] = ()
    """(index, attempt) of every attempt that ended in a fault; the runner no longer works on it."""
    returned: Sequence[int] = ()
    """Reclaimed or aborted indices, which it no longer works on."""
    live: Sequence[int] = ()
    """Indices that it has started; these it will not return."""


@dataclass(frozen=True, slots=True)
class PoolSized:
    """This many runners are expected in all, counting those that have not joined yet."""

    runners: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the rest."""


Event = RunnerJoined | RunnerLost | RunnerReported | PoolSized | Cancelled


# ------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Grant:
    """Give these leases to the runner."""

    runner: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Ask the runner for these leases back, as far as it has not started them."""

    runner: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Request to a runner to drop everything."""

    runner: int


@dataclass(frozen=True, slots=True)
class Record:
    """Count the report's rows at these positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Compare the report's rows at these positions with the records that count."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Charge:
    """Count the attempt that a lost runner was in against the episode."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """End this runner and count none of these attempts: it failed, again and again, what another completes."""

    runner: int
    failures: int
    """Attempts that failed on it."""
    uncharged: tuple[tuple[int, int], ...]
    """(index, attempt) of episodes that failed on no other runner and were not given up."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Record the episode as failed: its attempts are used up. Nothing else makes failed rows."""

    index: int
    seed: int
    attempts: int


Command = Grant | Reclaim | Abort | Record | Audit | Charge | Exclude | GiveUp

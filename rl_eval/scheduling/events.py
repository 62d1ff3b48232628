"""Events of the schedule, and its commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Command to add the rows at some positions of the report to the records."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Command to compare the rows at some positions of the report with the records of the same episodes."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Charge:
    """Command to use up an attempt of an episode: a suspected one, or one that ran on a lost runner."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """Command to end a runner on which all attempts fail, while other runners complete episodes.

    The failures of this runner use up no attempts.
    """

    runner: int
    failures: int
    """Number of attempts that failed on the runner."""
    uncharged: tuple[tuple[int, int], ...]
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


Command = Grant | Reclaim | Abort | Record | Audit | Charge | Exclude | GiveUp

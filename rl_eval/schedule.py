"""Which episode runs where, decided without running anything.

Two rules make the result independent of the layout:

1. **An episode is chosen by its index, before it runs.** Leases are granted in index order, and every
   granted episode is finished, by its holder or, when the holder is lost, by another runner. Nothing
   is ever chosen by finishing first.
2. **The record is exactly once.** Execution is at least once, since runners die. A record counts
   only if its runner still holds the lease; any other is audited: compared with the record that
   counts, never averaged in.

The schedule is a pure state machine: events in, commands out, through :meth:`Schedule.handle`. It
knows neither Ray nor time, threads or randomness, so a test can drive it through thousands of
histories in a second, and a run can be replayed from its events.

Balance is by pull. Each runner holds about one lease per lane beyond its lanes, more when its
episodes are so short that a report empties the queue. When fresh episodes run out, leases that a
busy runner has not started are *reclaimed* for runners with nothing to do; live episodes are never
taken from a live runner.

A lost runner is charged to an episode on evidence only. One that is proven guilty, or suspected, runs
in *quarantine* from then on: when all other episodes are done, alone in the whole fleet, so that it
can take nobody's work with it, and so that a second death convicts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from typing_extensions import assert_never

from rl_eval.episode import Lease
from rl_eval.plan import EpisodePlan

__all__ = [
    "Abort",
    "Audit",
    "Cancelled",
    "Charge",
    "Command",
    "Event",
    "FleetSized",
    "GiveUp",
    "Grant",
    "Reclaim",
    "Record",
    "RunnerJoined",
    "RunnerLost",
    "RunnerReported",
    "Schedule",
]


# ------------------------------------------------------------------------------ what can happen


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
    """A runner told what happened since its last report."""

    runner: int
    finished: Sequence[int] = ()
    """Indices of its finished episodes, in the order of the report's rows."""
    failed_attempts: Sequence[tuple[int, int]] = ()
    """(index, attempt) of every attempt that ended in a fault."""
    returned: Sequence[int] = ()
    """Reclaimed or aborted indices, which it no longer works on."""
    live: Sequence[int] = ()
    """Indices that it has started; these it will not return."""


@dataclass(frozen=True, slots=True)
class FleetSized:
    """This many runners are expected in all, counting those that have not joined yet."""

    runners: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the rest."""


Event = RunnerJoined | RunnerLost | RunnerReported | FleetSized | Cancelled


# ------------------------------------------------------------------------------ what may be done


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
    """Tell the runner to drop everything."""

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
class GiveUp:
    """Record the episode as failed: its attempts are used up, and no runner is left to say so."""

    index: int
    seed: int
    attempts: int


Command = Grant | Reclaim | Abort | Record | Audit | Charge | GiveUp


# ------------------------------------------------------------------------------ the state machine


@dataclass(slots=True)
class _Runner:
    lanes: int
    held: dict[int, None] = field(default_factory=dict)
    """Indices it holds, in the order of their grants."""
    reclaiming: set[int] = field(default_factory=set)
    """Held indices that it was asked to return."""
    pace: int = 0
    """Episodes that its latest report finished."""

    @property
    def depth(self) -> int:
        """Leases it should hold. Two calls are in flight, so a fast runner needs two reports' worth ahead."""
        return self.lanes + max(self.lanes, 2 * self.pace)

    @property
    def queued(self) -> int:
        """Held leases that can not all have started and were not asked back."""
        return max(0, len(self.held) - len(self.reclaiming) - self.lanes)


class Schedule:
    """Assigns the episodes of a plan to runners.

    Args:
        plan: Episodes to run.
        expected_runners: Runners that will join, if all goes well: the first to join leaves their
            share to the others.
        done: Indices that are finished already; a resumed run starts from them.
        attempts: Attempts that were charged already, by index. What has none left is given up with
            the first event.
        max_attempts: Attempts that an episode has.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        expected_runners: int = 1,
        done: Collection[int] = (),
        attempts: Mapping[int, int] | None = None,
        max_attempts: int = 3,
    ) -> None:
        self._plan = plan
        self._expected = max(1, expected_runners)
        self._done = bytearray(len(plan))
        for index in [*done, *(attempts or ())]:
            if not 0 <= index < len(plan):
                raise ValueError(f"episode {index} cannot have run: the plan has {len(plan)} episodes")
        for index in done:
            self._done[index] = 1
        self._unfinished = len(plan) - sum(self._done)
        self._next = 0
        self._requeued: list[int] = []
        self._quarantine: list[int] = []
        self._alone = -1
        """The episode that left the quarantine last; while it is held, nothing else is."""
        self._holder: dict[int, int] = {}
        self._max_attempts = max_attempts
        self._attempts = {index: count for index, count in (attempts or {}).items() if not self._done[index]}
        self._spent = sorted(index for index, count in self._attempts.items() if count >= max_attempts)
        self._runners: dict[int, _Runner] = {}
        self._dry: set[int] = set()
        self._backlogged: set[int] = set()
        self._cancelled = False
        self._skip_done()

    @property
    def complete(self) -> bool:
        """Whether every episode has its record, or was given up."""
        return self._unfinished == 0

    @property
    def outstanding(self) -> int:
        """Leases that are held."""
        return len(self._holder)

    @property
    def unfinished(self) -> int:
        """Episodes that have no record and were not given up."""
        return self._unfinished

    def holds(self, runner: int) -> bool:
        """Whether the runner holds any lease."""
        return runner in self._runners and bool(self._runners[runner].held)

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what to do about it, in order."""
        commands: list[Command] = self._give_up_spent() if self._spent else []
        match event:
            case RunnerJoined(runner, lanes):
                commands += self._joined(runner, lanes)
            case RunnerLost():
                commands += self._lost(event)
            case RunnerReported():
                commands += self._reported(event)
            case FleetSized(runners):
                self._expected = max(1, runners)
                commands += self._feed(self._hungry())
            case Cancelled():
                commands += self._cancel()
            case _:
                assert_never(event)
        return commands

    # ---------------------------------------------------------------- one method per event

    def _joined(self, runner: int, lanes: int) -> list[Command]:
        if runner in self._runners:
            raise ValueError(f"runner {runner} joined twice")
        self._runners[runner] = _Runner(lanes)
        self._note(runner)
        return self._feed([runner])

    def _lost(self, loss: RunnerLost) -> list[Command]:
        lost = self._runners.pop(loss.runner, None)
        if lost is None:
            return []
        # A suspect that was alone has no one to share the suspicion with.
        charged = dict(loss.charged) | {index: attempt for index, attempt in loss.suspects if index == self._alone}
        dangerous = charged.keys() | dict(loss.suspects).keys()
        commands: list[Command] = []
        for index in lost.held:
            if charged.get(index, 0) > self._attempts.get(index, 0):
                self._attempts[index] = charged[index]
                commands.append(Charge(index, charged[index]))
            del self._holder[index]
            if self._attempts.get(index, 0) >= self._max_attempts:
                commands.append(self._give_up(index))
            else:
                self._requeue(index, dangerous=index in dangerous)
        self._note(loss.runner)
        return commands + self._feed(self._hungry())

    def _reported(self, report: RunnerReported) -> list[Command]:
        runner = report.runner
        state = self._runners.get(runner)
        self._charge(runner, report.failed_attempts)
        recorded, audited = [], []
        for position, index in enumerate(report.finished):
            if state is not None and self._holder.get(index) == runner:
                self._finish(state, index)
                recorded.append(position)
            else:
                audited.append(position)
        commands: list[Command] = []
        if recorded:
            commands.append(Record(tuple(recorded)))
        if audited:
            commands.append(Audit(tuple(audited)))
        if state is None:
            return commands
        state.pace = len(recorded)
        state.reclaiming.difference_update(report.live)
        for index in report.returned:
            if self._holder.get(index) == runner:
                del state.held[index]
                state.reclaiming.discard(index)
                del self._holder[index]
                self._requeue(index)
        self._note(runner)
        return commands + self._feed(self._hungry() if report.returned else [runner])

    def _cancel(self) -> list[Command]:
        self._cancelled = True
        return [Abort(runner) for runner, state in self._runners.items() if state.held]

    # ---------------------------------------------------------------- episodes

    def _charge(self, runner: int, failed_attempts: Iterable[tuple[int, int]]) -> None:
        for index, attempt in failed_attempts:
            if self._holder.get(index) == runner:
                self._attempts[index] = max(attempt, self._attempts.get(index, 0))

    def _finish(self, state: _Runner, index: int) -> None:
        del self._holder[index]
        del state.held[index]
        state.reclaiming.discard(index)
        self._attempts.pop(index, None)
        self._done[index] = 1
        self._unfinished -= 1

    def _give_up(self, index: int) -> GiveUp:
        self._done[index] = 1
        self._unfinished -= 1
        return GiveUp(index, int(self._plan.seeds[index]), self._attempts.pop(index))

    def _give_up_spent(self) -> list[Command]:
        """Give up what had no attempt left when the run was resumed."""
        spent, self._spent = self._spent, []
        commands: list[Command] = [self._give_up(index) for index in spent]
        self._skip_done()
        return commands

    def _requeue(self, index: int, *, dangerous: bool = False) -> None:
        """Put an episode that nobody holds any more into its queue; there is no way out of the quarantine."""
        heappush(self._quarantine if dangerous or index == self._alone else self._requeued, index)

    def _skip_done(self) -> None:
        following = self._done.find(0, self._next)
        self._next = len(self._done) if following < 0 else following

    @property
    def _admitted(self) -> int:
        """Unfinished episodes, held or not, that are not kept in quarantine."""
        return self._unfinished - len(self._quarantine)

    def _take(self) -> int:
        """Remove and return the lowest index that nobody holds and that is not in quarantine."""
        if self._requeued:
            return heappop(self._requeued)
        index = self._next
        self._next += 1
        self._skip_done()
        return index

    # ---------------------------------------------------------------- balance

    def _hungry(self) -> list[int]:
        """Runners with a free lane, the emptiest first."""
        free = [runner for runner, state in self._runners.items() if len(state.held) < state.lanes]
        return sorted(free, key=lambda runner: len(self._runners[runner].held))

    def _feed(self, runners: Iterable[int]) -> list[Command]:
        if self._cancelled:
            return []
        grants = [self._grant(runner, count) for runner in runners if (count := self._room(runner))]
        if self._quarantine and self._runners and not self._holder:
            grants.append(self._grant_alone())
        return [*grants, *self._rebalance()]

    def _room(self, runner: int) -> int:
        """How many leases to grant now: up to its depth, but no more than its share of what is left."""
        state = self._runners[runner]
        fleet = max(self._expected, len(self._runners))
        admitted = self._admitted
        share = -(-admitted // fleet)
        return max(0, min(admitted - len(self._holder), min(state.depth, share) - len(state.held)))

    def _grant_alone(self) -> Grant:
        """Let one episode out of the quarantine: nothing is held, so nothing else is left to grant."""
        self._alone = heappop(self._quarantine)
        self._requeued.append(self._alone)
        # The lowest incarnation: losses go round the fleet, and with them the restarts.
        return self._grant(min(self._runners), 1)

    def _grant(self, runner: int, count: int) -> Grant:
        state, leases = self._runners[runner], []
        for _ in range(count):
            index = self._take()
            self._holder[index] = runner
            state.held[index] = None
            seed = int(self._plan.seeds[index])
            leases.append(Lease(index, seed, self._attempts.get(index, 0) + 1, runner))
        self._note(runner)
        return Grant(runner, tuple(leases))

    def _note(self, runner: int) -> None:
        """Keep the sets of runners with nothing to do and with leases to spare, after a runner changed."""
        state = self._runners.get(runner)
        (self._dry.add if state and not state.held else self._dry.discard)(runner)
        (self._backlogged.add if state and state.queued else self._backlogged.discard)(runner)

    def _rebalance(self) -> list[Command]:
        """Reclaim queued leases, from one runner for each that has run dry."""
        commands: list[Command] = []
        if not (self._dry and self._backlogged):
            return commands
        asked = sum(bool(state.reclaiming) for state in self._runners.values())
        while self._backlogged and asked < len(self._dry):
            victim = max(self._backlogged, key=lambda runner: (self._runners[runner].queued, runner))
            state = self._runners[victim]
            count = -(-state.queued // 2)
            wanted = [index for index in reversed(state.held) if index not in state.reclaiming][:count]
            state.reclaiming.update(wanted)
            self._note(victim)
            commands.append(Reclaim(victim, tuple(wanted)))
            asked += 1
        return commands

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Assert what must hold between any two events.

        Raises:
            AssertionError: The state is inconsistent.
        """
        held = [index for state in self._runners.values() for index in state.held]
        assert len(held) == len(set(held)) == len(self._holder), "an episode is held twice"
        assert all(self._holder[i] == r for r, s in self._runners.items() for i in s.held), "holder and held disagree"
        assert all(state.reclaiming <= state.held.keys() for state in self._runners.values()), (
            "reclaims what is not held"
        )
        assert not any(self._done[index] for index in held), "a finished episode is held"
        queued = [*self._requeued, *self._quarantine]
        assert not any(self._done[index] for index in queued), "a finished episode is queued"
        assert len(set(queued)) == len(queued), "an episode is queued twice"
        assert self._unfinished == self._done.count(0), "the count of unfinished episodes is off"
        fresh = self._done.count(0, self._next) if self._next < len(self._done) else 0
        unassigned = self._admitted - len(self._holder)
        assert unassigned == fresh + len(self._requeued), "an episode is in no queue"
        if unassigned and not self._cancelled:
            assert not self._dry, "a runner is idle while episodes wait"
        for runner, state in self._runners.items():
            assert (runner in self._dry) == (not state.held), "the set of dry runners is off"
            assert (runner in self._backlogged) == (state.queued > 0), "the set of backlogged runners is off"
        if self._alone in self._holder:
            assert self.outstanding == 1, "an episode in quarantine is not alone"
            assert not unassigned, "an episode left the quarantine before the others were done"
        if self._unfinished and self._runners and not self._cancelled:
            assert self._holder, "nothing is under way, and not everything is done"
        if self._dry and self._backlogged and not self._cancelled:
            assert any(s.reclaiming for s in self._runners.values()), "a runner is idle while leases queue elsewhere"

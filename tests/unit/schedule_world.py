"""A simulated world for the schedule: runners that lag, crash, fail and repeat themselves, and a referee.

The :class:`Referee` hands events to a schedule, keeps plain books of its own, and holds every command
against the laws: those of safety (nothing wrong happens) and those of liveness (something happens).
The :class:`World` makes a random history around it: runners that join late, die with reports still
under way, come back as ghosts, repeat rows; runners on which every attempt fails, from the start; nodes that are
pre-empted; episodes that fail, alone or with all that share the call; episodes that kill or hang their runner, once or
always, with and without evidence; reclaims that cross reports; a group that changes its size; cancellations; processes
that die and resume. The same seed makes the same history, so ``run_history(seed)`` replays a failure.

The module under test is an argument, so the same world also judges planted bugs.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, Final, NamedTuple

import rl_eval.scheduling.schedule
from rl_eval.records.episode import Lease
from rl_eval.scheduling import events as api
from rl_eval.scheduling.plan import EpisodePlan

MAX_ATTEMPTS: Final = 3
Pairs = Sequence[tuple[int, int]]
"""(index, attempt) of what a loss is put down to."""
STORY_LENGTH: Final = 12


# ------------------------------------------------------------------------------ the laws


@dataclass(slots=True)
class Books:
    """What the referee knows about one joined runner."""

    lanes: int
    held: dict[int, None] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Held indices that were asked back and that it may still return."""
    pace: int = 0
    failed: list[tuple[int, int]] = field(default_factory=list)
    streak: int = 0
    others_completed: int = 0
    """Episodes that others completed during its streak."""
    untried: bool = True

    @property
    def spare(self) -> int:
        """Leases that it can not have started and that were not asked back."""
        return len(self.held) - len(self.asked) - self.lanes

    @property
    def failing(self) -> bool:
        return self.streak >= max(3, self.lanes)


class Referee:
    """Hands events to a schedule and holds its commands against the laws."""

    def __init__(
        self,
        module: ModuleType,
        num_episodes: int,
        seed: int,
        expected: int = 1,
        done: Collection[int] = (),
        attempts: Mapping[int, int] | None = None,
        pardoned: Mapping[int, int] | None = None,
    ) -> None:
        plan, already, spent = EpisodePlan(num_episodes, seed), sorted(done), dict(attempts or {})
        forgiven = dict(pardoned or {})
        self.seeds: list[int] = plan.seeds.tolist()
        self.make_schedule: Callable[[], Any] = lambda: module.Schedule(
            plan, expected, already, spent, MAX_ATTEMPTS, forgiven
        )
        self.schedule = self.make_schedule()
        self.expected = max(1, expected)
        self.done = set(done)
        self.recorded: set[int] = set()
        self.given_up: set[int] = set()
        self.waiting = set(range(num_episodes)) - self.done
        """Episodes that nobody holds and that may run beside others."""
        self.group_size: dict[int, int] = {}
        """Isolated episodes, and how many of them may share a runner with each."""
        self.holder: dict[int, int] = {}
        self.attempts = {index: count for index, count in spent.items() if index not in self.done}
        self.pardoned = {index: count for index, count in forgiven.items() if index not in self.done}
        self.failed_on: dict[int, set[int]] = {}
        self.owed: list[tuple[int, int]] = []
        """Charges that the next event must cause."""
        self.hopeless = sorted(index for index, count in self.charges.items() if count >= MAX_ATTEMPTS)
        """Episodes that the next event must give up."""
        self.named: dict[int, int] = {}
        """How many losses each episode was named in, with something new to say about it."""
        self.runners: dict[int, Books] = {}
        self.cancelled = False
        self.log: list[tuple[Any, Any]] = []
        self.verdict = api.Verdict()
        """Verdict on the last event."""

    @property
    def unfinished(self) -> int:
        return len(self.seeds) - len(self.done)

    @property
    def isolated(self) -> set[int]:
        """Isolated episodes that nobody holds."""
        return self.group_size.keys() - self.holder.keys()

    @property
    def share(self) -> int:
        """What each runner may hold, if the expected ones are to get as much."""
        return -(-(self.unfinished - len(self.group_size)) // max(self.expected, len(self.runners)))

    @property
    def awaited(self) -> bool:
        return self.expected > len(self.runners)

    @property
    def charges(self) -> dict[int, int]:
        """Attempts that each unfinished episode was charged with."""
        return {i: n - self.pardoned.get(i, 0) for i, n in self.attempts.items() if n > self.pardoned.get(i, 0)}

    def isolating(self, runner: int) -> bool:
        return bool(self.group_size.keys() & self.runners[runner].held.keys())

    def suspended(self, runner: int) -> bool:
        """Whether a runner only failed, and another one has not ended any attempt yet."""
        untried = any(books.untried for other, books in self.runners.items() if other != runner)
        return self.runners[runner].failing and (self.awaited or untried)

    def eligible(self, runner: int, indices: Collection[int] | None = None) -> set[int]:
        """Return what waits and may run on a runner: what failed there only where there is no other."""
        return {
            index
            for index in (self.waiting if indices is None else indices)
            if runner not in self.failed_on.get(index, ())
            or not (self.awaited or self.runners.keys() - self.failed_on[index])
        }

    # ---------------------------------------------------------------- events

    def joined(self, runner: int, lanes: int) -> list[Any]:
        self.runners[runner] = Books(lanes)
        return self._send(api.RunnerJoined(runner, lanes))

    def lost(self, runner: int, charged: Pairs = (), suspects: Pairs = ()) -> list[Any]:
        known, overdue = self.runners.get(runner), bool(self.hopeless)
        if known:
            self._judge(known, self.isolating(runner) and len(known.held) == 1, dict(charged), dict(suspects))
            del self.runners[runner]
            self._release(known.held)
        commands = self._send(api.RunnerLost(runner, tuple(charged), tuple(suspects)))
        assert known or overdue or not commands, "a runner is lost twice, and something is done about it again"
        return commands

    def _judge(self, books: Books, alone: bool, charged: dict[int, int], suspects: dict[int, int]) -> None:
        """Book what a loss means for the episodes that the lost runner held: the rules of evidence."""
        proven = {index: charged.get(index) or (alone and suspects.get(index)) or 0 for index in books.held}
        suspected = [index for index in books.held if not proven[index] and index in suspects]
        for index in books.held:
            if proven[index] or index in suspected:
                self._count_name(index, proven[index] or suspects[index])
                self.group_size[index] = 1 if proven[index] else -(-len(suspected) // 8)
            if proven[index] > self.attempts.get(index, 0):
                self.attempts[index] = proven[index]
                self.owed.append((index, proven[index]))

    def _count_name(self, index: int, attempt: int) -> None:
        """No episode may cost more runners than two for the suspicion and one for each attempt."""
        if attempt > self.attempts.get(index, 0):
            self.named[index] = self.named.get(index, 0) + 1
            assert self.named[index] <= 2 + MAX_ATTEMPTS, f"episode {index} costs {self.named[index]} runners"

    def fleet_sized(self, runners: int) -> list[Any]:
        self.expected = max(1, runners)
        return self._send(api.PoolSized(runners))

    def cancel(self) -> list[Any]:
        self.cancelled = True
        commands = self._send(api.Cancelled())
        aborted = {command.runner for command in commands if isinstance(command, api.Abort)}
        assert aborted == {runner for runner, books in self.runners.items() if books.held}, "holders are not aborted"
        return commands

    def reported(
        self,
        runner: int,
        finished: Iterable[int] = (),
        failed_attempts: Iterable[tuple[int, int]] = (),
        returned: Iterable[int] = (),
        live: Iterable[int] = (),
        suspects: Iterable[tuple[int, int]] = (),
    ) -> list[Any]:
        event = api.RunnerReported(
            runner, tuple(finished), tuple(failed_attempts), tuple(returned), tuple(live), tuple(suspects)
        )
        counted = self._count(runner, event.finished)
        failed = [pair for pair in event.failed_attempts if self.holder.get(pair[0]) == runner]
        suspected = [pair for pair in event.suspects if self.holder.get(pair[0]) == runner]
        if len(suspected) == 1 and self.group_size.get(suspected[0][0]) == 1:
            failed, suspected = failed + suspected, []
        self.owed += failed
        for index, attempt in suspected:
            self._count_name(index, attempt)
            self.group_size[index] = -(-len(suspected) // 8)
        for index, attempt in failed:
            self.attempts[index] = attempt
            self.failed_on.setdefault(index, set()).add(runner)
        dropped = [index for index, _ in [*failed, *suspected]]
        back = [*dropped, *(i for i in event.returned if self.holder.get(i) == runner)]
        if runner in self.runners:
            self._book(runner, len(counted), failed)
            self.runners[runner].asked -= {*event.finished, *back, *event.live}
            for index in back:
                del self.runners[runner].held[index]
            self._release(back)
        commands = self._send(event)
        self._check_rows(counted, len(event.finished))
        return commands

    def _book(self, runner: int, completed: int, failed: list[tuple[int, int]]) -> None:
        books = self.runners[runner]
        books.pace, books.untried = completed, books.untried and not (completed or failed)
        books.failed += failed
        books.others_completed = books.others_completed if books.streak and not completed else 0
        books.streak = 0 if completed else books.streak + len(failed)
        for other, theirs in self.runners.items():
            theirs.others_completed += completed * (other != runner)

    def _count(self, runner: int, rows: tuple[int, ...]) -> list[int]:
        """Book the finished rows, and return the positions of those that count."""
        counted = []
        for position, index in enumerate(rows):
            if self.holder.get(index) == runner:
                counted.append(position)
                del self.holder[index]
                del self.runners[runner].held[index]
                assert index not in self.done, f"episode {index} is recorded twice"
                self.recorded.add(index)
                self._settle(index)
        return counted

    def _settle(self, index: int) -> None:
        self.done.add(index)
        for known in (self.group_size, self.attempts, self.pardoned, self.failed_on):
            known.pop(index, None)

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            del self.holder[index]
            if self.charges.get(index, 0) >= MAX_ATTEMPTS:
                self.hopeless.append(index)
            elif index not in self.group_size:
                self.waiting.add(index)

    # ---------------------------------------------------------------- commands

    def _send(self, event: Any) -> list[Any]:
        charges, failures = self.owed, self._reap()
        decision = self.schedule.handle(event)
        commands: list[Any] = [*decision.commands]
        self.schedule.validate()
        self.log.append((event, decision))
        self.verdict = decision.verdict
        self._check_verdicts(commands, charges, failures)
        for command in commands:
            match command:
                case api.Grant():
                    self._check_grant(command)
                case api.Reclaim():
                    self._check_reclaim(command)
                case api.Exclude():
                    self._check_exclusion(command)
                case api.Abort():
                    assert self.cancelled, "a runner is aborted though nobody cancelled"
        self._check_counts()
        self._check_liveness()
        return commands

    def _reap(self) -> list[tuple[int, int, int]]:
        """Book the episodes that must be given up now, and return what must be said of them."""
        failures = [(index, self.seeds[index], self.attempts[index]) for index in self.hopeless]
        assert self.done.isdisjoint(self.hopeless), "an episode is given up though it is finished"
        self.given_up.update(self.hopeless)
        self.waiting -= set(self.hopeless)
        for index in self.hopeless:
            self._settle(index)
        self.owed, self.hopeless = [], []
        return failures

    def _check_verdicts(self, commands: list[Any], charges: Any, failures: Any) -> None:
        """Attempts are charged and episodes given up exactly when they must be, before anything is granted."""
        charged = [*self.verdict.charge]
        given_up = [(c.index, c.seed, c.attempts) for c in commands if isinstance(c, api.GiveUp)]
        assert charged == charges, f"{charged} are charged where {charges} is right"
        assert given_up == failures, f"{given_up} are given up where {failures} is right"
        late = [isinstance(command, (api.Grant, api.Reclaim)) for command in commands]
        assert late == sorted(late), "something is granted before the verdicts"

    def _check_exclusion(self, exclude: Any) -> None:
        assert exclude.runner in self.runners, f"runner {exclude.runner} is excluded, which is not there"
        books = self.runners.pop(exclude.runner)
        assert books.failing, "a runner is excluded that completes episodes, or has hardly begun"
        assert books.others_completed, "a runner is excluded though the others complete nothing either"
        due = [(index, attempt) for index, attempt in books.failed if index not in self.given_up]
        assert list(exclude.pardoned) == due, f"{exclude.pardoned} are not charged where {due} is right"
        for index, _ in due:
            if index not in self.done:
                self.pardoned[index] = self.pardoned.get(index, 0) + 1
        self._release(books.held)

    def _check_rows(self, counted: list[int], total: int) -> None:
        """Every row is recorded or audited: recorded if its runner held the lease, audited otherwise."""
        late = [position for position in range(total) if position not in counted]
        found = [*self.verdict.record], [*self.verdict.audit]
        assert found == (counted, late), f"{found} are recorded and audited where {(counted, late)} is right"

    def _check_grant(self, grant: Any) -> None:
        assert not self.cancelled, "granted after the cancellation"
        assert grant.runner in self.runners, f"granted to runner {grant.runner}, which is not there"
        assert grant.leases, "granted nothing"
        assert not self.suspended(grant.runner), "granted to a runner that only fails, while another one is untried"
        assert not self.isolating(grant.runner), "granted to a runner that must be left alone"
        books = self.runners[grant.runner]
        if self.group_size.keys() & {lease.index for lease in grant.leases}:
            self._check_isolated(grant)
        else:
            self._check_common(grant)
        depth = books.lanes + max(books.lanes, 2 * books.pace)
        assert len(books.held) <= depth, f"runner {grant.runner} holds {len(books.held)} leases: deeper than {depth}"

    def _check_common(self, grant: Any) -> None:
        books, share = self.runners[grant.runner], self.share
        for lease in grant.leases:
            full = len(books.held) >= share
            eligible = self.eligible(grant.runner)
            if full:
                eligible &= self.failed_on.keys()
                assert len(books.held) < books.lanes, f"runner {grant.runner} holds more than its share of {share}"
            assert lease.index in eligible, f"episode {lease.index} is granted to runner {grant.runner}"
            first = min(eligible)
            assert lease.index == first, f"episode {lease.index} is granted before {first}"
            self._check_lease(lease, grant.runner)

    def _check_isolated(self, grant: Any) -> None:
        indices = [lease.index for lease in grant.leases]
        assert not self.runners[grant.runner].held, "an isolated episode joins others"
        assert len(indices) <= min(self.group_size.get(index, 0) for index in indices), f"{indices} run together"
        assert len(indices) <= self.runners[grant.runner].lanes, "more isolated episodes than lanes"
        assert indices[0] == min(self.eligible(grant.runner, self.isolated)), "isolated episodes leave the order"
        assert self.eligible(grant.runner, set(indices)) == set(indices), "an isolated episode runs where it failed"
        assert not self.eligible(grant.runner), "an isolated episode runs while others wait"
        if len(indices) == 1:
            self.group_size[indices[0]] = 1
        for lease in grant.leases:
            assert lease.how.alone == (len(indices) == 1 and self.group_size[lease.index] == 1), "alone, or not"
            self._check_lease(lease, grant.runner)

    def _check_lease(self, lease: Lease, runner: int) -> None:
        index = lease.index
        assert index not in self.holder, f"episode {index} is granted twice"
        assert index not in self.done, f"episode {index} is granted though it is finished"
        assert lease.seed == self.seeds[index], f"episode {index} is granted with another seed"
        assert lease.attempt == self.attempts.get(index, 0) + 1, f"episode {index} is granted as {lease.attempt}"
        assert self.charges.get(index, 0) < MAX_ATTEMPTS, f"episode {index} is granted with its attempts used up"
        assert lease.runner == runner, "a lease names another runner"
        self.waiting.discard(index)
        self.holder[index] = runner
        self.runners[runner].held[index] = None

    def _check_reclaim(self, reclaim: Any) -> None:
        assert not self.cancelled, "reclaimed after the cancellation"
        assert reclaim.runner in self.runners, f"reclaimed from runner {reclaim.runner}, which is not there"
        assert reclaim.indices, "reclaimed nothing"
        assert any(not books.held for books in self.runners.values()), "reclaimed though nobody is idle"
        books = self.runners[reclaim.runner]
        unasked = [index for index in books.held if index not in books.asked]
        latest = unasked[-len(reclaim.indices) :]
        assert sorted(reclaim.indices) == sorted(latest), "reclaimed others than the leases granted last"
        books.asked.update(reclaim.indices)
        assert books.spare >= 0, "reclaimed what may have started"

    # ---------------------------------------------------------------- between events

    def _check_counts(self) -> None:
        schedule = self.schedule
        assert schedule.unfinished == self.unfinished, "the count of unfinished episodes is off"
        assert schedule.complete == (not self.unfinished), "complete before the end, or not at the end"
        for runner, books in self.runners.items():
            assert schedule.holds(runner) == bool(books.held), f"what runner {runner} holds is off"

    def _check_liveness(self) -> None:
        if self.cancelled:
            return
        if self.unfinished and self.runners:
            assert self.holder or self.schedule.awaits_runners, "nothing is under way, and not everything is done"
        share = self.share
        for runner, books in self.runners.items():
            assert not (books.streak > 20 + 3 * books.lanes and books.others_completed > 20 and self.steady), (
                f"runner {runner} only fails, the others do not, and it is not excluded"
            )
            if self.isolating(runner) or self.suspended(runner):
                continue
            eligible = self.eligible(runner)
            idle = len(books.held) < (books.lanes if eligible & self.failed_on.keys() else min(books.lanes, share))
            assert not (eligible and idle), f"a lane of runner {runner} is idle, episodes wait for it"
        free = [runner for runner, books in self.runners.items() if not books.held and not self.suspended(runner)]
        asked = any(books.asked for books in self.runners.values())
        if free and any(books.spare > 0 for books in self.runners.values()):
            assert asked, "a runner is idle, others have leases to spare, nobody asks"
        if any(self.eligible(runner, self.isolated) for runner in free):
            assert asked, "a runner is idle, and isolated episodes wait"

    steady = False
    """Whether no episode fails by itself, so that only runners do."""

    def check_replay(self) -> None:
        """The same events give the same decisions, also after they were written as JSON."""
        again = self.make_schedule()
        for event, decision in self.log:
            read = api.from_list(json.loads(json.dumps(api.to_list(event))))
            assert again.handle(read) == decision, f"{event} had another decision when it was replayed"

    def story(self) -> str:
        """Return the latest events and decisions as text."""
        return "\n".join(f"  {event}\n    -> {decision}" for event, decision in self.log[-STORY_LENGTH:])


# ------------------------------------------------------------------------------ the runners


@dataclass(slots=True)
class Call:
    """What the driver tells a runner in one call."""

    leases: list[Lease] = field(default_factory=list)
    reclaim: set[int] = field(default_factory=set)
    abort: bool = False

    def __bool__(self) -> bool:
        return bool(self.leases or self.reclaim or self.abort)


@dataclass(slots=True)
class Report:
    """What a runner answers."""

    finished: list[int] = field(default_factory=list)
    failed_attempts: list[tuple[int, int]] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    suspects: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Lane:
    """One live episode."""

    attempt: int
    steps_left: int


class End(Enum):
    """How an attempt ends: well, in a fault that its runner survives, or with its runner."""

    GOOD = 0
    FAULT = 1
    KILL = 2
    HANG = 3


@dataclass(frozen=True, slots=True)
class Nature:
    """How long attempts take and how they end: a function of index and attempt, as in the real thing."""

    seed: int
    longest: int
    fault_percent: int
    lethal_percent: int
    """Of the attempts."""
    guilty_percent: int
    """Of the episodes, whose every attempt ends its runner."""

    def draw(self, index: int, attempt: int) -> tuple[int, End]:
        """Return the steps of an attempt and how it ends."""
        noise = hash((self.seed, index, attempt))
        long = (noise >> 40) % 4 == 0
        return 1 + (noise >> 8) % (self.longest if long else 3), self._end(index, noise)

    def _end(self, index: int, noise: int) -> End:
        if self.guilty(index) or (noise >> 20) % 100 < self.lethal_percent:
            return End.HANG if (noise >> 30) % 2 else End.KILL
        return End.FAULT if noise % 100 < self.fault_percent else End.GOOD

    def guilty(self, index: int) -> bool:
        """Whether every attempt of the episode ends its runner."""
        return hash((index, self.seed)) % 100 < self.guilty_percent

    def harmless(self, index: int) -> bool:
        """Whether no attempt of the episode goes wrong."""
        return {self.draw(index, attempt)[1] for attempt in range(1, 3 * MAX_ATTEMPTS)} == {End.GOOD}


class Death(NamedTuple):
    """Which attempt ended a runner, and how."""

    index: int  # type: ignore[assignment]  # The field's name hides tuple.index, which nobody calls.
    attempt: int
    end: End


class SimulatedRunner:
    """Runs leases in the order of their grants, each in a lane of its own; returns only what it has not started."""

    def __init__(self, number: int, lanes: int, nature: Nature, broken: bool = False, batched: bool = False) -> None:
        self.number = number
        self.broken = broken
        """Whether every attempt fails on it, in its first step."""
        self.batched = batched
        """Whether all its lanes take a step in one call, so that one attempt's fault ends them all."""
        self.lanes = lanes
        self.nature = nature
        self.mail = Call()
        self.calls: deque[Call] = deque()
        self.reports: deque[Report] = deque()
        self.queue: list[Lease] = []
        self.live: dict[int, Lane] = {}
        self.death: Death | None = None

    def obey(self, command: Any) -> None:
        """Put a command into the next call."""
        match command:
            case api.Grant():
                self.mail.leases += command.leases
            case api.Reclaim():
                self.mail.reclaim.update(command.indices)
            case api.Abort():
                self.mail.abort = True

    def post(self, holds: bool) -> None:
        """Keep two calls in flight, as long as there is anything to do."""
        while not self.death and len(self.calls) + len(self.reports) < 2 and (self.mail or holds):
            self.calls.append(self.mail)
            self.mail = Call()

    def execute(self, steps: int) -> Report | None:
        """Run the oldest call and put its report on the way; a runner that dies reports nothing."""
        call, report = self.calls.popleft(), Report()
        mine = {lease.index for lease in self.queue} | self.live.keys()
        assert mine.isdisjoint(lease.index for lease in call.leases), "a runner is granted what it has already"
        self.queue += call.leases
        self._give_back(call, report)
        for _ in range(steps):
            self._sweep(report)
            if self.death:
                self.calls.clear()
                return None
        report.live = list(self.live)
        self.reports.append(report)
        return report

    def _give_back(self, call: Call, report: Report) -> None:
        if call.abort:
            report.returned += [*self.live, *(lease.index for lease in self.queue)]
            self.live, self.queue = {}, []
        elif call.reclaim:
            report.returned += [lease.index for lease in self.queue if lease.index in call.reclaim]
            self.queue = [lease for lease in self.queue if lease.index not in call.reclaim]

    def _sweep(self, report: Report) -> None:
        """Fill the lanes and step each of them once."""
        free = self.lanes - len(self.live)
        for lease in self.queue[:free]:
            self.live[lease.index] = Lane(lease.attempt, self.nature.draw(lease.index, lease.attempt)[0])
        del self.queue[:free]
        for index, lane in list(self.live.items()):
            lane.steps_left -= 1
            if index in self.live and (not lane.steps_left or self.broken) and not self.death:
                self._end_attempt(index, lane, report)

    def _end_attempt(self, index: int, lane: Lane, report: Report) -> None:
        """A good attempt finishes the episode; any other frees its lane, or ends the runner."""
        end = End.FAULT if self.broken else self.nature.draw(index, lane.attempt)[1]
        if end in (End.KILL, End.HANG):
            self.death = Death(index, lane.attempt, end)
            return
        if end is End.FAULT and self.batched:
            report.suspects += [(other, lane.attempt) for other, lane in self.live.items()]
            self.live = {}
            return
        del self.live[index]
        if end is End.FAULT:
            report.failed_attempts.append((index, lane.attempt))
        else:
            report.finished.append(index)


# ------------------------------------------------------------------------------ the history


class World:
    """One random history, from the first runner to the last record."""

    def __init__(self, seed: int, module: ModuleType = rl_eval.scheduling.schedule) -> None:
        self.rng = random.Random(seed)
        self.module = module
        self.num_episodes = self.rng.choice([1, 2, 3, 5, 8, 13, 21, 40, 60])
        self.nature = Nature(
            seed,
            longest=self.rng.choice([1, 4, 25]),
            fault_percent=self.rng.choice([0, 0, 20, 50]),
            lethal_percent=self.rng.choice([0, 0, 0, 2, 20]),
            guilty_percent=self.rng.choice([0, 0, 0, 5, 20]),
        )
        self.obscurity = self.rng.choice([0.0, 0.3])
        """How many of the runners die without a trace."""
        self.lanes = self.rng.choice([1, 1, 2, 4, 8])
        self.batched = self.rng.random() < 0.3
        self.bad_nodes = self.rng.choice([0.0, 0.0, 0.3])
        """How many of the runners are broken from the start."""
        self.peril = self.rng.choice([0.0, 0.03, 0.08])
        self.stutter = self.rng.choice([0.0, 0.2])
        self.most_runners = self.rng.randint(1, 6)
        self.numbers = 0
        self.sessions: list[Referee] = []
        self.done: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.pardoned: dict[int, int] = {}
        if self.rng.random() < 0.1:
            self.done = {index for index in range(self.num_episodes) if self.rng.random() < 0.5}
            self.attempts = {index: self.rng.randint(1, MAX_ATTEMPTS) for index in range(0, self.num_episodes, 3)}
        self.framed = set(self.attempts)
        """Episodes that were charged, or may have been, with what another did, or a broken runner."""

    # ---------------------------------------------------------------- a session: one driver's life

    def _open(self) -> None:
        expected = self.rng.choice([1, self.most_runners, self.most_runners, 8])
        written = self.done, self.attempts, self.pardoned
        self.referee = Referee(self.module, self.num_episodes, self.nature.seed, expected, *written)
        self.referee.steady = not (
            self.nature.fault_percent or self.nature.lethal_percent or self.nature.guilty_percent
        )
        self.sessions.append(self.referee)
        self.runners: dict[int, SimulatedRunner] = {}
        self.ghosts: list[SimulatedRunner] = []
        for _ in range(self.rng.randint(0, self.most_runners)):
            self._join()

    def _resume(self) -> None:
        """Another driver takes over with what was written down in time, and with runners of its own."""
        self._close()
        self.attempts = {index: count for index, count in self.referee.attempts.items() if self.rng.random() < 0.9}
        self.pardoned = {index: self.referee.pardoned.get(index, 0) for index in self.attempts}
        self.done -= {index for index in sorted(self.referee.given_up) if self.rng.random() < 0.5}
        self._open()

    def _close(self) -> None:
        recorded, given_up = self.referee.recorded, self.referee.given_up
        assert self.done.isdisjoint(recorded | given_up), "a finished episode was recorded again after a resume"
        innocent = {index for index in given_up - self.framed if self.nature.harmless(index)}
        assert not innocent, f"episodes {innocent} are given up for what others did"
        self.done |= recorded | given_up
        self.referee.check_replay()

    # ---------------------------------------------------------------- what happens

    def run(self) -> None:
        """Let anything happen for a while, then let nothing more go wrong, and expect the end."""
        self._open()
        for _ in range(self.rng.randint(0, 300)):
            if self.referee.schedule.complete:
                break
            self._anything()
        if self.referee.cancelled or self.rng.random() < 0.1:
            self._wind_down()
        self._finish()
        self._close()
        assert self.done == set(range(self.num_episodes)), "complete, but not every episode has its record"

    def _anything(self) -> None:
        roll = self.rng.random()
        if roll < self.peril:
            self._mishap()
        elif roll < 0.12:
            if len(self.runners) < self.most_runners:
                self._join()
        elif roll < 0.5:
            self._execute(self._pick(runner for runner in self.runners.values() if runner.calls))
        elif roll < 0.9:
            self._deliver(self._pick(runner for runner in self.runners.values() if runner.reports))
        else:
            self._haunt()

    def _mishap(self) -> None:
        roll = self.rng.random()
        if roll < 0.7:
            self._lose(self._pick(self.runners.values()))
        elif roll < 0.85:
            self._obey(self.referee.fleet_sized(self.rng.randint(0, 8)))
        elif roll < 0.93:
            self._resume()
        else:
            self._obey(self.referee.cancel())

    def _pick(self, runners: Iterable[SimulatedRunner]) -> SimulatedRunner | None:
        candidates = list(runners)
        return self.rng.choice(candidates) if candidates else None

    def _join(self) -> None:
        """Runners that are started one after the other do not come up in that order."""
        broken = self.rng.random() < self.bad_nodes and any(not other.broken for other in self.runners.values())
        lanes = self.rng.randint(1, self.lanes)
        runner = SimulatedRunner(self.numbers ^ 1, lanes, self.nature, broken, self.batched)
        self.numbers += 1
        self.runners[runner.number] = runner
        self._obey(self.referee.joined(runner.number, runner.lanes))

    def _lose(self, runner: SimulatedRunner | None) -> None:
        """A runner is gone, pre-empted say; what it was doing then is sometimes suspected or charged."""
        if runner is None:
            return
        charged, suspects = [], []
        if runner.live and self.rng.random() < 0.5:
            index, lane = self.rng.choice(list(runner.live.items()))
            (suspects if self.rng.random() < 0.7 else charged).append((index, lane.attempt))
            self.framed.add(index)
        self._part(runner, charged, suspects)

    def _part(self, runner: SimulatedRunner, charged: Pairs, suspects: Pairs) -> None:
        del self.runners[runner.number]
        self.ghosts.append(runner)
        self._obey(self.referee.lost(runner.number, charged, suspects))

    def _notify_lost(self, runner: SimulatedRunner) -> None:
        """A runner died of an episode; its reports arrive before the news of its death, or after it."""
        while runner.reports and self.rng.random() < 0.5:
            self._deliver(runner)
        self._part(runner, *self._evidence(runner))

    def _evidence(self, runner: SimulatedRunner) -> tuple[Pairs, Pairs]:
        """Return what is found out about a death: charges and suspects."""
        assert runner.death is not None
        index, attempt, end = runner.death
        if self.rng.random() < self.obscurity:
            return [], []
        noise = self._irrelevant(runner) if self.rng.random() < self.stutter else []
        if end is End.HANG:
            return [*noise, (index, attempt)], []
        if self.rng.random() < 0.8:
            return noise, [(index, attempt)]
        self.framed.update(runner.live)
        return noise, [(other, lane.attempt) for other, lane in runner.live.items()]

    def _irrelevant(self, runner: SimulatedRunner) -> Pairs:
        """Return charges that mean nothing: episodes of others, and attempts that were charged before."""
        assert runner.death is not None
        holder, charged = self.referee.holder, self.referee.attempts
        others = [index for index in range(self.num_episodes) if holder.get(index) != runner.number]
        stale = [index for index in charged if holder.get(index) == runner.number and index != runner.death.index]
        noise = [(index, charged[index]) for index in stale]
        return [*noise, (self.rng.choice(others), self.rng.randint(1, MAX_ATTEMPTS))] if others else noise

    def _haunt(self) -> None:
        """A lost runner was alive after all: it works on, its reports arrive late, and then it is lost again."""
        ghost = self._pick(self.ghosts)
        if ghost is None:
            return
        if ghost.calls:
            self._execute(ghost)
        elif ghost.reports:
            self._deliver(ghost)
        else:
            self.ghosts.remove(ghost)
            self._obey(self.referee.lost(ghost.number, *(self._evidence(ghost) if ghost.death else ())))

    def _execute(self, runner: SimulatedRunner | None) -> None:
        if runner is None:
            return
        report = runner.execute(self.rng.randint(1, 4))
        if report is None:
            if runner.number in self.runners:
                self._notify_lost(runner)
        elif self.rng.random() < self.stutter:
            report.finished += report.finished[-1:] or sorted(self.referee.done)[-1:]

    def _deliver(self, runner: SimulatedRunner | None) -> None:
        if runner is None:
            return
        report = runner.reports.popleft()
        if runner.broken:
            self.framed.update(index for index, _ in [*report.failed_attempts, *report.suspects])
        self._obey(
            self.referee.reported(
                runner.number,
                report.finished,
                report.failed_attempts,
                report.returned,
                report.live,
                report.suspects,
            )
        )

    def _obey(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, api.Exclude):
                self.ghosts.append(self.runners.pop(command.runner))
            elif hasattr(command, "runner") and command.runner in self.runners:
                self.runners[command.runner].obey(command)
        for runner in self.runners.values():
            runner.post(self.referee.schedule.holds(runner.number))

    # ---------------------------------------------------------------- the end

    def _round(self) -> None:
        """Every runner answers every call."""
        for runner in list(self.runners.values()):
            while runner.calls:
                self._execute(runner)
            while runner.reports:
                self._deliver(runner)

    def _wind_down(self) -> None:
        """Cancel, and expect every lease back; then another driver does the rest."""
        if not self.referee.cancelled:
            self._obey(self.referee.cancel())
        for _ in range(3):
            self._round()
        assert not self.referee.holder, "leases are held long after the cancellation"
        self._resume()

    def _finish(self) -> None:
        """With runners that come up and no more mishaps, something happens every few rounds until the end."""
        self.obscurity, patience = 0.0, 0
        while not self.referee.schedule.complete:
            if not self.runners or (len(self.runners) < self.most_runners and self.rng.random() < 0.2):
                self._join()
            if self.referee.schedule.awaits_runners:
                self._obey(self.referee.fleet_sized(len(self.runners)))
            before = self.numbers, len(self.ghosts), self.referee.unfinished
            self._round()
            patience = patience + 1 if before == (self.numbers, len(self.ghosts), self.referee.unfinished) else 0
            assert patience < 10 + MAX_ATTEMPTS * self.nature.longest, (
                f"{self.referee.unfinished} episodes never finish"
            )


def run_history(seed: int, module: ModuleType = rl_eval.scheduling.schedule) -> World:
    """Run one history.

    Raises:
        AssertionError: A law was broken; the message names it, the seed, and the latest events.
    """
    world = World(seed, module)
    try:
        world.run()
    except Exception as error:
        story = world.sessions[-1].story() if world.sessions else ""
        raise AssertionError(
            f"history {seed}: {type(error).__name__}: {error}\nreplay: run_history({seed})\n{story}"
        ) from error
    return world

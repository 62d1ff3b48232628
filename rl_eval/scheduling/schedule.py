"""Assignment of episodes to runners: order, retries and isolation, as a pure state machine.

Two rules make the result independent of the number of runners and lanes:

1. **An episode is chosen by its index, before it runs.** Leases are granted in index order. Every granted episode is
   finished: by the runner with the lease or, if that runner is lost or fails, by another runner. The time of finishing
   never selects an episode.
2. **Each episode has exactly one record.** The episode may run more than once, because runners die. A record counts
   only if its runner still has the lease. Any other record of the episode is only compared with the record that counts.

The schedule is a pure state machine: :meth:`Schedule.handle` answers an event with a decision. It uses no Ray, time,
threads or randomness. So a test can drive it through thousands of histories in a second, and repeat a run from its
events.

Runners pull work. Each runner has about one lease per lane in addition to its running episodes, or more if its episodes
are so short that a report empties the queue. When fresh episodes run out, the schedule *reclaims* leases that a busy
runner has not started, and grants them to idle runners. It never takes live episodes from a live runner.

A failed attempt uses up an attempt of its episode, and the episode runs again on another runner. After several failures
in a row, a runner is paused while another runner is still in its first attempt. If other runners complete so many
episodes that chance cannot explain these failures, the failing runner is *excluded*, and its failures use up no
attempts. When the attempts of an episode are used up, the schedule gives the episode up. There is no other reason for
failed records.

The loss of a runner, or a fault in a call for several episodes, uses up an attempt of an episode only if there is
evidence that this episode is the cause. Episodes that caused the loss or the fault, or may have caused it, are
*isolated* from then on (see :mod:`rl_eval.scheduling.runner_states`). They run on idle runners, separate from all other
episodes. So their crashes affect no other episode, and a crash with a single episode proves that this episode is the
cause.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping

from typing_extensions import assert_never

from rl_eval.records.episode import How, Lease
from rl_eval.scheduling.events import (
    Abort,
    Cancelled,
    Command,
    Decision,
    Event,
    Exclude,
    GiveUp,
    Grant,
    PoolSized,
    Reclaim,
    RunnerJoined,
    RunnerLost,
    RunnerReported,
    Verdict,
)
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.runner_states import Isolation, RunnerState, RunnerStates


class Schedule:
    """Assigns the episodes of a plan to runners.

    Args:
        plan: Episodes to run.
        expected_runners: Number of runners that should join. A runner gets at most an equal share of the remaining
            episodes, except for retries, so that runners that join later get episodes, too.
        done: Indices that are already finished, in a resumed run.
        attempts: Highest number of a used or pardoned attempt, by index. Episodes that have no attempt left are given
            up at the first event.
        max_attempts: Maximum number of attempts of an episode.
        pardoned: Numbers of pardoned attempts, by index. They are not used up, but their numbers are not used again.

    Raises:
        ValueError: An index of ``done`` or ``attempts`` is outside the plan.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        expected_runners: int = 1,
        done: Collection[int] = (),
        attempts: Mapping[int, int] | None = None,
        max_attempts: int = 3,
        pardoned: Mapping[int, int] | None = None,
    ) -> None:
        self._plan = plan
        self._expected = max(1, expected_runners)
        self._done = bytearray(len(plan))
        for index in [*done, *(attempts or ())]:
            if not 0 <= index < len(plan):
                raise ValueError(f"episode {index} is outside the plan of {len(plan)} episodes")
        for index in done:
            self._done[index] = 1
        self._unfinished = len(plan) - sum(self._done)
        self._next = 0
        self._again: list[int] = []
        """Indices of episodes that will run again, in order. They wait for a runner on which they have not failed."""
        self._isolation = Isolation()
        self._num_isolated = 0
        """Number of isolated episodes whose lease a runner holds."""
        self._holder: dict[int, int] = {}
        self._max_attempts = max_attempts
        self._attempts = {index: count for index, count in (attempts or {}).items() if not self._done[index]}
        self._pardoned = dict(pardoned or {})
        """Number of pardoned attempts of an episode, by index."""
        self._failed_on: dict[int, list[int]] = {}
        """Runners on which an unfinished episode has failed."""
        self._given_up: set[int] = set()
        self._spent = sorted(filter(self._is_spent, self._attempts))
        self._runners = RunnerStates()
        self._cancelled = False
        self._skip_done()

    @property
    def complete(self) -> bool:
        """Whether every episode has a record or was given up."""
        return self._unfinished == 0

    @property
    def unfinished(self) -> int:
        """Number of episodes that have no record and were not given up."""
        return self._unfinished

    @property
    def runners(self) -> int:
        """Number of runners that have joined and are neither lost nor excluded."""
        return len(self._runners)

    @property
    def awaits_runners(self) -> bool:
        """Whether episodes wait for runners that have not joined; :class:`PoolSized` ends the wait."""
        if not self._awaited:
            return False
        waiting = {*self._again, *self._isolation.waiting}
        return bool(self._runners.failing or self._failed_on.keys() & waiting)

    def knows(self, runner: int) -> bool:
        """Whether the runner has joined and is neither lost nor excluded."""
        return runner in self._runners

    def holds(self, runner: int) -> bool:
        """Whether the runner holds any lease."""
        return runner in self._runners and bool(self._runners[runner].held)

    def gave_up(self, index: int) -> bool:
        """Whether an episode was given up."""
        return index in self._given_up

    def validate(self) -> None:
        """Check rules about the parts of the state. The effort grows with the number of held and waiting episodes.

        Raises:
            AssertionError: A rule is broken; the message names it.
        """
        states, isolation = self._runners, self._isolation
        held = [(index, runner) for runner, state in states.items() for index in state.held]
        opened = [*(index for index, _ in held), *self._again, *isolation.waiting]
        isolated = [index for index, runner in held if states[runner].isolating]
        fresh = self._unfinished - len(opened)
        rules = {
            "the holder of an episode holds it": self._holder == dict(held),
            "an episode is held or waits once": len(opened) == len({*opened}),
            "only an episode without a record is held or waits": not any(self._done[index] for index in opened),
            "only an episode that was granted before waits again": all(index < self._next for index in opened),
            "an episode is unfinished until the end": fresh >= 0 and (fresh > 0) == (self._next < len(self._done)),
            "an episode without an attempt left is given up": not any(map(self._is_spent, opened)),
            "an isolated episode runs apart": isolated == [index for index, _ in held if index in isolation],
            "isolated episodes are counted": len(isolated) == self._num_isolated,
            "retries wait in order, and isolated ones apart": self._again
            == sorted(index for index in self._again if index not in isolation),
            "a lease is reclaimed from its holder": all(one.reclaiming <= one.held.keys() for one in states.values()),
            "a runner without leases is idle": states.dry == {one for one in states if not states[one].held},
            "a runner with spare leases is loaded": states.backlogged == {one for one in states if states[one].queued},
        }
        if broken := [rule for rule, kept in rules.items() if not kept]:
            raise AssertionError("; ".join(broken))

    def handle(self, event: Event) -> Decision:
        """Handle one event; return the decision.

        Raises:
            ValueError: A runner with the same number joined before and was neither lost nor excluded.
        """
        spent, verdict = self._give_up_spent() if self._spent else [], Verdict()
        match event:
            case RunnerJoined(runner, lanes):
                commands = self._joined(runner, lanes)
            case RunnerLost():
                verdict, commands = self._lost(event)
            case RunnerReported():
                verdict, commands = self._reported(event)
            case PoolSized(runners):
                self._expected = max(1, runners)
                commands = self._feed(self._runners.hungry())
            case Cancelled():
                commands = self._cancel()
            case _:
                assert_never(event)
        return Decision(verdict, (*spent, *commands))

    # ---------------------------------------------------------------- one method per event

    def _joined(self, runner: int, lanes: int) -> list[Command]:
        if runner in self._runners:
            raise ValueError(f"runner {runner} joined twice")
        self._runners[runner] = RunnerState(lanes)
        self._runners.note(runner)
        return self._feed([runner])

    def _lost(self, loss: RunnerLost) -> tuple[Verdict, list[Command]]:
        lost = self._runners.get(loss.runner)
        if lost is None:
            return Verdict(), []
        held = list(lost.held)
        charged, suspected = dict(loss.charged), dict(loss.suspects)
        if lost.isolating and len(held) == 1:
            charged = suspected | charged  # No other episode was on the runner.
        self._isolation.suspect(index for index in held if index in suspected and index not in charged)
        for index in held:
            if index in charged:
                self._isolation.suspect([index])
        charge: list[tuple[int, int]] = []
        commands: list[Command] = []
        for index in self._remove(loss.runner):
            if charged.get(index, 0) > self._attempts.get(index, 0):
                self._attempts[index] = charged[index]
                charge.append((index, charged[index]))
            commands += self._put_back(index)
        return Verdict(charge=tuple(charge)), commands + self._feed(self._runners.hungry())

    def _reported(self, report: RunnerReported) -> tuple[Verdict, list[Command]]:
        runner = report.runner
        state = self._runners.get(runner)
        recorded: dict[int, int] = {}
        audited = []
        for position, index in enumerate(report.finished):
            if self._holder.get(index) == runner and index not in recorded:
                recorded[index] = position
            else:
                audited.append(position)
        record, audit = tuple(recorded.values()), tuple(audited)
        if state is None:
            return Verdict(record, audit), []
        self._drop(state, recorded)
        self._settle(recorded)
        first = state.untried
        state.pace, state.live = len(recorded), len(report.live)
        state.reclaiming.difference_update(report.live)
        failed = self._held_attempts(runner, report.failed_attempts)
        suspects = self._held_attempts(runner, report.suspects)
        if len(suspects) == 1 and all(map(self._isolation.alone, suspects)):  # It ran alone: the cause.
            failed, suspects = failed | suspects, {}
        self._isolation.suspect(suspects)
        self._runners.ended(runner, len(recorded), list(failed.items()))
        for index, attempt in failed.items():
            self._attempts[index] = attempt
            self._failed_on.setdefault(index, []).append(runner)
        commands: list[Command] = []
        for index in [*failed, *suspects]:
            self._drop(state, [index])
            commands += self._put_back(index)
        returned = [index for index in report.returned if self._holder.get(index) == runner]
        self._drop(state, returned)
        for index in returned:
            commands += self._put_back(index)
        self._runners.note(runner)
        broken = self._runners.broken() if self._runners.failing else []
        for one in broken:
            commands += self._exclude(one)
        # Other runners may run the returned episodes, and episodes that waited for the first attempt of this runner.
        shared = returned or failed or suspects or broken or (self._runners.failing and first)
        others = self._runners.hungry() if shared else []
        fed = [*others, *([runner] if runner in self._runners and runner not in others else ())]
        return Verdict(record, audit, charge=tuple(failed.items())), commands + self._feed(fed)

    def _cancel(self) -> list[Command]:
        self._cancelled = True
        return [Abort(runner) for runner, state in self._runners.items() if state.held]

    # ---------------------------------------------------------------- episodes

    def _held_attempts(self, runner: int, attempts: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return the attempts that are not used up yet and whose lease the runner still holds, by index."""
        return {
            index: attempt
            for index, attempt in attempts
            if self._holder.get(index) == runner and attempt > self._attempts.get(index, 0)
        }

    def _drop(self, state: RunnerState, indices: Collection[int]) -> None:
        """Remove leases from their runner."""
        for index in indices:
            del self._holder[index]
            del state.held[index]
        state.reclaiming.difference_update(indices)
        if state.isolating:
            self._num_isolated -= len(indices)
            state.isolating = bool(state.held)

    def _remove(self, runner: int) -> list[int]:
        """Remove a runner and return its episodes."""
        state = self._runners.pop(runner)
        held = list(state.held)
        self._drop(state, held)
        self._runners.note(runner)
        return held

    def _put_back(self, index: int) -> list[Command]:
        """Put an episode that no runner holds into its queue, or give it up."""
        if self._is_spent(index):
            return [self._give_up(index)]
        if index in self._isolation:
            self._isolation.add(index)
        else:
            insort(self._again, index)
        return []

    def _is_spent(self, index: int) -> bool:
        """Whether an episode has no attempt left."""
        return self._attempts.get(index, 0) - self._pardoned.get(index, 0) >= self._max_attempts

    def _settle(self, indices: Collection[int]) -> None:
        for index in indices:
            self._done[index] = 1
        self._unfinished -= len(indices)
        self._isolation.discard(indices)
        for index in self._attempts.keys() & indices:
            del self._attempts[index]
            self._pardoned.pop(index, None)
            self._failed_on.pop(index, None)

    def _give_up(self, index: int) -> GiveUp:
        attempts = self._attempts[index]
        self._settle([index])
        self._given_up.add(index)
        return GiveUp(index, self._plan[index].seed, attempts)

    def _give_up_spent(self) -> list[Command]:
        """Give up episodes that had no attempt left when the run was resumed."""
        spent, self._spent = self._spent, []
        commands: list[Command] = [self._give_up(index) for index in spent]
        self._skip_done()
        return commands

    def _skip_done(self) -> None:
        following = self._done.find(0, self._next)
        self._next = len(self._done) if following < 0 else following

    # ---------------------------------------------------------------- runners that fail

    @property
    def _awaited(self) -> bool:
        """Whether the number of expected runners is larger than the number of runners that have joined."""
        return self._expected > len(self._runners)

    def _exclude(self, runner: int) -> list[Command]:
        failed = self._runners[runner].failed
        pardoned = tuple((index, attempt) for index, attempt in failed if index not in self._given_up)
        for index, _ in pardoned:
            if not self._done[index]:
                self._pardoned[index] = self._pardoned.get(index, 0) + 1
        commands: list[Command] = [Exclude(runner, len(failed), pardoned)]
        for index in self._remove(runner):
            commands += self._put_back(index)
        return commands

    def _suspended(self, runner: int) -> bool:
        """Whether a failing runner is paused until every other runner has ended an attempt.

        Those attempts show whether only this runner fails.
        """
        return runner in self._runners.failing and (self._awaited or self._runners.untried_beside(runner))

    def _may_retry(self, runner: int, index: int) -> bool:
        """Whether the earlier failures of an episode allow a runner to run it."""
        return index not in self._failed_on or self._allowed(runner, index)

    def _allowed(self, runner: int, index: int) -> bool:
        """Whether a runner may run an episode that has failed.

        Another try on the same runner is allowed only if the episode has failed on all other runners, too, and no more
        runners are expected.
        """
        failed_on = self._failed_on[index]
        return runner not in failed_on or not (self._awaited or any(other not in failed_on for other in self._runners))

    # ---------------------------------------------------------------- balance

    @property
    def _waiting(self) -> int:
        """Number of episodes that are neither assigned nor isolated."""
        return self._unfinished - len(self._isolation) - len(self._holder)

    def _feed(self, runners: Iterable[int]) -> list[Command]:
        if self._cancelled:
            return []
        grants = [grant for runner in runners if (grant := self._grant(runner))]
        return [*grants, *self._rebalance(), *self._isolate()]

    def _grant(self, runner: int) -> Grant | None:
        """Grant leases to a runner, up to the runner's depth and to an equal share of the remaining episodes."""
        state = self._runners[runner]
        if state.isolating or self._suspended(runner):
            return None
        common = self._unfinished - len(self._isolation) - self._num_isolated
        share = -(-common // max(self._expected, len(self._runners)))
        limit = min(state.depth, share) - len(state.held)
        taken = [] if self._again else self._take_fresh(limit)
        while (index := self._take(runner, any_episode=len(taken) < limit, free=len(taken) < state.free)) is not None:
            taken.append(index)
        return self._lease(runner, taken) if taken else None

    def _take(self, runner: int, *, any_episode: bool, free: bool) -> int | None:
        """Remove and return the lowest index that a runner may take; None if there is no such index.

        Args:
            runner: The runner.
            any_episode: Whether the runner may take more leases within its limit.
            free: Whether the runner has a free lane. The runner may then exceed its limit for an episode that has
                failed.
        """
        if not (any_episode or free) or not self._waiting:
            return None
        for index in self._again:
            if self._allowed(runner, index) if index in self._failed_on else any_episode:
                self._again.remove(index)
                return index
        return next(iter(self._take_fresh(int(any_episode))), None)

    def _take_fresh(self, count: int) -> list[int]:
        """Remove and return the lowest indices that were never assigned."""
        taken: list[int] = []
        while len(taken) < count and self._next < len(self._done):
            limit = min(self._next + count - len(taken), len(self._done))
            done = self._done.find(1, self._next, limit)
            end = limit if done < 0 else done
            taken += range(self._next, end)
            self._next = end
            self._skip_done()
        return taken

    def _lease(self, runner: int, indices: list[int]) -> Grant:
        self._holder.update(dict.fromkeys(indices, runner))
        self._runners[runner].held.update(dict.fromkeys(indices))
        self._runners.note(runner)
        how = How(alone=len(indices) == 1 and self._isolation.alone(indices[0]))
        leases = [Lease(self._plan[index], self._attempts.get(index, 0) + 1, runner, how) for index in indices]
        return Grant(runner, tuple(leases))

    def _rebalance(self) -> list[Command]:
        """Reclaim leases that have not started. For each idle runner, one busy runner must return leases."""
        commands: list[Command] = []
        if not (self._runners.dry and self._runners.backlogged):
            return commands
        asked = self._runners.asked
        while self._runners.backlogged and asked < len(self._runners.dry):
            victim = max(self._runners.backlogged, key=lambda runner: (self._runners[runner].queued, runner))
            state = self._runners[victim]
            count = -(-state.queued // 2)
            wanted = [index for index in reversed(state.held) if index not in state.reclaiming][:count]
            state.reclaiming.update(wanted)
            self._runners.note(victim)
            commands.append(Reclaim(victim, tuple(wanted)))
            asked += 1
        return commands

    def _isolate(self) -> list[Command]:
        """Grant isolated episodes to idle runners."""
        commands: list[Command] = []
        if not self._isolation or not self._runners.dry:
            return commands
        idle = [runner for runner in sorted(self._runners.dry) if not self._suspended(runner)]
        idle = idle[: max(0, len(self._runners.dry) - self._runners.asked)]
        for place, runner in enumerate(idle):
            state = self._runners[runner]
            fit = [index for index in self._isolation.waiting if self._may_retry(runner, index)]
            if indices := self._isolation.take(fit, state.lanes, len(idle) - place):
                state.isolating = True
                self._num_isolated += len(indices)
                commands.append(self._lease(runner, indices))
        return commands

"""A simulated world for the session: runners that report, fail, lag and die, and laws for what comes of an evaluation.

The control loop, the pool and the session are real; the backend and the clock are the test's. The same seed makes the
same history, so ``run_session(seed)`` replays a failure. The module is an argument, to judge planted bugs, too.
"""

from __future__ import annotations

import random
import time
from types import ModuleType
from typing import Any, Final

import numpy as np

import rl_eval.execution.session
from rl_eval import EvalResult
from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Run, Start
from rl_eval.errors import RunnerLost
from rl_eval.execution.jobs import Job
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import Committing, EvalOutcome
from rl_eval.log import LogContents, Manifest
from rl_eval.log.contents import Scan, fold
from rl_eval.records.episode import PROGRESS, ROW, Batch, Fault, Lease, Outcome, RuleEnd, RunReport
from rl_eval.runners import layout_of
from rl_eval.scheduling.plan import EpisodePlan
from tests.unit.test_loop import World

EPISODES: Final = 40
TURNS: Final = 3_000
FAILING: Final = 7
"""Every seventh episode fails in its first attempt, and the one behind it in each."""


class Long:
    """Ends an evaluation at the second long episode in a row."""

    def after(self, k: int, rows: Any) -> str | None:
        return "two in a row" if k > 1 and (rows["length"][-2:] >= 15).all() else None


def length(index: int) -> int:
    return (4 * index * index + index) % 19 + 1


END: Final = RuleEnd(18, "Long", "two in a row")


class Opens(Opening):
    """Opening of an evaluation whose session is that of the module."""

    def __init__(self, outcome: EvalOutcome, session: ModuleType) -> None:
        super().__init__(outcome)
        self.outcome, self.session = outcome, session

    def successors(self) -> list[Job]:
        return [self.session.EpisodeSession(self.outcome)] if self.outcome.state == "running" else []


class Runner:
    """One runner, which holds leases and reports them in any order."""

    def __init__(self, rng: random.Random, position: int, *, broken: bool) -> None:
        self.rng, self.position, self.broken = rng, position, broken
        self.held: dict[int, Lease] = {}

    def answer(self, run: Run) -> RunReport:
        self.held |= {lease.index: lease for lease in run.leases}
        returned = [*self.held] if run.abort else [index for index in run.reclaim if index in self.held]
        for index in returned:
            del self.held[index]
        ended = [lease for lease in self.held.values() if self.rng.random() < 0.5]
        rows, faults = [], []
        for lease in ended:
            del self.held[lease.index]
            if self.broken or lease.index % FAILING == 1 or (lease.index % FAILING == 0 and lease.attempt == 1):
                told = "OSError", "a cable came off", "File"
                faults.append(
                    Fault(lease.index, lease.seed, lease.attempt, "env", "step", 0, *told, self.position, "h", 0.0)
                )
            else:
                rows.append(lease)
        return self.report(rows, faults, returned)

    def report(self, done: list[Lease], faults: list[Fault], returned: list[int]) -> RunReport:
        rows = np.zeros(len(done), ROW)
        for place, lease in enumerate(done):
            rows[place]["index"], rows[place]["seed"], rows[place]["length"] = (
                lease.index,
                lease.seed,
                length(lease.index),
            )
            rows[place]["outcome"], rows[place]["attempts"] = Outcome.COMPLETED, lease.attempt
            rows[place]["runner"] = self.position
        steps, progress = int(rows["length"].sum()), np.zeros(0, PROGRESS)
        return RunReport(
            rows, np.zeros((len(rows), 0)), tuple(faults), progress, tuple(returned), steps, 0.0, 0.0, 0.0, 0
        )


class Disk:
    """A log in memory, whose records are committed when the history says so."""

    def __init__(self) -> None:
        self.pending: list[Batch] = []
        self.committed: list[Batch] = []

    def begin(self, manifest: Manifest) -> LogContents:
        return fold(manifest, Scan(), "the disk")

    def append(self, batch: Batch) -> None:
        self.pending.append(batch)

    def commit(self) -> None:
        self.committed, self.pending = self.committed + self.pending, []

    def poll(self) -> list[Batch]:
        committed, self.committed = self.committed, []
        return committed

    @property
    def settled(self) -> bool:
        return not self.pending

    def hurry(self) -> None:
        """Do nothing: the history is not impatient."""

    def flush(self, timeout_s: float) -> None:
        self.commit()

    def close(self) -> None:
        """Do nothing."""


class History:
    """A random history of one evaluation.

    Args:
        seed: Seed of the history.
        session: Module of the session.
    """

    def __init__(self, seed: int, session: ModuleType) -> None:
        self.rng = random.Random(seed)
        self.ruled, self.cancel_at = self.rng.random() < 0.3, self.rng.choice([None, None, self.rng.randint(0, 30)])
        self.losses = self.rng.choice([0, 0.05, 0.3])
        runners, lanes, restarts = self.rng.randint(1, 3), self.rng.randint(1, 4), self.rng.choice([0, 10])
        self.world = World(runners, lanes, max_runner_restarts=restarts)
        settings = self.world.settings
        if self.ruled:
            evaluation = settings.evaluation.model_copy(update={"rules": (Long,)})
            settings = settings.model_copy(update={"evaluation": evaluation})
        self.broken = 0 if runners > 1 and self.rng.random() < 0.3 else None
        """Position on which every attempt fails."""
        self.disk: Any = self.rng.choice([None, Disk()])
        self.outcome = EvalOutcome(settings, layout_of(settings), EpisodePlan(EPISODES), self.disk)
        self.runners: dict[int, Runner] = {}
        self.rows = 0
        """Number of rows that the disk has not committed."""
        self.steps = 0
        """Steps of all reports that came before the end."""
        self.opening = Opens(self.outcome, session)

    def run(self) -> None:
        self.world.loop.post(self.opening)
        self.world.turn()
        while self.outcome.state == "waiting":  # Another thread reads the log.
            time.sleep(0.001)
            self.world.turn(*self.replies())
        for turn in range(TURNS):
            if turn == self.cancel_at:
                self.outcome.handle.cancel()
            before = self.outcome.state
            self.world.turn(*self.replies())
            self.check_turn(before, cancelled=self.cancel_at is not None and turn >= self.cancel_at)
            if self.outcome.handle.done():
                break
            if self.disk and self.rng.random() < 0.3:
                self.disk.commit()
        assert self.outcome.handle.done(), "the evaluation does not end"
        self.check()
        self.check_the_rest()

    def replies(self) -> list[Reply]:
        """Return answers to some of the calls, in the order of each runner's calls."""
        calls, replies, answered = self.world.backend.calls, [], set()
        for call in list(calls):
            runner, request, tag = call
            if runner in answered or self.rng.random() < 0.4:
                answered.add(runner)
                continue
            calls.remove(call)
            if isinstance(request, Start):
                self.runners[runner] = Runner(self.rng, request.index, broken=request.index == self.broken)
                replies.append(Reply(Call(runner, request, 0)))
            elif isinstance(request, Run) and self.rng.random() < self.losses:
                answered.add(runner)
                calls[:] = [one for one in calls if one[0] != runner]
                why = RunnerLost("the node is gone", runner=runner)
                replies.append(Reply(Call(runner, request, tag), error=why, lost=True))
            elif isinstance(request, Run):
                report = self.runners[runner].answer(request)
                self.steps += report.env_steps
                replies.append(Reply(Call(runner, request, tag), report))
        return replies

    def check_turn(self, before: Any, *, cancelled: bool) -> None:
        """Check the state after a turn."""
        store, state = self.outcome.store, self.outcome.state
        assert state != "running" or not cancelled, "it goes on although it was cancelled"
        assert state != "running" or store.ended_by is None, "it goes on although a rule has answered"
        if isinstance(before, Committing) and self.disk:
            rows = sum(len(batch.rows) for batch in self.disk.pending)
            assert rows <= self.rows, "a report after the end is recorded"
        self.rows = sum(len(batch.rows) for batch in self.disk.pending) if self.disk else 0
        assert state != "done" or not self.disk or self.disk.settled, "it is done before its records are committed"

    def check(self) -> None:
        """Check the result."""
        result, end = self.outcome.handle.result(), END if self.ruled else None
        cancelled, stranded = self.cancel_at is not None, not self.world.pool.members
        counted = EPISODES if end is None else end.after
        assert result.ended_by in (None, end)
        missing = [index for index in range(counted) if not result.table.filled[index]]
        assert not missing or cancelled or stranded, f"{missing} have no record"
        assert not missing or result.status in ("partial", "failed")
        assert (result.ended_by is not None) == (end is not None and not missing)
        self.check_faults(result)
        for index in np.flatnonzero(result.table.filled).tolist():
            row = result.table.rows[index]
            if self.broken is not None:
                continue
            fails = index % FAILING == 1
            assert (row["outcome"] == Outcome.FAILED) == fails
            assert row["length"] == (0 if fails else length(index))
            assert row["attempts"] == (3 if fails else 2 if index % FAILING == 0 else 1), (
                "an attempt is charged wrongly"
            )
        if not (missing or end is not None):
            assert result.timing.env_steps == self.steps

    def check_faults(self, result: EvalResult) -> None:
        """Check which faults are charged: of a runner that was excluded, only those of episodes that were given up."""
        failed = result.table.rows["outcome"] == Outcome.FAILED
        for index in np.flatnonzero(result.table.filled).tolist():
            faults = [fault for fault in result.table.faults.get(index, ()) if fault.charged or fault.pardon]
            attempts = len(faults) + int(not failed[index])
            assert result.table.rows[index]["attempts"] == attempts, "an attempt has no number of its own"
            assert sum(fault.charged for fault in faults) == 3 or not failed[index], "an episode is given up too early"
        for fault in result.faults:
            if fault.runner != self.broken:
                assert fault.charged, "a fault is pardoned without an exclusion, or is not charged"
            elif self.outcome.exclusions and not self.losses and not failed[fault.index]:
                assert not fault.charged, "what failed on an excluded runner is not pardoned"

    def check_the_rest(self) -> None:
        """Check that nothing goes on: what runners hold was aborted, and later answers change nothing."""
        before = self.outcome.store.table.rows.tobytes()
        for _ in range(50):
            self.world.turn(*self.replies())
        assert self.outcome.store.table.rows.tobytes() == before, "an answer after the end changes the records"
        held = {
            runner: one.held for runner, one in self.runners.items() if runner in self.world.pool.members and one.held
        }
        assert not held, f"episodes go on after the end: {held}"
        assert not self.world.loop._active


def run_session(seed: int, session: ModuleType = rl_eval.execution.session) -> None:
    """Run one history and check its laws."""
    History(seed, session).run()

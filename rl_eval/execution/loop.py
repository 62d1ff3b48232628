"""Control loop: the only code that reads the time. It delivers replies to jobs and acts on failures.

A turn reads all available replies before it checks timeouts. So a busy loop does not terminate a runner that has
already answered. :mod:`rl_eval.scheduling.runner_failures` decides the consequences of a failure.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, final

from rl_eval.backends import Backend, Reply
from rl_eval.backends.requests import Apply, Run, SetWeights, Start
from rl_eval.errors import ClusterError, EvalError, NumericsMismatch, PolicyUnavailable, RunnerLost, UsageError
from rl_eval.execution.jobs import Job, WeightsSync
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.records.episode import RunReport
from rl_eval.scheduling.runner_failures import Consequence, judge
from rl_eval.supervision.caller import one_thread, signals_noted
from rl_eval.supervision.flight_recorder import CrashReport

_STOP_TIMEOUT_S: Final = 8.0
_LAST_TURN_S: Final = 1.0
_POLL_S: Final = 0.05
_DISK_POLL_S: Final = 0.002
"""Poll interval while a job waits for a disk, in seconds."""
_STOPPED: Final = "the group was stopped before this request was done"


@final
class ControlLoop:
    """Runs jobs on a pool, in a separate thread or in the caller's thread.

    Exclusive jobs (evaluations, weight broadcasts) run one after the other in the order of posting, so an evaluation
    never uses two versions of the weights. Other jobs run in parallel.

    Args:
        backend: Backend of the runners.
        pool: The runners.
        threaded: Whether there is a separate thread. Without it, the thread that posts a job runs the job.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self, backend: Backend, pool: RunnerPool, threaded: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._backend = backend
        self._threaded = threaded
        self._process = os.getpid()
        self._pool = pool
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tags = itertools.count(1)
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._fatal: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="rl_eval control loop", daemon=True)
        backend.on_death = self._end_with

    def start(self) -> None:
        """Start the thread, if there is one."""
        if self._threaded:
            self._thread.start()

    def post(self, job: Job) -> None:
        """Add a job.

        Raises:
            EvalError: The group is stopped.
            UsageError: This process is a fork of the group's process, so it does not have the thread.
        """
        if self._forked:
            raise forked("the group")
        if self._stopping:
            cause = f" because of {type(self._fatal).__name__}: {self._fatal}" if self._fatal else ""
            raise EvalError(f"the group is stopped{cause}", key="stop", fix="Create a new group.") from self._fatal
        self._adopt(job)
        self._inbox.put(job)
        if self._stopping:
            # The loop may have read its inbox for the last time.
            self._fail(self._posted())
        elif not self._threaded:
            self._run(until=job)

    def forget(self, members: list[Member]) -> None:
        """Report to the jobs that members were removed on request. Only the loop's thread may call this."""
        for member in members:
            self._report_lost(member, None)

    def stop(self) -> None:
        """Fail the unfinished jobs, and end the thread and the runners. In a fork, do nothing."""
        if self._forked:
            return
        self._stopping = True
        self._inbox.put(None)
        if not self._threaded:
            self._leave()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT_S)
        self._backend.stop()
        if self._thread.is_alive():
            # A step in this process hangs; callers must not wait for its result.
            self._fail_all(f"{_STOPPED}; the environment is still in a call")

    def _end_with(self, error: EvalError) -> None:
        """End the loop from another thread. Fail the jobs even if a call of the backend blocks the loop's thread."""
        self._fatal, self._stopping = self._fatal or error, True
        self._thread.join(_LAST_TURN_S)
        self._fail_all()

    @property
    def _forked(self) -> bool:
        return self._threaded and os.getpid() != self._process

    # ------------------------------------------------------------------ the loop

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._fatal = error
        self._leave()

    def _run(self, until: Job) -> None:
        """Run the loop in this thread, until a job and its successors are done.

        Raises:
            BaseException: The thread was interrupted, which ends the group.
        """
        try:
            with signals_noted(), one_thread():
                while not (until.done and not self._active) and not self._stopping:
                    self._turn()
        except BaseException as error:
            self._fatal = error
            self._leave()
            raise

    def _leave(self) -> None:
        self._stopping = True
        with signals_noted():
            self._backend.leave()
        self._fail_all()

    def _turn(self) -> None:
        self._read_inbox(block=not self._backend.busy)
        looked = self._clock()
        for reply in self._backend.wait(self._poll_s):
            self._route(reply, self._clock())
        # All replies before this moment have been read.
        self._tick(looked)
        self._advance()

    def _adopt(self, job: Job) -> None:
        job.pool, job.tag = self._pool, next(self._tags)

    def _advance(self) -> None:
        """Remove finished jobs and start other jobs, until nothing changes. Some jobs end when they start."""
        self._retire()
        while self._waiting and self._start_jobs():
            self._retire()

    def _retire(self) -> None:
        """Remove finished jobs. Their successors go to the front of the queue."""
        # Read `done` once: another thread may end a waiting job at any moment.
        ended = {job.tag: job for job in [*self._active.values(), *self._waiting] if job.done}
        if not (ended or self._waiting):
            return
        self._active = {tag: job for tag, job in self._active.items() if tag not in ended}
        self._waiting = deque(job for job in self._waiting if job.tag not in ended)
        for job in reversed([job for one in ended.values() for job in one.successors()]):
            self._adopt(job)
            self._waiting.appendleft(job)
        # Requests that were replaced during a long evaluation must not keep their copies of the weights.
        followers = itertools.islice([*self._waiting, None], 1, None)
        self._waiting = deque(
            job for job, after in zip(self._waiting, followers, strict=True) if not _needless(job, after)
        )

    @property
    def _poll_s(self) -> float:
        return _DISK_POLL_S if any(job.waits_for_disk for job in self._active.values()) else _POLL_S

    def _read_inbox(self, block: bool) -> None:
        timeout = self._pool.patience(self._clock()) if block else 0.0
        if timeout and self._active:
            timeout = min(timeout, self._poll_s)
        self._waiting += self._posted(timeout)
        self._advance()

    def _posted(self, timeout_s: float = 0.0) -> Iterator[Job]:
        """Yield the jobs that were posted. Wait at most ``timeout_s`` for the first job."""
        with suppress(queue.Empty):
            job = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                if job is not None:
                    yield job
                job = self._inbox.get_nowait()

    def _start_jobs(self) -> bool:
        """Start the jobs that can start, and return whether any job was started."""
        waited = len(self._waiting)
        busy = any(job.exclusive for job in self._active.values())
        kept: deque[Job] = deque()
        for job in self._waiting:
            if isinstance(self._fatal, PolicyUnavailable) and not (job.renews or busy):
                self._pool.renew(self._clock())  # The server may be back.
                self._fatal = None
            if job.renews and not busy:
                self._fatal = None
            if self._fatal is not None:
                job.fail(self._fatal)
            elif job.exclusive and busy:
                kept.append(job)
            else:
                busy = busy or job.exclusive
                self._active[job.tag] = job
                self._start(job)
        self._waiting = kept
        return len(kept) < waited

    def _start(self, job: Job) -> None:
        job.started = True
        try:
            job.start(self._clock())
        except Exception as error:
            # An error of one job must not end the others.
            job.fail(error)

    def _tick(self, now: float) -> None:
        try:
            self._pool.tick(now)
        except EvalError as error:
            self._die(error)
        for job in [*self._active.values(), *self._waiting]:
            job.tick(now)

    # ------------------------------------------------------------------ replies

    def _route(self, reply: Reply, now: float) -> None:
        member = self._pool.answered(reply, now)
        if member is None:
            return
        if reply.lost:
            why = reply.error or RunnerLost("runner lost")
            self._lose(member, why, now, reply.crash_report, preempted=reply.preempted)
        elif reply.error is not None:
            self._raised(member, reply, reply.error, now)
        elif isinstance(reply.call.request, Start):
            self._pool.start_answered(member, now)
            for job in list(self._active.values()):
                job.joined(member, now)
        elif (addressee := self._active.get(reply.call.tag)) is not None:
            self._deliver(addressee, member, reply, now)

    def _deliver(self, job: Job, member: Member, reply: Reply, now: float) -> None:
        if job.counts and isinstance(reply.value, RunReport):
            member.count(reply.value)
        try:
            job.replied(member, reply.value, now)
        except NumericsMismatch as error:
            self._act_on(error, member, job, now)
        except EvalError as error:
            job.fail(error)

    def _raised(self, member: Member, reply: Reply, error: BaseException, now: float) -> None:
        """Handle the error of a start or of a call."""
        asked = self._active.get(reply.call.tag)
        if isinstance(reply.call.request, Apply):
            # An error of a caller's function is the caller's.
            if asked is not None:
                asked.fail(error)
            return
        if isinstance(reply.call.request, Run) and asked is None:
            return  # Its evaluation has ended, perhaps by the call before; the next evaluation judges its own calls.
        if isinstance(reply.call.request, SetWeights) and not self._pool.uses(reply.call.request):
            return  # Withdrawn, perhaps since another runner rejected them; the weights that follow are judged anew.
        everywhere = self._pool.raised(member)
        if isinstance(reply.call.request, Start):
            self._act_on(error, member, None, now, everywhere=everywhere and not self._pool.ever_ready)
            return
        # A starting runner first gets the weights of the running broadcast.
        syncs = [job for job in self._active.values() if isinstance(job, WeightsSync)]
        self._act_on(error, member, asked or next(iter(syncs), None), now, everywhere=everywhere)

    def _act_on(
        self, error: BaseException, member: Member, asked: Job | None, now: float, *, everywhere: bool = False
    ) -> None:
        match judge(error, everywhere=everywhere, starting=not self._pool.ever_ready):
            case Consequence.END if asked is not None:
                asked.fail(error)
            case Consequence.END:
                self._die(error)
            case Consequence.EXCLUDE:
                self._pool.exclude(member, error)
                self.forget([member])
            case Consequence.REPLACE:
                self._lose(member, error, now)

    def _lose(
        self,
        member: Member,
        why: BaseException,
        now: float,
        crash_report: CrashReport | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        # Events on a pre-empted node are not evidence against an episode.
        charged = self._report_lost(member, None if preempted else crash_report)
        self._pool.lose(member, why, now, free=charged or preempted)

    def _report_lost(self, member: Member, crash_report: CrashReport | None) -> bool:
        """Report a lost member to the jobs; return whether an episode caused the loss."""
        verdicts = [job.lost(member, crash_report, self._clock()) for job in list(self._active.values())]
        return any(verdicts)

    def _die(self, error: BaseException) -> None:
        """Fail the active jobs now, then all waiting and later jobs in order, until a job renews the group.

        If the policy was unavailable, the next job starts the runners again.
        """
        self._fatal = self._fatal or error
        self._retire()
        active, self._active = self._active, {}
        self._fail(active.values())

    def _fail_all(self, why: str = _STOPPED) -> None:
        self._retire()  # Successors of finished jobs fail too, so that their callers get an error.
        jobs = [*self._active.values(), *self._waiting, *self._posted()]
        self._active, self._waiting = {}, deque()
        self._fail(jobs, why)

    def _fail(self, jobs: Iterable[Job], why: str = _STOPPED) -> None:
        for job in jobs:
            with suppress(Exception):  # The other jobs must fail too.
                job.fail(self._fatal or ClusterError(why, key="stop"))


def _needless(job: Job, after: Job | None) -> bool:
    """Whether a job sends weights that other weights replace before any evaluation uses them."""
    return isinstance(job, WeightsSync) and job.superseded() and isinstance(after, WeightsSync)


def forked(what: str) -> UsageError:
    """Return the error for an object whose thread is in the parent of this process."""
    problem = f"{what} was created before a fork, and the thread that it needs is only in the parent process"
    return UsageError(problem, key=what, fix="Create the object again in this process.")

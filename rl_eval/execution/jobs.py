"""Jobs of the control loop: the base class, weight broadcasts, functions for runners, changes of the pool."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

from typing_extensions import override

from rl_eval.backends import requests
from rl_eval.backends.requests import RunnerRequest
from rl_eval.errors import ClusterError, RunnerLost
from rl_eval.execution.runner_pool import Member, PublishedWeights, RunnerPool
from rl_eval.supervision.flight_recorder import CrashReport

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult
    from rl_eval.runners import EvalRunner


Result = TypeVar("Result")


class Job(abc.ABC):
    """Request to a group.

    Only the control loop's thread calls the methods. Before :meth:`start`, it calls only :meth:`tick` and :meth:`fail`.
    """

    exclusive: ClassVar[bool]
    """Whether no other exclusive job may run at the same time."""
    renews = False
    """Whether this job may repair a group that has failed."""
    counts = True
    """Whether the episodes of this job count in the group's metrics."""
    waits_for_disk = False
    """Whether the job is waiting for a read or a write."""

    pool: RunnerPool
    """Runners of the group. The control loop sets this attribute and the next two attributes."""
    tag: int
    """Tag of the job's calls and their replies."""
    started = False
    """Whether the job was started."""

    @abc.abstractmethod
    def start(self, now: float) -> None:
        """Start the job.

        Some members may be ready now; :meth:`joined` is called for each member that becomes ready later.
        """

    def joined(self, member: Member, now: float) -> None:  # noqa: B027  # Most jobs need no more than start().
        """Handle a member that became ready."""

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Handle a lost member; return whether an episode caused the loss."""
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:  # noqa: B027  # As above.
        """Handle the return value of a call."""

    def tick(self, now: float) -> None:  # noqa: B027  # As above.
        """Check the time. This is also called before the job starts."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the job with an error."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the job has ended."""

    def successors(self) -> list[Job]:
        """Return the jobs to run directly after this job. This is called once."""
        return []


class Awaited(Job, Generic[Result]):
    """Job whose caller waits for a future."""

    done = False

    def __init__(self) -> None:
        self.future: Future[Result] = Future()

    def fail(self, error: BaseException) -> None:
        """Set the error, unless the job is done."""
        if not self.done:
            self.done = True
            self.future.set_exception(error)

    def _succeed(self, result: Result) -> None:
        if not self.done:
            self.done = True
            self.future.set_result(result)


class Do(Awaited[None]):
    """Job that calls a function in the control loop's thread, between two turns. The function may change the pool."""

    exclusive = False

    def __init__(self, function: Callable[[RunnerPool, float], None]) -> None:
        super().__init__()
        self._function = function

    @override
    def start(self, now: float) -> None:
        try:
            self._function(self.pool, now)
        except Exception as error:
            self.fail(error)
        else:
            self._succeed(None)


@final
class Reconfigure(Do):
    """Job that gives the runners other settings. It runs after all earlier evaluations, even if one of them failed."""

    exclusive = True
    renews = True


class _Broadcast(Awaited[Any]):
    """Job that calls all ready members and collects their answers.

    If no member is ready at the start, it calls the first member that becomes ready.
    """

    def __init__(self, request: RunnerRequest) -> None:
        super().__init__()
        self._request = request
        self._values: dict[int, Any] = {}
        """Answers of the members, by position in the group."""
        self._sent = False

    def start(self, now: float) -> None:
        """Call all ready members."""
        for member in self.pool.ready():
            self._send(member, now)

    def joined(self, member: Member, now: float) -> None:
        """Call the first member that becomes ready, if no member was ready at the start."""
        if not self._sent:
            self._send(member, now)

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Stop waiting for the answer of a lost member."""
        self._settle(without=member)
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Store an answer."""
        self._values[member.position] = value
        self._settle()

    def tick(self, now: float) -> None:
        """Fail if no runner is left."""
        if self.started and self.pool.hopeless:
            self.fail(ClusterError(f"no runner is left: {self.pool.last_loss}"))

    def _send(self, member: Member, now: float) -> None:
        self._sent = True
        self.pool.call(member, self._request, tag=self.tag, now=now)

    def _unanswered(self, without: Member | None = None) -> list[Member]:
        return [one for one in self.pool.members.values() if one is not without and one.in_flight(self.tag)]

    def _settle(self, without: Member | None = None) -> None:
        if self._values and not self._unanswered(without):
            self._succeed([self._values[index] for index in sorted(self._values)])


@final
class WeightsSync(_Broadcast):
    """Job that sends weights to every runner. Runners that start later get these weights, too."""

    exclusive = True

    def __init__(self, weights: PublishedWeights) -> None:
        super().__init__(requests.SetWeights(weights.handle))
        self.weights = weights
        self._former: PublishedWeights | None = None
        self.superseded: Callable[[], bool] = lambda: False
        """Function that returns whether the evaluation of these weights has ended. Then this job is not needed if other
        weights follow directly."""

    def start(self, now: float) -> None:
        """Send the weights."""
        self._former = self.pool.weights.send(self.weights)
        super().start(now)

    def joined(self, member: Member, now: float) -> None:
        """Ask a new member, which already has the weights, for its version."""
        if not self._values:
            self.pool.call(member, requests.GetWeightsVersion(), tag=self.tag, now=now)

    def fail(self, error: BaseException) -> None:
        """Restore the former weights on all runners."""
        if not self.done:
            group = self.pool.weights
            group.withdraw(self.weights, self._former if self.started else group.sent)
            if self.started and group.sent is not None:
                for member in self.pool.ready():
                    self.pool.call(member, requests.SetWeights(group.sent.handle), tag=0, now=time.monotonic())
        super().fail(error)


class ApplyToReady(_Broadcast):
    """Job that calls a function with every runner that is ready."""

    exclusive = False

    def __init__(self, function: Callable[[EvalRunner], Any]) -> None:
        super().__init__(requests.Apply(function))

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Fail if no other runner answers. The call is not retried, because it may already have had effects."""
        if member.in_flight(self.tag) and not self._values and not self._unanswered(member):
            why = f"no runner answered: runner {member.position} was lost during the call"
            self.fail(ClusterError(why, runner=member.position))
        return super().lost(member, crash_report, now)


@final
class ApplyToAll(ApplyToReady):
    """Job that calls a function with the runner of every position, and waits for runners that are not ready.

    If a runner is lost before the job ends, the function is also called with its replacement.
    """

    def __init__(self, function: Callable[[EvalRunner], Any], timeout_s: float) -> None:
        super().__init__(function)
        self._timeout_s = timeout_s
        self._deadline = math.inf

    @override
    def start(self, now: float) -> None:
        self._deadline = now + self._timeout_s
        super().start(now)

    @override
    def joined(self, member: Member, now: float) -> None:
        self._send(member, now)

    @override
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        self._settle(member)
        return False

    @override
    def tick(self, now: float) -> None:
        super().tick(now)
        lost = self.pool.positions - self._values.keys() - self.pool.filled
        if (lost or now > self._deadline) and not self.done:
            silent = sorted(lost or self.pool.positions - self._values.keys())
            what = "are no longer replaced" if lost else f"did not answer within {self._timeout_s:g} s"
            problem = f"runners {', '.join(map(str, silent))} {what}"
            fix = "Omit timeout_s to call only the runners that are ready."
            self.fail(ClusterError(problem, key="timeout_s", value=self._timeout_s, runner=silent[0], fix=fix))

    @override
    def _settle(self, without: Member | None = None) -> None:
        if self._values.keys() >= self.pool.positions:
            super()._settle(without)


@final
class Ask(ApplyToReady):
    """Job that calls a function with the first runner that is ready, between evaluations.

    A runner that does not answer in time is terminated, as if it hung in an episode.
    """

    exclusive = True

    def __init__(self, timeout_s: float, function: Callable[[EvalRunner], Any]) -> None:
        super().__init__(function)
        self._timeout_s = timeout_s
        self._deadline = math.inf

    @override
    def start(self, now: float) -> None:
        for member in self.pool.ready()[:1]:
            self._send(member, now)

    @override
    def replied(self, member: Member, value: Any, now: float) -> None:
        self._succeed(value)

    @override
    def tick(self, now: float) -> None:
        super().tick(now)
        for member in self._unanswered() if now > self._deadline and not self.done else ():
            why = f"runner {member.position} did not return from a call within {self._timeout_s:g} s"
            self.pool.terminate(member, RunnerLost(why, runner=member.position))
            self.fail(ClusterError(why, key="timeout_s", value=self._timeout_s, runner=member.position))

    def _send(self, member: Member, now: float) -> None:
        self._deadline = now + self._timeout_s
        super()._send(member, now)


@dataclass(frozen=True)
class FollowUp:
    """Work of a runner directly after an evaluation, with the same weights."""

    choose: Callable[[EvalResult], Sequence[Callable[[EvalRunner], Any]]]
    """Function that takes a result, and returns the functions to call with a runner, in order. The control loop's
    thread calls it. If an evaluation is cancelled before it starts, the cancelling thread calls it, and no runner is
    called."""
    done: Callable[[list[Future[Any]]], object]
    """Function that is called once, with the futures of these calls, when all calls have ended. It must return soon."""
    timeout_s: float
    """Time limit of one call, in seconds."""

    def jobs(self, result: EvalResult) -> list[Job]:
        """Return the jobs of this work."""
        try:
            asks = [Ask(self.timeout_s, function) for function in self.choose(result)]
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self.done([failed])
            return []
        futures = [ask.future for ask in asks]
        if not futures:
            self.done([])
        for future in futures:
            future.add_done_callback(lambda _: self.done(futures) if all(one.done() for one in futures) else None)
        return [*asks]

"""Jobs of the control loop, and those beside evaluations: weights, functions for runners, changes of the pool."""

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
    """One request to a group, from when it starts until it is done.

    Every method is called in the control loop's thread, and all but :meth:`tick` and :meth:`fail` after :meth:`start`.
    """

    exclusive: ClassVar[bool]
    """Whether no other exclusive job may run beside it."""
    waits_for_disk = False
    """Whether it goes on as soon as something is written or read."""

    pool: RunnerPool
    """The runners; set by the control loop, as are the next two."""
    tag: int
    """Mark of its calls, by which replies find it."""
    started = False
    """Whether its turn has come."""

    @abc.abstractmethod
    def start(self, now: float) -> None:
        """Begin. Some members may be up already; others are reported by :meth:`joined`."""

    def joined(self, member: Member, now: float) -> None:  # noqa: B027  # Most jobs need no more than start().
        """A member came up."""

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """A member is gone; return whether an episode is to blame."""
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:  # noqa: B027  # As above.
        """A call of this job returned."""

    def tick(self, now: float) -> None:  # noqa: B027  # As above.
        """Time passed; also called while the job still waits for its turn."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """It cannot be done."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it needs nothing more."""

    def successors(self) -> list[Job]:
        """Return the jobs that run as soon as this one is done, before any other; asked once."""
        return []


class Awaited(Job, Generic[Result]):
    """A job whose caller waits for a future."""

    def __init__(self) -> None:
        self.future: Future[Result] = Future()
        self._over = False

    def fail(self, error: BaseException) -> None:
        """Set the error, unless it is done."""
        if not self._over:
            self._over = True
            self.future.set_exception(error)

    @property
    def done(self) -> bool:
        """Whether it has a result or an error."""
        return self._over

    def _succeed(self, result: Result) -> None:
        if not self._over:
            self._over = True
            self.future.set_result(result)


@final
class Do(Awaited[None]):
    """Calls a function where the pool may be changed: in the driver's thread, between two turns."""

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


class _Broadcast(Awaited[Any]):
    """Calls every member that is up, waiting for the first if none is, and collects what they return."""

    def __init__(self, request: RunnerRequest) -> None:
        super().__init__()
        self._request = request
        self._values: dict[int, Any] = {}
        """Answers, by position in the group."""
        self._sent = False

    def start(self, now: float) -> None:
        """Call all members that are up."""
        for member in self.pool.ready():
            self._send(member, now)

    def joined(self, member: Member, now: float) -> None:
        """Call the first member that comes up; those after it did not exist at the time of the call."""
        if not self._sent:
            self._send(member, now)

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Go on without a member."""
        self._settle(without=member)
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Keep an answer."""
        self._values[member.index] = value
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
    """Sends weights to every runner; those that start later get them too."""

    exclusive = True

    def __init__(self, weights: PublishedWeights) -> None:
        super().__init__(requests.SetWeights(weights.handle))
        self.weights = weights
        self._former: PublishedWeights | None = None
        self.superseded: Callable[[], bool] = lambda: False
        """Whether the evaluation that it was sent for has gone: weights that follow at once make it needless."""

    def start(self, now: float) -> None:
        """Send the weights."""
        self._former = self.pool.weights.send(self.weights)
        super().start(now)

    def joined(self, member: Member, now: float) -> None:
        """Ask a member that comes up, and has been sent the weights already, for its version."""
        if not self._values:
            self.pool.call(member, requests.GetWeightsVersion(), tag=self.tag, now=now)

    def fail(self, error: BaseException) -> None:
        """Fall back to the former weights, also where the new ones have arrived."""
        if not self.done:
            group = self.pool.weights
            group.withdraw(self.weights, self._former if self.started else group.sent)
            if self.started and group.sent is not None:
                for member in self.pool.ready():
                    self.pool.call(member, requests.SetWeights(group.sent.handle), tag=0, now=time.monotonic())
        super().fail(error)


class Apply(_Broadcast):
    """Calls a function with every runner."""

    exclusive = False

    def __init__(self, function: Callable[[EvalRunner], Any]) -> None:
        super().__init__(requests.Apply(function))

    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        """Fail if no other runner answers. A call is not retried, since it may have had effects already."""
        if member.in_flight(self.tag) and not self._values and not self._unanswered(member):
            why = f"no runner answered: runner {member.index} was lost during the call"
            self.fail(ClusterError(why, runner=member.index))
        return super().lost(member, crash_report, now)


@final
class Ask(Apply):
    """Calls one runner, the first that is up, between evaluations; its future gets what that returns.

    A runner that does not answer in time is given up, as one that hangs in an episode is.
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
            why = f"runner {member.index} did not return from a call within {self._timeout_s:g} s"
            self.pool.terminate(member, RunnerLost(why, runner=member.index))
            self.fail(ClusterError(why, key="timeout_s", value=self._timeout_s, runner=member.index))

    def _send(self, member: Member, now: float) -> None:
        self._deadline = now + self._timeout_s
        super()._send(member, now)


@dataclass(frozen=True)
class FollowUp:
    """Work of a runner right after an evaluation, while it still has its weights."""

    choose: Callable[[EvalResult], Sequence[Callable[[EvalRunner], Any]]]
    """Given the result, in the driver's thread: what to call with a runner, one after the other.

    The result of an evaluation that was cancelled before it began comes in the thread that cancelled it; no runner is
    called then.
    """
    done: Callable[[list[Future[Any]]], object]
    """Given what they returned or raised, once, when all are done; must return soon."""
    timeout_s: float
    """Longest time that one may take."""

    def jobs(self, result: EvalResult) -> list[Job]:
        """Return the jobs that do it."""
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

"""How an evaluator reaches a service: requests go out as calls that may be repeated, answers come by long polls.

One background thread has a call waiting at the service at all times. Its answers conclude the handles, and its calls
are the client's sign of life.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import socket
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import ray

from rl_eval.errors import ClusterError, ConfigError, EvalError, UsageError
from rl_eval.handle import EvalHandle, EvalProgress
from rl_eval.service.directory import ANSWERS, Unanswered, ask, end_service, find_service, reach, start_service
from rl_eval.service.messages import Answer, FinishedEvaluation, Past, Ticket, Welcome
from rl_eval.settings import EvalSettings
from rl_eval.weights import HeldWeights, WeightsSnapshot, snapshot_weights

if TYPE_CHECKING:
    from rl_eval.jobs import FollowUp
    from rl_eval.video import VideoSettings

__all__ = ["ServiceEngine"]

_POLL_S: Final = 5.0
"""How long a call waits at the service for an answer."""
_LOOK_S: Final = 0.25
"""How often the waiting thread looks whether it should end."""
_CALL_S: Final = 10.0
_SILENCE_S: Final = 60.0
"""A service that does not answer for so long is given up."""
_RETRY_S: Final = 0.5
_CONNECT_S: Final = 180.0
_GOODBYE_S: Final = 5.0


@final
class ServiceEngine:
    """Submits to a service under the name of a client; see :class:`rl_eval.evaluator.Engine`.

    Args:
        actor: The service.
        name: Its name.
        namespace: Of its name.
        client: Who is asking; None makes up a name that nobody else has.
        owner: Whether the service ends with this.
        owns_connection: Whether the process' connection to the cluster does.

    Raises:
        ClusterError: The service does not answer, or takes no more clients.
    """

    def __init__(
        self, actor: Any, name: str, namespace: str, client: str | None, *, owner: bool, owns_connection: bool
    ) -> None:
        self._actor = actor
        self._name = name
        self._namespace = namespace
        self._owner = owner
        self._owns_connection = owns_connection
        self.client = client or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        """Who is asking."""
        try:
            self.welcome: Welcome = ask(actor.connect.remote(self.client, client is not None), _CONNECT_S, name)
        except BaseException:
            self._disconnect()
            raise
        self._who = self.client, self.welcome.session
        self._lock = threading.Lock()
        """Guards the next four."""
        self._handles: dict[str, EvalHandle] = {}
        """Of requests without an answer."""
        self._unread: dict[EvalHandle, str] = {}
        """Requests with an answer that the service keeps for this client."""
        self._reading: list[Any] = []
        """Calls that tell the service what was read, and may not have reached it."""
        self._gone: BaseException | None = None
        """Why nothing more can be asked."""
        self._ended = threading.Event()
        self._done = threading.Event()
        self.resumed = [self._resume(ticket) for ticket in self.welcome.tickets]
        """Handles of what was submitted earlier under this name and not read, in order."""
        self._thread = threading.Thread(target=self._collect_all, name="rl_eval service client", daemon=True)
        self._thread.start()
        # Ray must not be waited for in a thread while it is taken down.
        atexit.register(_end_thread, weakref.ref(self))

    @classmethod
    def start(
        cls,
        settings: EvalSettings,
        policy: Any,
        videos: VideoSettings | None,
        *,
        name: str,
        namespace: str,
        client: str | None,
        detached: bool,
        idle_timeout_s: float,
        max_queue: int,
    ) -> ServiceEngine:
        """Start a service and connect to it.

        Raises:
            ConfigError: The configuration cannot work, or there is a service of this name.
            ClusterError: It does not start.
        """
        if not name or idle_timeout_s <= 0:
            raise ConfigError(
                f"name is {name!r} and idle_timeout_s is {idle_timeout_s}: give a name, and seconds above 0"
            )
        actor, owns_connection = start_service(
            settings,
            policy,
            videos,
            name=name,
            namespace=namespace,
            detached=detached,
            idle_timeout_s=idle_timeout_s,
            max_queue=max_queue,
        )
        return cls(actor, name, namespace, client, owner=not detached, owns_connection=owns_connection)

    @classmethod
    def reach(cls, name: str, namespace: str, address: str | None, client: str | None) -> ServiceEngine:
        """Connect to a service that runs.

        Raises:
            UsageError: There is none of this name.
            ClusterError: It does not answer, or takes no more clients, or there is no cluster.
        """
        owns_connection = reach(address)
        try:
            actor = find_service(name, namespace)
        except BaseException:
            if owns_connection:
                ray.shutdown()
            raise
        return cls(actor, name, namespace, client, owner=False, owns_connection=owns_connection)

    # ------------------------------------------------------------------ asking

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """Have the service own a request; see :class:`rl_eval.evaluator.Engine`.

        Args:
            weights: As for ``EvalRunnerGroup.submit``; None for those that this client sent last.
            version: Least version that they may get.
            step: Training step.
            follow_up: Always None: what follows is the service's.
            held: Gets a copy of the weights.

        Raises:
            EvaluatorBusy: The service holds too many requests of this client.
            WeightsError: The weights are none.
            ClusterError: The service is gone.
        """
        assert follow_up is None
        snapshot = held.snapshot = None if weights is None else _snapshot(weights)
        request = uuid.uuid4().hex
        handle = self._handle(request)
        handle.step = step
        with self._lock:
            if self._gone is not None:
                raise self._gone
            self._handles[request] = handle  # The answer may be here before the acknowledgement.
        try:
            ticket = self._insist(lambda: self._actor.submit.remote(*self._who, request, step, version or 0, snapshot))
        except BaseException:
            with self._lock:
                self._handles.pop(request, None)
            raise
        if not handle.done():
            handle.weights_version = ticket.weights_version
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """The result of a handle has reached whoever wants it, so the service need not keep it for this client."""
        with self._lock, suppress(Exception):  # At worst it is read twice.
            request = self._unread.pop(handle, None)
            if request is not None and not self._ended.is_set():
                self._check_connection()
                self._reading.append(self._actor.read.remote(*self._who, [request]))
                self._reading = ray.wait(self._reading, num_returns=len(self._reading), timeout=0)[1]

    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients, the oldest first.

        Raises:
            ClusterError: The service is gone.
        """
        past: list[Past] = self._insist(self._actor.history.remote)
        return [_finished(one) for one in past]

    def stop(self) -> None:
        """Say goodbye, or end the service if it is this client's own; may be called again."""
        if self._done.is_set():
            return
        self._done.set()
        with self._lock:  # Nothing is read after this.
            self._ended.set()
        if ray.is_initialized():
            with suppress(EvalError):
                if self._owner:
                    end_service(self._name, self._namespace)
                else:
                    self._leave()
        if self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_S)
        self._give_up(
            ClusterError(
                "the evaluator was shut down before this was done"
                + ("" if self._owner else f"; evaluation service {self._name!r} goes on with it")
            )
        )
        self._disconnect()

    # ------------------------------------------------------------------ plumbing

    def _leave(self) -> None:
        """End the session, once the service knows what was read in it: calls may overtake each other."""
        deadline = time.monotonic() + _GOODBYE_S
        if self._reading:
            ray.wait(self._reading, num_returns=len(self._reading), timeout=_GOODBYE_S)
        ask(self._actor.leave.remote(*self._who), max(0.0, deadline - time.monotonic()), self._name)

    def _insist(self, call: Any) -> Any:
        """Make a call until it is answered; the service knows when it has heard it before.

        Raises:
            ClusterError: The service is gone, or has been silent for too long.
        """
        deadline = time.monotonic() + _SILENCE_S
        while True:
            self._check_connection()
            try:
                return ask(call(), _CALL_S, self._name)
            except Unanswered:
                if time.monotonic() > deadline or self._ended.is_set():
                    raise
                time.sleep(_RETRY_S)

    def _handle(self, request: str) -> EvalHandle:
        """Make a handle whose questions go to the service."""
        last = [EvalProgress(self.welcome.settings.evaluation.num_episodes, 0, 0, 0, 0, math.nan, math.nan, 0, 0.0, 0)]

        def progress() -> EvalProgress:
            with suppress(EvalError):
                self._check_connection()
                if (now := ask(self._actor.progress.remote(self.client, request), _CALL_S, self._name)) is not None:
                    last[0] = now
            return last[0]

        def cancel(reason: str, unless_started: bool) -> None:
            with suppress(ClusterError):  # The handle will say so.
                self._insist(lambda: self._actor.cancel.remote(*self._who, request, reason, unless_started))

        return EvalHandle(progress, cancel, lambda _: None)

    def _resume(self, ticket: Ticket) -> EvalHandle:
        handle = self._handles[ticket.request] = self._handle(ticket.request)
        handle.step, handle.weights_version = ticket.step, ticket.weights_version
        return handle

    def _check_connection(self) -> None:
        """A call without a connection would make Ray start a cluster."""
        if not ray.is_initialized():
            raise ClusterError(f"evaluation service {self._name!r} cannot be reached: ray.shutdown() was called")

    def _disconnect(self) -> None:
        if self._owns_connection:
            self._owns_connection = False
            ray.shutdown()

    # ------------------------------------------------------------------ answers

    def _collect_all(self) -> None:
        try:
            received: list[str] = []
            heard = time.monotonic()
            while not self._ended.is_set():
                try:
                    answers = self._collect(received)
                except Unanswered:
                    if time.monotonic() - heard > _SILENCE_S:
                        raise
                    self._ended.wait(_RETRY_S)
                    continue
                heard = time.monotonic()
                received = [answer.request for answer in answers]
                for answer in answers:
                    self._conclude(answer)
        except EvalError as error:
            self._lost(error)
        except Exception as error:
            self._lost(ClusterError(f"evaluation service {self._name!r} cannot be reached: {error!r}"))

    def _collect(self, received: list[str]) -> list[Answer]:
        self._check_connection()
        call = self._actor.collect.options(concurrency_group=ANSWERS).remote(*self._who, received, _POLL_S)
        deadline = time.monotonic() + _POLL_S + _CALL_S
        while not self._ended.is_set():
            self._check_connection()
            if ray.wait([call], timeout=_LOOK_S)[0] or time.monotonic() > deadline:
                answers: list[Answer] = ask(call, 0.0, self._name)
                return answers
        return []

    def _conclude(self, answer: Answer) -> None:
        with self._lock:
            handle = self._handles.pop(answer.request, None)
            if handle is None:
                return  # It was sent twice.
            self._unread[handle] = answer.request
        handle.weights_version = answer.weights_version
        outcome = _outcome(answer)
        if isinstance(outcome, BaseException):
            handle._set_error(outcome)
        else:
            handle._set_result(outcome)

    def _lost(self, error: BaseException) -> None:
        if not self._ended.is_set():  # Else it was to be expected.
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Nothing will be answered any more."""
        with self._lock:
            self._gone = self._gone or error
            handles = list(self._handles.values())
            self._handles = {}
        for handle in handles:
            handle._set_error(error)


def _end_thread(engine: weakref.ref[ServiceEngine]) -> None:
    if (alive := engine()) is not None:
        alive._ended.set()
        alive._thread.join(_GOODBYE_S)


def _snapshot(weights: Any) -> WeightsSnapshot:
    """Copy weights; their version is the service's to give."""
    return replace(weights, version=0) if isinstance(weights, WeightsSnapshot) else snapshot_weights(weights, 0)


def _outcome(answer: Answer) -> Any:
    try:
        return pickle.loads(answer.outcome)
    except Exception as error:
        return UsageError(
            f"the outcome of an evaluation cannot be unpickled in this process ({type(error).__name__}: {error}): it "
            "names a class of a module that is not there"
        )


def _finished(past: Past) -> FinishedEvaluation:
    outcome = _outcome(past.answer)
    failed = isinstance(outcome, BaseException)
    return FinishedEvaluation(
        client=past.client,
        step=past.step,
        weights_version=past.answer.weights_version,
        finished=past.finished,
        result=None if failed else outcome,
        error=outcome if failed else None,
    )

"""Client of a service: a request is a call of the actor that waits for its answer, and that Ray repeats.

Ray makes a call again when the service's process was replaced; the service knows a request by its name, so it is
evaluated once. One background thread waits for all answers, and shows that the client lives.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

import ray

from rl_eval.backends.connection import Connection
from rl_eval.errors import ClusterError, EvalError
from rl_eval.execution.handle import EvalHandle, EvalProgress
from rl_eval.execution.jobs import FollowUp
from rl_eval.results.result import EvalResult
from rl_eval.training.service.directory import ask, end_service
from rl_eval.training.service.messages import FinishedEvaluation, Ticket, Welcome, unpickled
from rl_eval.weights import HeldWeights, WeightsSnapshot, snapshot_weights

__all__ = ["ServiceEngine"]

_LOOK_S: Final = 0.05
"""Between two looks of the thread at what else it has to do."""
_BEAT_S: Final = 5.0
_CALL_S: Final = 10.0
_SILENCE_S: Final = 60.0
"""A service that does not answer for so long is given up."""
_CONNECT_S: Final = 180.0
_DISCONNECT_S: Final = 5.0


@final
class ServiceEngine:
    """Evaluations of a service under the name of a client; see :class:`rl_eval.training.engine.Engine`.

    Args:
        actor: The service.
        connection: Of this process to the service's cluster.
        name: Of the service.
        namespace: Of its name.
        client: Who is asking; None makes up a name that nobody else has.
        owner: Whether the service ends with this.

    Raises:
        ClusterError: The service does not answer.
    """

    def __init__(
        self, actor: Any, connection: Connection, name: str, namespace: str, client: str | None, *, owner: bool
    ) -> None:
        self._actor = actor
        self._name = name
        self._namespace = namespace
        self._owner = owner
        self._connection = connection
        self.client = client or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        """Who is asking."""
        try:
            self.welcome: Welcome = ask(actor.connect.remote(self.client), _CONNECT_S, name)
        except BaseException:
            connection.close()
            raise
        self._lock = threading.Lock()
        """Guards the next three."""
        self._waiting: dict[Any, EvalHandle] = {}
        """Handles of requests without an answer, by the call that waits for it."""
        self._names: dict[EvalHandle, str] = {}
        """Of requests that were accepted, and whose delivery was not reported."""
        self._notes: list[Any] = []
        """Calls that may not have reached the service."""
        self._ended = threading.Event()
        self._done = threading.Event()
        self.resumed = [self._expect(ticket) for ticket in self.welcome.tickets]
        """Handles of what was submitted earlier under this name and not delivered, in order."""
        self._thread = threading.Thread(target=self._wait_for_all, name="rl_eval service client", daemon=True)
        self._thread.start()
        # Ray must not be waited for in a thread while it is taken down.
        atexit.register(_end_thread_of, weakref.ref(self))

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """Have the service own a request; see :class:`rl_eval.training.engine.Engine`.

        Args:
            weights: As for ``EvalRunnerGroup.submit``; None for those that this client sent last.
            version: Least version that they may get.
            step: Training step.
            follow_up: Always None: what follows is the service's.
            held: Gets a copy of the weights.

        Raises:
            EvaluatorBusy: The service holds too many requests of this client.
            WeightsError: The weights are none.
            ClusterError: The service is gone, or does not answer.
        """
        assert follow_up is None
        snapshot = held.snapshot = None if weights is None else _snapshot(weights)
        self._check_connection()
        call = self._actor.submit.remote(self.client, uuid.uuid4().hex, step, version or 0, snapshot)
        return self._expect(ask(call, _SILENCE_S, self._name))

    def acknowledge(self, handle: EvalHandle) -> None:
        """Report that a result was delivered, so that it is not sent to a later client of this name."""
        with self._lock, suppress(Exception):  # At worst it is delivered twice.
            if (request := self._names.pop(handle, None)) is not None:
                self._check_connection()
                self._notes.append(self._actor.acknowledge.remote(request))
                self._notes = ray.wait(self._notes, num_returns=len(self._notes), timeout=0)[1]

    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients, the oldest first.

        Raises:
            ClusterError: The service is gone, or does not answer.
        """
        self._check_connection()
        past: list[FinishedEvaluation] = ask(self._actor.history.remote(), _SILENCE_S, self._name)
        return past

    def stop(self) -> None:
        """Leave the service, or end it if it is this client's own; may be called again."""
        if self._done.is_set():
            return
        self._done.set()
        self.end_thread()
        if not self._connection.lost:
            with suppress(EvalError):
                self._leave()
        self._fail_all(
            ClusterError(
                "the evaluator was shut down before this was done"
                + ("" if self._owner else f"; evaluation service {self._name!r} goes on with it")
            )
        )
        self._connection.close()

    def end_thread(self) -> None:
        """Wait for no more answers."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_DISCONNECT_S)

    # ------------------------------------------------------------------ plumbing

    def _leave(self) -> None:
        if self._notes:
            ray.wait(self._notes, num_returns=len(self._notes), timeout=_DISCONNECT_S)
        if self._owner:
            end_service(self._name, self._namespace)
        else:
            ask(self._actor.leave.remote(self.client), _DISCONNECT_S, self._name)

    def _expect(self, ticket: Ticket) -> EvalHandle:
        """Return a handle of a request that the service has accepted."""
        last = [EvalProgress(self.welcome.settings.evaluation.num_episodes, 0, 0, 0, 0, math.nan, math.nan, 0, 0.0, 0)]

        def progress() -> EvalProgress:
            with suppress(EvalError):
                self._check_connection()
                last[0] = ask(self._actor.progress.remote(ticket.request), _CALL_S, self._name) or last[0]
            return last[0]

        def cancel(reason: str, unless_started: bool) -> None:
            with suppress(ClusterError):  # The handle fails with it.
                self._check_connection()
                ask(self._actor.cancel.remote(ticket.request, reason, unless_started), _SILENCE_S, self._name)

        handle = EvalHandle(progress, cancel, lambda _: None, ticket.weights_version)
        handle.step = ticket.step
        with self._lock:
            self._names[handle] = ticket.request
            self._waiting[self._actor.result.remote(ticket.request)] = handle
        return handle

    def _check_connection(self) -> None:
        """Raise where a call would make Ray start a cluster."""
        if self._connection.lost:
            raise ClusterError(f"evaluation service {self._name!r} cannot be reached: ray.shutdown() was called")

    # ------------------------------------------------------------------ answers

    def _wait_for_all(self) -> None:
        try:
            beat = time.monotonic()
            while not self._ended.is_set():
                self._check_connection()
                self._conclude_some()
                if time.monotonic() - beat > min(_BEAT_S, self.welcome.beat_s):
                    beat = time.monotonic()
                    self._actor.beat.remote(self.client)
        except Exception as error:
            if not self._ended.is_set():  # Else it was to be expected.
                cause = f"evaluation service {self._name!r} cannot be reached: {error}"
                self._fail_all(error if isinstance(error, EvalError) else ClusterError(cause))

    def _conclude_some(self) -> None:
        with self._lock:
            calls = list(self._waiting)
        if not calls:
            self._ended.wait(_LOOK_S)
        elif ray.wait(calls, timeout=_LOOK_S)[0]:
            for call in ray.wait(calls, num_returns=len(calls), timeout=0)[0]:
                with self._lock:
                    handle = self._waiting.pop(call)
                self._conclude(handle, call)

    def _conclude(self, handle: EvalHandle, call: Any) -> None:
        try:
            outcome = unpickled(ask(call, _CALL_S, self._name))
        except Exception as error:
            self._fail(handle, error)
            return
        if isinstance(outcome, BaseException):
            handle.set_error(outcome)
        else:
            handle.release(_final_progress(outcome))
            handle.set_result(outcome)

    def _fail_all(self, error: BaseException) -> None:
        """Nothing will be answered any more."""
        with self._lock:
            handles, self._waiting = list(self._waiting.values()), {}
        for handle in handles:
            self._fail(handle, error)

    def _fail(self, handle: EvalHandle, error: BaseException) -> None:
        """End a handle whose result the service has, or will have, for a later client of this name."""
        self._names.pop(handle, None)
        handle.set_error(error)


def _final_progress(result: EvalResult) -> EvalProgress:
    """Return how far an evaluation came, of which the service keeps nothing but the result."""
    timing = result.timing
    return EvalProgress.of_table(
        result.table, env_steps=timing.env_steps, seconds=timing.wall_seconds, num_runners=timing.num_runners
    )


def _end_thread_of(engine: weakref.ref[ServiceEngine]) -> None:
    if (alive := engine()) is not None:
        alive.end_thread()


def _snapshot(weights: Any) -> WeightsSnapshot:
    """Copy weights; their version is the service's to give."""
    return replace(weights, version=0) if isinstance(weights, WeightsSnapshot) else snapshot_weights(weights, 0)

"""Client of a service: one background thread asks for answers again and again, which also shows that it lives.

Ray repeats a call when the service's process was replaced; the service knows a request by its identifier, so it is
evaluated once.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import uuid
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

from rl_eval.backends.connection import Connection
from rl_eval.errors import ClusterError, EvalError
from rl_eval.execution.handle import EvalHandle, EvalProgress
from rl_eval.training.service.directory import ask, end_service, find_service
from rl_eval.training.service.requests import FinishedEvaluation, Welcome, unpickled
from rl_eval.weights import HeldWeights, WeightsSnapshot, snapshot_weights

__all__ = ["ServiceClient"]

_LOOK_S: Final = 0.05  # Between two checks of the thread whether this client has left.
_SILENCE_S: Final = 60.0  # A service that does not answer for so long is given up.
_CONNECT_S: Final = 180.0
_DISCONNECT_S: Final = 5.0


@final
class ServiceClient:
    """Evaluations of a service under the name of a client.

    Args:
        connection: Of this process to the service's cluster; it is closed with this, and if an error is raised.
        name: Of the service.
        namespace: Of its name.
        client: Name of the client; None for a new one.
        actor: The service, which would end without this handle of it; by default it is found by its name.
        owner: Whether the service ends with this.

    Raises:
        UsageError: There is no service of this name.
        ClusterError: The service does not answer.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        namespace: str,
        client: str | None,
        actor: Any = None,
        *,
        owner: bool = False,
    ) -> None:
        self._connection = connection
        self._name = name
        self._namespace = namespace
        self._owner = owner
        self.client = client or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._handles: dict[str, EvalHandle] = {}  # Of requests that were not delivered, by identifier.
        self._delivered: list[str] = []  # Requests whose delivery the service does not know.
        self._progress: dict[str, EvalProgress] = {}
        self._ended = threading.Event()
        self._error: EvalError | None = None
        """Why no answers come any more."""
        try:
            self._actor = actor or find_service(name, namespace)
            self.welcome: Welcome = self._ask("connect", _CONNECT_S, self.client)
        except BaseException:
            connection.close()
            raise
        # Earlier requests of this client that were not delivered, in order.
        self.resumed = [self._expect(one.id, one.step, one.weights_version) for one in self.welcome.tickets]
        self._thread = threading.Thread(target=self._listen, name="rl_eval service client", daemon=True)
        self._thread.start()
        # Ray must not be waited for in a thread while it is taken down.
        atexit.register(self.end_thread)

    def submit(self, weights: Any, version: int | None, step: int, held: HeldWeights) -> EvalHandle:
        """Hand a request over to the service.

        Args:
            weights: As for ``EvalRunnerGroup.submit``; None for those that this client sent last.
            version: Least version that they may get.
            step: Training step.
            held: Gets a copy of the weights.

        Raises:
            WeightsError: The weights cannot be used.
            ClusterError: The service is gone, or does not answer.
        """
        if weights is not None:  # Their version is the service's to give.
            known = isinstance(weights, WeightsSnapshot)
            held.snapshot = replace(weights, version=0) if known else snapshot_weights(weights, 0)
        request = uuid.uuid4().hex
        handle = self._expect(request, step)  # Before the service can answer.
        ticket = self._ask("submit", _SILENCE_S, self.client, request, step, version or 0, held.snapshot)
        handle.weights_version = ticket.weights_version
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """Note that a result was delivered, so that it is not sent to a later client of this name."""
        for request, one in list(self._handles.items()):
            if one is handle:
                del self._handles[request]
                self._delivered.append(request)

    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients, the oldest first.

        Raises:
            ClusterError: The service is gone, or does not answer.
        """
        return [
            FinishedEvaluation(one.client, one.step, one.weights_version, run_dir, unpickled(answer))
            for one, run_dir, answer in self._ask("history", _SILENCE_S)
        ]

    def stop(self) -> None:
        """Leave the service, or end it if it is this client's own; may be called again."""
        self.end_thread()
        with suppress(EvalError):
            self._ask("poll", _DISCONNECT_S, self.client, (), self._delivered, False)
            if self._owner:
                end_service(self._name, self._namespace)
        goes_on = "" if self._owner else f"; evaluation service {self._name!r} goes on with it"
        self._fail_all(ClusterError(f"the evaluator was shut down before this was done{goes_on}"))
        self._connection.close()

    def end_thread(self) -> None:
        """Wait for no more answers."""
        atexit.unregister(self.end_thread)
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_DISCONNECT_S)

    # ------------------------------------------------------------------ plumbing

    def _ask(self, method: str, timeout_s: float, *args: Any) -> Any:
        self._check_connection()
        return ask(getattr(self._actor, method).remote(*args), timeout_s, self._name)

    def _check_connection(self) -> None:
        """Raise where a call would make Ray start a cluster, or where no answer would be heard."""
        if self._error is not None:
            raise self._error
        if self._connection.lost:
            raise ClusterError(f"evaluation service {self._name!r} cannot be reached: ray.shutdown() was called")

    def _expect(self, request: str, step: int, weights_version: int = 0) -> EvalHandle:
        """Return the handle of a request."""
        count = self.welcome.settings.evaluation.num_episodes
        nothing = EvalProgress(count, 0, 0, 0, 0, math.nan, math.nan, 0, 0.0, 0)

        def cancel(reason: str, unless_started: bool) -> None:
            with suppress(ClusterError):  # The handle fails with it.
                self._ask("cancel", _SILENCE_S, request, reason, unless_started)

        handle = EvalHandle(lambda: self._progress.get(request, nothing), cancel, lambda _: None, weights_version)
        handle.step, self._handles[request] = step, handle
        return handle

    def _listen(self) -> None:
        """Give answers to their handles, until this client leaves."""
        have: set[str] = set()
        try:
            while True:
                sent = list(self._delivered)
                self._check_connection()
                call = self._actor.poll.remote(self.client, have, sent)
                answer = (
                    call.future()
                )  # Not ray.wait: where the caller shuts Ray down meanwhile, that ends the process.
                while not futures.wait([answer], timeout=_LOOK_S).done:
                    self._check_connection()
                    if self._ended.is_set():
                        return
                answers, self._progress = ask(call, _SILENCE_S, self._name)
                del self._delivered[: len(sent)]
                have = (have - set(sent)) | set(answers)
                for request, answer in answers.items():
                    self._conclude(request, answer)
        except Exception as error:
            if not self._ended.is_set():  # Else it was to be expected.
                cause = f"evaluation service {self._name!r} cannot be reached: {error}"
                self._error = error if isinstance(error, EvalError) else ClusterError(cause)
                self._fail_all(self._error)

    def _conclude(self, request: str, answer: bytes) -> None:
        if (handle := self._handles.get(request)) is None:
            return  # Another process asks under the same name.
        outcome = unpickled(answer)
        if isinstance(outcome, Exception):
            handle.set_error(outcome)
            return
        timing = outcome.timing
        rest = {"env_steps": timing.env_steps, "seconds": timing.wall_seconds, "num_runners": timing.num_runners}
        handle.release(EvalProgress.of_table(outcome.table, **rest))
        handle.set_result(outcome)

    def _fail_all(self, error: BaseException) -> None:
        """Fail the handles whose results the service has, or will have, for a later client of this name."""
        for request, handle in list(self._handles.items()):
            if not handle.done():
                del self._handles[request]
                handle.set_error(error)

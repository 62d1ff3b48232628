"""Actor of a service: one group of runners, and the requests of many clients, one after the other, in turns.

A request is in the :mod:`journal <rl_eval.training.service.journal>` before it is acknowledged, so an actor that is
started again on the same folder goes on where the last one ended. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from rl_eval.config.settings import with_values
from rl_eval.errors import ClusterError, EvaluatorBusy, RunnerStartError, UsageError, WeightsError
from rl_eval.training.service.journal import Journal, Request
from rl_eval.training.service.messages import ClientStatus, FinishedEvaluation, ServiceStatus, Ticket, Welcome, pickled
from rl_eval.training.service.queue import FairQueue
from rl_eval.training.service.sealed import SealedFile
from rl_eval.training.service.videos import VideoWriter

if TYPE_CHECKING:
    from rl_eval.execution.group import EvalRunnerGroup
    from rl_eval.execution.group_weights import PublishedWeights
    from rl_eval.execution.handle import EvalHandle, EvalProgress
    from rl_eval.weights import WeightsSnapshot

__all__ = ["EvalService"]

_OPENING_S: Final = 180.0
_MAX_STARTS: Final = 8
"""A request that was started so often has ended as many processes of the service."""
_HISTORY: Final = 200

_logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _in_thread(
    method: Callable[Concatenate[EvalService, Parameters], Result],
) -> Callable[..., Awaitable[Result]]:
    """Make a method one that the actor's event loop does not wait for."""

    @functools.wraps(method)
    async def call(self: EvalService, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    return call


class EvalService:
    """Evaluates what its clients send.

    Args:
        name: What clients reach it by.
        namespace: Ray namespace of the name.
        run_dir: Folder of the service; it goes on with what an earlier one has left there.
        key: Of this service: with it a process that takes the place of another reads what it begins with.
        detached: Whether it outlives the process that started it; for :meth:`status`.
        idle_timeout_s: It ends when for so long there was no sign of life of any client, and nothing to do.
        clock: Seconds, monotonic.
        end: Called to end this process.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        run_dir: str,
        key: bytes,
        detached: bool,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[], object] | None = None,
    ) -> None:
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # All waiting is done in threads.
        self._name = name
        self._namespace = namespace
        self._folder = Path(run_dir)
        self._start_file = SealedFile(self._folder, key)
        self._detached = detached
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._end = end or _end_this_actor
        self._born = self._busy = clock()
        """The latter: when there was something to do."""
        self._lock = threading.RLock()
        """Guards everything below."""
        self._journal: Journal
        self._queue: FairQueue[Request] = FairQueue()
        self._running: Request | None = None
        self._seen: dict[str, float] = {}
        """Last sign of life of each client that is connected."""
        self._group: EvalRunnerGroup | None = None
        self._initial: PublishedWeights | None = None
        self._max_queue = 0
        self._opened = threading.Event()
        self._closed = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rl_eval service")
        """Starts and concludes evaluations, one after the other."""
        self._videos = VideoWriter(None)
        if (payload := self._start_file.read()) is not None:
            self._begin(payload)
        threading.Thread(target=self._end_when_idle, name="rl_eval idle watch", daemon=True).start()

    @_in_thread
    def open(self, payload: bytes) -> None:
        """Start the runners, and keep what is needed to start them again.

        Args:
            payload: Pickled ``(settings, policy, videos, max_queue)``.

        Raises:
            ConfigError: The configuration cannot work.
        """
        if self._opened.is_set():
            return  # The call is repeated, since its answer was lost.
        self._begin(payload)
        self._start_file.write(payload)

    def _begin(self, payload: bytes) -> None:
        import cloudpickle

        from rl_eval.execution.group import EvalRunnerGroup

        settings, policy, videos, max_queue = cloudpickle.loads(payload)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._journal = Journal(self._folder / "requests")
        group = EvalRunnerGroup(settings, policy)
        for request in self._journal.unfinished():
            self._queue.push(request.client, request)
        with self._lock:
            self._group, self._initial, self._max_queue = group, group.published_weights, max_queue
            self._videos = VideoWriter(videos)
            self._busy = self._clock()
        self._opened.set()
        self._post(self._run_next)

    # ------------------------------------------------------------------ calls of clients

    @_in_thread
    def connect(self, client: str) -> Welcome:
        """Return what a client needs to know, and what it has not been given yet.

        Raises:
            RunnerStartError: The service does not start.
        """
        if not self._opened.wait(_OPENING_S):
            raise RunnerStartError(f"evaluation service {self._name!r} did not start within {_OPENING_S:g} s")
        with self._lock:
            self._seen[client] = self._clock()
            group = self._open_group()
            own = self._journal.of_client(client)
            return Welcome(
                settings=with_values(group.settings, policy={"policy": None, "policy_kwargs": {}}),
                max_queue=self._max_queue,
                tickets=tuple(request.ticket for request in own if not request.delivered),
                next_step=own[-1].step + 1 if own else 0,
                weights_version=max((request.weights_version for request in own), default=0),
                beat_s=self._idle_timeout_s / 4,
            )

    @_in_thread
    def submit(self, client: str, name: str, step: int, version: int, snapshot: WeightsSnapshot | None) -> Ticket:
        """Accept a request; see :meth:`Journal.accept`. It may be sent again: what was accepted is acknowledged again.

        Raises:
            EvaluatorBusy: Too many of this client's requests wait.
            ClusterError: The service ends.
        """
        with self._lock:
            self._seen[client] = self._clock()
            if (known := self._journal.requests.get(name)) is not None:
                return known.ticket
            self._open_group()
            self._check_room(client)
            request = self._journal.accept(name, client, step, version, snapshot)
            self._queue.push(client, request)
        self._post(self._run_next)
        return request.ticket

    async def result(self, name: str) -> bytes:
        """Wait for the pickled outcome of a request.

        Raises:
            UsageError: There is no such request.
        """
        request = self._journal.requests.get(name)
        if request is None:
            raise UsageError(f"evaluation service {self._name!r} knows no request {name!r}")
        await asyncio.shield(asyncio.wrap_future(request.done))
        return await asyncio.to_thread(request.answer)

    @_in_thread
    def cancel(self, name: str, reason: str, unless_started: bool) -> None:
        """Cancel a request; one that waits has a result at once."""
        with self._lock:
            request = self._journal.requests.get(name)
            if request is None or request.done.done():
                return
            waits, handle = self._queue.remove(request.client, request), request.handle
            if not waits and not unless_started:
                request.cancelled = reason
        if waits:
            self._conclude(request, self._nothing_ran(reason))
        elif handle is not None and not unless_started:
            handle.cancel(reason)

    @_in_thread
    def progress(self, name: str) -> EvalProgress | None:
        """Return how far a request is; None if it does not run."""
        request = self._journal.requests.get(name)
        handle = None if request is None else request.handle
        return None if handle is None else handle.progress()

    @_in_thread
    def acknowledge(self, name: str) -> None:
        """Note that a result was delivered; it is not sent again when its client comes back."""
        request = self._journal.requests.get(name)
        if request is not None and not self._closed.is_set():  # What closing has answered is not done.
            self._journal.deliver(request)

    @_in_thread
    def beat(self, client: str) -> None:
        """Note that a client lives."""
        self._seen[client] = self._clock()

    @_in_thread
    def leave(self, client: str) -> None:
        """Note that a client has ended; what it has submitted is evaluated all the same."""
        self._seen.pop(client, None)

    # ------------------------------------------------------------------ calls of anybody

    @_in_thread
    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients, the oldest first."""
        done = sorted(
            (one for one in list(self._journal.requests.values()) if one.done.done()), key=lambda one: one.finished
        )
        return [
            FinishedEvaluation(one.client, one.step, one.weights_version, one.finished, str(one.run_dir), one.answer())
            for one in done[-_HISTORY:]
        ]

    @_in_thread
    def status(self) -> ServiceStatus:
        """Return its state."""
        import ray

        now = self._clock()
        with self._lock:
            running = self._running
            clients = sorted({*self._seen, *self._queue.clients()})
            requests = list(self._journal.requests.values()) if self._opened.is_set() else []
            return ServiceStatus(
                name=self._name,
                namespace=self._namespace,
                detached=self._detached,
                state=self._state(),
                node=ray.util.get_node_ip_address(),
                pid=os.getpid(),
                run_dir=str(self._folder),
                age_s=now - self._born,
                idle_timeout_s=self._idle_timeout_s,
                running="" if running is None else f"{running.client}, step {running.step}",
                num_waiting=len(self._queue),
                num_finished=sum(request.done.done() for request in requests),
                num_runners=0 if self._group is None else len(self._group.healthy_runner_ids),
                clients=tuple(self._client_status(name, now) for name in clients),
            )

    @_in_thread
    def close(self) -> None:
        """End the runners, within about ten seconds; what is not done stays in the journal."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            group = self._group
        if group is None:
            return
        error = ClusterError(
            f"evaluation service {self._name!r} was stopped before this was done; one that is started with "
            f"run_dir={str(self._folder)!r} goes on with it"
        )
        for request in self._journal.unfinished():
            request.unsaved = pickled(error)
            request.done.set_result(None)
        group.stop()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._videos.stop()
        self._journal.close()

    def _state(self) -> Any:
        if self._closed.is_set():
            return "stopping"
        if self._group is None:
            return "starting"
        return "idle" if self._running is None and not len(self._queue) else "running"

    def _client_status(self, name: str, now: float) -> ClientStatus:
        own = self._journal.of_client(name)
        undelivered = sum(one.done.done() and not one.delivered for one in own)
        return ClientStatus(name, now - self._seen.get(name, -float("inf")), self._queue.waiting(name), undelivered)

    # ------------------------------------------------------------------ one after the other

    def _open_group(self) -> EvalRunnerGroup:
        if self._closed.is_set() or self._group is None:
            raise ClusterError(f"evaluation service {self._name!r} was stopped")
        return self._group

    def _check_room(self, client: str) -> None:
        """Bound what waits for one client."""
        waiting = self._queue.waiting(client)
        # Two more than max_queue: the one that would run if no other client's did, and the one that ``latest`` sends
        # before it cancels another.
        if waiting > self._max_queue + 1:
            raise EvaluatorBusy(
                f"evaluation service {self._name!r} holds {waiting} requests of client {client!r} that wait, and "
                f"was started with max_queue={self._max_queue}: wait for results, or start it with a longer queue"
            )

    def _post(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # The service ends.
            self._worker.submit(function)

    def _run_next(self) -> None:
        """Start the next request, if none runs; whatever prevents that is its answer."""
        with self._lock:
            if self._running is not None or self._group is None or self._closed.is_set():
                return
            if (request := self._queue.take()) is None:
                return
            self._running = request
        try:
            handle = self._start(request)
        except Exception as error:
            self._conclude(request, error)
            return
        with self._lock:
            request.handle = handle
            cancelled = request.cancelled
        if cancelled is not None:
            handle.cancel(cancelled)
        handle.add_done_callback(lambda done: self._post(partial(self._finished, request, done)))

    def _start(self, request: Request) -> EvalHandle:
        group = self._open_group()
        if (starts := self._journal.count_start(request)) > _MAX_STARTS:
            raise ClusterError(f"the service ended {starts - 1} times while it evaluated this request")
        snapshot, weights = self._journal.weights(request), self._initial
        if snapshot is not None:
            weights = group.publish_weights(snapshot, request.weights_version)
        elif weights is None and group.published_weights is not None:
            raise UsageError(
                f"client {request.client!r} has sent no weights, and the runners have those of another client "
                "by now: send some, or start the service with a policy that is a module or has a weights file"
            )
        follow_up = self._videos.follow_up(request.client, request.step)
        return group.submit(run_dir=request.run_dir, weights=weights, follow_up=follow_up)

    def _finished(self, request: Request, handle: EvalHandle) -> None:
        try:
            outcome: Any = handle.exception() or handle.result()
        except Exception as error:
            outcome = error
        self._conclude(request, outcome)

    def _conclude(self, request: Request, outcome: Any) -> None:
        """Write an answer, release who waits for it, and go on with the next request."""
        failed = isinstance(outcome, BaseException)
        if not self._closed.is_set():  # Else it is for the next process to answer.
            fitted = (
                False if isinstance(outcome, WeightsError) else None if failed or not len(outcome.episodes) else True
            )
            answer = pickled(outcome)
            try:
                self._journal.conclude(request, answer, fitted)
            except Exception:
                request.unsaved = answer
                _logger.exception("the answer of %s cannot be kept, and is lost with this process", request.folder)
        with self._lock:
            if request.handle is not None and not failed:
                self._videos.expect()
            request.handle, self._busy = None, self._clock()
            if self._running is request:
                self._running = None
            if not request.done.done():
                request.done.set_result(None)
        self._post(self._run_next)

    def _nothing_ran(self, reason: str) -> Any:
        """Return the result of an evaluation that was cancelled while it waited."""
        from rl_eval.execution.outcome import EvalOutcome

        try:
            settings = self._open_group().settings
            return EvalOutcome(settings, settings.plan()).handle.snapshot(reason)
        except Exception as error:
            return error

    # ------------------------------------------------------------------ the end

    def _end_when_idle(self) -> None:
        while not self._closed.wait(min(1.0, self._idle_timeout_s / 4)):
            if self._idle():
                _logger.warning("evaluation service %r ends: no client, nothing to do", self._name)
                self.close.__wrapped__(self)  # type: ignore[attr-defined]
                self._end()

    def _idle(self) -> bool:
        with self._lock:
            now = self._clock()
            if self._running is not None or len(self._queue) or self._videos.busy:
                self._busy = now
            limit = self._idle_timeout_s if self._opened.is_set() else max(self._idle_timeout_s, _OPENING_S)
            return now - max([self._busy, *self._seen.values()]) > limit


def _end_this_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)

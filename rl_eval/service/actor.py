"""The service: one set of runners, and the requests of many clients, which it owns before it acknowledges them.

It runs as a Ray actor whose methods are called in several threads at once. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

from rl_eval.errors import ClusterError, EvaluatorBusy, RunnerStartError, UsageError, WeightsError
from rl_eval.redaction import redacted_traceback
from rl_eval.service.clients import Client, ClientBook, Request
from rl_eval.service.messages import Answer, ClientStatus, Past, ServiceStatus, Ticket, Welcome, pickled
from rl_eval.service.queue import FairQueue

if TYPE_CHECKING:
    from rl_eval.fleet import PublishedWeights
    from rl_eval.group import EvalRunnerGroup
    from rl_eval.handle import EvalHandle, EvalProgress
    from rl_eval.jobs import FollowUp
    from rl_eval.video import Video, VideoSettings
    from rl_eval.weights import WeightsSnapshot

__all__ = ["EvalService"]

_OPENING_S: Final = 180.0
_MAX_UNSENT: Final = 256
"""Answers that a client may leave with the service; requests that ``latest`` has replaced are answered at once."""
_HISTORY: Final = 200
_HISTORY_BYTES: Final = 256 * 2**20
_STOPPED: Final = "the service was stopped"

_logger = logging.getLogger(__name__)


class EvalService:
    """Evaluates what its clients send, one request after the other, in turns.

    Args:
        name: What clients reach it by.
        namespace: Ray namespace of the name.
        detached: Whether it outlives the driver that started it; for :meth:`status`.
        idle_timeout_s: It ends when for so long there was no sign of life of any client, and nothing to do.
    """

    def __init__(self, name: str, namespace: str, detached: bool, idle_timeout_s: float) -> None:
        self._name = name
        self._namespace = namespace
        self._detached = detached
        self._idle_timeout_s = idle_timeout_s
        self._born = self._busy = time.monotonic()
        """The latter: when there was something to do."""
        self._accepting = threading.Lock()
        """Held while a request is made the service's own, so that weights versions keep the order of requests."""
        self._version = 0
        """Of the weights that were accepted last."""
        self._changed = threading.Condition(threading.RLock())
        """Guards everything below, and is notified when there is an answer, or a session is over."""
        self._clients = ClientBook()
        self._queue: FairQueue[Request] = FairQueue()
        self._running: Request | None = None
        self._past: deque[Past] = deque()
        self._num_finished = 0
        self._num_filming = 0
        self._opened = threading.Event()
        self._closed = threading.Event()
        self._group: EvalRunnerGroup | None = None
        self._initial: PublishedWeights | None = None
        self._max_queue = 0
        self._videos: VideoSettings | None = None
        self._films = ThreadPoolExecutor(1, thread_name_prefix="rl_eval films")
        threading.Thread(target=self._end_when_orphaned, name="rl_eval orphan watch", daemon=True).start()

    def open(self, payload: bytes, max_queue: int) -> None:
        """Start the runners.

        Args:
            payload: Pickled ``(settings, policy, videos)``.
            max_queue: How many requests of one client may wait.

        Raises:
            ConfigError: The configuration cannot work.
        """
        import cloudpickle

        from rl_eval.group import EvalRunnerGroup

        settings, policy, self._videos = cloudpickle.loads(payload)
        group = EvalRunnerGroup(settings, policy)
        with self._changed:
            self._group, self._initial, self._max_queue = group, group.published_weights, max_queue
            self._busy = time.monotonic()
        self._opened.set()

    # ------------------------------------------------------------------ calls of clients

    def connect(self, name: str, lasting: bool) -> Welcome:
        """Begin a session of a client.

        Args:
            name: The client.
            lasting: Whether it may come back under this name.

        Raises:
            ClusterError: There are too many clients, or the service does not start.
        """
        if not self._opened.wait(_OPENING_S):
            raise RunnerStartError(f"evaluation service {self._name!r} did not start within {_OPENING_S:g} s")
        with self._changed:
            group = self._open_group()
            client = self._clients.connect(name, lasting, time.monotonic())
            self._changed.notify_all()  # A former session waits no more.
            policy = group.settings.policy.model_copy(update={"policy": None, "policy_kwargs": {}})
            return Welcome(
                session=client.session,
                settings=group.settings.model_copy(update={"policy": policy}),
                max_queue=self._max_queue,
                tickets=tuple(request.ticket for request in client.requests.values()),
                next_step=client.next_step,
                weights_version=client.weights_version,
            )

    def submit(
        self, name: str, session: int, request: str, step: int, version: int, snapshot: WeightsSnapshot | None
    ) -> Ticket:
        """Accept a request. It may be sent again: what was accepted once is acknowledged again.

        When this returns, nothing that the client holds is needed any more.

        Args:
            name: The client.
            session: Its session.
            request: Its name for the request.
            step: Training step.
            version: Least version that the weights may get.
            snapshot: Weights; None for those that the client sent last.

        Raises:
            EvaluatorBusy: Too many of this client's requests wait.
            UsageError: The session is over.
            ClusterError: The service ends.
        """
        with self._accepting:
            with self._changed:
                client = self._clients.find(name, session, time.monotonic())
                group = self._open_group()
                if request in client.known:
                    return client.known[request]
                self._check_room(client)
            sent = None
            if snapshot is not None:
                # Into an object of this process: what the client has put is lost with the client.
                self._version = max(self._version + 1, version)
                sent = group.publish_weights(snapshot, self._version)
            with self._changed:
                weights = client.weights if sent is None else sent
                version = 0 if weights is None else weights.snapshot.version
                accepted = Request(client, Ticket(request, step, version), weights)
                client.accept(accepted)
                self._queue.push(name, accepted)
                self._dispatch()
            return accepted.ticket

    def collect(self, name: str, session: int, received: list[str], timeout_s: float) -> list[Answer]:
        """Return answers that the session does not have yet, waiting for the first.

        Args:
            name: The client.
            session: Its session.
            received: Requests whose answers came with earlier calls; others are sent again.
            timeout_s: Longest wait, in seconds.

        Raises:
            UsageError: The session is over.
        """
        deadline = time.monotonic() + min(timeout_s, self._idle_timeout_s / 4)
        with self._changed:
            self._clients.find(name, session, time.monotonic()).receive(received)
            while True:
                now = time.monotonic()
                client = self._clients.find(name, session, now)
                if client.unsent or now >= deadline or self._closed.is_set():
                    return client.unsent
                self._changed.wait(deadline - now)

    def read(self, name: str, session: int, requests: list[str]) -> None:
        """Results have reached whoever wants them; they need not be kept for this client."""
        with self._changed, suppress(UsageError):  # A later session will read them once more.
            self._clients.find(name, session, time.monotonic()).read(requests)

    def cancel(self, name: str, session: int, request: str, reason: str, unless_started: bool) -> None:
        """Stop a request of a client; its answer is what there is of its result.

        Raises:
            UsageError: The session is over.
        """
        with self._changed:
            found = self._clients.find(name, session, time.monotonic()).requests.get(request)
            if found is None or found.answer is not None:
                return
            if self._queue.remove(name, found):
                self._conclude(found, self._nothing_ran(reason), found.ticket.weights_version)
            elif found.handle is not None and not unless_started:
                found.handle.cancel(reason)

    def progress(self, name: str, request: str) -> EvalProgress | None:
        """Return how far a request is; None if it does not run."""
        with self._changed:
            running = self._running
            if running is None or running.client.name != name or running.ticket.request != request:
                return None
            return None if running.handle is None else running.handle.progress()

    def leave(self, name: str, session: int) -> None:
        """End a session; what it has submitted is evaluated all the same."""
        with self._changed, suppress(UsageError):
            self._clients.leave(self._clients.find(name, session, time.monotonic()))
            self._changed.notify_all()

    # ------------------------------------------------------------------ calls of anybody

    def history(self) -> list[Past]:
        """Return the last evaluations of all clients, the oldest first."""
        with self._changed:
            return list(self._past)

    def status(self) -> ServiceStatus:
        """Return what it is doing."""
        import os

        import ray

        now = time.monotonic()
        with self._changed:
            running = self._running
            return ServiceStatus(
                name=self._name,
                namespace=self._namespace,
                detached=self._detached,
                state=self._state(),
                node=ray.util.get_node_ip_address(),
                pid=os.getpid(),
                age_s=now - self._born,
                idle_timeout_s=self._idle_timeout_s,
                running="" if running is None else f"{running.client.name}, step {running.ticket.step}",
                num_waiting=len(self._queue),
                num_finished=self._num_finished,
                num_runners=0 if self._group is None else len(self._group.healthy_runner_ids),
                clients=tuple(
                    ClientStatus(
                        name=client.name,
                        silent_s=now - client.seen,
                        num_waiting=self._queue.waiting(client.name),
                        num_unread=sum(one.answer is not None for one in client.requests.values()),
                    )
                    for client in self._clients
                ),
            )

    def close(self) -> None:
        """Fail what is unfinished and end the runners, within about ten seconds; the process is for others to end."""
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            while (request := self._queue.take()) is not None:
                self._conclude(request, ClusterError(_STOPPED), request.ticket.weights_version)
            group = self._group
        if group is not None:
            group.stop()
        self._films.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ one after the other

    def _open_group(self) -> EvalRunnerGroup:
        if self._closed.is_set() or self._group is None:
            raise ClusterError(f"evaluation service {self._name!r} was stopped")
        return self._group

    def _check_room(self, client: Client) -> None:
        """Bound what the service holds for one client: weights that wait, and answers that it does not fetch.

        Raises:
            EvaluatorBusy: There is no room.
        """
        waiting, unsent = self._queue.waiting(client.name), len(client.unsent)
        # Two more than that: what its client takes for the running one may wait for another client's, and ``latest``
        # sends a request before it cancels another.
        if waiting > self._max_queue + 1:
            raise EvaluatorBusy(
                f"evaluation service {self._name!r} holds {waiting} requests of client {client.name!r} that wait, and "
                f"was started with max_queue={self._max_queue}: wait for results, or start it with a longer queue"
            )
        if unsent > _MAX_UNSENT:
            raise EvaluatorBusy(
                f"evaluation service {self._name!r} holds {unsent} results that client {client.name!r} has not "
                "fetched: submit again once it has"
            )

    def _dispatch(self) -> None:
        """Start the next request, if none runs."""
        while self._running is None and not self._closed.is_set() and (request := self._queue.take()) is not None:
            self._start(request)

    def _start(self, request: Request) -> None:
        """Begin with a request; whatever prevents that is its answer, since nobody else will be told."""
        try:
            group = self._open_group()
            request.handle = group.submit(weights=self._weights_for(request, group), follow_up=self._filming(request))
        except Exception as error:
            self._conclude(request, error, request.ticket.weights_version)
            return
        self._running = request
        request.handle.add_done_callback(partial(self._finished, request))

    def _weights_for(self, request: Request, group: EvalRunnerGroup) -> PublishedWeights | None:
        weights = request.weights or self._initial
        if weights is None and group.published_weights is not None:
            raise UsageError(
                f"client {request.client.name!r} has sent no weights, and the runners have those of another client "
                "by now: send some, or start the service with a policy that is a module or has a weights file"
            )
        return weights

    def _finished(self, request: Request, handle: EvalHandle) -> None:
        """A request has its result; called in the thread that drives the runners."""
        with self._changed:
            try:
                self._conclude(request, self._outcome(request, handle), handle.weights_version)
            finally:
                self._running, self._busy = None, time.monotonic()
                self._dispatch()

    def _outcome(self, request: Request, handle: EvalHandle) -> Any:
        """Return the result of a request, or the error that there is instead, be it one of this function."""
        try:
            error, client = handle.exception(), request.client
            self._num_filming += self._videos is not None and error is None
            outcome: Any = error or handle.result()
            if isinstance(error, WeightsError):
                client.fall_back(request.weights)
            elif error is None and len(outcome.episodes):  # One that was cancelled may have had no use for its weights.
                client.proven = request.weights
        except Exception as error:
            return error
        return outcome

    def _conclude(self, request: Request, outcome: Any, version: int) -> None:
        """Keep an answer for its client, first of all, and in the history."""
        answer = Answer(request.ticket.request, version, pickled(outcome))
        request.answer, request.weights, request.handle = answer, None, None
        self._changed.notify_all()
        self._num_finished += 1
        self._past.append(Past(request.client.name, request.ticket.step, time.time(), answer))
        size = sum(len(one.answer.outcome) for one in self._past)
        while len(self._past) > _HISTORY or (size > _HISTORY_BYTES and len(self._past) > 1):
            size -= len(self._past.popleft().answer.outcome)
        self._clients.settle(request.client)

    def _nothing_ran(self, reason: str) -> Any:
        """Return the result of an evaluation that was cancelled while it waited."""
        from rl_eval.evaluation import Evaluation

        try:
            settings = self._open_group().settings
            evaluation = Evaluation(0, settings, settings.evaluation.plan())
            evaluation.handle.cancel(reason)
            evaluation.tick(0.0)
            return evaluation.handle.exception() or evaluation.handle.result()
        except Exception as error:
            return error

    def _state(self) -> Literal["starting", "idle", "running", "stopping"]:
        if self._closed.is_set():
            return "stopping"
        if self._group is None:
            return "starting"
        return "idle" if self._running is None else "running"

    # ------------------------------------------------------------------ films

    def _filming(self, request: Request) -> FollowUp | None:
        if self._videos is None:
            return None
        from rl_eval.video.recording import filming

        # Clients count steps of their own, and have names that need not be those of folders.
        client = f"client_{quote(request.client.name, safe='')}"
        folder = Path(self._videos.folder, client, f"step_{request.ticket.step}")

        def done(films: Sequence[Future[Video]]) -> None:
            with suppress(RuntimeError):  # The service ends.
                self._films.submit(self._save, films, folder)

        return filming(self._videos, done)

    def _save(self, films: Sequence[Future[Video]], folder: Path) -> None:
        from rl_eval.video.recording import saved

        def complain(error: Exception) -> None:
            _logger.error("an episode could not be filmed into %s\n%s", folder, redacted_traceback(error).rstrip())

        for _ in saved((film.result for film in films), folder, complain):
            pass
        with self._changed:
            self._num_filming -= 1
            self._busy = time.monotonic()

    # ------------------------------------------------------------------ the end

    def _end_when_orphaned(self) -> None:
        while not self._closed.wait(min(1.0, self._idle_timeout_s / 4)):
            with self._changed:
                now = time.monotonic()
                if self._running is not None or len(self._queue) or self._num_filming:
                    self._busy = now
                patience = self._idle_timeout_s if self._opened.is_set() else max(self._idle_timeout_s, _OPENING_S)
                seen = max([self._busy, *(client.seen for client in self._clients if not client.gone)])
            if now - seen > patience:
                _logger.warning("evaluation service %r ends: no client, nothing to do", self._name)
                self.close()
                _end_this_actor()


def _end_this_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)

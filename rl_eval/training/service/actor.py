"""Actor of a service: one group of runners, which evaluates one request at a time. The clients take turns.

A request is on disk before it is acknowledged, and its evaluation has a log. So a new actor with the same folder
continues where the last actor ended. An import of this module imports neither Ray nor torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rl_eval.atomic_write import write_atomically
from rl_eval.config.settings import with_values
from rl_eval.errors import ConfigError, WeightsError, traceback_of
from rl_eval.records.plain import damage
from rl_eval.training.service.requests import Request, ServiceOptions, Ticket, Welcome, join_secrets, unreachable
from rl_eval.weights import WeightsSnapshot, add_missing, weights_of

if TYPE_CHECKING:
    from rl_eval.execution.group import EvalRunnerGroup
    from rl_eval.execution.handle import EvalHandle, EvalProgress
    from rl_eval.execution.jobs import FollowUp
    from rl_eval.execution.runner_pool import PublishedWeights
    from rl_eval.recording.video import Video
    from rl_eval.results.result import EvalResult


_OPENING_S: Final = 180.0
_POLL_S: Final = 1.0
_CONNECTED_S: Final = 10.0
_HISTORY: Final = 200
_SETTINGS: Final = "settings_{}.pkl"
_SHOWN: Final = ("name", "namespace", "detached", "output", "idle_timeout_s")

_logger = logging.getLogger(__name__)


class EvalService:
    """Actor that evaluates the requests of its clients.

    Args:
        options: Name, folder and limits of the service.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._folder = Path(options.output)
        self._settings = self._folder / _SETTINGS.format(options.start)
        self._poll_s = min(_POLL_S, options.idle_timeout_s / 4)
        self._born = self._busy = time.monotonic()  # Start, and time of the last activity.
        # Protects the attributes below; notified when a request is accepted, started or done, and at the end.
        self._changed = threading.Condition()
        self._requests: dict[str, Request] = {}  # All requests of the folder, by identifier, in order of acceptance.
        self._running: Request | None = None
        self._turns: dict[str, int] = {}  # Last turn of each client.
        self._seen: dict[str, float] = {}  # Time of the last call of each client.
        self._group: EvalRunnerGroup | None = None
        self._initial: PublishedWeights | None = None
        self._knows_initial = self._has_sent = False
        self._closed = False
        if self._settings.exists():
            self.open(self._settings.read_bytes())
        threading.Thread(target=self._serve, name="rl_eval service", daemon=True).start()

    def open(self, payload: bytes) -> None:
        """Start the runners, and save settings and policy for a replacement process.

        Args:
            payload: Pickled settings and policy, without their secrets.

        Raises:
            ConfigError: The configuration is invalid, or another service uses the folder.
        """
        if self._group is not None:
            return  # Ray repeats a call if its answer was lost.
        from rl_eval.execution.group import EvalRunnerGroup

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            problem, fix = f"output is {self._folder}, which another evaluation service uses", "Pass another folder."
            raise ConfigError(problem, key="output", value=str(self._folder), fix=fix) from None
        group = EvalRunnerGroup(*join_secrets(payload, self._options.secrets))
        write_atomically(self._settings, partial(_write_private, payload))
        for former in {*self._folder.glob(_SETTINGS.format("*"))} - {self._settings}:
            former.unlink()
        with self._changed:
            self._requests = Request.read_all(self._folder / "requests")
            self._group, self._initial, self._busy = group, group.published_weights, time.monotonic()
            self._changed.notify_all()

    # ------------------------------------------------------------------ calls of clients

    def connect(self, client: str) -> Welcome:
        """Return the settings, and the requests of a client that were not delivered.

        Raises:
            ClusterError: The service did not start, or is ending.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._group is not None or self._closed, _OPENING_S)
            own = [request.ticket for request in self._of(client)]
            self._seen[client] = time.monotonic()
            return Welcome(
                settings=with_values(self._open_group().settings, policy={"policy": None, "policy_kwargs": {}}),
                tickets=[ticket for ticket in own if not self._requests[ticket.id].delivered],
                next_step=own[-1].step + 1 if own else 0,
                weights_version=max((ticket.weights_version for ticket in own), default=0),
            )

    def submit(self, client: str, request: str, step: int, version: int, weights: WeightsSnapshot | None) -> Ticket:
        """Accept a request; if it is sent again, acknowledge it again.

        When this method has returned, the service needs nothing more from the client.

        Args:
            client: Name of the client.
            request: Identifier that the client chose.
            step: Training step.
            version: Lowest version that the service may assign to the weights.
            weights: Weights; None for the client's last weights. Weights that did not fit the policy are skipped.

        Raises:
            ClusterError: The service is ending.
        """
        with self._changed:
            self._open_group()
            if request not in self._requests:
                tickets = [one.ticket for one in self._requests.values()]
                version = max(version, 1 + max((one.weights_version for one in tickets), default=0))
                if weights is None:
                    kept = (one.ticket.weights_version for one in self._of(client) if one.weights.exists())
                    version = max(kept, default=0)
                ticket = Ticket(1 + max((one.number for one in tickets), default=-1), request, client, step, version)
                self._requests[request] = Request.create(self._folder / "requests", ticket, weights)
                self._changed.notify_all()
            return self._requests[request].ticket

    def poll(
        self, client: str, have: Collection[str], delivered: Collection[str], wait: bool = True
    ) -> tuple[dict[str, bytes], dict[str, EvalProgress]]:
        """Return the answers to requests of a client, and the progress of its running request, by identifier.

        Args:
            client: Name of the client.
            have: Requests whose answers the client has received.
            delivered: Requests whose results the client has passed to callbacks and loggers. Their answers are not sent
                again, even to a later client of this name.
            wait: Whether to wait briefly, if there is no answer yet.
        """
        with self._changed:
            self._seen[client] = time.monotonic()
            for request in self._requests.keys() & delivered:
                self._requests[request].note_delivery()
            if wait:
                self._changed.wait_for(lambda: self._closed or self._undelivered(client, have), self._poll_s)
            found = self._undelivered(client, have)
            progress = {one.ticket.id: one.handle.progress() for one in self._of(client) if one.handle is not None}
        return {request.ticket.id: request.outcome() for request in found}, progress

    def cancel(self, request: str, reason: str, unless_started: bool) -> None:
        """Cancel a request. If it has not started, answer it immediately."""
        with self._changed:
            found = self._requests[request]
            self._changed.wait_for(lambda: found is not self._running or found.handle is not None)
            if found.handle is not None and not unless_started:
                found.handle.cancel(reason)
            elif found in self._waiting():
                from rl_eval.execution.aspects import default_aspects
                from rl_eval.execution.outcome import EvalOutcome
                from rl_eval.runners import layout_of

                settings = self._open_group().settings
                outcome = EvalOutcome(settings, layout_of(settings), settings.plan(), aspects=default_aspects(dict))
                self._conclude(found, outcome.handle.snapshot(reason))

    # ------------------------------------------------------------------ calls without a client

    def history(self) -> list[tuple[Ticket, str, bytes]]:
        """Return ticket, log and outcome of the last evaluations of all clients, in the order of acceptance."""
        with self._changed:
            done = [request for request in self._requests.values() if request.answer is not None]
        return [(request.ticket, str(request.output), request.outcome()) for request in done[-_HISTORY:]]

    def status(self) -> dict[str, Any]:
        """Return the state as plain data, in the format of ``rl-eval service list --json``."""
        import ray

        with self._changed:
            running, waiting, now = self._running, self._waiting(), time.monotonic()
            state = "starting" if self._group is None else "running" if running or waiting else "idle"
            connected = {client for client, seen in self._seen.items() if now - seen < _CONNECTED_S}
            return {
                **{name: getattr(self._options, name) for name in _SHOWN},
                "state": "stopping" if self._closed else state,
                "node": ray.util.get_node_ip_address(),
                "pid": os.getpid(),
                "age_s": now - self._born,
                "running": "" if running is None else f"{running.ticket.client}, step {running.ticket.step}",
                "num_waiting": len(waiting),
                "num_finished": sum(request.answer is not None for request in self._requests.values()),
                "num_runners": 0 if self._group is None else len(self._group.healthy_runner_ids),
                "clients": sorted({*connected, *(one.ticket.client for one in waiting)}),
            }

    def close(self) -> None:
        """Stop the runners, within about ten seconds; unfinished requests stay in the folder."""
        with self._changed:
            group, self._group, self._closed = self._group, None, True
            self._changed.notify_all()
        if group is not None:
            group.stop()
            self._lock.close()

    # ------------------------------------------------------------------ requests

    def _of(self, client: str) -> list[Request]:
        return [request for request in self._requests.values() if request.ticket.client == client]

    def _undelivered(self, client: str, have: Collection[str] = ()) -> list[Request]:
        """Return the requests of a client that have an answer, but whose results the client has not delivered."""
        done = [one for one in self._of(client) if one.answer is not None and not one.delivered]
        return [one for one in done if one.ticket.id not in have]

    def _waiting(self) -> list[Request]:
        return [one for one in self._requests.values() if one.answer is None and one is not self._running]

    def _open_group(self) -> EvalRunnerGroup:
        if self._group is None:
            raise unreachable(self._options.name, "was stopped or did not start")
        return self._group

    # ------------------------------------------------------------------ one after the other

    def _serve(self) -> None:
        """Evaluate all requests, until the service ends."""
        while (request := self._next()) is not None:
            try:
                outcome: EvalResult | Exception = self._start(request).result()
            except Exception as error:
                outcome = error
            with self._changed:
                self._running = None
                self._conclude(request, outcome)

    def _next(self) -> Request | None:
        """Wait for the next request and return it; return None when the service ends.

        If several clients have waiting requests, the client that was served least recently is next.
        """
        with self._changed:
            while not self._closed:
                if self._group is not None and (waiting := self._waiting()):
                    turn = min(waiting, key=lambda one: self._turns.get(one.ticket.client, 0))
                    self._turns[turn.ticket.client] = 1 + max(self._turns.values(), default=0)
                    self._running = turn
                    return turn
                limit = max(self._options.idle_timeout_s, 0.0 if self._group else _OPENING_S)
                if time.monotonic() - max([self._busy, *self._seen.values()]) > limit:
                    _logger.warning(
                        "evaluation service %r ends, because it has no clients and no requests", self._options.name
                    )
                    self.close()
                    self._end()
                self._changed.wait(self._poll_s)
        return None

    def _start(self, request: Request) -> EvalHandle:
        """Start an evaluation."""
        with self._changed:
            group = self._open_group()
        if not self._knows_initial:  # A runner has them until other weights are sent.
            snapshot = None if self._initial else group.apply_to_one(_weights_of_policy)
            with self._changed:
                self._initial = group.publish_weights(snapshot, 0) if snapshot else self._initial
                self._knows_initial = True
        with self._changed:
            weights = self._weights_for(request, group)
            request.handle = group.submit(output=request.output, weights=weights, follow_up=self._follow_up(request))
            self._changed.notify_all()
            return request.handle

    def _weights_for(self, request: Request, group: EvalRunnerGroup) -> PublishedWeights | None:
        """Return the weights of a request; None if the runners still have the initial weights that the request needs.

        If the weights of the request did not fit the policy, use the client's previous weights.
        """
        if request.ticket.weights_version and not request.weights.exists():
            former = self._former_of(request)
            request.use(former.ticket.weights_version if former else 0)
        if not (version := request.ticket.weights_version):
            return self._initial if self._has_sent else None  # None: the runners still have the initial weights.
        self._has_sent = True
        return group.publish_weights(self._complete(request, group), version)

    def _complete(self, request: Request, group: EvalRunnerGroup) -> WeightsSnapshot:
        """Return the weights of all policies for a request with weights.

        If the request has no weights for a policy, the policy gets the client's former weights.
        """
        try:
            snapshot: WeightsSnapshot = pickle.loads(request.weights.read_bytes())
        except Exception as error:  # A damaged pickle can raise any error.
            problem = f"{request.weights} is damaged: {damage(error)}"
            raise WeightsError(problem, key="weights", fix="Submit weights again.") from error
        policies = group.settings.policy.policies
        if policies and not snapshot.versions:
            former = self._former_of(request)
            last = self._complete(former, group) if former else self._initial and self._initial.snapshot
            snapshot = add_missing(replace(snapshot, version=request.ticket.weights_version), last, policies)
            request.put_weights(snapshot)
        return snapshot

    def _former_of(self, request: Request) -> Request | None:
        """Return the client's request with the last weights before those of ``request``; None if there is none."""
        kept = [one for one in self._of(request.ticket.client) if one.weights.exists()]
        earlier = [one for one in kept if one.ticket.weights_version < request.ticket.weights_version]
        return max(earlier, key=lambda one: one.ticket.weights_version, default=None)

    def _follow_up(self, request: Request) -> FollowUp | None:
        """Return the job that records the videos of an evaluation, in a folder per client and step."""
        if (settings := self._options.videos) is None:
            return None
        from rl_eval.recording.video import follow_up_videos, saved

        name = quote(request.ticket.client, safe="")
        folder = Path(settings.folder, f"client_{name}", f"step_{request.ticket.step}")

        def report(error: Exception) -> None:
            _logger.error("a video in %s could not be recorded\n%s", folder, traceback_of(error))

        def save(videos: Sequence[Future[Video]]) -> None:
            list(saved((video.result for video in videos), folder, report))

        return follow_up_videos(settings, lambda videos: threading.Thread(target=save, args=[videos]).start())

    def _conclude(self, request: Request, outcome: EvalResult | Exception) -> None:
        """Answer a request, and remove weights that are no longer needed."""
        self._busy = time.monotonic()
        if self._closed:
            return  # The next service with this folder answers the request.
        request.conclude(outcome)
        version, unfit = request.ticket.weights_version, isinstance(outcome, WeightsError)
        ran = not isinstance(outcome, Exception) and len(outcome.episodes) > 0
        for one in self._of(request.ticket.client):
            other = one.ticket.weights_version
            if other == version if unfit else ran and other < version:
                with suppress(OSError):  # A file that cannot be removed only takes up space.
                    one.weights.unlink()
        self._changed.notify_all()

    def _end(self) -> None:
        """End this process."""
        import ray

        ray.kill(ray.get_runtime_context().current_actor)


def _weights_of_policy(runner: Any) -> WeightsSnapshot | None:
    return weights_of(runner.policy)


def _write_private(content: bytes, file: Path) -> None:
    file.chmod(0o600)
    file.write_bytes(content)

"""Client of a service: start, find, list and end services by name, and submit evaluations.

One background thread of a client polls for answers; the polls also show that the client is alive. Ray repeats a call if
the service's process was replaced. Each request has an identifier, so the service evaluates it once.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import threading
import time
import uuid
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeVar, final
from urllib.parse import quote

import ray
from ray._private.state import actors
from ray.exceptions import RayError, RayTaskError

from rl_eval.backends.connection import Connection, summarize
from rl_eval.backends.pickling import pickled_settings
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.errors import ClusterError, ConfigError, EvalError, UsageError
from rl_eval.errors.redaction import secrets_in
from rl_eval.execution.handle import EvalHandle, EvalProgress
from rl_eval.policies.subject import Subject
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.requests import (
    FinishedEvaluation,
    ServiceOptions,
    Ticket,
    Welcome,
    split_secrets,
    unpickled,
    unreachable,
)
from rl_eval.weights import HeldWeights, WeightsSnapshot, snapshot_weights

_logger: Final = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_PREFIX: Final = "rl_eval:"
_OPENING_S: Final = 180.0
_CLOSING_S: Final = 20.0
_STATUS_S: Final = 5.0
_NAME_FREED_S: Final = 10.0


def _answer(call: Any, timeout_s: float, name: str, kind: type[_Answer]) -> _Answer:
    """Wait for the return value of a service call.

    Raises:
        ClusterError: The service has ended, failed or does not answer in time; it may have received the call. Or the
            value is of another type, as from an actor that is not a service.
        EvalError: The error of the call.
    """
    try:
        answer = ray.get(call, timeout=timeout_s)
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, EvalError):
            raise cause from None
        problem = f"has ended, failed or does not answer: {type(cause).__name__}: {summarize(cause)}"
        raise unreachable(name, problem) from error
    if not isinstance(answer, kind):
        raise unreachable(name, f"answered with a {type(answer).__name__} instead of a {kind.__name__}")
    return answer


def reach(address: str | None) -> Connection:
    """Connect this process to the cluster with the services.

    Args:
        address: Address of the cluster. Default: ``RAY_ADDRESS``, or the cluster on this machine.

    Raises:
        RunnerStartError: No cluster answers.
        ConfigError: The process is connected to another cluster.
    """
    elsewhere = None if ray.is_initialized() else os.environ.get("RAY_ADDRESS", "auto")
    return Connection(RunnersSection(address=address or elsewhere))


def start_service(settings: EvalSettings, subject: Subject, options: ServiceOptions) -> tuple[Any, Connection]:
    """Start a service; return its actor, and the connection to its cluster.

    Args:
        settings: Settings of the evaluations.
        subject: Policies of the evaluations.
        options: Options of the service. The default ``output`` is a folder of the Ray session.

    Raises:
        ConfigError: The configuration is invalid, or a service of this name exists.
        ClusterError: The service does not start.
    """
    name, runners = options.name, settings.runners
    if not name or options.idle_timeout_s <= 0:
        key, value = ("idle_timeout_s", options.idle_timeout_s) if name else ("name", name)
        problem = f"name is {name!r} and idle_timeout_s is {options.idle_timeout_s}"
        raise ConfigError(problem, key=key, value=value, fix="Pass a name, and an idle_timeout_s above 0.")
    if options.detached and not (ray.is_initialized() or runners.address or os.environ.get("RAY_ADDRESS")):
        problem, fix = "detached is True, but the cluster ends with this process", "Set runners.address or RAY_ADDRESS."
        raise ConfigError(problem, key="detached", value=True, fix=fix)
    content = _for_the_service(settings), subject.portable()
    pickled_settings(*content)  # Raises an error that names the key that cannot be pickled.
    payload, taken = split_secrets(content, secrets_in(settings.model_dump()))
    connection, actor = Connection(runners), None
    try:
        folder = str(Path(options.output or _session_folder(name)).absolute())
        actor_class = ray.remote(EvalService).options(
            name=_PREFIX + name,
            namespace=options.namespace,
            lifetime="detached" if options.detached else None,
            # The actor runs on the head node: the folder is there, and the cluster ends with this node anyway. So the
            # loss of any other node does not affect the actor.
            resources={"node:__internal_head__": 0.001},
            num_cpus=0,
            max_restarts=100,
            max_task_retries=-1,
            max_concurrency=128,  # Each client has one call that waits for answers.
            runtime_env=connection.runtime_env(runners),
        )
        try:
            actor = actor_class.remote(replace(options, output=folder, start=uuid.uuid4().hex, secrets=taken))
        except (TypeError, ValueError) as error:
            problem = f"service {name!r} exists already, or Ray rejects runners.runtime_env: {summarize(error)}"
            fix = "Connect with Evaluator.from_name, choose another name, or correct runners.runtime_env."
            raise ConfigError(problem, key="name", value=name, fix=fix) from error
        _answer(actor.open.remote(payload), _OPENING_S, name, NoneType)
    except BaseException:
        if actor is not None:
            ray.kill(actor)
        connection.close()
        raise
    return actor, connection


def _find(name: str, namespace: str) -> Any:
    """Return the actor of a service.

    Raises:
        UsageError: No service has this name; the message lists the existing services. Or another actor has it.
    """
    try:
        actor = ray.get_actor(_PREFIX + name, namespace=namespace)
    except ValueError:
        known = ", ".join(f"{one!r} (namespace {space!r})" for space, one in _names()) or "none"
        problem = f"service {name!r} does not exist in namespace {namespace!r}; existing services: {known}"
        raise UsageError(problem, key="name", value=name) from None
    if not repr(actor).startswith(f"Actor({EvalService.__name__},"):
        raise UsageError(f"{_PREFIX}{name} in {namespace!r} is {actor}, not a service", key="name", value=name)
    return actor


def list_services(namespace: str | None = None) -> dict[tuple[str, str], dict[str, Any] | None]:
    """Return the states of services, by namespace and name; None for a service that does not answer.

    Args:
        namespace: Ray namespace of the services; None for all namespaces.
    """
    found: dict[tuple[str, str], dict[str, Any] | None] = {}
    for space, name in _names():
        if namespace in (None, space):
            found[space, name] = None
            with suppress(EvalError):
                found[space, name] = _answer(_find(name, space).status.remote(), _STATUS_S, name, dict)
    return found


def end_service(name: str, namespace: str) -> bool:
    """End a service, its runners and its requests; return whether the service closed before it was killed.

    Raises:
        UsageError: No service has this name.
        ClusterError: The service was killed, but Ray still lists it.
    """
    actor, orderly = _find(name, namespace), False
    with suppress(ClusterError):  # A service that hangs is killed below.
        _answer(actor.close.remote(), _CLOSING_S, name, NoneType)
        orderly = True
    ray.kill(actor)
    deadline = time.monotonic() + _NAME_FREED_S
    while (namespace, name) in _names():
        if time.monotonic() > deadline:
            raise unreachable(name, "was killed, but Ray still lists it")
        time.sleep(0.05)
    return orderly


def _session_folder(name: str) -> Path:
    """Return the path of a new folder, in a folder that exists as long as the cluster."""
    from ray._private.worker import _global_node  # Ray has no public function for it.

    return Path(_global_node.get_session_dir_path(), "rl_eval", f"{quote(name, safe='')[:100]}_{uuid.uuid4().hex[:8]}")


def _names() -> list[tuple[str, str]]:
    """Return namespaces and names of all services."""
    found = ((one["namespace"], one["name"]) for one in ray.util.list_named_actors(all_namespaces=True))
    return sorted((space, name.removeprefix(_PREFIX)) for space, name in found if name.startswith(_PREFIX))


def _for_the_service(settings: EvalSettings) -> EvalSettings:
    """Return settings without the address and without the parts of ``runtime_env`` that runners inherit."""
    variables = {key: value for key, value in settings.runners.runtime_env.items() if key == "env_vars"}
    return with_values(settings, runners={"address": None, "runtime_env": variables})


_LOOK_S: Final = 0.05  # Between two checks whether this client has left.
_STARTING: Final = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")
_SILENCE_S: Final = 60.0  # Time limit for an answer of the service.
_DISCONNECT_S: Final = 5.0


@final
class ServiceClient:
    """Client of a service: it sends requests and receives results under the name of a client.

    Args:
        connection: Connection to the service's cluster; closed with this client, and on errors.
        name: Name of the service.
        namespace: Ray namespace of the name.
        client: Name of the client; None for a new unique name.
        actor: Handle of the service's actor. The client keeps it, because Ray ends an actor that is not detached and
            has no handle. Default: the actor of this name.
        owner: Whether the service ends with this client.

    Raises:
        UsageError: No service has this name.
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
        self._handles: dict[str, EvalHandle] = {}  # Handles of undelivered requests, by identifier.
        self._delivered: list[str] = []  # Delivered requests that were not yet reported to the service.
        self._progress: dict[str, EvalProgress] = {}
        self._ended = threading.Event()
        self._error: EvalError | None = None
        """Error that ended the polling; None if there was no error."""
        try:
            self._actor = actor or _find(name, namespace)
            self.welcome = self._ask("connect", Welcome, _OPENING_S, self.client)
        except BaseException:
            connection.close()
            raise
        # Earlier requests of this client that were not delivered, in order.
        self.resumed = [self._expect(one.id, one.step, one.weights_version) for one in self.welcome.tickets]
        self._thread = threading.Thread(target=self._listen, name="rl_eval service client", daemon=True)
        self._thread.start()
        # A thread must not wait for Ray while Ray shuts down.
        atexit.register(self.end_thread)

    def submit(self, weights: Any, version: int | None, step: int, held: HeldWeights) -> EvalHandle:
        """Send a request to the service.

        Args:
            weights: As for ``EvalRunnerGroup.submit``; None for the last weights of this client.
            version: Lowest version that the service may assign.
            step: Training step.
            held: Receives a copy of the weights.

        Raises:
            WeightsError: The weights cannot be used.
            ClusterError: The service has ended or does not answer.
        """
        if weights is not None:  # The service assigns the version.
            known = isinstance(weights, WeightsSnapshot)
            held.snapshot = replace(weights, version=0) if known else snapshot_weights(weights, 0)
        request = uuid.uuid4().hex
        handle = self._expect(request, step)  # It must exist before the service answers.
        # The service writes the weights to its disk: a minute more per GB.
        limit = _SILENCE_S * (1 + (held.snapshot.buffer.nbytes if held.snapshot else 0) / 1e9)
        ticket = self._ask("submit", Ticket, limit, self.client, request, step, version or 0, held.snapshot)
        handle.weights_version = ticket.weights_version
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """Record that a result was delivered. The service will not send it to a later client of this name."""
        for request, one in list(self._handles.items()):
            if one is handle:
                del self._handles[request]
                self._delivered.append(request)

    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients, the oldest first.

        Raises:
            ClusterError: The service has ended or does not answer.
        """
        return [
            FinishedEvaluation(one.client, one.step, one.weights_version, output, unpickled(answer))
            for one, output, answer in self._ask("history", list, _SILENCE_S)
        ]

    def stop(self) -> None:
        """Leave the service, or end it if this client owns it; may be called again."""
        self.end_thread()
        with suppress(EvalError):
            self._ask("poll", tuple, _DISCONNECT_S, self.client, (), self._delivered, False)
            if self._owner:
                end_service(self._name, self._namespace)
        goes_on = "" if self._owner else f"; evaluation service {self._name!r} continues it"
        problem = f"the evaluator was shut down before this evaluation was done{goes_on}"
        self._fail_all(ClusterError(problem, key="name", value=self._name))
        self._connection.close()

    def end_thread(self) -> None:
        """Stop polling for answers."""
        atexit.unregister(self.end_thread)
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_DISCONNECT_S)

    # ------------------------------------------------------------------ plumbing

    def _ask(self, method: str, kind: type[_Answer], timeout_s: float, *args: Any) -> _Answer:
        self._check_connection()
        return _answer(getattr(self._actor, method).remote(*args), timeout_s, self._name, kind)

    def _check_connection(self) -> None:
        """Raise an error if the polling has failed, or if Ray was shut down: a call would then start a new cluster."""
        if self._error is not None:
            raise self._error
        if self._connection.lost:
            problem = f"evaluation service {self._name!r} cannot be reached: ray.shutdown() was called"
            raise ClusterError(problem, key="name", value=self._name, fix="Connect again with Evaluator.from_name.")

    def _expect(self, request: str, step: int, weights_version: int = 0) -> EvalHandle:
        """Create the handle of a request."""
        count = self.welcome.settings.evaluation.num_episodes
        nothing = EvalProgress(count, 0, 0, 0, 0, math.nan, math.nan, 0, 0.0, 0)

        def cancel(reason: str, unless_started: bool) -> None:
            with suppress(ClusterError):  # The handle gets the error.
                self._ask("cancel", NoneType, _SILENCE_S, request, reason, unless_started)

        handle = EvalHandle(lambda: self._progress.get(request, nothing), cancel, lambda _: None, weights_version)
        handle.step, self._handles[request] = step, handle
        return handle

    def _listen(self) -> None:
        """Pass answers to their handles, until this client leaves."""
        have: set[str] = set()
        try:
            while not self._ended.is_set():
                sent = list(self._delivered)
                self._check_connection()
                call = self._actor.poll.remote(self.client, have, sent)
                if not self._came(call):
                    continue
                answers, self._progress = _answer(call, _DISCONNECT_S, self._name, tuple)
                del self._delivered[: len(sent)]
                have = (have - set(sent)) | set(answers)
                for request, answer in answers.items():
                    self._conclude(request, answer)
        except Exception as error:
            if not self._ended.is_set():  # Errors during a shutdown are expected.
                lost = unreachable(self._name, f"cannot be reached: {error}")
                self._error = error if isinstance(error, EvalError) else lost
                self._fail_all(self._error)

    def _came(self, call: Any) -> bool:
        """Wait for the answer of a poll, also while Ray starts the service again. Return whether it came.

        The handles fail if the service runs but does not answer. Later requests succeed if it answers again.
        """
        # ray.wait is not used: it would end the process if the caller shuts Ray down during the wait.
        answer, since = call.future(), time.monotonic()
        while not futures.wait([answer], timeout=_LOOK_S).done:
            self._check_connection()
            if self._ended.is_set():
                return False
            if time.monotonic() - since > _OPENING_S:
                state = actors(self._actor._actor_id.hex()).get("State", "unknown")  # noqa: SLF001
                silent = unreachable(self._name, f"does not answer; Ray's state of its actor is {state}")
                _logger.warning("%s", silent)
                if state not in _STARTING:
                    self._fail_all(silent)
                    return False
                since = time.monotonic()
        return True

    def _conclude(self, request: str, answer: bytes) -> None:
        if (handle := self._handles.get(request)) is None:
            return  # Another process uses the same client name.
        outcome = unpickled(answer)
        if isinstance(outcome, Exception):
            handle.set_error(outcome)
            return
        timing = outcome.timing
        rest = {"env_steps": timing.env_steps, "seconds": timing.wall_seconds, "num_runners": timing.num_runners}
        if len(outcome.episodes):
            handle.weights_version = outcome.episodes[0].weights_version
        handle.release(EvalProgress.of_table(outcome.table, **rest))
        handle.set_result(outcome)

    def _fail_all(self, error: BaseException) -> None:
        """Set an error for all unfinished handles; the service keeps their results for a later client of this name."""
        for request, handle in list(self._handles.items()):
            if not handle.done():
                del self._handles[request]
                handle.set_error(error)

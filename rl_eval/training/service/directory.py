"""Directory of services: one is started, found, listed and ended by name from any process of the cluster."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rl_eval.backends import pickled_settings
from rl_eval.backends.connection import Connection, summarize
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.errors import ClusterError, ConfigError, UsageError
from rl_eval.execution.group import portable_policy
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.messages import ServiceStatus
from rl_eval.training.service.sealed import new_key

if TYPE_CHECKING:
    from rl_eval.video import VideoSettings

__all__ = ["ask", "end_service", "find_service", "list_services", "reach", "reach_service", "start_service"]

_PREFIX: Final = "rl_eval:"
_HEAD: Final = "node:__internal_head__"
_CALLS_AT_ONCE: Final = 8192
"""Most of them wait for an answer, which costs a coroutine."""
_RESTARTS: Final = 100
_OPENING_S: Final = 180.0
_CLOSING_S: Final = 20.0
_STATUS_S: Final = 5.0
_NAME_FREED_S: Final = 10.0


def ask(call: Any, timeout_s: float, name: str) -> Any:
    """Wait for what a call of a service returns.

    Raises:
        ClusterError: The service is gone, or does not answer in time; whether it has got the call is unknown.
        EvalError: What the call raised.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ClusterError(f"evaluation service {name!r} does not answer: {summarize(error)}") from error
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from None
    except RayActorError as error:
        raise ClusterError(f"evaluation service {name!r} is gone: {summarize(error)}") from error
    except RayError as error:
        raise ClusterError(f"evaluation service {name!r} cannot be reached: {summarize(error)}") from error


def reach(address: str | None) -> Connection:
    """Connect this process to the cluster where services live.

    Args:
        address: Of the cluster; by default ``RAY_ADDRESS``, else the one that runs on this machine.

    Raises:
        RunnerStartError: There is none.
        ConfigError: The process is connected elsewhere.
    """
    if not ray.is_initialized() and address is None:
        address = os.environ.get("RAY_ADDRESS", "auto")
    return Connection(RunnersSection(address=address))


def start_service(
    settings: EvalSettings,
    policy: Any,
    videos: VideoSettings | None,
    *,
    name: str,
    namespace: str,
    detached: bool,
    idle_timeout_s: float,
    max_queue: int,
    run_dir: str | os.PathLike[str] | None,
) -> tuple[Any, Connection]:
    """Start a service; return its actor, and the connection to its cluster.

    Raises:
        ConfigError: The configuration cannot work, or there is a service of this name.
        ClusterError: It does not start.
    """
    if not name or idle_timeout_s <= 0:
        raise ConfigError(f"name is {name!r} and idle_timeout_s is {idle_timeout_s}: give a name, and seconds above 0")
    runners = settings.runners
    if detached and not ray.is_initialized() and not (runners.address or os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            "detached=True, but there is no cluster that would outlive this process: give runners.address, or set "
            "RAY_ADDRESS, or call ray.init(address=...) first"
        )
    payload = pickled_settings(_for_the_service(settings), portable_policy(policy), videos, max_queue)
    connection = Connection(runners)
    try:
        environment = connection.runtime_env(runners)
        folder = str(Path(_session_folder(name) if run_dir is None else run_dir).absolute())
        actor = _create(name, namespace, environment, folder, detached, idle_timeout_s)
        try:
            ask(actor.open.remote(payload), _OPENING_S, name)
        except BaseException:
            ray.kill(actor)
            raise
    except BaseException:
        connection.close()
        raise
    return actor, connection


def reach_service(name: str, namespace: str, address: str | None) -> tuple[Any, Connection]:
    """Return the actor of a service, and the connection to its cluster; see :func:`reach` and :func:`find_service`."""
    connection = reach(address)
    try:
        return find_service(name, namespace), connection
    except UsageError:
        connection.close()
        raise


def find_service(name: str, namespace: str) -> Any:
    """Return the actor of a service.

    Raises:
        UsageError: There is none of this name; the message lists those that there are.
    """
    try:
        return ray.get_actor(_PREFIX + name, namespace=namespace)
    except ValueError:
        known = [f"{one!r}" if space == namespace else f"{one!r} (namespace {space!r})" for space, one in _names()]
        raise UsageError(
            f"there is no evaluation service {name!r} in namespace {namespace!r}; there "
            + (f"is: {', '.join(known)}" if known else "is none at all")
        ) from None


def list_services(namespace: str | None = None) -> dict[tuple[str, str], ServiceStatus | None]:
    """Return the states of services, by namespace and name; None for one that does not answer.

    Args:
        namespace: Of the services; by default all.
    """
    asked = {}
    for space, name in _names():
        if namespace in (None, space):
            with suppress(ValueError):  # It has ended meanwhile.
                asked[space, name] = ray.get_actor(_PREFIX + name, namespace=space).status.remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATUS_S)
    found: dict[tuple[str, str], ServiceStatus | None] = {}
    for key, call in asked.items():
        try:
            found[key] = ask(call, 0.1, key[1])
        except ClusterError:  # noqa: PERF203  # Each is asked for itself.
            found[key] = None
    return found


def end_service(name: str, namespace: str) -> bool:
    """End a service, its runners and its requests; return whether it went in an orderly way.

    Raises:
        UsageError: There is none of this name.
        ClusterError: It is still there.
    """
    actor = find_service(name, namespace)
    orderly = True
    try:
        ask(actor.close.remote(), _CLOSING_S, name)
    except ClusterError:
        orderly = False  # What hangs is ended with its process.
    with suppress(RayError):
        ray.kill(actor)
    deadline = time.monotonic() + _NAME_FREED_S
    while (namespace, name) in _names():
        if time.monotonic() > deadline:
            raise ClusterError(f"evaluation service {name!r} was killed, but Ray still lists it")
        time.sleep(0.05)
    return orderly


def _session_folder(name: str) -> Path:
    """Return a new folder that lasts as long as the cluster."""
    from ray._private.worker import _global_node  # It is nowhere else.

    return Path(_global_node.get_session_dir_path(), "rl_eval", f"{quote(name, safe='')[:100]}_{uuid.uuid4().hex[:8]}")


def _create(
    name: str,
    namespace: str,
    environment: dict[str, Any],
    folder: str,
    detached: bool,
    idle_timeout_s: float,
) -> Any:
    try:
        actor_class = ray.remote(EvalService).options(
            name=_PREFIX + name,
            namespace=namespace,
            lifetime="detached" if detached else None,
            # Without the head node nothing lives on, so no other node's loss should end it; and its folder is there.
            resources={_HEAD: 0.001},
            num_cpus=0,
            max_restarts=_RESTARTS,
            max_task_retries=-1,
            max_concurrency=_CALLS_AT_ONCE,
            runtime_env=environment,
        )
        return actor_class.remote(name, namespace, folder, new_key(), detached, idle_timeout_s)
    except (TypeError, ValueError) as error:
        if (namespace, name) not in _names():
            raise ConfigError(f"runners: Ray does not take this runtime_env: {summarize(error)}") from error
        raise ConfigError(
            f"there is an evaluation service {name!r} in namespace {namespace!r} already, perhaps with other settings: "
            f"use Evaluator.from_name({name!r}), end it with `rl-eval service stop {name}`, or choose another name"
        ) from None


def _names() -> list[tuple[str, str]]:
    """Return namespace and name of all services."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        (actor["namespace"], actor["name"].removeprefix(_PREFIX))
        for actor in actors
        if actor["name"].startswith(_PREFIX)
    )


def _for_the_service(settings: EvalSettings) -> EvalSettings:
    """Leave out the address, which is known in the cluster, and what runners inherit from the service's process."""
    variables = {key: value for key, value in settings.runners.runtime_env.items() if key == "env_vars"}
    policy = settings.policy.policy
    policy = policy if isinstance(policy, str) else portable_policy(policy)
    return with_values(settings, runners={"address": None, "runtime_env": variables}, policy={"policy": policy})

"""Directory of services: one is started, found, listed and ended by name from any process of the cluster."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import ray
from ray.exceptions import RayError, RayTaskError

from rl_eval.backends.connection import Connection, summarize
from rl_eval.backends.pickling import pickled_settings
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.errors import ClusterError, ConfigError, EvalError, UsageError
from rl_eval.errors.redaction import secrets_in
from rl_eval.execution.group import portable_policy
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.requests import ServiceOptions, split_secrets

__all__ = ["ask", "end_service", "find_service", "list_services", "reach", "start_service"]

_PREFIX: Final = "rl_eval:"
_OPENING_S: Final = 180.0
_CLOSING_S: Final = 20.0
_STATUS_S: Final = 5.0
_NAME_FREED_S: Final = 10.0


def ask(call: Any, timeout_s: float, name: str) -> Any:
    """Wait for what a call of a service returns.

    Raises:
        ClusterError: The service is gone, or does not answer in time; it may have received the call.
        EvalError: The error of the call.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayError as error:
        raise ClusterError(f"evaluation service {name!r} is gone, or does not answer: {summarize(error)}") from error


def reach(address: str | None) -> Connection:
    """Connect this process to the cluster where services live.

    Args:
        address: Of the cluster; by default ``RAY_ADDRESS``, else the one that runs on this machine.

    Raises:
        RunnerStartError: There is none.
        ConfigError: The process is connected elsewhere.
    """
    elsewhere = None if ray.is_initialized() else os.environ.get("RAY_ADDRESS", "auto")
    return Connection(RunnersSection(address=address or elsewhere))


def start_service(settings: EvalSettings, policy: Any, options: ServiceOptions) -> tuple[Any, Connection]:
    """Start a service; return its actor, and the connection to its cluster.

    Args:
        settings: Its settings.
        policy: Its live policy, if any.
        options: Without ``run_dir`` it gets a folder of the Ray session.

    Raises:
        ConfigError: The configuration cannot work, or there is a service of this name.
        ClusterError: It does not start.
    """
    name, runners = options.name, settings.runners
    if not name or options.idle_timeout_s <= 0:
        raise ConfigError(f"name is {name!r} and idle_timeout_s is {options.idle_timeout_s}: give a name, and seconds")
    if options.detached and not (ray.is_initialized() or runners.address or os.environ.get("RAY_ADDRESS")):
        raise ConfigError("detached=True, but no cluster outlives this process: give runners.address or RAY_ADDRESS")
    content = _for_the_service(settings), portable_policy(policy)
    pickled_settings(*content)  # Names the key that cannot be pickled.
    payload, taken = split_secrets(content, secrets_in(settings.model_dump()))
    connection, actor = Connection(runners), None
    try:
        folder = str(Path(options.run_dir or _session_folder(name)).absolute())
        actor_class = ray.remote(EvalService).options(
            name=_PREFIX + name,
            namespace=options.namespace,
            lifetime="detached" if options.detached else None,
            # Without the head node nothing lives on, so no other node's loss should end it; and its folder is there.
            resources={"node:__internal_head__": 0.001},
            num_cpus=0,
            max_restarts=100,
            max_task_retries=-1,
            max_concurrency=128,  # Each client has one call that waits for answers.
            runtime_env=connection.runtime_env(runners),
        )
        try:
            actor = actor_class.remote(replace(options, run_dir=folder, start=uuid.uuid4().hex, secrets=taken))
        except (TypeError, ValueError) as error:
            cause = f"there is a service {name!r} already (see Evaluator.from_name), or Ray refuses runners.runtime_env"
            raise ConfigError(f"{cause}: {summarize(error)}") from error
        ask(actor.open.remote(payload), _OPENING_S, name)
    except BaseException:
        if actor is not None:
            ray.kill(actor)
        connection.close()
        raise
    return actor, connection


def find_service(name: str, namespace: str) -> Any:
    """Return the actor of a service.

    Raises:
        UsageError: There is none of this name; the message lists those that there are.
    """
    try:
        return ray.get_actor(_PREFIX + name, namespace=namespace)
    except ValueError:
        known = ", ".join(f"{one!r} (namespace {space!r})" for space, one in _names()) or "no service at all"
        raise UsageError(f"there is no service {name!r} in namespace {namespace!r}; there is: {known}") from None


def list_services(namespace: str | None = None) -> dict[tuple[str, str], dict[str, Any] | None]:
    """Return the states of services, by namespace and name; None for one that does not answer.

    Args:
        namespace: Of the services; by default all.
    """
    found: dict[tuple[str, str], dict[str, Any] | None] = {}
    for space, name in _names():
        if namespace in (None, space):
            found[space, name] = None
            with suppress(EvalError):
                found[space, name] = ask(find_service(name, space).status.remote(), _STATUS_S, name)
    return found


def end_service(name: str, namespace: str) -> bool:
    """End a service, its runners and its requests; return whether it went in an orderly way.

    Raises:
        UsageError: There is none of this name.
        ClusterError: It is still there.
    """
    actor, orderly = find_service(name, namespace), False
    with suppress(ClusterError):  # What hangs is ended with its process.
        ask(actor.close.remote(), _CLOSING_S, name)
        orderly = True
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


def _names() -> list[tuple[str, str]]:
    """Return namespace and name of all services."""
    found = ((one["namespace"], one["name"]) for one in ray.util.list_named_actors(all_namespaces=True))
    return sorted((space, name.removeprefix(_PREFIX)) for space, name in found if name.startswith(_PREFIX))


def _for_the_service(settings: EvalSettings) -> EvalSettings:
    """Leave out the address, which is known in the cluster, and what runners inherit from the service's process."""
    variables = {key: value for key, value in settings.runners.runtime_env.items() if key == "env_vars"}
    policy = settings.policy.policy
    policy = policy if isinstance(policy, str) else portable_policy(policy)
    return with_values(settings, runners={"address": None, "runtime_env": variables}, policy={"policy": policy})

"""Connection of this process to a Ray cluster, and the runtime environment of its runners."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import ray

from rl_eval.backends.cluster_watch import ClusterWatch, connect_once
from rl_eval.config.settings import RunnersSection
from rl_eval.errors import ConfigError, RunnerStartError
from rl_eval.supervision.process_environment import runner_environment

_PROBE_TIMEOUT_S: Final = 3.0
_LONGEST_FOLDER: Final = 39
"""Maximum length of the temporary folder: the path of a socket has 107 bytes, and Ray adds up to 68."""
_CLUSTER_ID: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Name of the first call that Ray's own client makes."""
_HOOK: Final = "worker_process_setup_hook"
_CRASH_SIGNALS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_SIGACTION_SIZE: Final = 256
"""Size of a buffer for ``struct sigaction`` in bytes. The struct has up to 152 bytes, and begins with the handler's
address."""
_NO_HANDLER: Final = bytes(ctypes.sizeof(ctypes.c_void_p))
"""Bytes of the address if there is no handler."""


@final
class Connection:
    """Connection of this process to an existing Ray cluster, or to a new local cluster that this object stops.

    Args:
        section: Address and runtime environment.
        on_death: Function that another thread calls when the cluster is lost.

    Raises:
        ConfigError: The process is connected to another cluster, or Ray rejects the ``runtime_env``.
        RunnerStartError: No cluster answers at the address, or a local cluster cannot start.
    """

    def __init__(self, section: RunnersSection, on_death: Callable[[], object] = lambda: None) -> None:
        self.owned = not ray.is_initialized()
        """Whether this object stops the cluster."""
        address = section.address or os.environ.get("RAY_ADDRESS")
        self._starts_cluster = self.owned and not address
        if self.owned:
            _connect(section, address)
        else:
            _check_connection(section)
        self._identity = _identity()
        self._raylet = _raylet_of_this_process()
        self.watch = ClusterWatch(self._identity[0], on_death)

    @property
    def lost(self) -> bool:
        """Whether ``ray.shutdown()`` was called. Ray's next call would connect again, perhaps to another cluster."""
        return not ray.is_initialized() or _identity() != self._identity

    @property
    def node_id(self) -> str:
        """Ray's id of the node of this process. The id is stored, because a later call of Ray could start a cluster."""
        return self._identity[-1]

    @property
    def death(self) -> str:
        """Reason why the cluster counts as dead; empty while it does not.

        Ray's client terminates this process with exit code 1 if the cluster's head does not answer. If the raylet that
        this process started dies, the object store dies with it, and Ray's client terminates this process when it needs
        the store, or at the latest when the cluster notices the loss.
        """
        code = None if self._raylet is None else self._raylet.poll()
        if code is None:
            return self.watch.loss
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the local Ray cluster died: its raylet {how}"

    def runtime_env(self, section: RunnersSection) -> dict[str, Any]:
        """Return the runtime environment of an actor, without the values inherited from this connection.

        If the actor inherits all environment variables, the result is empty. Then Ray does not start an additional
        interpreter for the actor.
        """
        variables = runner_environment()
        if self._starts_cluster:  # Its workers inherit the variables of this process.
            variables = {name: value for name, value in variables.items() if os.environ.get(name, "") != value}
        variables |= section.runtime_env.get("env_vars", {})
        inherited = {} if self.owned else section.runtime_env
        return {**inherited, "env_vars": variables} if variables else {}

    def close(self) -> None:
        """Disconnect from the cluster, unless this process was connected before. Further calls have no effect."""
        self.watch.end()
        if self.death and os.getppid() == 1:
            return  # Ray would take the parent of this orphan for the dead raylet, and end the process here.
        if self.owned and not self.lost:
            with _process_kept():
                ray.shutdown()


def _identity() -> tuple[str, ...]:
    """Return cluster, job and node. Each connection is a new job, so the result is unique in the process."""
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id(), context.get_node_id()


def _raylet_of_this_process() -> subprocess.Popen[bytes] | None:
    """Return the raylet that this process started, now or for an earlier connection; None if it started no raylet."""
    node = ray._private.worker._global_node  # noqa: SLF001 -- Ray has no public name for it.
    raylets = [] if node is None else node.all_processes.get("raylet", [])
    return raylets[0].process if raylets else None


def _connect(section: RunnersSection, address: str | None) -> None:
    # This runtime environment applies to all actors of this process; Ray uploads local folders.
    runtime_env = {key: value for key, value in section.runtime_env.items() if key != "env_vars"}
    try:
        if address:
            connect_once(address)
            _check_token(address)
            with _process_kept():
                ray.init(address=address, log_to_driver=False, logging_level="WARNING", runtime_env=runtime_env)
        else:
            # Without "local", Ray would join any cluster that is running on this machine.
            with _process_kept():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    runtime_env=runtime_env,
                )
    except RunnerStartError:
        raise
    except Exception as error:
        if runtime_env and isinstance(error, (TypeError, ValueError)):
            problem = f"runners.runtime_env: Ray rejected it: {summarize(error)}"
            raise ConfigError(problem, key="runners.runtime_env", value=runtime_env) from error
        if not address:
            raise _not_started(error) from error
        if type(error).__name__ == "AuthenticationError":  # Older versions of Ray have no such class.
            raise _token_needed(address) from error
        problem = f"no Ray cluster answers at runners.address={address!r}: {summarize(error)}{_cause(error)}"
        fix = (
            "Start a cluster with `ray start --head`, correct the address, or remove the address to run on a local "
            "cluster."
        )
        raise RunnerStartError(problem, key="runners.address", value=address, fix=fix) from error


def _not_started(error: Exception) -> RunnerStartError:
    """Return an error about a local cluster. Ray's own message does not name the variable of the temporary folder."""
    problem = f"Ray cannot start a cluster on this machine: {summarize(error)}"
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = os.environ.get(name, "")
    if folder.isascii() and len(folder) <= _LONGEST_FOLDER:
        return RunnerStartError(problem, key="runners.address")
    fix = f"Set {name} to a folder whose path has at most {_LONGEST_FOLDER} ASCII characters, such as {name}=/tmp."
    return RunnerStartError(f"{problem}. {name} is {folder}", key=name, value=folder, fix=fix)


def summarize(error: BaseException) -> str:
    """Return the first and the last line of an error. Ray writes the cause in the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} [...] {lines[-1]}").rstrip(".")


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Undo side effects of ``ray.init`` and ``ray.shutdown`` on this process, which may be a trainer.

    Ray draws numbers from ``random``, sets environment variables, and replaces the handlers of SIGTERM and of crashes.
    If there was no handler of SIGTERM, Ray's handler is kept, because this handler terminates the daemons of a local
    cluster together with this process.
    """
    state, variables, handler = random.getstate(), dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        with _crash_handlers_kept():
            yield
    finally:
        random.setstate(state)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if handler not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _crash_handlers_kept() -> Iterator[None]:
    """Restore crash handlers, such as those of :mod:`faulthandler`. A new handler is kept if there was none before.

    C code installs these handlers, so the module :mod:`signal` does not know them.
    """
    sigaction = ctypes.CDLL(None).sigaction
    kept: dict[signal.Signals, Any] = {
        number: ctypes.create_string_buffer(_SIGACTION_SIZE) for number in _CRASH_SIGNALS
    }
    for number, action in kept.items():
        sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            if not action.raw.startswith(_NO_HANDLER):
                sigaction(number, action, None)


def _check_connection(section: RunnersSection) -> None:
    connected = ray.get_runtime_context().gcs_address
    if section.address not in (None, "auto", connected) and not _is_same(section.address, connected):
        problem = f"runners.address is {section.address!r}, but this process is already connected to {connected!r}"
        fix = "Remove the address, or call ray.shutdown() first."
        raise ConfigError(problem, key="runners.address", value=section.address, fix=fix)
    if _HOOK in section.runtime_env:
        problem = f"runners.runtime_env.{_HOOK}: Ray would ignore this value, because this process is already connected"
        fix = "Pass it to ray.init(runtime_env=...), or call ray.shutdown() first."
        raise ConfigError(problem, key=f"runners.runtime_env.{_HOOK}", value=section.runtime_env[_HOOK], fix=fix)


def _is_same(address: str, connected: str) -> bool:
    """Whether an address is another spelling of the address to which Ray is connected."""
    host, _, port = address.rpartition(":")
    there, _, other = connected.rpartition(":")
    try:
        ip = socket.gethostbyname(host)
    except OSError:
        return False
    return port == other and (ip == there or (ip.startswith("127.") and there == ray.util.get_node_ip_address()))


def _check_token(address: str) -> None:
    """Check that the cluster accepts this process. Ray itself would try twenty times and print each rejection.

    Raises:
        RunnerStartError: The cluster asks for a token.
    """
    if address.startswith("ray://"):
        return
    place = address
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.services import canonicalize_bootstrap_address_or_die

        place = canonicalize_bootstrap_address_or_die(address)
        # Ray's own client writes to file descriptor 2, and aborts a process that has no token.
        with init_grpc_channel(place) as channel:
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=_PROBE_TIMEOUT_S)
    except Exception as error:  # Ray reports all other problems.
        if "UNAUTHENTICATED" in str(error):
            raise _token_needed(place) from None


def _cause(error: BaseException) -> str:
    return "" if error.__cause__ is None else f" ({summarize(error.__cause__)})"


def _token_needed(place: str) -> RunnerStartError:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        problem, fix = "", "Set RAY_AUTH_MODE=token, and put"
    elif os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        problem, fix = "; RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH has another token", "Put"
    else:
        problem, fix = "; RAY_AUTH_MODE=token is set, but this machine has another token", "Put"
    return RunnerStartError(
        f"the cluster at {place} answered and asks for a token{problem}",
        key="runners.address",
        value=place,
        fix=f"{fix} the cluster's token in ~/.ray/auth_token (copied from its head node) or in RAY_AUTH_TOKEN. Or "
        "start nodes and clients with RAY_AUTH_MODE=disabled. See docs/cluster.md, Authentication.",
    )

"""Environment in a child process. The runner sends requests to the process, and reads replies as they arrive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar, cast, final

import cloudpickle
import numpy as np

from rl_eval.errors import EnvError, EnvFailed, summary_of, traceback_of
from rl_eval.errors.printable import printable
from rl_eval.errors.redaction import redact_text
from rl_eval.records.episode import Lease
from rl_eval.records.generators import GeneratorSensor
from rl_eval.runners.environment import attribute_of, construct_env, episode_hook, time_limit
from rl_eval.supervision.caller import expect_no_ctrl_c, survivable

_WORKER: Final = "from rl_eval.runners.slot_process import main; main()"
_LAST: Final = -1
"""Number of the reply that reports the end of the process."""
_LAST_WORDS_S: Final = 0.2
_SEARCHED: Final = 200_000
"""Number of characters of an error that are searched for secrets. It is more than any message shows."""
_FACTS: Final = ("observation_space", "action_space", "render_mode", "metadata", "condition_keys")
"""Attributes of an environment that its runner reads without a call."""

Result = TypeVar("Result")


class CallLimit(NamedTuple):
    """Time limit of a call."""

    key: str
    seconds: float


@final
class SlotProcess:
    """Process of a slot, started at the first request and again after it died.

    Args:
        payload: Pickled arguments of :func:`rl_eval.runners.environment.construct_env`.
        sensed: Takes the change of a global random generator by an environment, as a text.
    """

    def __init__(self, payload: bytes, sensed: Callable[[str], object]) -> None:
        self._payload, self._sensed = payload, sensed
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._awaited = 0
        """Number of the request that waits for its reply; 0 for none."""
        self._stash: deque[SlotReply] = deque()
        """Replies that came while :meth:`call` waited for the reply to its own request."""
        self.connection: Connection | None = None
        """Pipe to the process; None without a process."""
        self.doing = BEGIN
        """Last request: ``begin`` for an episode, or ``step``."""
        self.since = 0.0
        """Time of the last request. It is set again at a start, at a new environment and at an abandoned request."""
        self.started = False
        """Whether the process has started and has imported the modules of its environment."""
        self.abandoned = False
        """Whether the next reply is dropped."""
        self._request: tuple[str, int, tuple[Any, ...]] = (BEGIN, 0, ())
        """Last request that :meth:`ask` sent."""
        self._built: set[int] = set()
        """Numbers of the environments that the process has built."""
        self._closing = 0
        """Number of closes that have not ended."""
        self.facts: dict[str, Any] = {}
        """Attributes (:data:`_FACTS`) and time limit of the environment that was built last."""
        self.build_seconds = 0.0
        """Build time of the same environment, in seconds."""

    # ------------------------------------------------------------------ requests

    @property
    def pid(self) -> int | None:
        """Process id; None if there is none."""
        return None if self._process is None else self._process.pid

    @property
    def busy(self) -> bool:
        """Whether a reply is pending, even if this reply will be dropped."""
        return self._awaited > 0

    @property
    def constructing(self) -> bool:
        """Whether an episode waits until its environment is built."""
        return self.busy and self.doing == BEGIN and self._request[1] not in self._built

    @property
    def closing(self) -> bool:
        """Whether the process is closing an earlier environment."""
        return self._closing > 0

    def start(self, limit: CallLimit) -> None:
        """Start the process. Wait until it has imported the modules of its environment, or has ended.

        Raises:
            EnvError: The limit is over.
        """
        self._start()
        end = perf_counter() + limit.seconds
        while self.connection is not None and not self.started:
            self._next(end, limit)

    def ask(self, kind: str, env: int, *args: Any) -> None:
        """Send a request; :meth:`poll` returns the reply."""
        assert not self.busy
        if kind == BEGIN:
            self._start()
        self.doing, self.since, self._request = kind, perf_counter(), (kind, env, args)
        self._awaited = self._send(kind, env, *args)

    def ask_again(self) -> None:
        """End the process, and send the last request to a new one."""
        abandoned, (kind, env, args) = self.abandoned, self._request
        self.kill()
        self.ask(kind, env, *args)
        self.abandoned = abandoned

    def close(self, env: int) -> None:
        """Ask the process to close an environment, without waiting. Do nothing if there is no process."""
        if self.connection is not None:
            self._built.discard(env)
            self._closing += 1
            self._send(CLOSE, env)

    def abandon(self) -> None:
        """Drop the next reply when it comes."""
        self.abandoned, self.since = True, perf_counter()

    def call(self, env: int, function: Callable[[Any], Result], limit: CallLimit | None = None) -> Result:
        """Call a function with an environment and return its result. Build the environment if necessary.

        Args:
            env: Number of the environment.
            function: The function. It is pickled.
            limit: Time limit; None to wait without one.

        Raises:
            EnvError: The process has ended, or the limit is over.
            BaseException: The function raised it.
        """
        self._start()
        number = self._send(CALL, env, cloudpickle.dumps(function))
        end = perf_counter() + (limit.seconds if limit else 0.0)
        while (reply := self._next(end, limit)) is None or reply.number not in (number, _LAST):
            if reply is not None:
                self._stash.append(reply)
        if reply.number == _LAST and self.busy:
            self._stash.append(reply)
        return value_of(reply)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ replies

    @property
    def has_stash(self) -> bool:
        """Whether a reply is already stored."""
        return bool(self._stash)

    @property
    def has_reply(self) -> bool:
        """Whether a reply, or the end of the process, can be read now."""
        return self.has_stash or (self.connection is not None and self.connection.poll())

    def poll(self) -> SlotReply | None:
        """Return the next reply if it answers the last request, else None. Call this when a reply can be read."""
        reply = self._stash.popleft() if self._stash else self._read()
        if reply is None or reply.number not in (self._awaited, _LAST):
            return None
        wanted = not self.abandoned
        self._awaited, self.abandoned = 0, False
        return reply if wanted else None

    # ------------------------------------------------------------------ the process

    def kill(self) -> None:
        """Kill the process, and drop its pending replies."""
        self._collect()
        self._awaited, self.abandoned = 0, False
        self._stash.clear()

    def finish(self) -> None:
        """Close the pipe, so that the process closes its environments and exits."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def join(self, timeout_s: float) -> None:
        """Wait for the process to exit; kill it after the timeout."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, timeout_s))
            self._collect()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is not None and not self.busy:
            self.kill()
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        main = ["main"] if threading.current_thread() is threading.main_thread() else []
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # This interpreter, our module.
                [sys.executable, "-c", _WORKER, str(theirs.fileno()), str(os.getpid()), *main],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.connection = Connection(ours.detach())
        self._write(self._payload)

    def _send(self, kind: str, env: int, *args: Any) -> int:
        """Send a request; return its number."""
        self._number += 1
        self._write(fast_dumps((self._number, kind, env, *args)))
        return self._number

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # Reading detects that the process has ended.
            if self.connection is not None:
                self.connection.send_bytes(data)

    def _next(self, end: float, limit: CallLimit | None) -> SlotReply | None:
        """Read a reply, as :meth:`_read` does, before the end of a limit."""
        left = max(0.0, end - perf_counter())
        if limit is not None and self.connection is not None and not self.connection.poll(left):
            doing = "constructor of the environment" if self.started else "start of the environment's process"
            self.kill()
            problem = f"the {doing} took longer than {limit.key}={limit.seconds:g}; the process was terminated"
            raise EnvError(problem, key=limit.key, value=limit.seconds)
        return self._read(repeats=False)

    def _read(self, *, repeats: bool = True) -> SlotReply | None:
        """Return the next reply.

        Return None if the reply only reports that the process started, that an environment was built or closed, or that
        it changed a global random generator.

        Args:
            repeats: Whether to send the last request again if ``close`` of an earlier environment ended the process.
        """
        reply = self._received()
        if reply is None:
            if repeats and self.closing and self.busy:
                self.ask_again()
                return None
            ended = EnvFailed(f"the process of the environment ended: {_described(self._collect())}", key=self.doing)
            return SlotReply(_LAST, self.doing, None, ended)
        return None if self._took(reply) else reply

    def _took(self, reply: SlotReply) -> bool:
        """Process an extra reply; return whether the reply is one."""
        if reply.phase == STARTED:
            self.started, self.since = True, perf_counter()
        elif reply.phase == MADE:
            env, self.facts = reply.value
            self._built.add(env)
            self.build_seconds, self.since = reply.seconds, perf_counter()
        elif reply.phase == SENSED:
            self._sensed(reply.value)
        elif reply.phase == CLOSED:
            self._closing, self.since = self._closing - 1, perf_counter()
        else:
            return False
        return True

    def _received(self) -> SlotReply | None:
        """Read a reply; None if the pipe is closed."""
        data = b""
        with contextlib.suppress(EOFError, OSError):
            if self.connection is not None:
                data = self.connection.recv_bytes()
        try:
            return cast("SlotReply", pickle.loads(data)) if data else None
        except Exception as error:
            problem = f"the result of {self.doing} cannot be read in the runner's process: {error}"
            return SlotReply(self._awaited or self._number, self.doing, None, EnvError(problem, key=self.doing))

    def _collect(self) -> int:
        """Kill the process if it still runs; return its exit status."""
        self.finish()
        self._built, self._closing, self.started = set(), 0, False
        if self._process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)  # Without this wait, a kill would hide the signal that ended the process.
        self._process.kill()
        code, self._process = self._process.wait(), None
        return code


def _described(code: int) -> str:
    if code >= 0:
        return f"it exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _look_at(env: Any) -> None:
    """Do nothing: the slot builds its environment before it calls this function."""


class _RemoteTraceback(Exception):
    """Traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def value_of(reply: SlotReply) -> Any:
    """Return the value of a reply, or raise its error."""
    if reply.error is None:
        return reply.value
    if reply.traceback:
        raise reply.error from _RemoteTraceback(reply.traceback)
    raise reply.error


@final
class SlotEnv:
    """Environment in a slot's process.

    The runner sends requests with :meth:`ask_reset` and :meth:`ask_step`. After the reply has come, ``reset`` or
    ``step`` returns the result.
    """

    def __init__(self, slot: SlotProcess, number: int) -> None:
        self._slot = slot
        self._number = number
        self.reply: SlotReply | None = None
        """Reply to the last request."""

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return self._slot.facts.get(name)
        raise AttributeError(name)

    def build(self, limit: CallLimit) -> None:
        """Build the environment and wait until it is ready.

        Raises:
            EnvError: The limit is over.
            BaseException: The constructor raised it.
        """
        self._slot.call(self._number, _look_at, limit)

    def ask_reset(self, lease: Lease) -> None:
        """Send the reset of an attempt. The process first builds the environment, if it is not built yet."""
        self._slot.ask(BEGIN, self._number, lease)

    def ask_step(self, action: Any) -> None:
        """Send an action for the next step."""
        self._slot.ask(STEP, self._number, action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Return the result of the reset, or raise its error."""
        return self._taken()

    def step(self, action: Any) -> Any:
        """Return the result of the step, or raise its error."""
        return self._taken()

    def render(self) -> Any:
        """Render a frame and return it."""
        return self.call(lambda env: env.render())

    def call(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with the environment in its process, and return the result."""
        return self._slot.call(self._number, function)

    def close(self) -> None:
        """Ask the process to close its environment; do not wait."""
        self._slot.close(self._number)

    def _taken(self) -> Any:
        assert self.reply is not None
        reply, self.reply = self.reply, None
        return value_of(reply)


BEGIN: Final = "begin"
"""Build an environment if necessary, and reset it."""
CALL: Final = "call"
"""Call a pickled function with an environment."""
CLOSE: Final = "close"
"""Close an environment."""
CLOSED: Final = "closed"
"""Phase of the reply after an environment was closed."""
MADE: Final = "made"
"""Phase of an extra reply. It reports that a new environment is ready, before the reply to the request itself."""
SENSED: Final = "sensed"
"""Phase of an extra reply, before the reply to a reset or step that changed a global random generator."""
STARTED: Final = "started"
"""Phase of the first message of a process: it has imported the modules of its environment."""
STEP: Final = "step"
_PHASES: Final = {BEGIN: "reset"}

_DEATH_SIGNAL: Final = 1
"""Linux: PR_SET_PDEATHSIG."""
_LOOK_S: Final = 0.5


class SlotReply(NamedTuple):
    """Answer to one request."""

    number: int
    phase: str
    """``started``, ``made``, ``construct``, ``reset``, ``step``, ``sensed``, ``call`` or ``closed``."""
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0
    """Duration of the request."""


class _Slot:
    """Environments of a slot, by number: the usual one and, while an episode needs a new environment, this new one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._envs: dict[int, Any] = {}
        self._sensor = GeneratorSensor.of_this_process(lambda change: self._reply(SlotReply(0, SENSED, change)))
        self._stepped = False
        """Whether an environment has made a step."""
        self._where = cloudpickle.loads(connection.recv_bytes())
        self._reply(SlotReply(0, STARTED))

    def answer(self, number: int, kind: str, env: int, *args: Any) -> None:
        """Execute a request and send the reply."""
        started, phase = perf_counter(), kind
        try:
            if kind == CLOSE:
                self.close(env)
                self._reply(SlotReply(number, CLOSED))
                return
            if kind != STEP and env not in self._envs:
                phase = "construct"
                self._envs[env] = construct_env(*self._where)
                made = env, _facts(self._envs[env])
                self._reply(SlotReply(number, MADE, made, seconds=perf_counter() - started))
            started, phase = perf_counter(), _PHASES.get(kind, kind)
            value = getattr(self, f"_{kind}")(self._envs[env], *args)
            self._reply(SlotReply(number, phase, value, seconds=perf_counter() - started))
        except survivable() as error:
            self._reply(SlotReply(number, phase, None, *_portable(error), perf_counter() - started))

    def close(self, env: int) -> None:
        """Close an environment if it exists; ignore an error of its ``close``."""
        if (gone := self._envs.pop(env, None)) is not None:
            try:
                gone.close()
            except survivable():
                pass

    def close_all(self) -> None:
        """Close all environments."""
        for env in list(self._envs):
            self.close(env)

    def _begin(self, env: Any, lease: Lease) -> Any:
        if self._stepped and self._sensor is not None and self._sensor.finished():
            self._sensor = None
        if (hook := episode_hook(env)) is not None:
            hook(lease.spec.position, lease.seed, lease.attempt)
        arguments = lease.spec.reset_arguments
        return env.reset(**arguments) if self._sensor is None else self._sensor.call("reset", env.reset, **arguments)

    def _step(self, env: Any, action: Any) -> Any:
        self._stepped = True
        return env.step(action) if self._sensor is None else self._sensor.call("step", env.step, action)

    @staticmethod
    def _call(env: Any, function: bytes) -> Any:
        return cloudpickle.loads(function)(env)

    def _reply(self, reply: SlotReply) -> None:
        """Send a reply; drop entries of ``info`` that cannot be pickled and unpickled."""
        try:
            data = fast_dumps(reply)
            if not _is_plain(_info_of(reply)):
                pickle.loads(data)
        except Exception as error:
            data = self._without_what_cannot_travel(reply, error)
        self._connection.send_bytes(data)

    def _without_what_cannot_travel(self, reply: SlotReply, error: Exception) -> bytes:
        if found := _info_of(reply):
            info = {key: value for key, value in found.items() if _travels(value)}
            with contextlib.suppress(Exception):
                return bytes(cloudpickle.dumps(reply._replace(value=(*reply.value[:-1], info))))
        problem = EnvError(
            f"the result of {reply.phase} cannot be sent to the runner's process: {error}", key=reply.phase
        )
        return bytes(cloudpickle.dumps(reply._replace(value=None, error=problem)))


def _info_of(reply: SlotReply) -> dict[Any, Any]:
    """Return the info in the result of ``reset`` or ``step``; empty for other replies."""
    value = reply.value
    return value[-1] if isinstance(value, tuple) and value and isinstance(value[-1], dict) else {}


def _is_plain(value: Any) -> bool:
    """Whether a value consists of types that can always be unpickled."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufcSU"
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, np.generic)


def fast_dumps(value: Any) -> bytes:
    """Pickle a value with pickle; if that raises, with cloudpickle, which takes several times as long."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value))


def _facts(env: Any) -> dict[str, Any]:
    """Return an environment's attributes (:data:`_FACTS`) and time limit, which the runner reads without a call."""
    facts = {name: attribute_of(env, name) for name in _FACTS} | {"time_limit": time_limit(env)}
    return {name: value for name, value in facts.items() if _travels(value)}


def _travels(value: Any) -> bool:
    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:
        return False
    return True


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return an error that can be raised in the runner's process, and its traceback as a string."""
    stacks = traceback_of(error)
    with contextlib.suppress(Exception):
        text = str(error)[:_SEARCHED]
        # Only this process knows the secrets in its variables.
        open_text = redact_text(text, len(text)) == printable(text)
        if open_text and type(pickle.loads(cloudpickle.dumps(error))) is type(error):
            return error, stacks
    return EnvFailed(summary_of(error)), stacks


def serve(connection: Connection) -> None:
    """Answer requests until the pipe is closed."""
    slot = _Slot(connection)
    try:
        while True:
            slot.answer(*pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        slot.close_all()


def _end_with(parent: int) -> None:
    """Exit when the runner's process exits, even while an environment is busy."""
    if sys.platform == "linux" and "main" in sys.argv[3:]:
        # The signal comes when the starting thread exits. Only the main thread lives as long as its process.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="rl_eval parent watch", daemon=True).start()


def main() -> None:
    """Answer requests of the runner that started this process. Arguments: file descriptor of the pipe, runner's pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner's process, which ends this one.
    expect_no_ctrl_c()
    _end_with(int(sys.argv[2]))
    connection = Connection(int(sys.argv[1]))
    # A process that the environment starts must not keep the pipe open: the runner waits until it is closed.
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(after_in_child=connection.close)
    serve(connection)

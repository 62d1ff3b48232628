"""Environment in a child process. The runner sends requests to the process, and reads replies as they arrive."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar, final

import cloudpickle
import gymnasium as gym

from rl_eval.errors import EnvError, EnvFailed, UsageError
from rl_eval.records.episode import EpisodeSpec, Lease
from rl_eval.runners.environment import wrapped
from rl_eval.runners.interpreter import Interpreter, Pipe
from rl_eval.runners.slot_worker import (
    BEGIN,
    BUILD,
    CALL,
    CLOSE,
    CLOSED,
    CONSTRUCT,
    FACTS,
    GET,
    MADE,
    RENDER,
    SENSED,
    STARTED,
    STEP,
    SlotReply,
)

_LAST: Final = -1
"""Number of the reply that reports the end of the process."""
_LAST_WORDS_S: Final = 0.2
Result = TypeVar("Result")


class CallLimit(NamedTuple):
    """Time limit of a call."""

    key: str
    seconds: float


@final
class SlotProcess:
    """Process of a slot, started at the first request and again after it died.

    Args:
        interpreter: Interpreter of the process.
        sensed: Takes the change of a global random generator by an environment, as a text.
    """

    def __init__(self, interpreter: Interpreter, sensed: Callable[[str], object]) -> None:
        self._interpreter, self._sensed = interpreter, sensed
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._awaited = 0
        """Number of the request that waits for its reply; 0 for none."""
        self._stash: deque[SlotReply] = deque()
        """Replies that came while :meth:`call` waited for the reply to its own request."""
        self.connection: Pipe | None = None
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
        """Attributes (:data:`FACTS`) of the environment that was built last."""
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

    def call(self, kind: str, env: int, *args: Any, limit: CallLimit | None = None) -> Any:
        """Send a request and return the value of its reply. Build the environment if necessary.

        Args:
            kind: ``build``, ``render``, ``get`` or ``call``.
            env: Number of the environment.
            *args: Arguments of the request.
            limit: Time limit; None to wait without one.

        Raises:
            EnvError: The process has ended, or the limit is over.
            BaseException: The environment or the function raised it.
        """
        self._start()
        number = self._send(kind, env, *args)
        end = perf_counter() + (limit.seconds if limit else 0.0)
        while (reply := self._next(end, limit)) is None or reply.number not in (number, _LAST):
            if reply is not None:
                self._stash.append(reply)
        if reply.number == _LAST and self.busy:
            self._stash.append(reply)
        return value_of(reply)

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
        self._process, self.connection = self._interpreter.start()

    def _send(self, kind: str, env: int, *args: Any) -> int:
        """Send a request; return its number."""
        self._number += 1
        data = self._interpreter.dumps((self._number, kind, env, *args))
        with contextlib.suppress(OSError):  # Reading detects that the process has ended.
            if self.connection is not None:
                self.connection.send_bytes(data)
        return self._number

    def _next(self, end: float, limit: CallLimit | None) -> SlotReply | None:
        """Read a reply, as :meth:`_read` does, before the end of a limit."""
        left = None if limit is None else max(0.0, end - perf_counter())
        if self.connection is not None and not self.connection.poll(left) and limit is not None:
            doing = "first construction or reset" if self.started else "start of the process"
            self.kill()
            limited = f"{limit.key}={limit.seconds:g}; the process was terminated"
            problem = f"the {doing} of the environment took longer than {limited}"
            raise EnvError(problem, key=limit.key, value=limit.seconds)
        return self._read(repeats=False)

    def _read(self, *, repeats: bool = True) -> SlotReply | None:
        """Return the next reply.

        Return None if the reply only reports that the process started, that an environment was built or closed, or that
        it changed a global random generator.

        Args:
            repeats: Whether to send the last request again if ``close`` of an earlier environment ended the process.
        """
        try:
            data = b"" if self.connection is None else self.connection.take()
            if data is None:
                return None
            return self._own(self._interpreter.loads(data)) if data else self._ended(repeats=repeats)
        except (EOFError, OSError):
            return self._ended(repeats=repeats)
        except UsageError as error:
            self._collect()
            return SlotReply(_LAST, CONSTRUCT, None, error)
        except Exception as error:
            return self._garbled(error)

    def _ended(self, *, repeats: bool) -> SlotReply | None:
        """Return the reply for the end of the process; None if another process repeats the last request."""
        if repeats and self.closing and self.busy:
            self.ask_again()
            return None
        ended = EnvFailed(f"the process of the environment ended: {_described(self._collect())}", key=self.doing)
        return SlotReply(_LAST, self.doing, None, ended)

    def _garbled(self, error: Exception) -> SlotReply:
        """Return the reply for bytes that cannot be read. End the process, since the next bytes have no meaning."""
        self._collect()
        problem = f"the result of {self.doing} cannot be read in the runner's process: {error}"
        return SlotReply(_LAST, self.doing, None, EnvError(problem, key=self.doing))

    def _own(self, reply: SlotReply) -> SlotReply | None:
        """Return a reply to a request; process an extra reply."""
        if reply.phase == SENSED:
            self._sensed(reply.value)
            return None
        if reply.phase == STARTED:
            self.started = True
        elif reply.phase == MADE:
            env, facts = reply.value
            self.facts = self._interpreter.checked(facts)
            self._built.add(env)
            self.build_seconds = reply.seconds
        elif reply.phase == CLOSED:
            self._closing -= 1
        elif reply.number in (self._awaited, self._number):
            return reply
        else:
            raise ValueError(f"it is the reply to request {reply.number}, not to {self._number}")
        self.since = perf_counter()
        return None

    def _collect(self) -> int:
        """Kill the process if it still runs; return its exit status."""
        self.finish()
        self._built, self._closing, self.started = set(), 0, False
        if self._process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)  # Without this wait, a kill would hide the signal that ended the process.
        self._interpreter.kill(self._process)
        code, self._process = self._process.wait(), None
        return code


def _described(code: int) -> str:
    if code >= 0:
        return f"it exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


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
        if name in FACTS:
            return self._slot.facts.get(name)
        raise AttributeError(name)

    def build(self, limit: CallLimit) -> None:
        """Build the environment and wait until it is ready.

        Raises:
            EnvError: The limit is over.
            BaseException: The constructor raised it.
        """
        self._slot.call(BUILD, self._number, limit=limit)

    def begin(self, spec: EpisodeSpec, limit: CallLimit) -> None:
        """Begin an episode, and wait for the first observation, which :meth:`reset` returns.

        Raises:
            EnvError: The limit is over.
            BaseException: The environment raised it.
        """
        arguments = spec.position, spec.seed, 1, spec.reset_arguments
        self.reply = SlotReply(0, BEGIN, self._slot.call(BEGIN, self._number, *arguments, limit=limit))

    def ask_reset(self, lease: Lease) -> None:
        """Send the reset of an attempt. The process first builds the environment, if it is not built yet."""
        spec = lease.spec
        self._slot.ask(BEGIN, self._number, spec.position, lease.seed, lease.attempt, spec.reset_arguments)

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
        return self._slot.call(RENDER, self._number)

    def get(self, name: str) -> Any:
        """Return an attribute of the environment, or of an environment that it wraps; None if there is none."""
        return self._slot.call(GET, self._number, name)

    def call(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with the environment in its process, and return the result."""
        return self._slot.call(CALL, self._number, cloudpickle.dumps(function))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ask the process to close its environment; do not wait."""
        self._slot.close(self._number)

    def wrapped(self, wrappers: Mapping[str, Any]) -> Any:
        """Return the environment with wrappers in this process, by key."""
        env: gym.Env[Any, Any] = _WrappedEnv(self)
        for key, wrapper in wrappers.items():
            env = wrapped(env, wrapper, key)
        return env

    def _taken(self) -> Any:
        assert self.reply is not None
        reply, self.reply = self.reply, None
        return value_of(reply)


class _WrappedEnv(gym.Env[Any, Any]):
    """Environment in a slot's process, as wrappers in the runner's process need it."""

    def __init__(self, slot_env: SlotEnv) -> None:
        self.slot_env = slot_env
        for name in FACTS:
            setattr(self, name, getattr(slot_env, name))
        self.reset, self.step = slot_env.reset, slot_env.step  # type: ignore[method-assign]
        self.close, self.render = slot_env.close, slot_env.render  # type: ignore[method-assign]


def slot_env_of(env: Any) -> SlotEnv:
    """Return the environment in a slot's process, without wrappers of this process."""
    return env if isinstance(env, SlotEnv) else env.unwrapped.slot_env

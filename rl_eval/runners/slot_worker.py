"""Process of one environment slot: answers requests of its runner over a pipe, in order, until the runner is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Final, NamedTuple

import cloudpickle

from rl_eval.errors import EnvError
from rl_eval.runners.environment import construct_env, time_limit

__all__ = ["BEGIN", "CALL", "CLOSE", "MADE", "STEP", "Reply", "fast_dumps", "main"]

BEGIN: Final = "begin"
"""Build an environment if need be, and reset it."""
CALL: Final = "call"
"""Call a pickled function with an environment."""
CLOSE: Final = "close"
"""Close an environment; there is no reply."""
MADE: Final = "made"
"""Phase of the reply that comes before that of a reset, if the environment is new."""
STEP: Final = "step"
_PHASES: Final = {BEGIN: "reset"}

_DEATH_SIGNAL: Final = 1
"""Linux: PR_SET_PDEATHSIG."""
_LOOK_S: Final = 0.5


class Reply(NamedTuple):
    """Answer to one request."""

    number: int
    phase: str
    """``made``, ``construct``, ``reset``, ``step`` or ``call``."""
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0
    """What it took."""


class _Slot:
    """Environments of a slot by number; there are two while one is set aside for an episode that needs a new one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._envs: dict[int, Any] = {}
        self._where = cloudpickle.loads(connection.recv_bytes())

    def answer(self, number: int, kind: str, env: int, *args: Any) -> None:
        """Do what is requested, and reply."""
        started, phase = perf_counter(), kind
        try:
            if kind == CLOSE:
                self.close(env)
                return
            if kind != STEP and env not in self._envs:
                phase = "construct"
                self._envs[env] = construct_env(*self._where)
                self._reply(Reply(number, MADE, _facts(self._envs[env]), seconds=perf_counter() - started))
            started, phase = perf_counter(), _PHASES.get(kind, kind)
            value = getattr(self, f"_{kind}")(self._envs[env], *args)
            self._reply(Reply(number, phase, value, seconds=perf_counter() - started))
        except BaseException as error:
            self._reply(Reply(number, phase, None, *_portable(error), perf_counter() - started))

    def close(self, env: int) -> None:
        """Close an environment, if it is there; no episode is to blame for a broken ``close``."""
        if (gone := self._envs.pop(env, None)) is not None:
            with contextlib.suppress(Exception):
                gone.close()

    def close_all(self) -> None:
        """Close all environments."""
        for env in list(self._envs):
            self.close(env)

    @staticmethod
    def _begin(env: Any, index: int, seed: int, attempt: int) -> Any:
        has = env.has_wrapper_attr("begin_episode") if hasattr(env, "has_wrapper_attr") else True
        get = getattr(env, "get_wrapper_attr", lambda name: getattr(env, name, None))
        if has and (hook := get("begin_episode")) is not None:
            hook(index, seed, attempt)
        return env.reset(seed=seed)

    @staticmethod
    def _step(env: Any, action: Any) -> Any:
        return env.step(action)

    @staticmethod
    def _call(env: Any, function: bytes) -> Any:
        return cloudpickle.loads(function)(env)

    def _reply(self, reply: Reply) -> None:
        """Send a reply; of an info that cannot be sent, what can be."""
        try:
            data = fast_dumps(reply)
        except Exception as error:
            data = self._without_what_cannot_travel(reply, error)
        self._connection.send_bytes(data)

    def _without_what_cannot_travel(self, reply: Reply, error: Exception) -> bytes:
        if isinstance(reply.value, tuple) and reply.value and isinstance(reply.value[-1], dict):
            info = {key: value for key, value in reply.value[-1].items() if _travels(value)}
            with contextlib.suppress(Exception):
                return bytes(cloudpickle.dumps(reply._replace(value=(*reply.value[:-1], info))))
        problem = EnvError(f"what {reply.phase} returned cannot be sent to the runner's process: {error}")
        return bytes(cloudpickle.dumps(reply._replace(value=None, error=problem)))


def fast_dumps(value: Any) -> bytes:
    """Pickle what is mostly plain: cloudpickle takes several times as long, and is for the rest."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value))


def _facts(env: Any) -> dict[str, Any]:
    """Return what a runner asks of an environment without calling it."""
    names = ("observation_space", "action_space", "render_mode", "metadata")
    facts = {name: getattr(env, name, None) for name in names} | {"time_limit": time_limit(env)}
    return {name: value for name, value in facts.items() if _travels(value)}


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return an error that can be raised in the runner's process, and its traceback as text."""
    text = traceback.format_exc()
    if isinstance(error, (Exception, SystemExit)):
        with contextlib.suppress(Exception):
            if type(pickle.loads(cloudpickle.dumps(error))) is type(error):
                return error, text
    return EnvError(f"{type(error).__name__}: {error}"), text


def serve(connection: Connection) -> None:
    """Answer requests until the pipe is closed."""
    slot = _Slot(connection)
    try:
        while True:
            slot.answer(*pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        slot.close_all()


def _end_with(parent: int) -> None:
    """End this process when the runner's ends, also while an environment is busy."""
    if sys.platform == "linux" and "main" in sys.argv[3:]:
        # The signal comes when the thread ends that started this process; only the main one lives as long as its own.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="rl_eval parent watch", daemon=True).start()


def main() -> None:
    """Answer requests of the runner that started this process: its arguments are the pipe and the runner's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner's process, which ends this one.
    _end_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))

"""Environments of a slot in a process of this interpreter, and the messages between it and the runner."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, final

import cloudpickle
import numpy as np
from typing_extensions import override

from rl_eval.errors import EnvError, EnvFailed, summary_of, traceback_of
from rl_eval.errors.printable import printable
from rl_eval.errors.redaction import redact_text
from rl_eval.records.generators import GeneratorSensor
from rl_eval.runners import foreign_worker
from rl_eval.runners.environment import attribute_of, construct_env, episode_hook, time_limit
from rl_eval.supervision.caller import end_fork, expect_no_ctrl_c

_SEARCHED: Final = 200_000
"""Number of characters of an error that are searched for secrets. It is more than any message shows."""
FACTS: Final = ("observation_space", "action_space", "render_mode", "metadata", "condition_keys", "time_limit")
"""Attributes of an environment that its runner reads without a call."""

BEGIN: Final = "begin"
"""Build an environment if necessary, and reset it."""
BUILD: Final = "build"
"""Build an environment if necessary."""
CALL: Final = "call"
"""Call a pickled function with an environment."""
CLOSE: Final = "close"
"""Close an environment."""
CLOSED: Final = "closed"
"""Phase of the reply after an environment was closed."""
CONSTRUCT: Final = "construct"
"""Phase of the reply if an environment could not be built."""
GET: Final = "get"
"""Return an attribute of an environment."""
MADE: Final = "made"
"""Phase of an extra reply. It reports that a new environment is ready, before the reply to the request itself."""
RENDER: Final = "render"
SENSED: Final = "sensed"
"""Phase of an extra reply, before the reply to a reset or step that changed a global random generator."""
STARTED: Final = "started"
"""Phase of the first message of a process: it has imported the modules of its environment."""
STEP: Final = "step"


class SlotReply(NamedTuple):
    """Answer to one request."""

    number: int
    phase: str
    """``started``, ``made``, ``construct``, ``reset``, ``step``, ``sensed``, ``closed``, or another request."""
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0
    """Duration of the request."""


@final
class _Slot(foreign_worker.Slot):
    """Environments of a slot in this interpreter.

    Args:
        connection: Pipe to the runner.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        super().__init__(cloudpickle.loads(connection.recv_bytes()), lambda reply: self._reply(SlotReply(*reply)))
        self._sensor = GeneratorSensor.of_this_process(lambda change: self._reply(SlotReply(0, SENSED, change)))
        self._stepped = False
        """Whether an environment has made a step."""
        self._reply(SlotReply(0, STARTED))

    @override
    def _constructed(self) -> tuple[Any, dict[str, Any]]:
        env = construct_env(*self._where)
        return env, _facts(env)

    @override
    def _explained(self, error: BaseException) -> tuple[BaseException, str]:
        return _portable(error)

    @override
    def _begin(self, env: Any, position: int, seed: int, attempt: int, arguments: dict[str, Any]) -> Any:
        if self._stepped and self._sensor is not None and self._sensor.finished():
            self._sensor = None
        if (hook := episode_hook(env)) is not None:
            hook(position, seed, attempt)
        return env.reset(**arguments) if self._sensor is None else self._sensor.call("reset", env.reset, **arguments)

    @override
    def _step(self, env: Any, action: Any) -> Any:
        self._stepped = True
        return env.step(action) if self._sensor is None else self._sensor.call("step", env.step, action)

    @override
    def _get(self, env: Any, name: str) -> Any:
        return attribute_of(env, name)

    def _call(self, env: Any, function: bytes) -> Any:
        return cloudpickle.loads(function)(env)

    def _reply(self, reply: SlotReply) -> None:
        """Send a reply; drop entries of ``info`` that cannot be pickled and unpickled."""
        end_fork()
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
    """Return the facts of an environment; its time limit is that of its wrappers."""
    facts = {name: attribute_of(env, name) for name in FACTS} | {"time_limit": time_limit(env)}
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


def main() -> None:
    """Answer requests of the runner that started this process. Arguments: file descriptor of the pipe, runner's pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner's process, which ends this one.
    expect_no_ctrl_c()
    foreign_worker.end_with(int(sys.argv[2]))
    connection = Connection(int(sys.argv[1]))
    # A process that the environment starts must not keep the pipe open: the runner waits until it is closed.
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(after_in_child=connection.close)
    serve(connection)

"""Interpreters of the processes of slots: how a process is started, and what travels between it and its runner.

A process of this interpreter gets pickles. A process of another one (``environment.python``) gets frames, in which
nothing is pickled; see :mod:`rl_eval.runners.foreign_worker`.
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, final

import cloudpickle
import gymnasium as gym

from rl_eval.adapters import learning_wrappers
from rl_eval.config.settings import EnvironmentSection, EvalSettings
from rl_eval.errors import ConfigError, EnvFailed
from rl_eval.errors.redaction import redact_text
from rl_eval.runners import foreign_worker
from rl_eval.runners.environment import GYMNASIUM_ID, refuse_unseeded
from rl_eval.runners.running_statistics import refuse_learning
from rl_eval.runners.slot_worker import CALL, SlotReply, fast_dumps
from rl_eval.supervision.process_environment import reproducible_environment

_OWN_WORKER: Final = "from rl_eval.runners.slot_worker import main; main()"
_MOST_BEFORE: Final = 2**16
"""Number of bytes that a command may print before the mark of the worker."""
_BUFFER: Final = 2**20
"""Number of bytes that a worker can send at once, if the system allows it."""
PYTHON: Final = "environment.python"
_working: Final[set[tuple[str, ...]]] = set()
"""Commands that have started a worker for this process."""


def interpreter_of(settings: EvalSettings, runner_index: int, lane_index: int) -> OwnInterpreter | OtherInterpreter:
    """Return the interpreter of a slot's process."""
    num_runners = settings.runners.num_runners
    if settings.environment.python is None:
        return OwnInterpreter(settings.environment, runner_index, lane_index, num_runners)
    context = {"runner_index": runner_index, "lane_index": lane_index, "num_runners": num_runners, "remote": True}
    return OtherInterpreter(settings.environment, context)


@functools.cache
def _other_worker() -> str:
    """Return the program of a worker in another interpreter.

    It has one line, since some programs that start others, such as ``conda run``, refuse arguments with line breaks.
    """
    source = base64.b64encode(zlib.compress(Path(foreign_worker.__file__).read_bytes())).decode()
    return f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode('{source}')),'rl_eval worker','exec'))"


def _inherited() -> list[str]:
    """Return the argument that tells a process that its parent thread lives as long as its parent."""
    return ["main"] if threading.current_thread() is threading.main_thread() else []


# ---------------------------------------------------------------------------------------------- this interpreter


@final
class OwnInterpreter:
    """This interpreter.

    Args:
        where: Arguments of :func:`rl_eval.runners.environment.construct_env` before ``remote``.
    """

    def __init__(self, *where: Any) -> None:
        self._payload = bytes(cloudpickle.dumps((*where, True)))

    def start(self) -> tuple[subprocess.Popen[bytes], _PicklePipe]:
        """Start a process, and send the description of its environment."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603  # This interpreter, our module.
                [sys.executable, "-c", _OWN_WORKER, str(theirs.fileno()), str(os.getpid()), *_inherited()],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        pipe = _PicklePipe(ours.detach())
        _send(pipe, self._payload)
        return process, pipe

    def dumps(self, request: tuple[Any, ...]) -> bytes:
        """Pickle a request."""
        return fast_dumps(request)

    def loads(self, data: bytes | memoryview) -> SlotReply:
        """Unpickle a reply."""
        reply: SlotReply = pickle.loads(data)
        return reply

    def checked(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes as they are: the process has checked its environment."""
        return facts

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process."""
        process.kill()


class _PicklePipe(Connection):
    def take(self) -> bytes:
        return self.recv_bytes()


def _send(pipe: _PicklePipe | FramePipe, data: bytes) -> None:
    with suppress(OSError):  # Reading detects that the process has ended.
        pipe.send_bytes(data)


# ---------------------------------------------------------------------------------------------- another interpreter


@final
class OtherInterpreter:
    """Interpreter of ``environment.python``.

    Args:
        section: Section of the environment.
        context: Fields of the environment's :class:`~rl_eval.EnvContext`.

    Raises:
        ConfigError: Arguments of the environment or of a wrapper cannot be sent.
    """

    def __init__(self, section: EnvironmentSection, context: Mapping[str, Any]) -> None:
        assert section.python is not None
        ours = [is_ours(one) for one in section.wrappers]
        if ours != sorted(ours):
            place = ours.index(True)
            problem = f"environment.wrappers[{place}] works in the runner, but later wrappers work in {PYTHON}"
            fix = "Put the wrappers of rl_eval last."
            raise ConfigError(problem, key="environment.wrappers", value=section.wrappers[place], fix=fix)
        self._command = [section.python] if isinstance(section.python, str) else list(section.python)
        self._env, self._path = section.env, foreign_worker.dumps(list(section.python_path))
        described = {
            "env": section.env,
            "env_kwargs": section.env_kwargs,
            "wrappers": [_named(one) for one in section.wrappers if not is_ours(one)],
            "context": dict(context),
            "module": str(section.env).rpartition(":")[0] or "gymnasium",
            "ids": GYMNASIUM_ID.pattern,
            "learning": learning_wrappers(),
        }
        _framed(section.env_kwargs, "environment.env_kwargs", key="environment.env_kwargs")
        self._payload = _framed(described, "environment.wrappers", key="environment.wrappers")

    def start(self) -> tuple[subprocess.Popen[bytes], FramePipe]:
        """Start a process, and send the description of its environment.

        Its input and its output are one end of a socket pair. It has a process group of its own, so that a command that
        starts the interpreter ends with it.

        Raises:
            ConfigError: The command cannot be started.
        """
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        mark = secrets.token_bytes(16)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603  # The command of the config.
                    [*self._command, "-c", _other_worker(), mark.hex(), *_inherited()],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env={**variables, "PYTHONHASHSEED": reproducible_environment()["PYTHONHASHSEED"]},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                problem = f"{PYTHON}: {self._command[0]!r} cannot be started: {error.strerror}"
                fix = "Name the Python of the simulator's environment, or write a command as a list: [conda, run, ...]."
                raise ConfigError(problem, key=PYTHON, value=self._command[0], fix=fix) from error
        pipe = FramePipe(ours, mark, "" if tuple(self._command) in _working else " ".join(self._command))
        _send(pipe, self._path)
        _send(pipe, self._payload)
        return process, pipe

    def dumps(self, request: tuple[Any, ...]) -> bytes:
        """Return the frame of a request.

        Raises:
            ConfigError: The request is a function, or contains something that cannot be sent.
        """
        command = " ".join(self._command)
        if request[1] == CALL:
            problem = "a function cannot be sent to an environment in another interpreter"
            fix = "Name an attribute of the environment instead, or return the value in the info."
            raise ConfigError(problem, key=PYTHON, value=command, fix=fix)
        return _framed(request, f"the arguments of {request[1]}", key=PYTHON, value=command)

    def loads(self, data: bytes | memoryview) -> SlotReply:
        """Return the reply of a frame.

        Raises:
            ValueError: The frame is not a reply.
        """
        number, phase, value, error, stacks, seconds = foreign_worker.loads(data)
        failed = None if error is None else EnvFailed(redact_text(str(error)))
        return SlotReply(int(number), str(phase), value, failed, redact_text(str(stacks)), float(seconds))

    def checked(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of a new environment, with its spaces.

        Raises:
            ConfigError: The environment cannot be evaluated.
        """
        what = f"environment.env {self._env!r}"
        if facts["provenance"]["seeded_by"] == "neither":
            refuse_unseeded(what, facts["name"])
        if facts["learning"] is not None:
            refuse_learning("environment.env", *facts["learning"])
        _working.add(tuple(self._command))
        spaces = {name: _space(facts[name], self._env) for name in ("observation_space", "action_space")}
        return facts | spaces

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and those that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def is_ours(wrapper: Any) -> bool:
    """Whether a wrapper is one of rl_eval, which is applied in the runner's process."""
    return str(_named(wrapper)["wrapper"]).startswith("rl_eval.")


def _named(wrapper: Any) -> Mapping[str, Any]:
    return wrapper if isinstance(wrapper, Mapping) else {"wrapper": wrapper}


def _framed(content: Any, what: str, **fields: Any) -> bytes:
    """Return the frame of some content.

    Args:
        content: The content.
        what: Its description, for the message.
        fields: Fields of the error.

    Raises:
        ConfigError: A part of the content cannot be sent.
    """
    try:
        return foreign_worker.dumps(content)
    except TypeError as error:
        problem = f"{what} cannot be sent to the interpreter of {PYTHON}: {error}"
        raise ConfigError(problem, fix="Use numbers, texts, lists, mappings and arrays.", **fields) from error


def _space(described: Any, env: Any) -> gym.Space[Any]:
    """Return a space from its description; see :func:`rl_eval.runners.foreign_worker.describe_space`."""
    kind, given = described
    if kind not in foreign_worker.SPACES:
        problem = f"environment.env {env!r}: its {given} is a {kind}, which cannot be sent from another interpreter"
        fix = f"Wrap the environment there, so that the space is one of {', '.join(foreign_worker.SPACES)}."
        raise ConfigError(problem, key="environment.env", value=kind, fix=fix)
    if kind == "Dict":
        given = {"spaces": {key: _space(one, env) for key, one in given.items()}}
    if kind == "Tuple":
        given = {"spaces": [_space(one, env) for one in given]}
    space: gym.Space[Any] = getattr(gym.spaces, kind)(**given)
    return space


@final
class FramePipe:
    """Pipe of frames. It reads only what is there, so a process that sends half a frame stops nobody.

    Args:
        ours: This end of the pair.
        mark: Bytes that precede the first frame. What comes before them is printed to the standard error stream.
        command: Command of the process, for the error if it does not start the worker; empty if it has started one.
    """

    def __init__(self, ours: socket.socket, mark: bytes, command: str) -> None:
        self._socket, self._mark, self._before, self._command = ours, mark, 0, command
        self._buffer = bytearray(2**16)
        self._begin(foreign_worker.LENGTH.size, is_length=True)

    def _begin(self, size: int, *, is_length: bool) -> None:
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        self._part, self._count, self._is_length = memoryview(self._buffer)[:size], 0, is_length

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether something can be read within a time, in seconds; None waits without a limit."""
        return bool(wait([self._socket], timeout))

    def take(self) -> memoryview | None:
        """Return the next frame, until the next call; None if only a part of it has come.

        Raises:
            ConfigError: The command does not start the worker.
            EOFError: The process has closed the pipe.
            ValueError: The bytes are not a frame.
        """
        try:
            while self._mark:
                self._find_mark()
            while True:
                while rest := len(self._part) - self._count:
                    count = self._socket.recv_into(self._part[self._count :], rest, socket.MSG_DONTWAIT)
                    if not count:
                        raise EOFError
                    self._count += count
                data = self._part
                if not self._is_length:
                    self._begin(foreign_worker.LENGTH.size, is_length=True)
                    return data
                self._begin(_size(data), is_length=False)
        except BlockingIOError:
            return None

    def _find_mark(self) -> None:
        """Read up to the end of the mark, or all bytes that cannot be a part of it."""
        seen = b""
        with suppress(ConnectionResetError):  # The process ended without reading a frame.
            seen = self._socket.recv(_MOST_BEFORE, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        kept = next((n for n in range(len(self._mark) - 1, 0, -1) if seen.endswith(self._mark[:n])), 0)
        ended = not seen or (len(seen) == kept and self._has_ended())
        if ended or self._before > _MOST_BEFORE:
            if not self._command:  # It worked before, so this is a fault of the machine.
                raise EOFError
            problem = f"{PYTHON}: {self._command!r} ended or printed too much, and did not start the worker of rl_eval"
            fix = "Name a Python of version 3.6 or newer, or a command that ends with one and passes its arguments on."
            raise ConfigError(problem, key=PYTHON, value=self._command, fix=fix)
        found = seen.find(self._mark)
        before = seen[: found if found >= 0 else len(seen) - kept]
        self._before += len(before)
        self._socket.recv(len(before) + (len(self._mark) if found >= 0 else 0))
        sys.stderr.write(redact_text(before.decode(errors="replace")))
        if found >= 0:
            self._mark = b""
        elif kept:
            raise BlockingIOError

    def _has_ended(self) -> bool:
        """Whether no process has the other end of the pipe."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def send_bytes(self, data: bytes) -> None:
        """Send a frame."""
        self._socket.sendall(foreign_worker.LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the pipe."""
        self._socket.close()


Pipe = _PicklePipe | FramePipe
"""Runner's end of the pipe to a process."""
Interpreter = OwnInterpreter | OtherInterpreter
"""Interpreter of a slot's process."""


def _size(data: memoryview) -> int:
    (size,) = foreign_worker.LENGTH.unpack(data)
    if not 0 < size <= foreign_worker.MOST_BYTES:
        raise ValueError(f"it announced a frame of {size} bytes; a frame has at most {foreign_worker.MOST_BYTES}")
    return int(size)

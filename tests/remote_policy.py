"""A policy that asks a server in another process, and the process."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import PolicyUnavailable
from rl_eval.protocols import EnvContext

_SCRIPT = Path(__file__).with_name("policy_server.py")


class Server:
    """Process of a server, which can be killed and started again on the same port.

    Args:
        gain: Number that makes the policy: another gain is another policy.
    """

    def __init__(self, gain: float = 1.0) -> None:
        self.port = 0
        self.start(gain)

    def start(self, gain: float = 1.0) -> None:
        """Start the process, and wait until its port is open."""
        command = [sys.executable, str(_SCRIPT), str(self.port), str(gain)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Remote:
    """Policy for CartPole that asks a server for each row, and connects again if the connection is lost.

    Args:
        port: Port of the server.
        patience_s: Seconds for which it tries to connect.
    """

    def __init__(self, port: int, patience_s: float = 0.0) -> None:
        self._port, self._patience_s = port, patience_s
        self._socket: socket.socket | None = None

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[npt.NDArray[np.int64], None]:
        actions = np.zeros(len(observations), np.int64)
        for row in np.flatnonzero(live):
            actions[row] = self._answer(*observations[row, 2:]) > 0
        return actions, None

    def _answer(self, angle: float, speed: float) -> float:
        ends = time.monotonic() + self._patience_s
        while True:
            try:
                connection = self._socket = self._socket or self._connect()
                connection.sendall(struct.pack("dd", angle, speed))
                if answer := connection.recv(8):
                    return float(struct.unpack("d", answer)[0])
                raise ConnectionResetError
            except OSError as error:
                self._close()
                if time.monotonic() >= ends:
                    raise PolicyUnavailable(f"127.0.0.1:{self._port} does not answer", key="port") from error
                time.sleep(0.02)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    __del__ = _close


class Reporting(Remote):
    """The same policy, which reports its connections."""

    connections = 0

    def _connect(self) -> socket.socket:
        connection = super()._connect()
        self.connections += 1
        return connection


class Kills(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that kills a process in the third step of an episode, once."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=60))
        self._pid, self._struck = context["pid"], context["struck"]
        self._index, self._steps = -1, 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if (self._index, self._steps) == (self._struck, 3):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return super().step(action)

"""Process of ``rl-eval serve``, policies for it, and a client of the tests' own."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval.integrations.openpi.connection import Connection, LostError
from rl_eval.integrations.openpi.greeting import EXTENSION
from rl_eval.integrations.openpi.wire import pack, unpack
from rl_eval.protocols import EnvContext

HORIZON = 4


class Recurrent:
    """Recurrent policy for Pendulum, which samples; it fails on an observation whose last number is 7."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.random = delay_s, np.random.default_rng()

    def initial_state(self, batch_size: int) -> Any:
        return np.zeros((batch_size, 4), np.float32)

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        time.sleep(self.delay_s * self.random.random())
        if (observations[live, -1] == 7).any():
            raise ValueError("seven")
        weights = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        rows = np.array([np.tanh(seen @ weights + kept) for seen, kept in zip(observations, state, strict=True)])
        drawn = np.zeros((len(observations), 1)) if noise is None else noise.normal(1)
        return (2 * np.tanh(rows[:, :1].astype(np.float64) + 0.3 * drawn)).astype(np.float32), rows


class Flat:
    """Policy for Pendulum without memory. Each pass takes some seconds; a random delay is added to it."""

    def __init__(self, pass_s: float = 0.0, delay_s: float = 0.0, horizon: int = 0, gain: float = 3.0) -> None:
        self.pass_s, self.delay_s, self.horizon, self.gain = pass_s, delay_s, horizon, gain
        self.random = np.random.default_rng()

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        time.sleep(self.pass_s + self.delay_s * self.random.random())
        drawn = np.zeros((len(observations), 1)) if noise is None else noise.normal(1)
        rows = np.array([self.gain * np.tanh(seen[:1] + 0.5 * seen[-1:]) for seen in observations]) + 0.2 * drawn
        if self.horizon:
            return (rows[:, None] * np.linspace(1, 0.2, self.horizon)[:, None]).astype(np.float32), None
        return rows.astype(np.float32), None


class Served:
    """Process of ``rl-eval serve`` for Pendulum, which can be killed and started again on the same port.

    Args:
        policy: Name of a function of this module.
        options: More options of the command.
        token: Token in the environment of the command; empty for none.
    """

    def __init__(self, policy: str, *options: str, token: str = "") -> None:
        self.options = (f"{__name__}:{policy}", "--env", "Pendulum-v1", "--json", *options)
        self.token, self.port = token, 0
        self.ends = False
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rl_eval", "serve", *self.options, "--port", str(self.port)]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENPI_API_KEY": self.token}
        where = [] if self.token else ["--host", "127.0.0.1"]
        self.process = subprocess.Popen([*command, *where], stdout=subprocess.PIPE, env=given, text=True)
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, f"the server ended: {text}"
            text += line
        self.announced = json.loads(text)
        self.port = int(self.announced["address"].rpartition(":")[2])

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.ends = True
        self.process.send_signal(number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def start_again(self) -> threading.Thread:
        """Start the process again when it has been killed, in a thread."""

        def wait() -> None:
            if self.process.wait() == -signal.SIGKILL and not self.ends:
                assert self.process.stdout is not None
                self.process.stdout.close()
                self.start()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


CLIENTS: list[Client] = []
"""All clients; the fixtures of tests close them."""


class Client:
    """Client that numbers its episodes."""

    def __init__(self, port: int, token: str = "") -> None:
        headers = {"Authorization": f"Api-Key {token}"} if token else {}
        self.link = Connection(f"127.0.0.1:{port}", headers, 30.0, 30.0)
        self.greeting = self.link.metadata
        CLIENTS.append(self)

    def receive(self) -> Any:
        while not self.link.messages:
            assert select.select([self.link], [], [], 60)[0]
            try:
                self.link.read()
            except LostError:  # The last message may come with the end of the connection.
                if not self.link.messages:
                    raise
        return self.link.messages.popleft()

    def close(self) -> None:
        self.link.close()

    def reset(self) -> None:
        """Lose the connection, as if this process had died."""
        lost = socket.socket(fileno=os.dup(self.link.fileno()))
        lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.link.close()
        lost.close()

    def send(self, observation: Any, episode: int, step: int = 0, seed: int = 0, begin: bool | None = None) -> None:
        named = {"id": episode, "seed": seed, "step": step, "begin": step == 0 if begin is None else begin}
        self.link.send(pack({"observation": observation, EXTENSION: named}))

    def answer(self) -> tuple[int, Any]:
        """Return the episode of the next answer, and its action, or its error as a dict."""
        found = unpack(self.receive())
        named = found[EXTENSION]
        return named["id"], found.get("actions", named)

    def ask(self, observation: Any, episode: int, step: int = 0, **more: Any) -> Any:
        self.send(observation, episode, step, **more)
        found, action = self.answer()
        assert found == episode
        return action

    def end(self, episode: int) -> None:
        self.link.send(pack({EXTENSION: {"id": episode, "end": True}}))


class Struck(gym.Wrapper[Any, Any, Any, Any]):
    """Pendulum that kills a process in the third step of an episode."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(gym.make("Pendulum-v1", max_episode_steps=25))
        self._pid, self._struck = context.get("pid"), context.get("struck")
        self._index = self._steps = 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._pid and (self._index, self._steps) == (self._struck, 3):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return super().step(action)


def recurrent(delay_s: float = 0.0) -> Recurrent:
    return Recurrent(delay_s)


def flat(delay_s: float = 0.0) -> Flat:
    return Flat(delay_s=delay_s)


def opposite() -> Flat:
    return Flat(gain=-3.0)


def chunks() -> Flat:
    return Flat(horizon=HORIZON)

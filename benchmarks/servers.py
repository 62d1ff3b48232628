"""A policy on a server and many simulators: rows per second, as a share of what the server and the simulators can do.

The server computes a block of up to 16 rows in 20 ms, and waits for a full block for at most 10 ms. A simulator takes
5 ms for a step. With chunks, each answer comes 60 ms after its request, for any number of requests, and simulators of
20 ms ask 3 steps before they need a chunk. (A server that computes one chunk after the other would delay requests of 8
simulators by up to 8 x 60 ms, for any client.) All times are multiplied, because other programs of the machine disturb
short times.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np
import ray
from gymnasium import spaces

from benchmarks.runner import Row
from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.policies.inference import pass_times
from rl_eval.protocols import Answer

__all__ = ["measure"]

_BLOCK: Final = 16
_BLOCK_S: Final = 0.020
_STEP_S: Final = 0.005
_REAL: Final = np.float32(7.0)
"""Last number of each real observation. The generated observations of a probe take no time."""
_KEY: Final = b"benchmark"
_WEIGHTS: Final = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Arm(gym.Env[Any, Any]):
    """Simulator that sleeps in each step; episodes of 10 to 20 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(10, 21))
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        self.left -= 1
        return self._seen(), float(action.sum()), self.left == 0, False, {}

    def _seen(self) -> Any:
        return np.append(self.np_random.normal(size=7), _REAL).astype(np.float32)


def _actions(rows: Any) -> Any:
    return np.stack([np.tanh(row @ _WEIGHTS) for row in rows])


class _Server:
    """Server of one policy: a thread per connection, and one for the blocks.

    Args:
        block_s: Time of a block.
        wait_s: Longest wait for a full block; None if rows do not queue: each has its answer after the time of a block.
    """

    def __init__(self, block_s: float, wait_s: float | None) -> None:
        self._block_s, self._wait_s = block_s, wait_s
        self._queue: list[tuple[Connection, int, int, Any]] = []
        self._came: list[float] = []
        """Times at which the rows of the queue came."""
        self._ready = threading.Condition()
        self.log: list[tuple[float, int]] = []

    def read(self, connection: Connection) -> None:
        try:
            while True:
                number, rows = connection.recv()
                if number < 0:
                    connection.send(self.log)
                    continue
                with self._ready:
                    self._queue += [(connection, number, place, row) for place, row in enumerate(rows)]
                    self._came += [time.monotonic()] * len(rows)
                    self._ready.notify()
        except (EOFError, OSError):
            return

    def work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue)
                if self._wait_s is None:
                    rows, began = 1, self._came[0]
                else:
                    self._ready.wait_for(lambda: len(self._queue) >= _BLOCK, self._wait_s)
                    rows, began = _BLOCK, time.monotonic()
                block, self._queue, self._came = self._queue[:rows], self._queue[rows:], self._came[rows:]
            real = sum(row[-1] == _REAL for *_, row in block)
            time.sleep(max(0.0, began + self._block_s - time.monotonic()) if real else 0)
            self.log.append((time.monotonic(), int(real)))
            answers: dict[int, Any] = {}
            for (connection, number, place, _), action in zip(block, _actions([one[3] for one in block]), strict=True):
                answers.setdefault(id(connection), (connection, []))[1].append((number, place, action))
            for connection, given in answers.values():
                with suppress(OSError):  # The client has gone.
                    connection.send(given)


def _serve(pipe: Any, block_s: float, wait_s: float | None) -> None:
    server, listener = _Server(block_s, wait_s), Listener(("127.0.0.1", 0), backlog=64, authkey=_KEY)
    threading.Thread(target=server.work, daemon=True).start()
    pipe.send(listener.address)
    while True:
        threading.Thread(target=server.read, args=[listener.accept()], daemon=True).start()


class Waits:
    """Client that sends all rows and waits, as a policy did before answers could come later."""

    def __init__(self, address: tuple[str, int], horizon: int = 0) -> None:
        self._address, self._horizon = address, horizon
        self._connection: Any = None
        self._number = 0
        self._kept: list[Answer] = []

    @property
    def connection(self) -> Any:
        self._connection = self._connection or Client(self._address, authkey=_KEY)
        return self._connection

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        actions = self._chunk(np.zeros((len(observations), 4), np.float32))
        rows = np.flatnonzero(live)
        left, number = len(rows), self._send(observations[rows])
        while left:
            for answer in self._read():
                if answer.request == number:
                    actions[rows[answer.rows]] = answer.actions
                    left -= len(answer.rows)
                else:
                    self._kept.append(answer)
        return actions, None

    def _send(self, rows: Any) -> int:
        self._number += 1
        self.connection.send((self._number, rows))
        return self._number

    def _read(self) -> list[Answer]:
        return [Answer(number, self._chunk(action[None]), rows=[row]) for number, row, action in self.connection.recv()]

    def _chunk(self, actions: Any) -> Any:
        return np.repeat(actions[:, None], self._horizon, 1) if self._horizon else actions


class Overlaps(Waits):
    """Client whose answers come later."""

    def send(self, observations: Any, state: Any, noise: Any) -> int:
        return self._send(observations)

    def received(self) -> list[Answer]:
        while self.connection.poll():
            self._kept += self._read()
        kept, self._kept = self._kept, []
        return kept

    def fileno(self) -> int:
        return int(self.connection.fileno())


_CLIENTS: Final = {Waits: "waits for each answer", Overlaps: "answers come later"}


class Slow:
    """Policy in the process: the time of a block for each 16 live rows."""

    log: ClassVar[list[tuple[float, int]]] = []
    """Time and number of rows of each pass; of the class, because an evaluation copies its policy."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self.log.clear()

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        real = int((live & (observations[:, -1] == _REAL)).sum())
        for _ in range(-(-real // _BLOCK)):
            time.sleep(self._block_s)
        self.log.append((time.monotonic(), real))
        return _actions(observations), None


@contextmanager
def _server(block_s: float, wait_s: float | None) -> Iterator[tuple[str, int]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=[theirs, block_s, wait_s], daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _log_of(address: tuple[str, int]) -> list[tuple[float, int]]:
    with Client(address, authkey=_KEY) as connection:
        connection.send((-1, ()))
        return list(connection.recv())


def _steady(log: list[tuple[float, int]]) -> float:
    """Return the rows per second between three and seven tenths of the rows, while every slot has an episode."""
    log = [entry for entry in log if entry[1]]
    total = np.cumsum([rows for _, rows in log])
    begin, end = np.searchsorted(total, (total[-1] * 0.3, total[-1] * 0.7))
    return float((total[end] - total[begin]) / (log[end][0] - log[begin][0]))


def _bare(address: tuple[str, int], clients: int, seconds: float) -> None:
    """Ask for one row at a time, from many connections."""
    row, stop = np.full((1, 8), _REAL), time.monotonic() + seconds

    def ask() -> None:
        with Client(address, authkey=_KEY) as connection:
            while time.monotonic() < stop:
                connection.send((1, row))
                connection.recv()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _config(runner: str, runners: int, slots: int, step_s: float, episodes: int) -> EvalConfig:
    made = (
        EvalConfig()
        .environment(Arm, env_kwargs={"step_s": step_s})
        .evaluation(num_episodes=episodes, determinism_check=0)
    )
    return made.runners(runner=runner, num_runners=runners, num_envs_per_runner=slots, num_cpus_per_runner=0.25)


def measure(slower: float, episodes: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure each layout with a client that waits, and with one whose answers come later.

    Args:
        slower: Factor for all times.
        episodes: Number of episodes of each evaluation.
        progress: Takes a line about each measurement.
    """
    block_s, step_s = slower * _BLOCK_S, slower * _STEP_S
    rows: list[Row] = []

    def add(label: str, limit: float, rate: float, result: EvalResult) -> None:
        rows.append(
            {
                "label": label,
                "status": "ok",
                "rows_per_second": rate,
                "limit": limit,
                "share": rate / limit,
                "fingerprint": result.fingerprint,
            }
        )
        progress(f"{label}: {rate:.0f} of {limit:.0f} rows/s ({rate / limit:.0%}), {result.fingerprint}")

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for runner in ("subprocess", "vector"):
        for client, how in _CLIENTS.items():
            with _server(block_s, block_s / 2) as address:
                _bare(address, 32, 20 * block_s)
                bare = _steady(_log_of(address))
            with _server(block_s, block_s / 2) as address:
                result = evaluate(_config(runner, 4, 8, step_s, episodes), client(address))
                rate = _steady(_log_of(address))
            simulators = 4 * (8 if runner == "subprocess" else 1) / step_s
            add(f"{runner}, 4 x 8, {how}", min(bare, simulators), rate, result)
    ray.shutdown()
    usual = pass_times.SLOW_S
    for label, slow_s in (("acts at once", float("inf")), ("waits for full blocks", usual)):
        pass_times.SLOW_S = slow_s
        policy = Slow(block_s)
        result = evaluate(_config("subprocess", 0, 32, step_s, episodes), policy)
        add(f"subprocess, 0 x 32, policy in the process, {label}", _BLOCK / block_s, _steady(policy.log), result)
    return rows + _chunks(slower, max(1, episodes // 24), progress)


def _chunks(slower: float, episodes: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure how long simulators of 20 ms wait for answers of 60 ms, with chunks of 6 actions and a delay of 3."""
    rows = []
    for client, slots in ((Waits, 1), (Overlaps, 1), (Overlaps, 8)):
        with _server(slower * 0.060, None) as address:
            made = _config("subprocess", 0, slots, slower * 0.020, slots * episodes)
            result = evaluate(made.policy(chunk={"execute": 6, "delay": 3}), client(address, horizon=9))
        first = slower * 0.060 * len(result.episodes)
        waited = result.timing.inference_seconds
        share = max(0.0, waited - first) / (result.timing.step_seconds + waited)
        label = f"subprocess, 0 x {slots}, chunks with a delay, {_CLIENTS[client]}"
        rows.append({"label": label, "status": "ok", "waiting": share, "fingerprint": result.fingerprint})
        progress(f"{label}: slots wait for {share:.1%} of their time, first chunks aside; {result.fingerprint}")
    return rows


if __name__ == "__main__":
    import sys

    measure(float(sys.argv[1]), int(sys.argv[2]), lambda line: print(line, flush=True))

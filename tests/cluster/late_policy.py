"""Policy whose answers come late and in any order, as those of a server."""

from __future__ import annotations

import math
import os
import random
import threading
from typing import Any

import numpy as np

from rl_eval.protocols import Answer

WEIGHTS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Now:
    """Recurrent policy that samples, row by row."""

    def initial_state(self, batch_size: int) -> Any:
        return np.zeros((batch_size, 4), np.float32)

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        drawn = np.zeros((len(observations), 1)) if noise is None else noise.normal(1)
        rows = [np.tanh(seen @ WEIGHTS + kept) for seen, kept in zip(observations, state, strict=True)]
        actions = [
            [2 * math.tanh(float(row[0]) + 0.3 * draw)] for row, (draw,) in zip(rows, drawn.tolist(), strict=True)
        ]
        return np.array(actions, np.float32), np.array(rows, np.float32)


class Chunked(Now):
    """The same policy; it returns a chunk of 8 actions per row."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        actions, rows = super().act(observations, state, live, noise)
        return actions[:, None] * np.linspace(1, 0.3, 8, dtype=np.float32)[None, :, None], rows


class Late(Now):
    """The same policy; each answer waits up to some milliseconds."""

    def __init__(self, most_s: float = 0.003) -> None:
        self._most_s, self._random = most_s, random.Random(0)
        self._requests, self._answers, self._lock = 0, list[Answer](), threading.Lock()
        self._readable, self._written = os.pipe()
        self.ended_states: list[Any] = []

    def send(self, observations: Any, state: Any, noise: Any) -> int:
        self._requests += 1
        answer = Answer(self._requests, *self.act(observations, state, None, noise))
        threading.Timer(self._random.random() * self._most_s, self._arrive, [answer]).start()
        return self._requests

    def _arrive(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            os.write(self._written, b".")

    def received(self) -> list[Answer]:
        with self._lock:
            answers, self._answers = self._answers, []
            if answers:
                os.read(self._readable, len(answers))
        self._random.shuffle(answers)
        return answers

    def fileno(self) -> int:
        return self._readable

    def ended(self, state: Any) -> None:
        self.ended_states.append(state)


class LateChunked(Late, Chunked):
    """The policy with chunks; each answer waits up to some milliseconds."""


def late() -> Late:
    return Late()


def now() -> Now:
    return Now()


def late_chunks() -> LateChunked:
    return LateChunked()


def now_chunks() -> Chunked:
    return Chunked()

"""A backend without runners, for tests of the pool, the control loop and the evaluation above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Run, RunnerRequest
from rl_eval.errors import RunnerLost


class FakeBackend:
    """Writes down what it is asked to do; the test plays the runners, and puts their answers into ``ready``."""

    busy = True
    payload: object = None

    def __init__(self) -> None:
        self.spawned: list[tuple[int, int]] = []
        self.calls: list[tuple[int, Any, int]] = []
        """Those of runners that were not killed."""
        self.killed: list[int] = []
        self.terminated: list[tuple[int, RunnerLost]] = []
        self.ready: list[Reply] = []
        self.room: int | None = None

    def spawn(self, runner: int, index: int, weights: object) -> None:
        self.spawned.append((runner, index))

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        self.calls.append((runner, request, tag))

    def publish(self, weights: Any) -> tuple[Any, Any]:
        return weights, weights

    def wait(self, timeout_s: float) -> list[Reply]:
        ready, self.ready = self.ready, []
        return ready

    def kill(self, runner: int) -> None:
        self.killed.append(runner)
        self.calls = [call for call in self.calls if call[0] != runner]

    def terminate(self, runner: int, why: RunnerLost) -> None:
        self.terminated.append((runner, why))
        self.ready.append(Reply(Call(runner, Run(), 0), error=why, lost=True))

    def starting(self, runners: Sequence[int]) -> str:
        return f"starting {len(runners)}"

    def shortage(self) -> str:
        return "each runner asks for 7 CPU; the cluster has 2 CPU in all and 1 CPU free"

    def capacity(self) -> int | None:
        if self.room == 0:
            raise ConnectionError
        return self.room

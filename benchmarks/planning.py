"""What it costs to decide which episode runs where: plan, seeds and schedule, with a thousand simulated runners."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.runner import Row
from rl_eval.records.episode import EpisodeTable, Outcome
from rl_eval.scheduling.events import Decision, Grant, Reclaim, RunnerJoined, RunnerReported
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule

__all__ = ["measure"]

_RUNNERS: Final = 1000
_LANES: Final = 64


class _Fleet:
    """Simulated runners that finish their leases in order, so many per report."""

    def __init__(self, schedule: Schedule, per_report: int, record: Callable[[list[int]], None]) -> None:
        self._schedule = schedule
        self._per_report = per_report
        self._record = record
        self._held: list[list[int]] = [[] for _ in range(_RUNNERS)]
        self._reclaims: list[Reclaim] = []

    def run(self) -> None:
        """Join, and report in turn until every episode is done."""
        for runner in range(_RUNNERS):
            self._obey(self._schedule.handle(RunnerJoined(runner, _LANES)))
        while not self._schedule.complete:
            for runner, held in enumerate(self._held):
                if held:
                    finished = held[: self._per_report]
                    del held[: self._per_report]
                    self._record(finished)
                    self._obey(self._schedule.handle(RunnerReported(runner, finished)))
            while self._reclaims:
                self._answer(self._reclaims.pop())

    def _obey(self, decision: Decision) -> None:
        for command in decision.commands:
            if isinstance(command, Grant):
                self._held[command.runner] += [lease.index for lease in command.leases]
            elif isinstance(command, Reclaim):
                self._reclaims.append(command)

    def _answer(self, reclaim: Reclaim) -> None:
        held = self._held[reclaim.runner]
        started, queued = held[:_LANES], set(held[_LANES:])
        returned = [index for index in reclaim.indices if index in queued]
        self._held[reclaim.runner] = started + [index for index in held[_LANES:] if index not in returned]
        self._obey(self._schedule.handle(RunnerReported(reclaim.runner, (), (), returned, started)))


def measure(num_episodes: int, turns: int, progress: Callable[[str], None]) -> list[Row]:
    """Time one million episodes in CPU seconds, reported one by one and in batches; weigh a fifth as many."""
    rows = []
    for per_report in (1, 10):
        progress(f"{num_episodes} episodes, {per_report} per report")
        micros = [_micros_per_episode(num_episodes, per_report) for _ in range(turns)]
        rows.append(_row(f"{num_episodes:,} episodes, {_RUNNERS} runners, {per_report} per report", micros, None))
    fewer = num_episodes // 5
    progress(f"memory of {fewer} episodes")
    rows.append(_row(f"{fewer:,} finished episodes: plan, schedule and records", (), _bytes_per_episode(fewer)))
    return rows


def _micros_per_episode(num_episodes: int, per_report: int) -> float:
    started = time.process_time()
    plan = EpisodePlan(num_episodes, 0)
    _Fleet(Schedule(plan, _RUNNERS), per_report, lambda _: None).run()
    return (time.process_time() - started) / num_episodes * 1e6


def _bytes_per_episode(num_episodes: int) -> float:
    tracemalloc.start()
    plan = EpisodePlan(num_episodes, 0)
    table = EpisodeTable(num_episodes)
    schedule = Schedule(plan, _RUNNERS)

    def record(finished: list[int]) -> None:
        rows = np.zeros(len(finished), table.rows.dtype)
        rows["index"], rows["outcome"] = finished, Outcome.COMPLETED
        table.fill(rows)

    pool = _Fleet(schedule, 10, record)
    pool.run()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.filled.all()
    return held / num_episodes


def _row(label: str, micros: Sequence[float], size: float | None) -> Row:
    return {
        "label": label,
        "status": "ok",
        "micros_per_episode": statistics.median(micros) if micros else None,
        "bytes_per_episode": size,
        "turns": [{"micros_per_episode": one} for one in micros],
    }

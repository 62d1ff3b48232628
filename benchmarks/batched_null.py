"""Cost of the batched runner itself: a simulator and a policy that compute nothing, for several numbers of slots."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import gymnasium as gym
import numpy as np
from typing_extensions import override

from benchmarks.runner import Row
from rl_eval import EvalConfig
from rl_eval.records.episode import EpisodeSpec, Lease
from rl_eval.runners.batched.runner import BatchedEvalRunner
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep

__all__ = ["measure"]

_SLOTS: Final = (64, 1024, 16_384)
_LIMITS: Final = {"micros_per_step": None, "micros_with_starts": 200}
"""Steps of an episode in each measurement; None if no episode ends in it."""
_SLICE_S: Final = 0.1


class Null(BatchSimulator):
    """Returns the same arrays from every step."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._observations, never = np.zeros((num_envs, 4), np.float32), np.zeros(num_envs, bool)
        self._step = BatchStep(self._observations, np.ones(num_envs), never, never)

    @override
    def restart(self, slots: Any, specs: Sequence[EpisodeSpec]) -> Any:
        return self._observations[slots]

    @override
    def step(self, actions: Any) -> BatchStep:
        return self._step

    @override
    def close(self) -> None:
        pass


def stay(actions: Any, observations: Any) -> Any:
    """Return as many of the actions as there are observations."""
    return actions[: len(observations)]


def measure(budget_s: float, turns: int, progress: Callable[[str], None]) -> list[Row]:
    """Time the runner in turns, without groups and processes, in CPU seconds."""
    found: dict[int, list[Row]] = {slots: [] for slots in _SLOTS}
    for turn in range(turns):
        for slots in _SLOTS:
            progress(f"turn {turn + 1} of {turns}: {slots:,} slots")
            found[slots].append({name: _micros(slots, limit, budget_s) for name, limit in _LIMITS.items()})
    return [
        {"label": f"{slots:,} slots", "status": "ok", "turns": turns}
        | {name: statistics.median(turn[name] for turn in turns) for name in _LIMITS}
        for slots, turns in found.items()
    ]


def _micros(slots: int, limit: int | None, budget_s: float) -> float:
    """Return the CPU microseconds per slot and step, with episodes that end after ``limit`` steps or never."""
    policy = partial(stay, np.zeros(slots, np.int64))
    made = EvalConfig().environment(Null).policy(policy).runners(runner="batched", num_envs_per_runner=slots)
    runner = BatchedEvalRunner(made.evaluation(max_episode_steps=limit).build(), 0)
    leases = (Lease(EpisodeSpec(index, index), 1) for index in itertools.count())
    try:
        runner.run(
            list(itertools.islice(leases, 2 * slots)), 0.0
        )  # The simulator is built, and all slots have started.
        steps, started = 0, time.process_time()
        while time.process_time() - started < budget_s:
            report = runner.run((), _SLICE_S)
            steps += report.env_steps
            runner.run(list(itertools.islice(leases, len(report.rows))), 0.0)
        return (time.process_time() - started) / steps * 1e6
    finally:
        runner.stop()

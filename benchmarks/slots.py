"""Slots in processes of their own against a lock-step vector environment, for steps whose times differ."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.runner import Row
from benchmarks.scenarios import REPO
from rl_eval import EvalConfig
from rl_eval.records.episode import Lease
from rl_eval.runners.subprocess_slots import SubprocessEvalRunner

__all__ = ["measure"]

_SHORTEST_S: Final = 0.001
_LONGEST_S: Final = 0.050
_EPISODE_STEPS: Final = 20
_SLOTS: Final = 16
_SHORT_STEPS: Final = 100
_TURNS: Final = 3


class Uneven(gym.Env[Any, Any]):
    """Takes 1 to 50 ms for a step, as a simulator that another program computes; drawn by its seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = _EPISODE_STEPS
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> Any:
        seconds = self.np_random.uniform(_SHORTEST_S, _LONGEST_S)
        time.sleep(seconds)
        self.left -= 1
        return np.full(8, seconds, np.float32), seconds, self.left == 0, False, {}


class Small(gym.Env[Any, Any]):
    """Takes no time for a step."""

    observation_space: gym.Space[Any] = spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = _SHORT_STEPS
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._seen(), 1.0, self.left == 0, False, {"is_success": False}

    def _seen(self) -> Any:
        return np.zeros(8, np.float32)


class Images(Small):
    """The same with two images."""

    observation_space = spaces.Dict(dict.fromkeys(("front", "wrist"), spaces.Box(0, 255, (224, 224, 3), np.uint8)))

    def _seen(self) -> Any:
        return {key: np.zeros((224, 224, 3), np.uint8) for key in ("front", "wrist")}


def act(observations: Any) -> Any:
    """Choose actions; a policy that costs next to nothing."""
    return (observations[:, 0] > 0.02).astype(np.int64)


def measure(episodes: int, progress: Callable[[str], None]) -> list[Row]:
    """Time both over the same steps; the ideal is the sum of the steps' times over the number of processes."""
    rows = []
    for label, contender in (("subprocess slots", _ours), ("gymnasium AsyncVectorEnv", _lock_step)):
        progress(f"{label}: {_SLOTS} slots, {episodes} episodes of {_EPISODE_STEPS} steps")
        seconds, busy = contender(_SLOTS, episodes)
        rows.append(
            {
                "label": f"{label}, {_SLOTS} processes",
                "status": "ok",
                "seconds": seconds,
                "ideal_seconds": busy / _SLOTS,
                "share_of_ideal": busy / _SLOTS / seconds,
            }
        )
    for label, python in (("this interpreter", None), ("environment.python", sys.executable)):
        for env in ("Small", "Images"):
            progress(f"{label}: CPU time of a step of {env}")
            turns = [_cost(env, python) for _ in range(_TURNS)]
            cpu_us, start_s = (min(column) for column in zip(*turns, strict=True))
            rows.append({"label": f"{label}, {env}", "status": "ok", "cpu_us": cpu_us, "start_s": start_s})
    return rows


def _cost(env: str, python: str | None) -> tuple[float, float]:
    """Return the CPU time of the runner per step, in microseconds, and the seconds until the first slot is ready."""
    made = EvalConfig().environment(f"{__name__}:{env}", python=python, python_path=[str(REPO)]).policy("random")
    made.policy(deterministic=False).runners(runner="subprocess", num_envs_per_runner=4)
    settings = made.evaluation(num_episodes=_TURNS * 4).build()
    leases = [Lease(settings.plan()[index], 1) for index in range(_TURNS * 4)]
    started = time.perf_counter()
    runner = SubprocessEvalRunner(settings, 0)
    try:
        start_s = time.perf_counter() - started
        _play(runner, leases[:4])
        before = time.process_time()
        _play(runner, leases[4:])
        return 1e6 * (time.process_time() - before) / (len(leases) - 4) / _SHORT_STEPS, start_s
    finally:
        runner.stop()


def _ours(slots: int, episodes: int) -> tuple[float, float]:
    """Return the wall-clock seconds from the first reset on, and the sum of the steps' times."""
    made = EvalConfig().environment(Uneven).policy(act).runners(runner="subprocess", num_envs_per_runner=slots)
    settings = made.evaluation(num_episodes=episodes + slots).build()
    plan = settings.plan()
    leases = [Lease(plan[index], 1) for index in range(episodes + slots)]
    runner = SubprocessEvalRunner(settings, 0)
    try:
        _play(runner, leases[episodes:])  # The processes are up.
        started = time.perf_counter()
        busy = _play(runner, leases[:episodes])
        return time.perf_counter() - started, busy
    finally:
        runner.stop()


def _play(runner: SubprocessEvalRunner, leases: list[Lease]) -> float:
    """Run episodes; return the sum of their rewards, which are the times of their steps."""
    rows = [*runner.run(leases, 0.1).rows]
    while len(rows) < len(leases):
        rows += [*runner.run((), 0.1).rows]
    return float(sum(row["episode_return"] for row in rows))


def _lock_step(slots: int, episodes: int) -> tuple[float, float]:
    """The same number of steps, each of which waits for the slowest."""
    env = gym.vector.AsyncVectorEnv([Uneven] * slots)
    try:
        observations, _ = env.reset(seed=0)
        started, busy = time.perf_counter(), 0.0
        for _ in range(episodes * _EPISODE_STEPS // slots):
            observations, rewards, *_ = env.step(act(observations))
            busy += float(rewards.sum())
        return time.perf_counter() - started, busy
    finally:
        env.close()

"""CPU time of a runner itself per step, and with more attributes than CPython looks up quickly."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig, VectorEvalRunner
from rl_eval.records.episode import Lease

__all__ = ["measure"]

_LANES: Final = 8
_EPISODES: Final = 2_000
_MORE: Final = 30
"""CPython looks up each attribute in a dict if an object has more than 30 of them."""


class _Null(gym.Env[Any, Any]):
    """Environment that computes nothing: 20 steps."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    _seen = np.zeros(4, np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self._left = 20
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return self._seen, 1.0, not self._left, False, {}


def measure(repeat: int) -> tuple[float, float]:
    """Time both runners in turns; return microseconds per step of the runner, and the median ratio of a turn."""
    made = EvalConfig().environment(_Null).policy(lambda observations: np.zeros(len(observations), np.int64))
    settings = made.runners(num_envs_per_runner=_LANES).evaluation(num_episodes=_EPISODES).build()
    usual, larger = (VectorEvalRunner(settings, 0, settings.policy.policy) for _ in range(2))
    vars(larger).update({f"more_{number}": None for number in range(_MORE)})
    plan = settings.plan()
    leases = [Lease(plan[index], 1) for index in range(len(plan))]
    turns = [[_seconds(runner, leases) for runner in (usual, larger)] for _ in range(repeat + 1)][1:]
    return 1e6 * statistics.median(ours for ours, _ in turns), statistics.median(more / ours for ours, more in turns)


def _seconds(runner: VectorEvalRunner, leases: list[Lease]) -> float:
    begun, steps = time.process_time(), runner.run(leases, 600.0).env_steps
    while steps < 20 * len(leases):
        steps += runner.run((), 600.0).env_steps
    return (time.process_time() - begun) / steps


if __name__ == "__main__":
    microseconds, ratio = measure(9)
    print(f"{microseconds:.2f} us per step; {ratio:.2f} times as long with {_MORE} more attributes")

"""Environments that a test can hold up, and policies whose returns say which weights they have.

It imports no torch, so that a runner's process comes up fast; the modules are in ``evaluator_modules``.
"""

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig

LIMIT_S = 120.0
"""Far beyond what anything takes; reached only by what hangs."""


class Line(gym.Env[Any, Any]):
    """One step per episode, worth its action.

    Args:
        gate: A folder; a reset notes there that it has begun, and waits until the gate is opened.
        until: A file; no episode ends before it is there.
        endless: Whether episodes never end.
        raises: Whether every reset raises.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, gate: str = "", until: str = "", endless: bool = False, raises: bool = False) -> None:
        self.gate, self.until, self.endless, self.raises = gate, until, endless, raises

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.raises:
            raise RuntimeError("no day for episodes")
        if self.gate:
            Path(self.gate, "entered").touch()
            wait_for(Path(self.gate, "open"))
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.until and not Path(self.until).exists():
            time.sleep(0.01)
            return np.ones(1, np.float32), 0.0, False, False, {}
        return np.ones(1, np.float32), float(action[0]), not self.endless, False, {}


def line(context: dict[str, Any]) -> Line:
    return Line(**context)


def echo(observations: Any) -> Any:
    """A policy without weights: every episode returns 1."""
    return observations


def refuse(observations: Any) -> Any:
    raise RuntimeError("no mood for actions")


def make_refusing() -> Any:
    return refuse


def make_echo() -> Any:
    return echo


def config(policy: Any = "evaluator_world:make_echo", **environment: Any) -> EvalConfig:
    """Two episodes of one step, in one lane."""
    return (
        EvalConfig()
        .environment("evaluator_world:line", env_kwargs=environment)
        .policy(policy)
        .runners(num_envs_per_runner=1)
        .evaluation(num_episodes=2)
    )


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.002)

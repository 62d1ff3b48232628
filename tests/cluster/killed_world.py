"""Environments that make it hard to end their processes, in runs that are killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np

_SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


class Plain(gym.Env[Any, Any]):
    """Eight steps of five milliseconds."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 2), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        time.sleep(0.005)
        return self.np_random.uniform(-1, 1, 2), float(self.np_random.normal()), self.steps == 8, False, {}


class Threads(Plain):
    """Starts a thread that is no daemon."""

    def __init__(self) -> None:
        threading.Thread(target=lambda: time.sleep(1000)).start()


class Deaf(Plain):
    """Ignores all signals that can be ignored."""

    def step(self, action: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        return super().step(action)


class HangsInClose(Plain):
    """Never closes."""

    def close(self) -> None:
        time.sleep(1000)


class Stuck(Plain):
    """Never returns from some of its steps."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.02:
            time.sleep(1000)
        return super().step(action)


class Raises(Plain):
    """Raises an exception that is not an error in some of its steps."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.02:
            raise GeneratorExit
        return super().step(action)


class Dies(Plain):
    """Ends its process in some of its steps."""

    def step(self, action: Any) -> Any:
        if time.time() % 1.0 < 0.003:
            os._exit(0)
        return super().step(action)


class Parents(Plain):
    """Starts processes, and ends them when it is closed."""

    def __init__(self) -> None:
        self.children = [subprocess.Popen(_SLEEP), subprocess.Popen(_SLEEP, start_new_session=True)]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def policy(observations: Any) -> Any:
    """Act on the sign of the first value."""
    return (observations[:, 0] > 0).astype(np.int64)

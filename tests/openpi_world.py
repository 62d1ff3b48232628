"""Process of a server of openpi's protocol, and evaluations of its policy on Pendulum."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from rl_eval import EvalConfig
from tests.remote_policy import Server

_SCRIPT = Path(__file__).with_name("openpi_server.py")
EPISODES, STEPS = 12, 20


class Openpi(Server):
    """The process.

    Args:
        mode: What it serves, and its fault; see the script.
        variables: Environment variables of the script.
    """

    def __init__(self, mode: str = "det", gain: float = 1.0, **variables: str) -> None:
        self.mode, self._variables = mode, variables
        super().__init__(gain)

    def start(self, gain: float = 1.0) -> None:
        command = [sys.executable, str(_SCRIPT), str(self.port), self.mode, str(gain)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_SCRIPT.parent.parent), **self._variables},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def config(self, runners: int = 0, lanes: int = 3, runner: str = "vector", **kwargs: Any) -> EvalConfig:
        """Return an evaluation of the policy on this server."""
        limits = {"patience_s": 5.0, "answer_timeout_s": 5.0}
        config = (
            EvalConfig().environment(Short).policy(f"openpi://127.0.0.1:{self.port}", policy_kwargs=limits | kwargs)
        )
        config.runners(num_runners=runners, num_envs_per_runner=lanes, runner=runner)
        return config.evaluation(num_episodes=EPISODES)


class Short(gym.Wrapper[Any, Any, Any, Any]):
    """Pendulum with short episodes."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1", max_episode_steps=STEPS))

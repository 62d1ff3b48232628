"""Rows that policies compute per step with few environments, in passes of the smallest size and in blocks."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import io
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import gymnasium as gym
import numpy as np

from benchmarks.runner import Row
from rl_eval import EvalConfig, evaluate
from rl_eval.policies.inference import probe
from rl_eval.supervision.process_environment import reproducible_environment

__all__ = ["Planner", "build", "measure"]

_SLOTS: Final = (1, 4, 16)
_EPISODES: Final = 16
_STEPS: Final = 200
_WIDTH: Final = 2048
"""Width of a network whose block takes a few milliseconds."""
_BLOCK_STEPS: Final = 10
"""Steps of an episode in blocks, which take long."""
_ROWS: Final = [0]
"""Rows that the policies of this process have computed."""
_SEEN: Final[list[int]] = []
"""The same number at each reset and each step."""


class ShowState(gym.ObservationWrapper[Any, Any, Any]):
    """Replace the observation of a pendulum with its state, for planners."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation(self, observation: Any) -> Any:
        """Return angle and velocity."""
        _SEEN.append(_ROWS[0])
        env: Any = self.env.unwrapped
        return np.array(env.state, np.float64)


class Planner:
    """Greedy planner: it tries nine constant torques for ten steps in its own simulator."""

    def __init__(self) -> None:
        self.simulator: Any = gym.make("Pendulum-v1").unwrapped
        self.simulator.reset(seed=0)

    def __call__(self, observations: Any) -> Any:
        return np.array([[self.best(row)] for row in observations], np.float32)

    def best(self, state: Any) -> float:
        """Return the torque with the highest sum of rewards."""
        return max(np.linspace(-2, 2, 9).tolist(), key=lambda torque: self._sum(state, torque))

    def _sum(self, state: Any, torque: float) -> float:
        self.simulator.state = state.copy()
        return float(sum(self.simulator.step(np.array([torque]))[1] for _ in range(10)))


class _Counted:
    """Policy that counts its rows."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, None]:
        """Act; see :class:`rl_eval.Policy`."""
        _ROWS[0] += len(observations)
        return self.function(observations), None


def _torch_network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    hidden = nn.Linear(2, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(_WIDTH, 1)).eval()


def _torch() -> Callable[[Any], Any]:
    import torch

    network = _torch_network()
    return lambda observations: network(torch.as_tensor(observations, dtype=torch.float32)).detach().numpy()


def _onnx() -> Callable[[Any], Any]:
    import onnxruntime
    import torch

    file = io.BytesIO()
    names = {"input_names": ["x"], "dynamic_axes": {"x": {0: "rows"}}}
    torch.onnx.export(_torch_network(), (torch.zeros(2, 2),), file, dynamo=False, **names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    return lambda observations: session.run(None, {"x": observations.astype(np.float32)})[0]


_KINDS: Final[dict[str, Callable[[], Callable[[Any], Any]]]] = {
    "planner": Planner,
    "torch network": _torch,
    "ONNX network": _onnx,
}


def build(name: str, observation_space: Any, action_space: Any) -> Any:
    """Build a policy by its name."""
    return _Counted(_KINDS[name]())


def measure(turns: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure each policy in each number of slots, in a process with the variables of the command line."""
    os.environ.update(reproducible_environment())
    spawn = multiprocessing.get_context("spawn")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
        for name in _KINDS:
            if name.startswith("ONNX") and not importlib.util.find_spec("onnxruntime"):
                rows.append({"label": name, "status": "left out", "error": "onnxruntime is not installed"})
                continue
            for slots in _SLOTS:
                progress(f"{name}, {slots} slots")
                rows.append(process.submit(_row, name, slots, turns).result())
    return rows


def _row(name: str, slots: int, turns: int) -> Row:
    found: list[Row] = []
    for _ in range(turns):
        with mock.patch.object(probe, "_SAVED_S", math.inf):
            blocks = _evaluated(name, slots, _BLOCK_STEPS)  # It comes first, because it also imports modules.
        small = _evaluated(name, slots, _STEPS)
        turn = {"per_step": small["per_step"], "per_step_of_blocks": blocks["per_step"]}
        turn["probe"] = small["probe"] - blocks["probe"]
        if name == "planner":
            turn["times_loop"] = small["cpu"] / _loop_seconds()
        found.append(turn)
    return {"label": name, "slots": slots, "status": "ok", "turns": found} | {
        key: statistics.median(turn[key] for turn in found) for key in found[0]
    }


def _evaluated(name: str, slots: int, steps: int) -> Row:
    """Evaluate some episodes; count the rows of the probe, which ends before the first reset, apart from others."""
    config = (
        EvalConfig()
        .environment("Pendulum-v1", wrappers=["benchmarks.rows:ShowState"])
        .policy("benchmarks.rows:build", policy_kwargs={"name": name})
        .evaluation(num_episodes=_EPISODES, max_episode_steps=steps, determinism_check=0)
        .runners(num_envs_per_runner=slots)
    )
    _SEEN.clear()
    before, started = _ROWS[0], time.process_time()
    evaluate(config)
    per_step = (_SEEN[-1] - _SEEN[0]) / (_EPISODES * steps)
    return {"per_step": per_step, "probe": _SEEN[0] - before, "cpu": time.process_time() - started}


def _loop_seconds() -> float:
    """Return the CPU seconds of the same number of steps in a loop of a few lines."""
    env, planner = ShowState(gym.make("Pendulum-v1", max_episode_steps=_STEPS)), Planner()
    started = time.process_time()
    for seed in range(_EPISODES):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            observation, _, terminated, truncated, _ = env.step(np.array([planner.best(observation)], np.float32))
            over = terminated or truncated
    return time.process_time() - started

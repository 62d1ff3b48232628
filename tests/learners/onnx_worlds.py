"""Exported ONNX models, and loops over one environment with onnxruntime alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import torch
from torch import nn

STEPS = 60
"""Maximum length of an episode."""


class Memory(nn.Module):
    """LSTM with two layers and a head."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, 8, 2), nn.Linear(8, outputs)

    def forward(self, obs: Any, h_in: Any, c_in: Any) -> Any:
        features, (h, c) = self.lstm(obs[None], (h_in, c_in))
        return torch.tanh(5 * self.head(features[0])), h, c


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs)).eval()


def exported(
    path: Path,
    module: nn.Module,
    given: Any,
    takes: list[str],
    gives: list[str],
    free: dict[str, int] | None = None,
    **more: Any,
) -> Path:
    """Export a module. ``free`` has the axis of the batch of each input; None for a batch of fixed size."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    shapes = None if free is None else tuple({free[one]: torch.export.Dim.DYNAMIC} for one in takes)
    names = {"input_names": takes, "output_names": gives}
    torch.onnx.export(module.eval(), given, path, dynamic_shapes=shapes, verbose=False, **names, **more)
    return path


@functools.cache
def model(folder: Path, kind: str, env: str) -> Path:
    """Export a model for an environment: ``mlp`` or ``lstm``, with a ``free`` or a ``fixed`` batch."""
    made = gym.make(env)
    sizes = made.observation_space.shape[0], int(getattr(made.action_space, "n", 1))
    network, batch = kind.split()
    size, path = (4 if batch == "free" else 1), folder / f"{network}_{batch}_{env}.onnx"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        obs = torch.zeros(size, sizes[0])
        if network == "mlp":
            return exported(path, mlp(*sizes), (obs,), ["obs"], ["actions"], {"obs": 0} if batch == "free" else None)
        state = torch.zeros(2, size, 8)
        axes = {"obs": 0, "h_in": 1, "c_in": 1}
        gives = ["actions", "h_out", "c_out"]
        free = axes if batch == "free" else None
        return exported(path, Memory(*sizes), (obs, state, state), list(axes), gives, free)


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def loop(env: gym.Env[Any, Any], path: Path, seeds: Any, act: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return the return and the length of each episode: one environment, a batch of one, states that are fed back."""
    session, rows = session_of(path), []
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    act = act or ((lambda output: int(output[0].argmax())) if discrete else lambda output: output[0])
    takes = [one.name for one in session.get_inputs()]
    for seed in seeds:
        observation, _ = env.reset(seed=int(seed))
        state = [np.zeros((2, 1, 8), np.float32) for _ in takes[1:]]
        total, length, over = 0.0, 0, False
        while not over:
            given = dict(zip(takes, [observation[None], *state], strict=True))
            output, *state = session.run(None, given)
            observation, reward, terminated, truncated, _ = env.step(act(output))
            total, length = total + float(reward), length + 1
            over = terminated or truncated or length == STEPS
        rows.append((total, length))
    return rows

"""Pendulum, its torques or a picture of it, and a policy of each kind; for processes that share nothing else."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

SIDE = 36


class Torques(gym.ActionWrapper[Any, Any, Any]):
    """Two actions: full torque in either direction."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(2)

    def action(self, action: Any) -> Any:
        return np.array([2.0 if action else -2.0], np.float32)


class Picture(gym.ObservationWrapper[Any, Any, Any]):
    """A blot where the tip is, as bright as it is fast; float32, so that no pixel hides a rounding."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-10, 10, (1, SIDE, SIDE), np.float32)

    def observation(self, observation: Any) -> Any:
        across, along, speed = observation
        axis = np.linspace(-1.5, 1.5, SIDE)
        blot = np.exp(-4 * ((axis[:, None] - across) ** 2 + (axis - along) ** 2))
        return ((1 + speed) * blot).astype(np.float32)[None]


def make_env(actions: str, network: str) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = gym.make("Pendulum-v1")
    env = Torques(env) if actions == "discrete" else env
    return Picture(env) if network == "cnn" else env


class Sides(nn.Module):
    """Logits of two torques out of one number."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        torque = self.network(observations)
        return torch.cat([-torque, torque], dim=1)


def make_policy(actions: str, network: str) -> nn.Module:
    torch.manual_seed(3)
    body = {"mlp": make_mlp, "cnn": make_cnn, "sac": make_sac_actor}[network]()
    return Sides(body) if actions == "discrete" else body


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1), nn.Tanh())


def make_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 3 * 3, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())


def make_sac_actor() -> nn.Module:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=1, seed=3, device="cpu")
    return Mean(model.policy.actor)


class Mean(nn.Module):
    """Mean action of an actor, in [-1, 1]."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.actor(observations, deterministic=True))


def make_config(actions: str, network: str, num_runners: int) -> dict[str, Any]:
    """Return an evaluation as plain values, which a command and a script can share."""
    kwargs = {"actions": actions, "network": network}
    return {
        "environment": {"env": "fingerprint_worlds:make_env", "env_kwargs": kwargs},
        "policy": {"policy": "fingerprint_worlds:make_policy", "policy_kwargs": kwargs, "actions": "unsquash"},
        "runners": {"num_runners": num_runners, "num_envs_per_runner": 4},
        "evaluation": {"num_episodes": 8, "seed": 0},
    }

"""Environments beside CartPole in which evaluators are timed: a physics simulator, images, and steps that take long.

Episodes of a world are equally long whatever the policy does, so no evaluator gains by which ones it takes. Its policy
is one network with fixed random weights, the same for everybody. Importable without rl_eval and without any peer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np

if TYPE_CHECKING:
    from torch import nn

__all__ = ["WORLDS", "Actor", "World", "factory", "make", "make_policy"]

_STEP_S: Final = 0.005
_FEATURES: Final = 8


class Slow(gym.Env[Any, Any]):
    """Takes 5 ms for a step, as a simulator that another program computes: the cores are free meanwhile."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (_FEATURES,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """See :class:`gymnasium.Env`."""
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See :class:`gymnasium.Env`."""
        time.sleep(_STEP_S)
        return self._observation(), 1.0, False, False, {}

    def _observation(self) -> Any:
        return self.np_random.standard_normal(_FEATURES, np.float32)


def _hopper() -> gym.Env[Any, Any]:
    return gym.make("Hopper-v5", terminate_when_unhealthy=False, disable_env_checker=True).unwrapped


def _pong() -> gym.Env[Any, Any]:
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1, disable_env_checker=True).unwrapped
    return FrameStackObservation(AtariPreprocessing(env), 4)


@dataclass(frozen=True)
class World:
    """An environment, and how it is evaluated."""

    title: str
    build: Callable[[], gym.Env[Any, Any]]
    steps: int
    """Length of every episode."""
    envs: int
    """Environments that step at the same time, in all."""
    rounds: int
    """Episodes that each of them has: as many as make a measurement of ten to twenty seconds."""
    discrete: bool = True


WORLDS: Final = {
    "hopper": World("Hopper-v5 of MuJoCo, 64x64 tanh network", _hopper, 200, envs=64, rounds=8, discrete=False),
    "atari": World("ALE/Pong-v5, 84x84x4 pixels, Nature CNN", _pong, 1000, envs=32, rounds=1),
    "slow": World("simulator with steps of 5 ms, 64x64 tanh network", Slow, 50, envs=16, rounds=32),
}


def make(context: Any = None, *, name: str) -> gym.Env[Any, Any]:
    """Build a world; ``context`` is what a framework hands to its factories."""
    del context
    world = WORLDS[name]
    return gym.wrappers.TimeLimit(world.build(), world.steps)


def make_policy(*_: Any, name: str) -> nn.Module:
    """Build a world's network, from a batch of observations to logits, or to continuous actions."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def forward(self, observations: Any) -> Any:
            return observations.float() / (255.0 if name == "atari" else 1.0)

    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = [Scaled()]
    if name == "atari":
        convolutions = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        for channels, filters, width, stride in convolutions:
            layers += [nn.Conv2d(channels, filters, width, stride), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6)]
    else:
        inputs, outputs = {"hopper": (11, 3), "slow": (_FEATURES, 2)}[name]
        layers += [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
        layers += [nn.Tanh()] if name == "hopper" else []
    module = nn.Sequential(*layers)
    with torch.no_grad():
        for values in module.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) / max(1.0, values[0].numel()) ** 0.5)
    return module.eval()


class Actor:
    """A world's network as a function of NumPy observations; its ``predict`` is that of Stable-Baselines3."""

    def __init__(self, name: str) -> None:
        self._network, self._discrete = make_policy(name=name), WORLDS[name].discrete

    def __call__(self, observations: Any) -> Any:
        """Actions for a batch of observations."""
        import torch

        with torch.inference_mode():
            outputs = self._network(torch.as_tensor(observations)).numpy()
        return outputs.argmax(-1) if self._discrete else outputs

    def predict(self, observation: Any, state: Any = None, **_: Any) -> tuple[Any, Any]:
        """Actions, and no state."""
        return self(observation), state


def factory(name: str) -> Callable[..., gym.Env[Any, Any]]:
    """Factory of a world's environments, picklable, called with or without a context."""
    return functools.partial(make, name=name)

"""An arm, policies that answer with chunks of eight actions for it, and the loop that one writes by hand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval import EvalConfig, EvalResult
from rl_eval.policies.inference.probe import BLOCK
from rl_eval.policies.noise import EpisodeNoise

HORIZON = 8
CASES = [(1, 0), (4, 0), (8, 0), (4, 3), (4, 4), (5, 3)]
"""Values of ``execute`` and ``delay``."""
_GAINS = np.linspace(0.2, 1.5, HORIZON)[:, None]

Array = npt.NDArray[Any]
Answer = Callable[[Array, EpisodeNoise], Array]
"""Takes the observations and the noise of a block, and returns its chunks."""


class Arm(gym.Env[Array, Array]):
    """Arm in a plane that is pushed about. Its episodes have different lengths, often no multiple of a chunk's."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    @override
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.speed = self.np_random.normal(size=(2, 2))
        self.steps, self.length = 0, int(self.np_random.integers(1, 30))
        return self.seen(), {}

    def seen(self) -> Array:
        return np.concatenate([self.place, self.speed]).astype(np.float32)

    @override
    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.speed = 0.9 * self.speed + 0.3 * np.asarray(action, np.float64) + self.np_random.normal(size=2) * 0.1
        self.place = self.place + 0.2 * self.speed
        reward = -float(np.abs(self.place).sum() + 0.1 * np.abs(action).sum())
        return self.seen(), reward, self.steps >= self.length, False, {}


def plan_ahead(observations: Array) -> Array:
    """Return chunks, shape (batch, 8, 2), as a function of NumPy arrays."""
    place, speed = observations[:, None, :2], observations[:, None, 2:]
    return np.asarray(np.tanh(-_GAINS * place - speed), np.float32)


def make_net(sampled: bool = False) -> Any:
    """Return a network with the same weights at each call.

    It returns chunks, shape (batch, 8, 2); with ``sampled`` means and logarithms of widths.
    """
    import torch  # The processes of environments do without it.

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, HORIZON * 2)
            self.body, self.log_std = torch.nn.Sequential(*layers), torch.full((HORIZON, 2), -1.0)

        @override
        def forward(self, observations: Any) -> Any:
            chunks = self.body(observations).unflatten(1, (HORIZON, 2))
            return (chunks, self.log_std) if sampled else chunks

    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def net_answer(observations: Array, noise: EpisodeNoise) -> Array:
    """Return the chunks of the network, for a block of observations."""
    import torch

    with torch.no_grad():
        return np.asarray(make_net()(torch.from_numpy(observations)).numpy())


def sampled_answer(observations: Array, noise: EpisodeNoise) -> Array:
    """Return the chunks of the network, sampled with the noise of the step."""
    mean = net_answer(observations, noise).astype(np.float64)
    widths = np.exp(np.full(mean.shape, -1.0))
    return np.asarray(mean + widths * noise.normal(HORIZON * 2).reshape(mean.shape))


def numpy_answer(observations: Array, noise: EpisodeNoise) -> Array:
    """Return the chunks of :func:`plan_ahead`."""
    return plan_ahead(observations)


class Asked:
    """Policy around :func:`plan_ahead` that counts the live rows of each pass, also in copies in this process."""

    counts: ClassVar[list[int]] = []

    def act(self, observations: Array, state: Any, live: Array, noise: Any) -> tuple[Array, Any]:
        self.counts.append(int(live.sum()))
        return plan_ahead(observations), None


def by_hand(seed: int, execute: int, delay: int, answer: Answer) -> tuple[float, int]:
    """Return the return and the length of an episode, in a loop that keeps all chunks by the step of their request."""
    env = Arm()
    observation, _ = env.reset(seed=seed)
    total, step, ended = 0.0, 0, False
    chunks: dict[int, Array] = {}
    while not ended:
        if step % execute == 0:
            noise = EpisodeNoise(np.full(BLOCK, seed), np.full(BLOCK, step))
            chunks[step] = answer(np.repeat(observation[None], BLOCK, 0), noise)[0]
        used = max((asked for asked in chunks if asked + delay <= step), default=0)
        action = np.clip(chunks[used][step - used], -1.0, 1.0).astype(np.float32)
        observation, reward, ended, _, _ = env.step(action)
        total, step = total + reward, step + 1
    return total, step


def config(execute: int, delay: int, lanes: int = 8, **runners: Any) -> EvalConfig:
    """Twenty episodes of the arm."""
    return (
        EvalConfig()
        .environment(Arm)
        .policy("tests.chunk_world:make_net", chunk={"execute": execute, "delay": delay})
        .runners(num_envs_per_runner=lanes, **runners)
        .evaluation(num_episodes=20)
    )


def played(result: EvalResult) -> list[tuple[float, int]]:
    """Return the return and the length of each episode."""
    return [(one.episode_return, one.length) for one in result.episodes]


def by_hand_of(result: EvalResult, execute: int, delay: int, answer: Answer) -> list[tuple[float, int]]:
    """Return the return and the length of the same episodes by hand."""
    return [by_hand(one.seed, execute, delay, answer) for one in result.episodes]

"""Environments and policies for tests: with a known mean, unusual spaces, a state leak, or a recurrent state."""

from __future__ import annotations

import time
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EnvironmentSection
from rl_eval.protocols import EnvContext
from rl_eval.runners.environment import construct_env


class TwoLengthEnv(gym.Env[npt.NDArray[np.float32], np.int64]):
    """Environment with a true mean return of 0.5: half of the episodes have return 0, half have return 1.

    The seed decides: an episode has 5 steps and return 0, or 200 steps and return 1.

    An evaluator that uses only the episodes that finish first reports a lower mean.

    Args:
        step_seconds: Minimum duration of a step, in seconds.
    """

    MEAN: Final = 0.5
    SHORT: Final = 5
    LONG: Final = 200

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._length = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Draw the length of the episode."""
        super().reset(seed=seed)
        self._length = self.LONG if self.np_random.random() < self.MEAN else self.SHORT
        self._steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count the step; the last step of a long episode has a reward."""
        self._steps += 1
        if self._step_seconds:
            time.sleep(self._step_seconds)
        done = self._steps >= self._length
        return self._observation(), float(done and self._length == self.LONG), done, False, {}

    def render(self) -> None:
        """Return None. The method exists because some evaluators render after every step."""

    def _observation(self) -> npt.NDArray[np.float32]:
        return np.array([self._steps / self.LONG, self._length == self.LONG], np.float32)


class DictObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Wrapper that splits a vector observation into a nested dict, and adds an image and a discrete part."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        box = env.observation_space
        assert isinstance(box, gym.spaces.Box)
        self.observation_space = gym.spaces.Dict(
            {
                "body": gym.spaces.Tuple(
                    (
                        gym.spaces.Box(box.low[:1], box.high[:1], dtype=np.float32),
                        gym.spaces.Box(box.low[1:], box.high[1:], dtype=np.float32),
                    )
                ),
                "camera": gym.spaces.Box(0, 255, (4, 4, 1), np.uint8),
                "side": gym.spaces.Discrete(2),
            }
        )

    def observation(self, observation: npt.NDArray[np.float32]) -> dict[str, Any]:
        """Return a dict with the parts of one observation, an image and a discrete part."""
        pixels = np.full((4, 4, 1), int(abs(float(observation[0])) * 100) % 256, np.uint8)
        return {"body": (observation[:1], observation[1:]), "camera": pixels, "side": int(observation[0] > 0)}


class ImpureEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper whose state survives a reset: rewards grow with the number of episodes that this object has run."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._episodes = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset everything except the count of episodes."""
        self._episodes += 1
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step, and add 0.001 to the reward for each reset of this object so far."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward) + 0.001 * self._episodes, terminated, truncated, info


def wrapped_env(context: EnvContext) -> tuple[gym.Env[Any, Any], dict[str, Any]]:
    """Build the environment that a test factory wraps.

    Args:
        context: Context with ``env`` (any value of ``environment.env``, or ``two_length``; by default CartPole-v1) and
            ``env_kwargs``.

    Returns:
        The environment, and the other items of the context.
    """
    kwargs = dict(context)
    name, inner = kwargs.pop("env", "CartPole-v1"), kwargs.pop("env_kwargs", {})
    if isinstance(name, str) and name == "two_length":
        return TwoLengthEnv(**inner), kwargs
    section = EnvironmentSection(env=name, env_kwargs=inner)
    return construct_env(section, context.runner_index, context.lane_index, context.num_runners), kwargs


def impure(context: EnvContext) -> ImpureEnv:
    """Build an :class:`ImpureEnv` around the environment of the context's ``env`` and ``env_kwargs``."""
    return ImpureEnv(wrapped_env(context)[0])


def two_length(context: EnvContext) -> TwoLengthEnv:
    """Build a :class:`TwoLengthEnv`."""
    return TwoLengthEnv(**context)


def make_gru(observation_space: gym.Space[Any], action_space: gym.Space[Any], hidden: int = 16, seed: int = 12) -> Any:
    """Build a recurrent policy with fixed weights: a GRU cell on flat observations.

    The policy samples actions from logits. It implements :class:`rl_eval.Policy`. Its state has shape (batch, hidden).
    """
    import torch
    from torch import nn

    class GRUPolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.cell = nn.GRUCell(int(np.prod(observation_space.shape or ())), hidden)
            self.head = nn.Linear(hidden, int(action_space.n))  # type: ignore[attr-defined]
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.5, generator=generator)

        def initial_state(self, batch_size: int) -> torch.Tensor:
            return torch.zeros(batch_size, hidden)

        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            state = self.cell(torch.from_numpy(observations).float().flatten(1), state)
            logits = self.head(state).double().numpy()
            if noise is None:
                return logits.argmax(1), state
            gumbel = -np.log(-np.log(noise.uniform(logits.shape[1])))
            return (logits + gumbel).argmax(1), state

    return GRUPolicy()


def make_dict_policy(observation_space: gym.Space[Any]) -> Any:
    """Build a NumPy policy for observations of :class:`DictObservation`. It pushes in the direction of the pole."""

    def act(observations: dict[str, Any]) -> npt.NDArray[np.int64]:
        cart, rest = observations["body"]
        lean = rest[:, 1] + 0.01 * cart[:, 0]
        picture = observations["camera"].reshape(len(lean), -1).mean(1) * 1e-5
        return np.asarray(lean + picture * (2 * observations["side"] - 1) > 0, np.int64)

    return act

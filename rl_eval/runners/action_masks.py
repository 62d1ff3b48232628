"""Action masks as a part of the observation, for environments of one agent."""

from __future__ import annotations

from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, EnvError

_METHOD: Final = "action_masks"
"""Name of the method in sb3-contrib; the key of ``info`` is singular, as in gymnasium's own environments."""


@final
class ActionMasks(gym.Wrapper[Any, Any, Any, Any]):
    r"""Wrapper whose observations are dicts of ``observation`` and ``action_mask``.

    The mask comes from the method ``action_masks()`` of the environment or of one of its wrappers. Without this method,
    it comes from ``info["action_mask"]``. It has one number per choice: ``n`` numbers for a Discrete space,
    ``sum(nvec)`` for a MultiDiscrete space and two per bit for a MultiBinary space. No action follows the last
    observation of an episode, so the mask of this observation is all ones.

    Raises:
        ConfigError: The environment's actions cannot be masked.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        if not isinstance(env, gym.Env):
            problem = (
                f"environment.action_masks is true, but the environment is a {type(env).__name__}, not a gymnasium.Env"
            )
            raise ConfigError(
                problem, key="environment.action_masks", value=True, fix="Derive the environment from gymnasium.Env."
            )
        super().__init__(env)
        self._choices = _num_choices(env.action_space)
        mask = gym.spaces.Box(0, 1, (self._choices,), np.int8)
        self.observation_space = gym.spaces.Dict({"observation": env.observation_space, "action_mask": mask})
        self._ask = env.get_wrapper_attr(_METHOD) if env.has_wrapper_attr(_METHOD) else None

    def reset(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment; see :meth:`gymnasium.Env.reset`."""
        observation, info = self.env.reset(**kwargs)
        return self._masked(observation, info), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        """Take a step; see :meth:`gymnasium.Env.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            masked = {"observation": observation, "action_mask": np.ones(self._choices, np.int8)}
        else:
            masked = self._masked(observation, info)
        return masked, reward, terminated, truncated, info

    def _masked(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        return {"observation": observation, "action_mask": self._read(info)}

    def _read(self, info: dict[str, Any]) -> npt.NDArray[np.int8]:
        if self._ask is not None:
            given = self._ask()
        elif "action_mask" in info:
            given = info["action_mask"]
        else:
            problem = (
                "environment.action_masks is true, but the environment has no method action_masks(), and its info has "
                "no action_mask"
            )
            fix = "Define action_masks(), put action_mask into info, or remove environment.action_masks."
            raise EnvError(problem, key="environment.action_masks", value=True, fix=fix)
        parts = given if isinstance(given, tuple) else (given,)  # A tuple has a mask for each part of the action.
        mask = np.concatenate([np.ravel(part) for part in parts]).astype(bool).astype(np.int8)
        if len(mask) != self._choices:
            problem = f"the action mask has {len(mask)} numbers, but {self.action_space} needs {self._choices}"
            raise EnvError(problem, key="action_mask", value=len(mask))
        return mask


def _num_choices(space: gym.Space[Any]) -> int:
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, gym.spaces.MultiBinary):
        return 2 * int(np.prod(space.shape))
    problem = (
        f"environment.action_masks is true, but the environment's action space is {space}: only Discrete, "
        "MultiDiscrete and MultiBinary actions have masks"
    )
    raise ConfigError(problem, key="environment.action_masks", value=True, fix="Remove environment.action_masks.")

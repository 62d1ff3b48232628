"""Wrappers that add the last action, the last reward or values of ``info`` to the observation, and normalization.

An observation that is no Dict becomes a Dict with the key ``observation``; a Dict keeps its keys. The added values
depend only on the episode. In ``environment.wrappers``, these wrappers also apply to each slot of a batched simulator.

``Normalized`` and ``frozen`` are for policies that were trained behind a normalizer. They are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import gymnasium as gym
import numpy as np
from typing_extensions import override

from rl_eval.adapters import FROZEN
from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError, EnvError
from rl_eval.policies.inference.spaces import zeros_of

if TYPE_CHECKING:
    from rl_eval.integrations.normalizers import frozen as frozen  # noqa: PLC0414 - for type checkers
    from rl_eval.policies.normalized import Normalized as Normalized  # noqa: PLC0414

_LATER: Final = {"Normalized": "rl_eval.policies.normalized:Normalized", "frozen": FROZEN}

Spaces = dict[str, gym.Space[Any]]
Read = Callable[[str, gym.Space[Any]], Any]
"""Takes a key of ``info`` and its space; returns the value, or None if it is missing."""
_NUMBER: Final = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class AddingWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Base class of the wrappers of this module.

    Its method :meth:`values` returns the added values of one environment. For a batched simulator, its arguments and
    results have one row for each slot.

    Args:
        env: The environment.
        arguments: Arguments of :meth:`added_spaces`.

    Raises:
        ConfigError: The observation space already has one of the keys.
    """

    reads_info: ClassVar[bool] = False
    """Whether the added values are values of ``info``."""

    def __init__(self, env: gym.Env[Any, Any], **arguments: Any) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, **arguments)
        super().__init__(env)
        self._added = self.added_spaces(env.action_space, **arguments)
        self.observation_space = extended(env.observation_space, self._added)

    @classmethod
    def added_spaces(cls, action_space: gym.Space[Any], *_: Any, **arguments: Any) -> Spaces:
        """Return the spaces of the added values, by key."""
        raise NotImplementedError

    @staticmethod
    def values(added: Spaces, action: Any, reward: Any, info: Read) -> dict[str, Any]:
        """Return the known values after a step, or after a reset, which has neither action nor reward."""
        raise NotImplementedError

    @override
    def reset(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        known = self.values(self._added, None, None, _reader(info))
        return joined(self.env.observation_space, observation, zeros(self._added) | known), info

    @override
    def step(self, action: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        values = complete(self._added, self.values(self._added, action, reward, _reader(info)))
        return joined(self.env.observation_space, observation, values), reward, terminated, truncated, info


@final
class LastAction(AddingWrapper):
    """Wrapper that adds ``last_action``: the action of the last step, in the form that the environment takes.

    Before the first step, it is zero, or the lowest action if zero is not in the action space.
    """

    @classmethod
    @override
    def added_spaces(cls, action_space: gym.Space[Any]) -> Spaces:
        return {"last_action": action_space}

    @staticmethod
    @override
    def values(added: Spaces, action: Any, reward: Any, info: Read) -> dict[str, Any]:
        return {} if reward is None else {"last_action": action}


@final
class LastReward(AddingWrapper):
    """Wrapper that adds ``last_reward``: the reward of the last step, shape (1,), float32; zero before the first."""

    @classmethod
    @override
    def added_spaces(cls, action_space: gym.Space[Any]) -> Spaces:
        return {"last_reward": _NUMBER}

    @staticmethod
    @override
    def values(added: Spaces, action: Any, reward: Any, info: Read) -> dict[str, Any]:
        return {} if reward is None else {"last_reward": np.asarray(reward, np.float32)[..., None]}


@final
class InfoKeys(AddingWrapper):
    """Wrapper that adds values of ``info``, by their keys.

    Every step must report each key. If the reset does not report a key, its value is zero until the first step.

    Args:
        env: The environment.
        keys: Keys of numbers, which are added with shape (1,) and dtype float32. Or a mapping of keys to spaces.
    """

    reads_info: ClassVar[bool] = True

    def __init__(self, env: gym.Env[Any, Any], keys: Sequence[str] | Mapping[str, gym.Space[Any]]) -> None:
        super().__init__(env, keys=keys)

    @classmethod
    @override
    def added_spaces(cls, action_space: gym.Space[Any], keys: Sequence[str] | Mapping[str, gym.Space[Any]]) -> Spaces:
        return dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, _NUMBER)

    @staticmethod
    @override
    def values(added: Spaces, action: Any, reward: Any, info: Read) -> dict[str, Any]:
        return {key: value for key, space in added.items() if (value := info(key, space)) is not None}


def extended(space: gym.Space[Any], added: Spaces) -> gym.spaces.Dict:
    """Return an observation space with more keys.

    Raises:
        ConfigError: The space already has one of the keys.
    """
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"observation": space}
    if twice := parts.keys() & added.keys():
        problem = f"a wrapper adds {min(twice)!r} to the observation, which already has this key"
        fix = "Remove the wrapper, or rename the key of the environment."
        raise ConfigError(problem, key="environment.wrappers", value=min(twice), fix=fix)
    return gym.spaces.Dict({**parts, **added})


def joined(space: gym.Space[Any], observation: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation of a space, or a batch of them, with more values."""
    parts = observation if isinstance(space, gym.spaces.Dict) else {"observation": observation}
    return {**parts, **values}


def complete(added: Spaces, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values after a step.

    Raises:
        EnvError: One is missing.
    """
    for key in added:
        if key not in values:
            problem = f"info lacks {key!r}, which the wrapper InfoKeys adds to the observation"
            fix = "Report the key in the info of every step, or remove it from the wrapper's keys."
            raise EnvError(problem, key=f"info.{key}", fix=fix)
    return values


def zeros(added: Spaces, *rows: int) -> dict[str, Any]:
    """Return the values before the first step, of one environment or of some rows."""
    return {key: zeros_of(space, rows) for key, space in added.items()}


def _reader(info: Mapping[str, Any]) -> Read:
    def read(key: str, space: gym.Space[Any]) -> Any:
        value = info.get(key)
        return np.float32(value).reshape(1) if value is not None and space is _NUMBER else value

    return read


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_attribute(f"{__name__}.{name}", _LATER[name])

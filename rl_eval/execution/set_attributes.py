"""Attributes that were set on a live environment after it was made, which environments that are built like it lack."""

from __future__ import annotations

from typing import Any, Final

import gymnasium as gym

__all__ = ["attributes_set"]

_STEPS: Final = 50
"""Random steps in which an attribute that is a part of the state is expected to change."""


def attributes_set(env: Any) -> dict[str, Any]:
    """Return the public numbers and texts of a live environment that a new one of its spec has otherwise, by name.

    Those that change while a new one is played are its state, and left out. What cannot be built has none.

    Args:
        env: An environment, or several in this process, as ``DummyVecEnv`` and ``SyncVectorEnv`` hold them.
    """
    given = [one.unwrapped for one in getattr(env, "envs", [env])]
    spec = given[0].spec
    if spec is None:
        return {}
    new = gym.make(spec)
    try:
        first = _plain_attributes(new.unwrapped)
        found = {
            name: value
            for one in given
            for name, value in _plain_attributes(one).items()
            if first.get(name, value) != value
        }
        if not found:
            return {}
        _play(new)
        after = _plain_attributes(new.unwrapped)
        return {name: value for name, value in found.items() if after.get(name) == first[name]}
    finally:
        new.close()


def _plain_attributes(env: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(env).items()
        if type(value) in (bool, int, float, str) and not name.startswith("_")
    }


def _play(env: gym.Env[Any, Any]) -> None:
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(_STEPS):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()

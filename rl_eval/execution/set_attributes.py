"""Attributes that were set on a live environment after it was made, which environments that are built like it lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import gymnasium as gym

__all__ = ["attributes_set"]

_EPISODES: Final = 3
_STEPS: Final = 1_000
"""In so many random episodes and steps, an attribute that is a part of the state is expected to change."""


def attributes_set(env: Any) -> dict[str, Any]:
    """Return the public numbers and texts of a live environment that a new one of its spec has otherwise, by name.

    Those that change while a new one is played are its state, and left out.

    Args:
        env: An environment, or several in this process, as ``DummyVecEnv`` and ``SyncVectorEnv`` hold them.
    """
    given = [one.unwrapped for one in getattr(env, "envs", [env])]
    spec = given[0].spec
    if spec is None:
        return {}
    new = gym.make(spec, **({"render_mode": None} if "render_mode" in spec.kwargs else {}))
    try:
        first = _plain_attributes(new.unwrapped)
        found = {
            name: value
            for one in given
            for name, value in _plain_attributes(one).items()
            if first.get(name, value) != value
        }
        for _ in _steps_of(new) if found else ():
            now = _plain_attributes(new.unwrapped)
            found = {name: value for name, value in found.items() if now.get(name) == first[name]}
        return found
    finally:
        new.close()


def _plain_attributes(env: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(env).items()
        if type(value) in (int, float, str) and not name.startswith("_") and name != "render_mode"
    }


def _steps_of(env: gym.Env[Any, Any]) -> Iterator[None]:
    """Play an environment, and stop after each reset and step."""
    env.action_space.seed(0)
    left = _STEPS
    for episode in range(_EPISODES):
        env.reset(seed=episode)
        ended = False
        while not ended and left:
            yield
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            ended, left = terminated or truncated, left - 1
        yield

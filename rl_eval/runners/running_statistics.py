"""Wrappers with running statistics, such as ``NormalizeObservation``: rejected unless their statistics are frozen.

The statistics change in every step, so an episode depends on the episodes before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper

from rl_eval.adapters import learning_wrappers
from rl_eval.config.objects import name_of
from rl_eval.errors import ConfigError


def check_frozen(env: Any, key: str) -> None:
    """Check that no wrapper of an environment has statistics that change.

    Args:
        env: A single environment, or a vector environment.
        key: Configuration key of the environment or wrapper.

    Raises:
        ConfigError: A wrapper updates its statistics.
    """
    for name, flag in _learning(env):
        refuse_learning(key, name, flag)


def refuse_learning(key: str, name: str, flag: str) -> NoReturn:
    """Raise an error about a wrapper that updates its statistics.

    Args:
        key: Configuration key of the environment or wrapper.
        name: Name of the wrapper's class.
        flag: Attribute that freezes the statistics.
    """
    problem = f"{key} has a {name}, whose statistics change in every step, so episodes depend on earlier episodes"
    fix = (
        "Remove it. If it normalizes observations, pass the policy Normalized(policy, **frozen(env)), from "
        "rl_eval.wrappers, with the environment of the training. Otherwise, pass a function that builds the "
        f"environment with the statistics of the training and sets {flag} to False."
    )
    raise ConfigError(problem, key=key, value=name, fix=fix)


def _learning(env: Any) -> Iterator[tuple[str, str]]:
    """Yield the class name of each wrapper that updates its statistics, and the attribute that freezes it."""
    flags = learning_wrappers()
    while isinstance(env, (gym.Wrapper, VectorWrapper)):
        flag = next((flags[base] for base in map(name_of, type(env).__mro__) if base in flags), "")
        if flag and getattr(env, flag, True):
            yield type(env).__name__, flag
        env = env.env
    if isinstance(env, SyncVectorEnv):
        for one in env.envs:
            yield from _learning(one)
    elif isinstance(env, AsyncVectorEnv):  # Its environments are in other processes.
        for flag in dict.fromkeys(flags.values()):
            if all(env.call("has_wrapper_attr", flag)) and any(env.get_attr(flag)):
                yield f"wrapper with {flag}", flag

"""Environments of lanes, from a gymnasium id, ``"module:attr"`` or a callable."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import Any, Final

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from rl_eval.adapters import integration_for
from rl_eval.config.references import import_attribute
from rl_eval.config.settings import LIVE_ENVIRONMENT, EnvironmentSection, copy_containers, is_live_environment
from rl_eval.errors import ConfigError
from rl_eval.protocols import EnvContext

__all__ = ["construct_env", "import_env"]

_MEMBERS: Final = ("reset", "step", "observation_space", "action_space")

_GYMNASIUM_ID: Final = re.compile(r"(?:[\w.]+:)?(?:[\w-]+/)?[\w.-]+-v\d+")


def import_env(section: EnvironmentSection) -> None:
    """Import the module of an environment that is given by name, so that building it takes its time alone.

    What goes wrong is for :func:`construct_env` to say.
    """
    env = section.env
    with suppress(Exception):
        if isinstance(env, str) and isinstance(entry := gym.spec(env).entry_point, str):
            load_env_creator(entry)


def construct_env(
    section: EnvironmentSection, runner_index: int, lane_index: int, num_runners: int
) -> gym.Env[Any, Any]:
    """Build one environment.

    An id such as ``"CartPole-v1"`` or ``"my_pkg:MyEnv-v0"`` goes to ``gymnasium.make`` with the kwargs. An
    environment class is called with the kwargs; any other callable with an :class:`EnvContext` that holds them, or
    without an argument if it takes none.

    Raises:
        ConfigError: The id is unknown, or the path cannot be imported.
        Exception: Whatever the environment's constructor raises.
    """
    env, kwargs = section.env, copy_containers(section.env_kwargs)
    if isinstance(env, str) and (env in gym.registry or _GYMNASIUM_ID.fullmatch(env)):
        try:
            # Runners check what an environment returns themselves; the checker would cost a call per step.
            return gym.make(env, **{"disable_env_checker": True, **kwargs})
        except (gym.error.UnregisteredEnv, gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
            raise ConfigError(f"environment.env is {env!r}: {_without_period(error)}") from error
    factory = import_attribute("environment.env", env) if isinstance(env, str) and ":" in env else env
    if is_live_environment(factory):
        raise ConfigError(f"environment.env is a live {type(factory).__name__}, but {LIVE_ENVIRONMENT}")
    if not callable(factory):
        raise ConfigError(
            f'environment.env is {env!r}: give a gymnasium id such as "CartPole-v1", "module:attr" or a callable'
        )
    context = EnvContext(kwargs, runner_index, lane_index, num_runners)
    built: gym.Env[Any, Any] = _call(factory, kwargs, context)
    if not isinstance(built, gym.Env) and (adapt := integration_for(built, "as_env")) is not None:
        built = adapt(built)
    if lacking := [name for name in _MEMBERS if getattr(built, name, None) is None]:
        raise ConfigError(
            f"environment.env {env!r} built a {type(built).__name__}, which is not a gymnasium.Env: "
            f"it lacks {', '.join(lacking)}"
        )
    return built


def _call(factory: Any, kwargs: dict[str, Any], context: EnvContext) -> Any:
    if _is_env_class(factory):
        return factory(**kwargs)
    try:
        takes_none = not inspect.signature(factory).parameters
    except (TypeError, ValueError):  # Some callables hide their signature.
        takes_none = False
    if takes_none and kwargs:
        raise ConfigError(
            f"environment.env_kwargs are {kwargs!r}, but {factory!r} takes no argument: have it take an EnvContext, in "
            "which they are"
        )
    return factory() if takes_none else factory(context)


def _is_env_class(factory: Any) -> bool:
    return inspect.isclass(factory) and issubclass(factory, gym.Env)


def _without_period(error: Exception) -> str:
    return str(error).rstrip(". ")

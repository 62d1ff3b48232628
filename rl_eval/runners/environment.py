"""Construction of environments, from a gymnasium id, ``"module:attr"`` or a callable."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from rl_eval.adapters import Integration, integration_for, simulator_for
from rl_eval.config.references import import_attribute, takes_observations
from rl_eval.config.settings import LIVE_ENVIRONMENT, EnvironmentSection, copy_containers, is_live_environment
from rl_eval.errors import ConfigError, nearest
from rl_eval.protocols import EnvContext
from rl_eval.runners.foreign_worker import context_parameter
from rl_eval.runners.running_statistics import check_frozen

if TYPE_CHECKING:
    from rl_eval.scheduling.conditions import Conditions


_MEMBERS: Final = ("reset", "step", "observation_space", "action_space")

GYMNASIUM_ID: Final = re.compile(r"(?:[\w.]+:)?(?:[\w-]+/)?[\w.-]+-v\d+")

_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")

_NAMESPACE: Final = (
    'Put the package that registers the id before the id, as in "ale_py:ALE/Pong-v5", which needs '
    "pip install 'rl-eval[atari]'."
)
_BY_MODULE: Final = 'If a module registers the id, put the module before the id, as in "my_module:MyEnv-v0".'
_NOT_HERE: Final = (
    "An id that a script registers is not registered in runner processes. Pass the class, or a function that builds "
    'the environment. If my_module registers the id on import, pass "my_module:MyEnv-v0".'
)
_BATCHED: Final = "Set runners.runner: batched (--batched), or build single environments."
_MUJOCO: Final = (
    "The version of the simulator affects the episodes. To install the version of our tests, run "
    'pip install -c constraints.txt ".[mujoco]".'
)


def import_env(section: EnvironmentSection) -> None:
    """Import the module of a gymnasium id, so that construction times exclude the import.

    Ignore errors; :func:`construct_env` raises them.
    """
    env = section.env
    with suppress(Exception):
        if section.python is None and isinstance(env, str) and isinstance(entry := gym.spec(env).entry_point, str):
            load_env_creator(entry)


def construct_env(
    section: EnvironmentSection, runner_index: int, lane_index: int, num_runners: int, remote: bool = False
) -> gym.Env[Any, Any]:
    """Build one environment of one agent, with its wrappers; see :func:`build_env`.

    Raises:
        ConfigError: The id is unknown, a path cannot be imported, a wrapper or the environment is of a wrong type, or a
            wrapper updates running statistics.
        Exception: A constructor raised it.
    """
    env: gym.Env[Any, Any] = build_env(section, runner_index, lane_index, num_runners, remote)
    if not isinstance(env, gym.Env) and (adapt := integration_for(env, "as_env")) is not None:
        env = adapt(env)
    # A gym.Env may answer every name in __getattr__, so only a name that it declares counts.
    if (inspect.getattr_static if isinstance(env, gym.Env) else getattr)(env, "possible_agents", None) is not None:
        problem = (
            f"environment.env {section.env!r} built a {type(env).__name__}, which is an environment of several agents"
        )
        fix = (
            "Name the agents' policies in policy.policies. For one policy that acts for all agents, set runners.runner "
            'to "multi_agent".'
        )
        raise ConfigError(problem, key="environment.env", value=section.env, fix=fix)
    if isinstance(env, gym.vector.VectorEnv) or (hasattr(env, "num_envs") and not isinstance(env, gym.Env)):
        problem = (
            f"environment.env {section.env!r} built a {type(env).__name__}, which steps {env.num_envs} environments in "
            "one call"
        )
        raise ConfigError(problem, key="environment.env", value=type(env).__name__, fix=_BATCHED)
    _check_members(env, f"environment.env {section.env!r}")
    _check_seed(env, f"environment.env {section.env!r}")
    check_frozen(env, "environment.env")
    for place, wrapper in enumerate(section.wrappers):
        env = wrapped(env, wrapper, f"environment.wrappers[{place}]")
        check_frozen(env, f"environment.wrappers[{place}]")
    if not section.action_masks:
        return env
    from rl_eval.runners.action_masks import ActionMasks

    return ActionMasks(env)


def build_env(
    section: EnvironmentSection,
    runner_index: int,
    lane_index: int,
    num_runners: int,
    remote: bool = False,
    num_envs: int | None = None,
) -> Any:
    """Build one environment of any type, without wrappers.

    An id such as ``"CartPole-v1"`` or ``"my_pkg:MyEnv-v0"`` is passed to ``gymnasium.make`` with the kwargs. If
    ``num_envs`` is set, it becomes one of the kwargs, and the id is passed to ``gymnasium.make_vec``.

    A callable is called with the kwargs, or with an :class:`EnvContext` if it has a parameter for one. This parameter
    is annotated ``EnvContext``. Without such an annotation, it is the first parameter if one of two conditions is met:

    - its name is ``config``, ``context`` or ``env_config``;
    - it has no default, and neither it nor ``num_envs`` is one of the kwargs.

    For an environment class, both conditions must be met. If the kwargs contain the name of a class's annotated
    parameter, as in ``{"config": {"size": 3}}``, that value is the contents of the context. If the context is the
    first argument, the kwargs that are keyword-only parameters are passed too.

    Raises:
        ConfigError: The id is unknown, or the path cannot be imported.
        Exception: The environment's constructor raised it.
    """
    env, kwargs = section.env, copy_containers(section.env_kwargs)
    if num_envs is not None:
        kwargs["num_envs"] = num_envs
    if (library := simulator_for(env)) is not None:
        return _simulator(library, env, kwargs)
    if isinstance(env, str) and _is_id(env):
        try:
            # Runners check what an environment returns themselves; the checker would cost a call per step.
            return (
                gym.make(env, **{"disable_env_checker": True, **kwargs})
                if num_envs is None
                else gym.make_vec(env, **kwargs)
            )
        except (gym.error.UnregisteredEnv, gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
            hint = _NAMESPACE if isinstance(error, gym.error.NamespaceNotFound) else ""
            if isinstance(error, ModuleNotFoundError) and str(env).startswith("ale_py:"):
                hint = "Run pip install 'rl-eval[atari]'."
            if isinstance(error, gym.error.UnregisteredEnv) and not hint and "Did you mean" not in str(error):
                here = _BY_MODULE if isinstance(error, gym.error.NameNotFound) else ""
                hint = _NOT_HERE if num_runners or remote else here
            if isinstance(error, gym.error.DependencyNotInstalled) and "mujoco" in str(error).lower():
                hint = _MUJOCO
            text = f"environment.env is {env!r}: {str(error).rstrip('. ')}"
            raise ConfigError(text, key="environment.env", value=env, fix=hint) from error
    factory = import_attribute("environment.env", env) if isinstance(env, str) and ":" in env else env
    if is_live_environment(factory):
        if num_envs is not None:
            return factory
        problem = f"environment.env is a live {type(factory).__name__}, but {LIVE_ENVIRONMENT}"
        raise ConfigError(problem, key="environment.env", value=type(factory).__name__)
    if not callable(factory):
        problem = f"environment.env is {env!r}" + (f": did you mean {meant!r}?" if (meant := _meant_name(env)) else "")
        fix = 'Pass a gymnasium id such as "CartPole-v1", "module:attr" or a callable.'
        raise ConfigError(problem, key="environment.env", value=env, fix=fix)
    if takes_observations(factory):
        problem = f"environment.env is {env!r}, a function of observations: that is a policy, not an environment"
        raise ConfigError(problem, key="environment.env", value=env)
    return _call(factory, kwargs, EnvContext(kwargs, runner_index, lane_index, num_runners, remote))


def takes_context(section: EnvironmentSection, num_envs: int | None = None) -> bool:
    """Whether the function that builds an environment receives an :class:`EnvContext`.

    Such a function may choose a port, a device or a folder by the indices of the context. So two of its environments
    with equal indices must not exist at the same time.
    """
    if section.python is not None:
        return True
    env, given = section.env, {**section.env_kwargs, **({} if num_envs is None else {"num_envs": num_envs})}
    try:
        factory = import_attribute("environment.env", env) if isinstance(env, str) and not _is_id(env) else env
        parameters = inspect.signature(factory).parameters.values()
    except (ConfigError, TypeError, ValueError):  # An id of a registry, or a callable that hides its signature.
        return callable(env) and not _is_env_class(env)
    return context_parameter(parameters, given, _is_env_class(factory)) is not None


def _is_id(env: str) -> bool:
    """Whether a string is an id of gymnasium's registry, or can only be one."""
    return env in gym.registry or GYMNASIUM_ID.fullmatch(env) is not None


def _simulator(library: Integration, env: str, kwargs: dict[str, Any]) -> Any:
    """Build the batched simulator of a library.

    Raises:
        ConfigError: ``kwargs`` lacks ``num_envs``, so the runner needs single environments. Or the library is not
            installed.
    """
    if "num_envs" not in kwargs:
        problem = f"environment.env is {env!r}, a simulator of {library.name} that steps many environments in one call"
        raise ConfigError(problem, key="environment.env", value=env, fix="Set runners.runner: batched (--batched).")
    build = import_attribute("environment.env", library.simulator)
    return build(env.partition(":")[2], **kwargs)


def check_id(env: str, library: str, known: Collection[str]) -> None:
    """Check that a library has the simulator that an id ``LIBRARY:NAME`` names.

    Raises:
        ConfigError: The library does not have the simulator; the message suggests the nearest name.
    """
    name = env.partition(":")[2]
    if name not in known:
        problem = f"environment.env is {env!r}, which is not in {library}; {nearest(name, known)}"
        raise ConfigError(problem, key="environment.env", value=env)


def episode_hook(env: gym.Env[Any, Any]) -> Callable[[int, int, int], None] | None:
    """Return :meth:`rl_eval.EpisodeAware.begin_episode` of an environment; None if it has no such method."""
    hook: Callable[[int, int, int], None] | None = attribute_of(env, "begin_episode")
    return hook if callable(hook) else None


def attribute_of(env: Any, name: str) -> Any:
    """Return an attribute of an environment or of an environment that it wraps; None if there is no such attribute."""
    if isinstance(env, gym.Env):
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
    return getattr(env, name, None)


def check_condition_keys(conditions: Conditions | None, declared: Sequence[str] | None) -> None:
    """Check that an environment supports the keys of all conditions.

    Args:
        conditions: The conditions; None without conditions.
        declared: Keys that the environment lists in ``condition_keys``; None if the environment has no such attribute.

    Raises:
        ConfigError: The environment does not declare one of the keys.
    """
    if conditions is None or not (unknown := [key for key in conditions.keys if key not in (declared or ())]):
        return
    declares = f"declares only {', '.join(declared)}" if declared else "declares no condition_keys"
    problem = f"evaluation.conditions has the key {unknown[0]!r}, but the environment {declares}"
    fix = (
        "Give the environment or a wrapper an attribute condition_keys: the names of the options that its reset() "
        f"supports, such as condition_keys = {conditions.keys!r}."
    )
    raise ConfigError(problem, key="evaluation.conditions", value=unknown[0], fix=fix)


def time_limit(env: Any) -> int | None:
    """Return the lowest limit, in steps, of an environment's ``TimeLimit`` wrappers; None if there are none."""
    limits = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            limits.append(int(env._max_episode_steps))
        env = env.env
    return min(limits, default=None)


def _meant_name(env: Any) -> str:
    """Return a suggestion for a wrong name; empty if there is none.

    The first choice is the newest version of an id with the same name, ignoring case. The second is ``module:attr``.
    """
    found = [spec for spec in gym.registry.values() if spec.name.casefold() == str(env).casefold()]
    if found:
        return max(found, key=lambda spec: spec.version or 0).id
    if isinstance(env, str) and env.endswith(".py"):
        return f"{env.removesuffix('.py').replace('/', '.')}:NAME"
    if isinstance(env, str) and env.isidentifier() and find_spec(env) is not None:
        return f"{env}:NAME"
    return ":".join(env.rsplit(".", 1)) if isinstance(env, str) and _DOTTED.fullmatch(env) else ""


def wrapper_of(wrapper: Any, key: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the factory and the arguments of an entry of ``environment.wrappers``.

    Raises:
        ConfigError: The entry is not a wrapper, or cannot be imported.
    """
    kwargs = dict(wrapper) if isinstance(wrapper, Mapping) else {"wrapper": wrapper}
    given = kwargs.pop("wrapper", None)
    factory = import_attribute(key, given) if isinstance(given, str) else given
    if not callable(factory):
        problem = f"{key} is {wrapper!r}, which is not a wrapper"
        fix = (
            'Pass "module:Class", a callable that takes the environment, or a mapping with "wrapper" and its '
            "keyword arguments."
        )
        raise ConfigError(problem, key=key, value=wrapper, fix=fix)
    return factory, copy_containers(kwargs)


def wrapped(env: gym.Env[Any, Any], wrapper: Any, key: str) -> gym.Env[Any, Any]:
    """Put a wrapper around an environment."""
    factory, kwargs = wrapper_of(wrapper, key)
    try:
        built: gym.Env[Any, Any] = factory(env, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{key}: {wrapper!r} cannot be built: {error}", key=key, value=wrapper) from error
    _check_members(built, f"{key} {wrapper!r}")
    return built


def _check_members(built: Any, what: str) -> None:
    if lacking := [name for name in _MEMBERS if getattr(built, name, None) is None]:
        problem = f"{what} built a {type(built).__name__}, which is not a gymnasium.Env: it lacks {', '.join(lacking)}"
        raise ConfigError(problem, key=what.partition(" ")[0], value=type(built).__name__)


def _check_seed(built: Any, what: str) -> None:
    """Raise if ``reset`` of the innermost environment takes no seed, even if ``reset`` of a wrapper takes one."""
    inner = getattr(built, "unwrapped", built)
    with suppress(TypeError, ValueError):  # Some methods hide their signature.
        parameters = inspect.signature(inner.reset).parameters.values()
        if not any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in parameters):
            refuse_unseeded(what, type(inner).__name__)


def refuse_unseeded(what: str, name: str) -> NoReturn:
    """Raise an error about an environment whose ``reset`` takes no seed.

    Args:
        what: Configuration key of the environment, and its value.
        name: Name of its class.
    """
    problem = f"{what} built a {name}, whose reset() takes no seed"
    fix = "Define reset(self, *, seed=None, options=None), with super().reset(seed=seed) as its first line."
    raise ConfigError(problem, key=what.partition(" ")[0], value=name, fix=fix)


def _call(factory: Any, kwargs: dict[str, Any], context: EnvContext) -> Any:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # Some callables hide their signature.
        return factory(**kwargs) if _is_env_class(factory) else factory(context)
    parameters = signature.parameters
    wide = parameters.get("num_envs")
    if wide is not None and wide.default is wide.empty and "num_envs" not in kwargs:
        name = getattr(factory, "__name__", repr(factory))
        problem = (
            f"environment.env is {name}, which needs num_envs to build many environments that are stepped in one call"
        )
        raise ConfigError(problem, key="environment.env", value=name, fix=_BATCHED)
    receiver = context_parameter(parameters.values(), kwargs, _is_env_class(factory))
    if receiver is None:
        _check_arguments(factory, signature, kwargs)
        return factory(**kwargs)
    if receiver.name in kwargs and _is_env_class(factory):
        if isinstance(items := kwargs[receiver.name], Mapping):
            context.clear()
            kwargs[receiver.name] = context
            context.update(items)
        _check_arguments(factory, signature, kwargs)
        return factory(**kwargs)
    if receiver is not next(iter(parameters.values())):
        return factory(**{**kwargs, receiver.name: context})
    named = {name: kwargs[name] for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY and name in kwargs}
    return factory(context, **named)


def _check_arguments(made: Any, signature: inspect.Signature, kwargs: dict[str, Any]) -> None:
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        given = f"has {', '.join(kwargs)}" if kwargs else "is empty"
        name = getattr(made, "__name__", repr(made))
        taken = any(one.name == "num_envs" or one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        if "num_envs" in kwargs and not taken:
            problem = f"environment.env is {name}, which has no parameter num_envs"
            fix = (
                "For runners.runner: batched, add the parameter num_envs, and build num_envs slots. For single "
                "environments, set runners.runner: vector (without --batched)."
            )
            raise ConfigError(problem, key="environment.env", value=name, fix=fix) from error
        advice = "To receive env_kwargs as one mapping, add a parameter with the annotation EnvContext."
        problem = (
            f"environment.env_kwargs {given}, but {name} takes {', '.join(signature.parameters) or 'no arguments'}: "
            f"{error}"
        )
        fix = "" if inspect.isclass(made) else advice
        raise ConfigError(problem, key="environment.env_kwargs", value=", ".join(kwargs), fix=fix) from error


def _is_env_class(factory: Any) -> bool:
    # observation_space is a method in environments of several agents, and an attribute in others.
    return inspect.isclass(factory) and (
        issubclass(factory, gym.Env) or callable(getattr(factory, "observation_space", None))
    )

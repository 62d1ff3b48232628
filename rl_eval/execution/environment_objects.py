"""Settings for environments like an environment object.

An evaluation builds its own environments. From an object, ``gymnasium.make`` rebuilds them with the object's arguments
and wrappers. The arguments do not contain attributes that were set on the object, or the methods of a subclass. So one
environment is rebuilt at once, and its classes and public plain attributes are compared with those of the object.
"""

from __future__ import annotations

import copy
import functools
import inspect
import numbers
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.utils import RecordConstructorArgs

from rl_eval.adapters import integrations, learning_wrappers
from rl_eval.config.builder import EvalConfig
from rl_eval.config.objects import name_of
from rl_eval.errors import ConfigError, summary_of
from rl_eval.policies import random_state_kept
from rl_eval.records.plain import canonical_digest, plain
from rl_eval.runners.environment import build_env, time_limit, wrapped
from rl_eval.supervision.caller import working_in

_MADE: Final = ("gymnasium.wrappers.common:OrderEnforcing", "gymnasium.wrappers.common:PassiveEnvChecker")
"""Wrappers that ``gymnasium.make`` adds, and that do not change episodes."""
_ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
_NOT_OF_THE_EPISODES: Final = ("render_mode", "num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments of ``gymnasium.make`` and ``make_vec``, or attributes, that do not change episodes."""
_NO_LIMIT: Final = -1
"""``max_episode_steps`` of ``gymnasium.make`` for an environment without the time limit of its id."""
_SCALARS: Final = (numbers.Number, np.generic, str, bytes, type(None))
_TRIALS: Final = 20
_TRIAL_STEPS: Final = 10
"""Trials, and steps in each, that show which attributes of an environment change in its episodes."""
_ABSENT: Final = "(absent)"

_Values = dict[tuple[int, str], Any]
"""Attributes, by level of the rebuilt environment (0 is the outermost wrapper) and by name."""


class _Wrapper(NamedTuple):
    make: Any
    """Class of the wrapper."""
    kwargs: Mapping[str, Any] | None
    """Its arguments; None if the wrapper does not record them."""


class _Slot(NamedTuple):
    """One environment of the object: the object itself, or one of a vector environment."""

    kind: str
    """Name of the object's class."""
    spec: Any
    limit: int | None
    """Time limit, in steps."""
    wrappers: Sequence[_Wrapper]
    """Its wrappers, the innermost first."""
    differing: Callable[[Sequence[Any], tuple[str, ...]], _Values]
    """Returns the attributes that differ from those of the levels of a rebuilt environment. The second argument names
    wrappers to ignore. It raises an error if the classes differ."""
    num_envs: int | None = None
    """Number of environments that the object steps in one call; None for a single environment."""


def is_environment_object(given: Any) -> bool:
    """Return whether an argument is an environment or a vector environment, and not a name, a function or a class."""
    return not isinstance(given, (str, type)) and hasattr(given, "reset")


def environment_like(env: Any, *, of_the_model: bool) -> dict[str, Any]:
    """Return the arguments of ``EvalConfig.environment`` for environments like ``env``.

    For an environment object, an environment is built, compared with the object, and closed.

    Args:
        env: The environment, as for :func:`rl_eval.evaluate_policy`.
        of_the_model: Whether to leave out wrappers that the integration of the model replaces.

    Raises:
        ConfigError: The environment cannot be rebuilt, or the rebuilt environment differs from the object.
    """
    if not is_environment_object(env):
        return {"env": env}
    harmless: tuple[str, ...] = _MADE
    for one in integrations():
        harmless += one.watching_wrappers + (one.modelled_wrappers if of_the_model else ())
    slots = _slots_of(_without_wrappers(env, harmless))
    described = [_described(slot, harmless) for slot in slots]
    texts = [_ADDRESS.sub("", str(plain(one))) for one in described]  # Each environment may have its own functions.
    for number, text in enumerate(texts):
        if text != texts[0]:
            problem = f"env has different environments: number 0 is {texts[0]}, and number {number} is {text}"
            raise ConfigError(problem, key="env", value=text, fix="Evaluate the environments one after the other.")
    with random_state_kept(), working_in(None):
        return _compared(described[0], slots, harmless)


def _compared(arguments: dict[str, Any], slots: Sequence[_Slot], harmless: tuple[str, ...]) -> dict[str, Any]:
    """Rebuild an environment, compare it with the object, and return the arguments.

    The returned arguments do not contain wrappers that ``gymnasium.make`` adds itself.
    """
    with _rebuilt(arguments, slots[0], harmless) as (env, own):
        levels = _levels(env, harmless)
        differing: _Values = {}
        for slot in slots:
            differing |= slot.differing(levels, harmless)
        built = {place: _read(levels, place) for place in differing}
        fixed = _fixed(env, levels, differing) if differing else {}
    if not fixed:
        return own
    with _rebuilt(arguments, slots[0], harmless) as (env, _):
        levels = _levels(env, harmless)
        common = [place for place in fixed if _same(built[place], _read(levels, place))]
    if common:  # Otherwise each environment has its own value, such as a port or a time.
        level, name = common[0]
        was, new = (reprlib.repr(values[level, name]) for values in (fixed, built))
        problem = (
            f"env has a {type(levels[level]).__name__} with {name}={was}, but an environment that is built with the "
            f"same arguments has {name}={new}"
        )
        raise _not_rebuilt(problem, name)
    return own


def _not_rebuilt(problem: str, value: str) -> ConfigError:
    fix = "Pass a function that builds the environment, such as lambda: MyEnv()."
    return ConfigError(problem, key="env", value=value, fix=fix)


def _described(slot: _Slot, harmless: tuple[str, ...]) -> dict[str, Any]:
    spec = slot.spec
    if not isinstance(spec, EnvSpec):
        raise _not_rebuilt(f"env is a {slot.kind} object that gymnasium.make did not build", slot.kind)
    if spec.id not in gym.registry:
        raise _not_rebuilt(f"env is a {slot.kind} object with the id {spec.id!r}, which is not registered", slot.kind)
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in _NOT_OF_THE_EPISODES}
    if slot.limit is not None:
        kwargs["max_episode_steps"] = slot.limit
    elif gym.registry[spec.id].max_episode_steps is not None:
        kwargs["max_episode_steps"] = _NO_LIMIT
    wrappers = [one for one in slot.wrappers if not name_of(one.make).startswith(harmless)]
    return {"env": spec.id, "env_kwargs": kwargs, "wrappers": tuple(map(_wrapper_with_arguments, wrappers))}


def _wrapper_with_arguments(wrapper: _Wrapper) -> dict[str, Any]:
    name = wrapper.make.__name__
    if name_of(wrapper.make) in learning_wrappers():
        problem = f"env has a wrapper {name}, whose statistics a new environment does not have"
        fix = (
            "Remove it. If it normalizes observations, pass the policy Normalized(policy, **frozen(env)), from "
            "rl_eval.wrappers."
        )
        raise ConfigError(problem, key="env", value=name, fix=fix)
    kwargs = {} if len(inspect.signature(wrapper.make).parameters) == 1 else wrapper.kwargs
    if kwargs is None:
        problem = f"env has a wrapper {name}, which does not record its arguments"
        raise ConfigError(
            problem, key="env", value=name, fix="Pass a function that builds the environment with this wrapper."
        )
    return {"wrapper": wrapper.make, **kwargs}


# ---------------------------------------------------------------------- the object


def _without_wrappers(env: Any, harmless: tuple[str, ...]) -> Any:
    """Return the vectorized environment inside its wrappers."""
    while (inner := getattr(env, "venv", env.env if isinstance(env, gym.vector.VectorWrapper) else None)) is not None:
        wrapper = type(env)
        if not name_of(wrapper).startswith(harmless):
            problem = (
                f"env has a {wrapper.__name__} around several environments, but an episode here has a single "
                "environment"
            )
            fix = "Pass a function that builds a single environment, with a wrapper for single environments."
            raise ConfigError(problem, key="env", value=wrapper.__name__, fix=fix)
        env = inner
    return env


def _slots_of(env: Any) -> list[_Slot]:
    kind = type(env).__name__
    if isinstance(env, gym.Env) or not hasattr(env, "get_attr"):
        return [_here(kind, env)]
    if hasattr(env, "envs"):
        return [_here(kind, one) for one in env.envs]
    call = getattr(env, "env_method", None) or env.call

    @functools.cache
    def ask(name: str) -> Sequence[Any] | None:
        return env.get_attr(name) if all(call("has_wrapper_attr", name)) else None

    texts = call("__str__")
    return [_elsewhere(kind, spec, ask, texts[number], number) for number, spec in enumerate(env.get_attr("spec"))]


def _here(kind: str, env: Any) -> _Slot:
    """Return the slot of an environment in this process."""

    def differing(rebuilt: Sequence[Any], harmless: tuple[str, ...]) -> _Values:
        mine = _levels(env, harmless)
        if [*map(type, mine)] != [*map(type, rebuilt)]:
            chains = [" in a ".join(name_of(type(level)) for level in reversed(one)) for one in (mine, rebuilt)]
            raise _not_rebuilt(f"env is a {chains[0]}, but its arguments build a {chains[1]}", type(mine[-1]).__name__)
        return {
            (number, name): value
            for number, (level, other) in enumerate(zip(mine, rebuilt, strict=True))
            for name in sorted({*_names(level), *_names(other)})
            if not _same(value := getattr(level, name, _ABSENT), getattr(other, name, _ABSENT))
        }

    spec = getattr(env, "spec", None)
    if not isinstance(env, gym.Env):
        return _Slot(kind, spec, getattr(spec, "max_episode_steps", None), (), differing, env.num_envs)
    wrappers = [
        _Wrapper(type(level), _recorded(level))
        for level in reversed(_chain(env)[:-1])
        if not isinstance(level, gym.wrappers.TimeLimit)
    ]
    return _Slot(kind, spec, time_limit(env), wrappers, differing)


def _recorded(wrapper: Any) -> Mapping[str, Any] | None:
    """Return the arguments of a wrapper, without the environment; None if it does not record them."""
    if not isinstance(wrapper, RecordConstructorArgs):
        return None
    return {name: value for name, value in vars(wrapper)["_saved_kwargs"].items() if name != "env"}


def _elsewhere(kind: str, spec: Any, ask: Callable[[str], Sequence[Any] | None], text: str, number: int) -> _Slot:
    """Return the slot of an environment in another process, whose attributes can only be read.

    Args:
        kind: Name of the class of the vector environment.
        spec: The environment's ``spec``.
        ask: Returns an attribute of all environments; None if one of them does not have it.
        text: The environment as text.
        number: Number of the environment.
    """

    def differing(rebuilt: Sequence[Any], harmless: tuple[str, ...]) -> _Values:
        base = rebuilt[-1]
        made: Any = type(base)
        if made.__str__ is gym.Env.__str__ and str(base) not in text:
            raise _not_rebuilt(f"env is a {text}, but its arguments build a {base}", text)
        # Only the outermost attribute of a name can be read.
        owners = {name: level for level in reversed(range(len(rebuilt))) for name in _names(rebuilt[level])}
        found: _Values = {}
        for name, level in owners.items():
            value = getattr(rebuilt[level], name)
            # What is None here may be an object there that cannot be sent, such as a window.
            if value is not None and (theirs := ask(name)) is not None and not _same(theirs[number], value):
                found[level, name] = theirs[number]
        return found

    recorded = getattr(spec, "additional_wrappers", ())
    try:
        wrappers = [_Wrapper(load_env_creator(one.entry_point), one.kwargs) for one in recorded]
    except (ImportError, AttributeError) as error:
        raise _not_rebuilt(f"env has a wrapper that cannot be imported: {summary_of(error)}", kind) from error
    return _Slot(kind, spec, getattr(spec, "max_episode_steps", None), wrappers, differing)


# ---------------------------------------------------------------------- the rebuilt environment


@contextmanager
def _rebuilt(arguments: dict[str, Any], like: _Slot, harmless: tuple[str, ...]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Build an environment from arguments, and close it at the end.

    Yields:
        The environment, and the arguments without wrappers that ``gymnasium.make`` adds itself.
    """
    kwargs, wrappers = arguments["env_kwargs"], arguments["wrappers"]
    if like.num_envs is not None:
        kwargs = {**kwargs, "vectorization_mode": like.spec.kwargs.get("vectorization_mode")}
    section = EvalConfig().environment(arguments["env"], env_kwargs=kwargs).build().environment
    env = None
    try:
        try:
            env = build_env(section, 0, 0, 0, num_envs=like.num_envs)
            inside = [one for one in _levels(env, harmless)[:-1] if not isinstance(one, gym.wrappers.TimeLimit)]
            wrappers = wrappers[len(inside) :]
            for wrapper in wrappers:
                env = wrapped(env, wrapper, "env")
        except Exception as error:
            raise _not_rebuilt(
                f"env is a {like.kind} that cannot be rebuilt: {summary_of(error)}", like.kind
            ) from error
        yield env, {**arguments, "wrappers": wrappers}
    finally:
        if env is not None:
            env.close()


def _chain(env: Any) -> list[Any]:
    """Return an environment and all that it wraps, the outermost first."""
    chain = [env]
    while isinstance(env, gym.Wrapper):
        env = env.env
        chain.append(env)
    return chain


def _levels(env: Any, harmless: tuple[str, ...]) -> list[Any]:
    """Return the levels of an environment that affect episodes, the outermost first. Of adjacent time limits, keep one.

    The lowest of them is an argument of the rebuilt environment.
    """
    levels = [one for one in _chain(env) if not name_of(type(one)).startswith(harmless)]
    limits = [isinstance(one, gym.wrappers.TimeLimit) for one in levels]
    return [
        one
        for one, is_limit, before in zip(levels, limits, [False, *limits], strict=False)
        if not (is_limit and before)
    ]


def _fixed(env: Any, levels: Sequence[Any], differing: _Values) -> _Values:
    """Return the attributes that are settings of an environment, and not part of its episodes.

    Episodes change the others: a reset or a step changes them, or a reset overwrites the value of the object.

    Args:
        env: Rebuilt environment, which is changed.
        levels: Its levels.
        differing: Attributes that differ from those of the object, with the values of the object.
    """
    built = {place: _read(levels, place) for place in differing}
    fixed = dict(differing)

    def keep_unchanged(values: _Values) -> None:
        for place in [one for one in fixed if not _same(_read(levels, one), values[one])]:
            del fixed[place]

    with suppress(Exception):  # An attribute is fixed unless an episode shows the contrary.
        env.action_space.seed(0)
        env.reset(seed=0)
        keep_unchanged(built)
        for _ in range(_TRIALS):
            for _ in range(_TRIAL_STEPS):
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if np.any(terminated) or np.any(truncated):
                    env.reset()
            keep_unchanged(built)
        for (level, name), value in fixed.items():
            setattr(levels[level], name, copy.deepcopy(value))
        env.reset(seed=1)
        keep_unchanged(differing)
    return fixed


def _read(levels: Sequence[Any], place: tuple[int, str]) -> Any:
    """Return a copy of an attribute's value, because the environment may change an array in place."""
    return copy.deepcopy(getattr(levels[place[0]], place[1], _ABSENT))


def _names(level: Any) -> list[str]:
    """Return the names of the public plain attributes of an environment or a wrapper."""
    return [
        name
        for name, value in getattr(level, "__dict__", {}).items()
        if not name.startswith("_") and name not in _NOT_OF_THE_EPISODES and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, an array, or consists of them."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal. Values that are not plain are not compared."""
    if not _is_plain(value) or not _is_plain(other):
        return True
    if not isinstance(value, np.ndarray) and not isinstance(other, np.ndarray):
        with suppress(ValueError):  # Of arrays in a container.
            if value == other:
                return True
    return canonical_digest(value) == canonical_digest(other)  # NaN equals NaN.

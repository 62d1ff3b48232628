"""Which environment a lane gets from an id, a path or a callable, and what is said when there is none."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import EnvironmentSection
from rl_eval.errors import ConfigError
from rl_eval.protocols import EnvContext
from rl_eval.runners.environment import build_env, construct_env
from tests.refused import refused


class Corridor(gym.Env[Any, Any]):
    """The least environment: walk to the end."""

    def __init__(self, length: int = 3, table: Any = None) -> None:
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.table = table


class Holder:
    """A namespace, for paths with a dot behind the colon."""

    @staticmethod
    def make(context: EnvContext) -> Corridor:
        return Corridor(**context)


class DuckTyped:
    """Has an environment's methods without being a gymnasium.Env."""

    def __init__(self, context: EnvContext) -> None:
        self.context = context
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, True, False, {}


class WithoutObservationSpace(gym.Env[Any, Any]):
    """Forgot one of its spaces."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)


def seen_context(context: EnvContext) -> Corridor:
    env = Corridor()
    env.context = context  # type: ignore[attr-defined]
    return env


def greedy(context: EnvContext) -> Corridor:
    """Take its arguments out of the context."""
    return Corridor(length=context.pop("length"))


def broken(context: EnvContext) -> Corridor:
    raise OSError("the port is taken")


NOT_CALLABLE = 3


def build(env: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return construct_env(
        EnvironmentSection(env=env, env_kwargs=kwargs or {}), runner_index=4, lane_index=2, num_runners=9
    )


def call(make: Callable[..., Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Return what a factory returns, without the checks of an environment."""
    return build_env(EnvironmentSection(env=make, env_kwargs=kwargs or {}), 4, 2, 9)


@pytest.fixture
def registered() -> Iterator[str]:
    """Register an environment of this file for one test."""
    name = "Corridor-v7"
    gym.register(name, f"{__name__}:Corridor", max_episode_steps=11)
    yield name
    del gym.registry[name]


# ------------------------------------------------------------------------------ what is built


def test_a_gymnasium_id_is_made_with_its_kwargs() -> None:
    """An id goes to ``gymnasium.make``, wrappers and registered limits included."""
    env = build("CartPole-v1", {"max_episode_steps": 17})
    assert isinstance(env.unwrapped, gym.make("CartPole-v1").unwrapped.__class__)
    assert env.spec.max_episode_steps == 17


def test_an_id_may_name_the_module_that_registers_it(registered: str) -> None:
    """``module:Id-v0`` imports the module first, as gymnasium does."""
    env = build(f"{__name__}:{registered}", {"length": 5})
    assert (env.unwrapped.length, env.spec.max_episode_steps) == (5, 11)


@pytest.mark.parametrize("env", [Corridor, f"{__name__}:Corridor"], ids=["class", "path"])
def test_an_environment_class_is_called_with_the_kwargs(env: Any) -> None:
    """A subclass of gymnasium.Env gets the kwargs as keywords."""
    built = build(env, {"length": 8})
    assert type(built) is Corridor
    assert built.length == 8


@pytest.mark.parametrize("env", [seen_context, f"{__name__}:seen_context"], ids=["callable", "path"])
def test_a_callable_is_called_with_the_context(env: Any) -> None:
    """Any other callable gets one argument: a dict of the kwargs that knows where it runs."""
    context = build(env, {"length": 8}).context
    assert isinstance(context, EnvContext)
    assert context == {"length": 8}
    assert (context.runner_index, context.lane_index, context.num_runners, context.remote) == (4, 2, 9, False)


def test_a_path_may_have_dots_behind_the_colon() -> None:
    """``module:Class.method`` is found."""
    assert build(f"{__name__}:Holder.make", {"length": 6}).length == 6


def test_an_environment_need_not_be_a_subclass() -> None:
    """What has spaces, ``reset`` and ``step`` is an environment; its class is called like any callable."""
    assert build(DuckTyped, {"a": 1}).context == {"a": 1}


def test_an_environment_that_takes_its_arguments_away_can_be_built_again() -> None:
    """The configured kwargs are not the factory's to change."""
    section = EnvironmentSection(env=greedy, env_kwargs={"length": 4})
    assert [construct_env(section, 0, lane, 1).length for lane in range(2)] == [4, 4]  # type: ignore[attr-defined]
    assert section.env_kwargs == {"length": 4}


@pytest.mark.parametrize("env", [Corridor, Holder.make], ids=["class", "callable"])
def test_environments_do_not_share_the_containers_in_their_kwargs(env: Any) -> None:
    """What one environment does to a list that it was given, another never sees."""
    section = EnvironmentSection(env=env, env_kwargs={"table": [1, 2]})
    first, second = (construct_env(section, 0, lane, 1) for lane in range(2))
    first.table.append(3)  # type: ignore[attr-defined]
    assert second.table == [1, 2]  # type: ignore[attr-defined]
    assert section.env_kwargs == {"table": [1, 2]}


# ------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize(
    ("env", "fragments"),
    [
        ("CartPol-v1", ["CartPole"]),
        ("CartPole-v99", ["v1"]),
        ("ALE2/Pong-v5", ["ALE2"]),
        ("no_such_module_at_all:Env-v0", ["no_such_module_at_all"]),
        ("no_such_module_at_all:Env", ["no_such_module_at_all"]),
        (f"{__name__}:Coridor", ["Coridor"]),
        (f"{__name__}:Holder.made", ["made"]),
        *((env, []) for env in ("CartPole", "Cart Pole", "", ":Corridor", f"{__name__}:", f"{__name__}:NOT_CALLABLE")),
        ("arms/myenv.py", ["'arms.myenv:NAME'"]),
        ("tests", ["'tests:NAME'"]),
        ("cartpole", ["'CartPole-v1'"]),
        ("mountaincarcontinuous", ["'MountainCarContinuous-v0'"]),
        (NOT_CALLABLE, []),
        (dict, ["dict"]),
        (lambda context: None, ["NoneType"]),
        (WithoutObservationSpace, ["WithoutObservationSpace", "observation_space"]),
    ],
)
def test_an_environment_that_cannot_be_is_a_config_error(env: Any, fragments: list[str]) -> None:
    """The error of an unknown id or path, or of another object, names the key, the value and the cause."""
    with refused(ConfigError, "environment.env") as caught:
        build(env)
    message = str(caught.value)
    assert repr(env) in message
    assert all(fragment in message for fragment in fragments), message


def test_an_id_that_only_the_callers_process_may_know_is_told_in_runners() -> None:
    """It is registered there, perhaps: the message says how runners get to know it."""
    section = EnvironmentSection(env="OnlyInMyScript-v0")
    with refused(ConfigError, "environment.env", value="OnlyInMyScript-v0") as in_runners:
        construct_env(section, 0, 0, 2)
    with refused(ConfigError, "environment.env", value="OnlyInMyScript-v0") as here:
        construct_env(section, 0, 0, 0)
    assert in_runners.value.fix != here.value.fix


@pytest.mark.parametrize("env", [broken, f"{__name__}:broken"], ids=["callable", "path"])
def test_what_a_constructor_raises_is_not_disguised(env: Any) -> None:
    """The environment's own error passes: a runner makes a fault of it, with type and message."""
    with pytest.raises(OSError, match="the port is taken"):
        build(env)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda bonus=None: bonus, None),
        (lambda kind=dict: kind, dict),
        (lambda table=(): table, ()),
        (lambda bonus=None, *, depth=2: (bonus, depth), (None, 2)),
        (lambda bonus=None, *rest, **others: (bonus, rest, others), (None, (), {})),
        (functools.partial(lambda size, bonus=None: (size, bonus), 3), (3, None)),
    ],
)
def test_a_default_of_a_factory_is_kept(make: Callable[..., Any], received: Any) -> None:
    """Whatever the default is: ``render_mode=None`` is a default, not a place for a context."""
    assert received == call(make)


def annotated(context: EnvContext | None = None) -> Any:
    return context


def annotated_later(size: float = 1.0, place: EnvContext | None = None) -> Any:
    return size, place


@pytest.mark.parametrize(
    ("make", "kwargs", "received"),
    [
        (lambda anything: anything, {"a": 1}, {"a": 1}),
        (lambda config=None: config, {"a": 1}, {"a": 1}),
        (lambda context=None: context, {"a": 1}, {"a": 1}),
        (lambda config=None: config, {"config": 5}, {"config": 5}),
        (lambda size=1.0: size, {"size": 3}, 3),
        (lambda env_config=(): env_config, {"a": 1}, {"a": 1}),
        (annotated, {"a": 1}, {"a": 1}),
        (annotated_later, {}, (1.0, {})),
        (annotated_later, {"size": 2.0}, (2.0, {"size": 2.0})),
        (lambda *everything: everything, {"a": 1}, ({"a": 1},)),
        (lambda anything, *, a: (anything, a), {"a": 1}, ({"a": 1}, 1)),
        (lambda a, b=None: (a, b), {"a": 1}, (1, None)),
        (lambda **everything: everything, {"a": 1}, {"a": 1}),
    ],
)
def test_a_context_goes_to_a_parameter_without_a_default_or_of_its_name_or_type(
    make: Callable[..., Any], kwargs: dict[str, Any], received: Any
) -> None:
    """By annotation in any place, else as the first argument."""
    assert received == call(make, kwargs)


class Configured(gym.Env[Any, Any]):
    """An environment as RLlib's users write it."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.config = config


class Optional(Configured):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)


def test_a_class_of_environments_gets_a_context_only_as_a_required_config() -> None:
    """By annotation, too; any other argument of a class is one of env_kwargs."""
    assert call(Configured, {"a": 1}).config == {"a": 1}
    assert isinstance(call(Configured, {}).config, EnvContext)
    assert call(Configured, {"config": 3}).config == 3
    assert call(Optional, {}).config is None


class Annotated(Configured):
    def __init__(self, config: EnvContext, *, depth: int = 2) -> None:
        super().__init__((config, depth))


def test_the_item_with_the_name_of_an_annotated_parameter_of_a_class_is_its_contents() -> None:
    """As for any other argument of a class; it still has the place of the environment."""
    assert call(Annotated, {"a": 1, "depth": 3}).config == ({"a": 1, "depth": 3}, 3)
    config, depth = call(Annotated, {"config": {"a": 1}, "depth": 3}).config
    assert (config, depth, config.lane_index) == ({"a": 1}, 3, 2)
    assert call(Annotated, {"config": 4}).config == (4, 2)
    with refused(ConfigError, "environment.env_kwargs", value="config, a"):
        call(Annotated, {"config": {}, "a": 1})


def test_kwargs_that_a_factory_does_not_take_are_refused() -> None:
    """The message names them, the factory's parameters and how it gets a context."""
    with refused(ConfigError, "environment.env_kwargs", value="size"):
        call(lambda bonus=None: bonus, {"size": 3})


def test_a_factory_without_arguments_is_called_without() -> None:
    """``lambda: gym.make(...)`` is what many write first; kwargs that it could not see are refused."""
    section = EnvironmentSection(env=lambda: gym.make("CartPole-v1"))
    assert construct_env(section, 0, 0, 1).spec.id == "CartPole-v1"  # type: ignore[union-attr]
    with refused(ConfigError, "environment.env_kwargs", value="a"):
        construct_env(section.model_copy(update={"env_kwargs": {"a": 1}}), 0, 0, 1)


def test_a_live_environment_is_refused() -> None:
    """Each lane needs one of its own."""
    with refused(ConfigError, "environment.env", value="TimeLimit"):
        construct_env(EnvironmentSection(env=gym.make("CartPole-v1")), 0, 0, 1)


class _AnswersAll(gym.Env[Any, Any]):
    """Proxy of a simulator: it answers every name, also those that only environments of several agents have."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, True, False, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True


class _AnswersItself(_AnswersAll):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


@pytest.mark.parametrize("env", [_AnswersAll, _AnswersItself])
def test_an_environment_that_answers_every_name_has_one_agent(env: Any) -> None:
    result = evaluate(EvalConfig().environment(env).evaluation(num_episodes=3), lambda obs: np.zeros(len(obs), int))
    assert result.status == "complete"
    assert result.mean_return == 1.0


class _Several(_AnswersAll):
    possible_agents = ("a", "b")


def test_an_environment_that_declares_agents_has_several() -> None:
    with refused(ConfigError, "environment.env"):
        evaluate(EvalConfig().environment(_Several), lambda obs: np.zeros(len(obs), int))


def test_a_game_of_atari_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module before the id is asked for by the advice itself."""
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with refused(ConfigError, "environment.env", value="ale_py:ALE/Pong-v5") as caught:
        evaluate("ale_py:ALE/Pong-v5", "random", num_episodes=1)
    assert "rl-eval[atari]" in str(caught.value)

"""Wrappers with running statistics: rejected wherever an environment is built, accepted if they are frozen."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward

from rl_eval import EvalConfig, adapters, evaluate
from rl_eval.adapters import Integration
from rl_eval.errors import ConfigError
from rl_eval.runners.environment import construct_env
from tests.refused import refused


class Own(NormalizeObservation):  # type: ignore[type-arg]
    """A subclass learns as well."""


def learning() -> Any:
    return FrameStackObservation(NormalizeObservation(gym.make("CartPole-v1")), 2)


def frozen() -> Any:
    env = NormalizeReward(NormalizeObservation(gym.make("CartPole-v1")))
    env.update_running_mean = False
    env.env.update_running_mean = False  # type: ignore[attr-defined]
    return env


def config(env: Any, **environment: Any) -> EvalConfig:
    made = EvalConfig().environment(env, **environment).evaluation(num_episodes=6, determinism_check=0)
    return made.policy(lambda observations: np.zeros(len(observations), np.int64))


@pytest.mark.parametrize("wrapper", [NormalizeObservation, NormalizeReward, Own])
def test_a_wrapper_of_a_config_that_learns_is_an_error(wrapper: Any) -> None:
    """Episodes would depend on each other."""
    with refused(ConfigError, "environment.wrappers[0]", value=wrapper.__name__):
        evaluate(config("CartPole-v1", wrappers=(wrapper,)))


@pytest.mark.parametrize("runner", ["vector", pytest.param("subprocess", marks=pytest.mark.process)])
def test_so_is_one_that_a_function_puts_around(runner: str) -> None:
    """Also inside of another wrapper, and in the process of a slot."""
    with refused(ConfigError, "environment.env", value="NormalizeObservation"):
        evaluate(config(learning).runners(runner=runner))


def slots(kind: Any, num_envs: int, function: Any, mode: AutoresetMode = AutoresetMode.DISABLED) -> Any:
    return kind([function] * num_envs, autoreset_mode=mode)


def test_so_is_one_in_a_slot_of_a_vector_environment() -> None:
    """Its environments are in this process."""

    def make(num_envs: int) -> Any:
        return slots(gym.vector.SyncVectorEnv, num_envs, learning)

    with refused(ConfigError, "environment.env", value="NormalizeObservation"):
        evaluate(config(make).runners(runner="batched", num_envs_per_runner=2))


@pytest.mark.process
@pytest.mark.parametrize("function", [learning, frozen])
def test_so_is_one_in_a_process_of_a_vector_environment(function: Any) -> None:
    """Only what freezes it can be read there."""

    def make(num_envs: int) -> Any:
        return slots(gym.vector.AsyncVectorEnv, num_envs, function)

    several = config(make).runners(runner="batched", num_envs_per_runner=2)
    if function is frozen:
        assert evaluate(several).status == "complete"
    else:
        with refused(ConfigError, "environment.env", value="wrapper with update_running_mean"):
            evaluate(several)


def test_so_is_one_around_all_slots() -> None:
    """The statistics of its class are those of all slots."""

    def make(num_envs: int) -> Any:
        several = slots(gym.vector.SyncVectorEnv, num_envs, frozen, AutoresetMode.NEXT_STEP)
        return gym.wrappers.vector.NormalizeObservation(several)

    with refused(ConfigError, "environment.env", value="NormalizeObservation"):
        evaluate(config(make).runners(runner="batched", num_envs_per_runner=2))


def test_frozen_statistics_are_accepted() -> None:
    """Results do not depend on the number of environments."""
    prints = {evaluate(config(frozen).runners(num_envs_per_runner=lanes)).fingerprint for lanes in (1, 4)}
    assert len(prints) == 1


class Drifts(gym.ObservationWrapper[Any, Any, Any]):
    """A wrapper of another library."""

    training = True

    def observation(self, observation: Any) -> Any:
        return observation


def test_an_integration_adds_its_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the class, with the attribute that freezes it."""
    settings = config("CartPole-v1", wrappers=(Drifts,)).build().environment
    construct_env(settings, 0, 0, 0).close()
    known = adapters.integrations()
    more = Integration("drifting", learning_wrappers={f"{__name__}:Drifts": "training"})
    monkeypatch.setattr(adapters, "integrations", lambda: (*known, more))
    with refused(ConfigError, "environment.wrappers[0]", value="Drifts"):
        construct_env(settings, 0, 0, 0)
    monkeypatch.setattr(Drifts, "training", False)
    construct_env(settings, 0, 0, 0).close()

"""An environment object stands for environments that gymnasium builds with its arguments, or it is rejected."""

import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

from rl_eval import evaluate_policy
from rl_eval.errors import ConfigError
from rl_eval.execution.environment_objects import environment_like
from tests.refused import refused


class Doubled(CartPoleEnv):
    """Its rewards are twice those of CartPole."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, 2 * reward, terminated, truncated, info


class Tripled(gym.RewardWrapper):
    """Wrapper without arguments, which does not record that it has none."""

    def reward(self, reward):
        return 3 * reward


class Scaled(gym.RewardWrapper):
    """Wrapper that does not record its argument."""

    def __init__(self, env, scale=1.0):
        super().__init__(env)
        self.scale = scale

    def reward(self, reward):
        return self.scale * reward


class Repeated(gym.Wrapper):
    """Wrapper that repeats each action."""

    def step(self, action):
        self.env.step(action)
        return self.env.step(action)


class Port(gym.Wrapper):
    """Wrapper with an attribute that each environment has for itself, and one that survives episodes."""

    ports = iter(range(9000, 10_000))

    def __init__(self, env):
        super().__init__(env)
        self.port = next(self.ports)
        self.steps_so_far = 0

    def step(self, action):
        self.steps_so_far += 1
        return self.env.step(action)


def with_attribute(env, name, value):
    setattr(env.unwrapped, name, value)
    return env


class WithSpec(Doubled):
    spec = gym.spec("CartPole-v1")


class Unregistered(Doubled):
    spec = EnvSpec("Doubled-v0", "no-entry-point")


def like(env):
    return environment_like(env, of_the_model=False)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (WithSpec, "WithSpec"),
        (Unregistered, "Unregistered"),
        (lambda: gym.make(EnvSpec("Own-v0", entry_point=Doubled, max_episode_steps=9)), "TimeLimit"),
        (lambda: gym.vector.SyncVectorEnv([WithSpec] * 2), "WithSpec"),
        (lambda: with_attribute(gym.make("Pendulum-v1"), "g", 2.0), "g"),
        (lambda: with_attribute(gym.make("Pendulum-v1"), "max_speed", np.float32(3)), "max_speed"),
        (lambda: with_attribute(gym.make("Pendulum-v1"), "wind", np.ones(2)), "wind"),
        (lambda: with_attribute(gym.make("FrozenLake-v1"), "P", {}), "P"),
        (lambda: with_attribute(gym.make_vec("CartPole-v1", num_envs=2), "gravity", 1.0), "gravity"),
        (lambda: Scaled(gym.make("CartPole-v1")), "Scaled"),
        (lambda: gym.wrappers.TimeLimit(Repeated(gym.make("CartPole-v1", max_episode_steps=-1)), 9), "CartPoleEnv"),
        (
            lambda: gym.vector.SyncVectorEnv(
                [lambda: gym.make("Pendulum-v1"), lambda: with_attribute(gym.make("Pendulum-v1"), "g", 2.0)]
            ),
            "g",
        ),
    ],
)
def test_an_object_that_gymnasium_does_not_rebuild_is_rejected(make, value):
    """The numbers would be those of another environment."""
    with refused(ConfigError, "env", value=value):
        like(make())


@pytest.mark.process
def test_an_attribute_in_another_process_is_compared():
    env = gym.vector.AsyncVectorEnv([lambda g=g: with_attribute(gym.make("Pendulum-v1"), "g", g) for g in (10.0, 2.0)])
    with refused(ConfigError, "env", value="g"):
        like(env)
    env.close()


def test_a_class_registered_anew_is_another_class():
    gym.register("Anew-v0", entry_point=CartPoleEnv, max_episode_steps=9)
    try:
        env = gym.make("Anew-v0")
        assert like(env)["env"] == "Anew-v0"
        del gym.registry["Anew-v0"]
        gym.register("Anew-v0", entry_point=Doubled, max_episode_steps=9)
        with refused(ConfigError, "env", value="CartPoleEnv"):
            like(env)
    finally:
        del gym.registry["Anew-v0"]


def test_wrappers_without_arguments_are_rebuilt():
    env = Tripled(gym.make("CartPole-v1", max_episode_steps=5))
    assert evaluate_policy(lambda batch: np.zeros(len(batch), int), env, 3)[0] == 15.0
    assert evaluate_policy(lambda batch: np.zeros(len(batch), int), gym.vector.SyncVectorEnv([lambda: env]), 3)[0] == 15


def test_a_wrapper_that_the_id_adds_is_not_added_twice():
    gym.register("Tripled-v0", entry_point=lambda: Tripled(CartPoleEnv()), max_episode_steps=5)
    try:
        assert evaluate_policy(lambda batch: np.zeros(len(batch), int), gym.make("Tripled-v0"), 3)[0] == 15.0
    finally:
        del gym.registry["Tripled-v0"]


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 5), 5),
        (lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1", max_episode_steps=5), 400), 5),
        (lambda: gym.make("CartPole-v1", max_episode_steps=-1), -1),
    ],
)
def test_the_lowest_time_limit_counts(make, limit):
    assert like(make())["env_kwargs"] == {"max_episode_steps": limit}


USABLE = [
    one.id
    for one in gym.registry.values()
    if str(one.entry_point).startswith(("gymnasium.envs.classic_control", "gymnasium.envs.toy_text"))
    and one.id != "CartPole-v0"  # It warns.
]


@pytest.mark.parametrize("env_id", [*USABLE, "mujoco"])
@pytest.mark.parametrize("steps", [0, 300])
def test_a_used_environment_is_not_rejected(env_id, steps):
    """What episodes change is not a setting."""
    if env_id == "mujoco":
        pytest.importorskip("mujoco")
        env_id = "HalfCheetah-v5"
    env = gym.make(env_id)
    env.reset(seed=1)
    env.action_space.seed(1)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    assert like(env)["env"] == env_id
    env.close()


def test_attributes_of_one_environment_are_not_settings():
    """Ports differ between environments, and steps are counted."""
    env = Port(gym.make("CartPole-v1"))
    env.reset(seed=0)
    env.step(0)
    assert like(env)["wrappers"] == ({"wrapper": Port},)


def test_global_generators_are_left_alone():
    class Draws(CartPoleEnv):
        def __init__(self):
            super().__init__()
            random.seed(0)

    gym.register("Draws-v0", entry_point=Draws)
    try:
        env = gym.make("Draws-v0")
        random.seed(7)
        before = random.getstate()
        like(env)
        assert random.getstate() == before
    finally:
        del gym.registry["Draws-v0"]

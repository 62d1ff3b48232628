"""Wrappers by config: which are put around an environment, in which order, and what is said of those that cannot be."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import EnvironmentSection
from rl_eval.errors import ConfigError
from rl_eval.results.source_code import code_of
from rl_eval.runners.environment import construct_env
from tests.refused import refused


class Pays(gym.Env[Any, Any]):
    """Pays what its action is worth, for three steps."""

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.full(1, self.left, np.float32), 10 * float(action[0]), self.left == 0, False, {}


class Scaled(gym.RewardWrapper[Any, Any]):
    """Multiplies rewards."""

    def __init__(self, env: Any, by: float = 2.0) -> None:
        super().__init__(env)
        self.by = by

    def reward(self, reward: Any) -> float:
        return float(reward) * self.by


def no_environment(env: Any) -> str:
    return "something else"


class Counts(Pays):
    """Observes a sequence of any length."""

    observation_space = spaces.Sequence(spaces.Box(-10, 10, (1,), np.float32))  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        place, info = super().reset(seed=seed)
        return (place,), info

    def step(self, action: Any) -> Any:
        place, *others = super().step(action)
        return (place,) * self.left, *others


def pad(observation: Any) -> Any:
    padded = np.zeros((4, 1), np.float32)
    padded[: len(observation)] = np.reshape(observation, (-1, 1))
    return padded


NOT_CALLABLE = 3
HERE = __name__


def config(*wrappers: Any) -> EvalConfig:
    made = EvalConfig().environment(Pays, wrappers=wrappers).evaluation(num_episodes=2, determinism_check=0)
    return made.policy(lambda observations: np.ones((len(observations), 1), np.float32), actions="none")


def mean(*wrappers: Any) -> float:
    return float(evaluate(config(*wrappers)).metrics["episode_return_mean"])


def test_wrappers_are_put_around_in_order() -> None:
    """The first is the innermost: clip and then double is not double and then clip."""
    clip = {"wrapper": "gymnasium.wrappers:ClipReward", "min_reward": -1, "max_reward": 3}
    assert mean() == 30
    assert mean(clip, f"{HERE}:Scaled") == 18
    assert mean(Scaled, clip) == 9
    assert mean({"wrapper": Scaled, "by": 0.5}) == 15


def test_yaml_may_name_wrappers_with_their_arguments(tmp_path: Any) -> None:
    """What a file says is what is built."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "environment:\n  env: CartPole-v1\n  wrappers:\n"
        "    - gymnasium.wrappers:RecordEpisodeStatistics\n"
        "    - {wrapper: 'gymnasium.wrappers:FrameStackObservation', stack_size: 3}\n"
    )
    section = EvalConfig.from_yaml(path).policy("x:y").build().environment
    env = construct_env(section, 0, 0, 1)
    assert env.observation_space.shape == (3, 4)
    assert isinstance(env.env, gym.wrappers.RecordEpisodeStatistics)  # type: ignore[attr-defined]
    assert EvalConfig.from_yaml(path).to_yaml()


def test_actions_are_clipped_by_a_wrapper_of_gymnasium() -> None:
    """The recipe of the docs."""
    clipped = EnvironmentSection(env=Pays, wrappers=("gymnasium.wrappers:ClipAction",))
    env = construct_env(clipped, 0, 0, 1)
    env.reset(seed=0)
    assert env.step(np.full(1, 7.0, np.float32))[1] == 10


@pytest.mark.parametrize(
    "wrapper",
    [
        "gymnasium.wrappers:ClipRewards",
        f"{HERE}:NOT_CALLABLE",
        {"stack_size": 4},
        ["gymnasium.wrappers:ClipReward", -1, 1],
        {"wrapper": Scaled, "sideways": 1},
        no_environment,
    ],
)
def test_what_is_not_a_wrapper_is_named_by_its_place(wrapper: Any) -> None:
    """The error has the key with the wrapper's place."""
    with refused(ConfigError, "environment.wrappers[1]"):
        construct_env(EnvironmentSection(env=Pays, wrappers=(Scaled, wrapper)), 0, 0, 1)


def test_wrappers_are_part_of_what_a_result_depends_on() -> None:
    """With their arguments and their source; without any, the identity is that of a config that knows of none."""
    bare, wrapped = config().build(), config({"wrapper": f"{HERE}:Scaled", "by": 3}).build()
    assert "wrappers" not in bare.identity()["environment"]
    assert wrapped.identity()["environment"]["wrappers"] == [{"wrapper": f"{HERE}:Scaled", "by": 3}]
    named = config({"wrapper": "gymnasium.wrappers:ClipReward", "max_reward": 1}).build()
    assert "gymnasium" in code_of(named)["packages"]


# ------------------------------------------------------------------------------ Atari


def atari_config(**kwargs: Any) -> EvalConfig:
    made = EvalConfig().environment("rl_eval.integrations.atari:atari", env_kwargs=kwargs)
    return made.policy(lambda o: o.reshape(len(o), -1).sum(1, dtype=np.int64) % 4)


def test_an_atari_evaluation_is_of_whole_games_and_raw_scores() -> None:
    """Sticky actions, all lives, no clipping, four grey screens; and the same rows in two layouts."""
    pytest.importorskip("ale_py")
    made = atari_config(game="Breakout", max_frames=300, noop_max=0)
    env = construct_env(made.build().environment, 0, 0, 1)
    assert env.observation_space.shape == (4, 84, 84)
    assert env.observation_space.dtype == np.uint8
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25  # type: ignore[attr-defined]
    preprocessing = env.env  # type: ignore[attr-defined]
    assert not preprocessing.terminal_on_life_loss
    env.close()
    layouts = [made.copy().runners(num_envs_per_runner=lanes).evaluation(num_episodes=2) for lanes in (1, 2)]
    assert len({evaluate(layout).fingerprint for layout in layouts}) == 1


@pytest.mark.parametrize(
    ("kwargs", "key", "value"),
    [
        ({}, "environment.env_kwargs.game", None),
        ({"game": "Pnog"}, "environment.env_kwargs.game", "Pnog"),
        ({"game": "Pong", "life_loss": True}, "environment.env_kwargs", "life_loss"),
    ],
)
def test_what_is_wrong_with_an_atari_config_is_said(kwargs: dict[str, Any], key: str, value: str | None) -> None:
    """Before any game is loaded, where that is possible."""
    pytest.importorskip("ale_py")
    with refused(ConfigError, key, value=value):
        construct_env(atari_config(**kwargs).build().environment, 0, 0, 1)


def test_a_wrapper_of_gymnasium_can_pad_a_sequence() -> None:
    with refused(ConfigError, "observation_space") as caught:
        evaluate(config().environment(Counts))
    assert "gymnasium.wrappers.TransformObservation" in caught.value.fix
    padding = {"wrapper": "gymnasium.wrappers:TransformObservation", "func": pad}
    padding["observation_space"] = spaces.Box(-10, 10, (4, 1), np.float32)
    assert evaluate(config(padding).environment(Counts)).mean_return == 30

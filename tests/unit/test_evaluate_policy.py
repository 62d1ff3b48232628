"""``evaluate_policy``: two numbers as of Stable-Baselines3, from the result that ``evaluate`` gives."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import vector

from rl_eval import EvalConfig, evaluate, evaluate_policy
from rl_eval.errors import ConfigError, EvalError
from rl_eval.testing import faulty
from tests.refused import refused


def zeros(observations):
    return np.zeros(len(observations), np.int64)


def by_hand(env="CartPole-v1", episodes=10, seed=0, **kwargs):
    return evaluate(EvalConfig().environment(env, **kwargs).evaluation(num_episodes=episodes, seed=seed), zeros)


class Mine(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(self.np_random.random()), True, False, {}

    def close(self):
        type(self).closed += 1


class Silent(gym.Wrapper):
    """Wrapper that does not record its argument."""

    def __init__(self, env, scale=1.0):
        super().__init__(env)


def test_mean_and_std_are_those_of_the_result():
    """The standard deviation divides by n, as numpy's does; the result is behind them."""
    mean, std = found = evaluate_policy(zeros, "CartPole-v1", n_eval_episodes=12, seed=3)
    result = by_hand(episodes=12, seed=3)
    returns = result.table.rows["episode_return"]
    assert (mean, std) == (result.mean_return, pytest.approx(np.std(returns)))
    assert found.result.fingerprint == result.fingerprint
    assert found == (mean, std)


def test_returns_and_lengths_of_each_episode():
    returns, lengths = evaluate_policy(zeros, "CartPole-v1", return_episode_rewards=True)
    rows = by_hand().table.rows
    assert returns == rows["episode_return"].tolist()
    assert lengths == rows["length"].tolist()
    assert all(type(length) is int for length in lengths)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gym.make("CartPole-v1"),
        lambda: gym.make("CartPole-v1", render_mode="rgb_array"),
        lambda: gym.make_vec("CartPole-v1", num_envs=3),
        lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"),
        lambda: lambda: gym.make("CartPole-v1"),
    ],
)
def test_environments_of_every_kind_give_the_same_episodes(make):
    """One, several, or what builds one."""
    assert evaluate_policy(zeros, make(), return_episode_rewards=True) == evaluate_policy(
        zeros, "CartPole-v1", return_episode_rewards=True
    )


def test_a_result_says_that_its_vector_environment_was_replaced():
    found = evaluate_policy(zeros, gym.make_vec("CartPole-v1", num_envs=3)).result
    assert any("CartPoleVectorEnv" in note for note in found.notes)
    assert found.fingerprint == by_hand().fingerprint


@pytest.mark.process
def test_processes_are_not_replaced_by_one():
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async", max_episode_steps=9)
    found = evaluate_policy(zeros, env).result
    env.close()
    assert any("AsyncVectorEnv" in note for note in found.notes)
    assert found.fingerprint == by_hand(env_kwargs={"max_episode_steps": 9}).fingerprint


def test_a_vector_environment_with_other_observations_stays_one():
    """That of ALE stacks frames, which ``gymnasium.make`` does not."""
    pytest.importorskip("ale_py")
    env = gym.make_vec("ale_py:ALE/Pong-v5", num_envs=2, max_num_frames_per_episode=60)
    result = evaluate_policy(zeros, env, n_eval_episodes=2).result
    assert any("AtariVectorEnv" in note for note in result.notes)
    assert result.metrics["episode_len_max"] < 60


def test_settings_and_wrappers_of_a_live_environment_count():
    env = gym.wrappers.TransformReward(gym.make("CartPole-v1", max_episode_steps=5), abs)
    with refused(ConfigError, "env", value="Silent"):
        evaluate_policy(zeros, Silent(env))
    stacked = gym.wrappers.FrameStackObservation(
        gym.make("CartPole-v1", max_episode_steps=5, sutton_barto_reward=True), 2
    )
    found = evaluate_policy(zeros, stacked).result
    assert found.metrics["episode_len_max"] == 5
    assert found.mean_return == 0.0
    assert evaluate_policy(zeros, env)[0] == 5.0


SHORT = [lambda: gym.make("CartPole-v1", max_episode_steps=5), lambda: gym.make("CartPole-v1")]
SYNC = {"vectorization_mode": "sync"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: vector.TransformReward(gym.make_vec("CartPole-v1", 2), abs), "TransformReward"),
        (
            lambda: vector.RecordEpisodeStatistics(
                vector.TransformObservation(gym.make_vec("CartPole-v1", 2, **SYNC), np.negative)
            ),
            "TransformObservation",
        ),
        (lambda: gym.vector.SyncVectorEnv(SHORT), None),
    ],
)
def test_what_one_environment_cannot_stand_for_is_refused(make, expected):
    """Else the numbers would be those of another environment."""
    with refused(ConfigError, "env", **({"value": expected} if expected else {})):
        evaluate_policy(zeros, make())


def test_wrappers_that_only_watch_are_left_out():
    watched = vector.RecordEpisodeStatistics(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"))
    alone = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    plain = evaluate_policy(zeros, gym.make("CartPole-v1")).result
    for env in (watched, alone):
        assert evaluate_policy(zeros, env).result.provenance["identity"] == plain.provenance["identity"]


def test_a_live_environment_is_left_alone():
    """It is neither reset nor closed: others are built."""
    env = gym.make("CartPole-v1")
    env.reset(seed=1)
    before = env.unwrapped.state
    evaluate_policy(zeros, env)
    assert env.unwrapped.state is before
    Mine.closed = 0
    with refused(ConfigError, "env", value="Mine"):
        evaluate_policy(zeros, Mine())
    assert Mine.closed == 0
    assert evaluate_policy(zeros, Mine)[0] == evaluate_policy(zeros, lambda context: Mine())[0]


def test_arguments_have_the_places_of_stable_baselines3():
    """Unsupported arguments are rejected, and the threshold is an assertion, as in Stable-Baselines3."""
    returns, _ = evaluate_policy(zeros, "CartPole-v1", 4, True, False, None, 5.0, True, False)
    assert len(returns) == 4
    with pytest.raises(AssertionError):
        evaluate_policy(zeros, "CartPole-v1", 4, reward_threshold=400.0)
    with refused(ConfigError, "render"):
        evaluate_policy(zeros, "CartPole-v1", 4, render=True)


def test_a_callback_is_called_after_every_step():
    """It gets the values that Stable-Baselines3's has."""
    seen = []

    def callback(values, _):
        assert values["model"] is zeros
        assert values["new_observations"] is not values["observations"]
        assert not np.array_equal(values["new_observations"], values["observations"])
        assert values["infos"][values["i"]] is values["info"]
        seen.append((values["observations"].shape, float(values["rewards"][0]), values["done"], values["dones"][0]))

    _, lengths = evaluate_policy(zeros, "CartPole-v1", 4, callback=callback, return_episode_rewards=True)
    assert len(seen) == sum(lengths)
    assert {(shape, reward) for shape, reward, _, _ in seen} == {((1, 4), 1.0)}
    assert sum(done for _, _, done, _ in seen) == sum(done for *_, done in seen) == 4


def test_an_error_of_the_callback_is_raised():
    with pytest.raises(KeyError):
        evaluate_policy(zeros, "CartPole-v1", 4, callback=lambda values, _: values["unknown"])


def test_advice_names_only_arguments_of_the_function():
    """The config of ``evaluate`` has settings that this function does not have."""
    rng = np.random.default_rng(0)
    with refused(ConfigError, "policy.allow_nondeterministic") as caught:
        evaluate_policy(lambda batch: rng.integers(0, 2, len(batch)), "CartPole-v1")
    assert "EvalConfig" in caught.value.fix


def test_failed_episodes_are_no_number():
    """The two numbers could not say that they are about fewer episodes."""
    with refused(EvalError, "status", value="partial"):
        evaluate_policy(zeros, lambda: faulty({"env": "two_length", "attempt_rates": [0.5, 1.0, 1.0]}))


def test_a_result_is_a_table_in_a_notebook():
    """Quoted text is escaped, so that its tags do not survive."""
    result = by_hand()
    result.provenance["identity"]["policy"] = "</table><script>alert(1)</script>\x1b[31m"
    shown = result._repr_html_()
    assert shown.count("<table") == shown.count("</table>") == 1
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert f"{result.mean_return:.2f}" in shown

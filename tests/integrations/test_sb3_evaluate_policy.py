"""``rl_eval.evaluate_policy`` takes what Stable-Baselines3's takes."""

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy as theirs
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from rl_eval import EvalConfig, evaluate, evaluate_policy
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import EvalCallback
from tests.integrations.sb3_worlds import Masked, make_model
from tests.refused import refused


@pytest.fixture(scope="module")
def model():
    return PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, seed=0).learn(2_000)


def test_a_model_and_the_environments_of_the_framework(model):
    """Monitored ones, several, and an id are one environment; the framework's own mean is near."""
    venv = make_vec_env("CartPole-v1", n_envs=2)
    mean, std = found = evaluate_policy(model, venv, n_eval_episodes=40)
    again = evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=40, seed=0), model)
    assert found.result.fingerprint == again.fingerprint
    assert evaluate_policy(model, venv.envs[0], n_eval_episodes=40) == (mean, std)
    their_mean, their_std = theirs(model, venv, n_eval_episodes=40)
    assert abs(mean - their_mean) < 4 * np.hypot(std, their_std) / np.sqrt(40)


def test_the_statistics_of_the_environment_are_used(model):
    """As there: a model that was trained without them acts on what the given VecNormalize shows it."""
    venv = VecNormalize(make_vec_env("CartPole-v1", n_envs=1))
    venv.obs_rms.mean[:] = [0.3, -0.2, 0.1, 0.0]
    venv.obs_rms.var[:] = [0.01, 4.0, 0.01, 4.0]
    venv.obs_rms.count = 100.0
    venv.training = venv.norm_reward = False
    returns, lengths = evaluate_policy(model, venv, n_eval_episodes=5, return_episode_rewards=True)
    plan = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=5, seed=0).build().plan()
    for seed, length in zip(plan.seeds.tolist(), lengths, strict=True):
        env = venv.venv.envs[0]
        observation, _ = env.reset(seed=int(seed))
        steps, done = 0, False
        while not done:
            action, _ = model.predict(venv.normalize_obs(observation[None]), deterministic=True)
            observation, _, terminated, truncated, _ = env.step(int(action[0]))
            steps, done = steps + 1, terminated or truncated
        assert steps == length
    assert returns != evaluate_policy(model, "CartPole-v1", n_eval_episodes=5, return_episode_rewards=True)[0]


def test_a_masked_model_gets_its_masks():
    """As with the command line; the functions have no argument for masks."""
    masked = make_model("MaskablePPO")
    found = evaluate_policy(masked, lambda: Masked("vector", "discrete"), 5).result
    make = {"env": lambda: Masked("vector", "discrete"), "action_masks": True}
    config = EvalConfig().environment(**make).evaluation(num_episodes=5, seed=0)
    assert found.fingerprint == evaluate(config, masked).fingerprint
    callback = EvalCallback(lambda: Masked("vector", "discrete"), eval_freq=32, n_eval_episodes=2, verbose=0)
    masked.learn(32, callback=callback)
    assert callback.results[0][1].status == "complete"


@pytest.mark.parametrize("wrapper", [gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward])
def test_a_wrapper_that_learns_is_refused(wrapper):
    """A new environment would not have its statistics."""
    env = wrapper(gym.make("CartPole-v1"))
    with refused(ConfigError, key="env"):
        evaluate_policy(PPO("MlpPolicy", env, device="cpu"), env, 2)


@pytest.mark.process
def test_attributes_that_were_set_in_other_processes_are_compared(model):
    """Only their values can be read there."""

    def make(length):
        env = gym.make("CartPole-v1")
        env.unwrapped.length = length
        return env

    venv = SubprocVecEnv([lambda length=length: Monitor(make(length)) for length in (0.5, 2.0)])
    with refused(ConfigError, key="env", value="length"):
        evaluate_policy(model, venv, 2)
    venv.close()


def test_the_callback_of_an_evaluation_rejects_a_changed_environment_at_once():
    env = gym.make("CartPole-v1")
    env.unwrapped.length = 2.0
    with refused(ConfigError, key="env", value="length"):
        EvalCallback(env)

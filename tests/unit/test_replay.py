"""``rl_eval.replay``: an episode comes out again bit by bit, or what differs is named, or why it cannot be run."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.execution.evaluate import evaluate
from rl_eval.recording.replay import replay
from rl_eval.testing import two_length
from tests.refused import refused

MODULE = '''
import numpy as np
from rl_eval.testing import two_length

SHIFT = 0.0


class Shifted:
    """Its rewards depend on a global, as on a file or a clock."""


def shifted(context):
    env = two_length(context)
    step = env.step

    def shifted_step(action):
        observation, reward, *rest = step(action)
        return observation, reward + SHIFT, *rest

    env.step = shifted_step
    return env


def ones():
    return lambda observations: np.ones(len(observations), np.int64)


def acting(observations):
    return np.ones(len(observations), np.int64)


def steering(states):
    return np.ones(len(states), np.int64)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "replay_toys.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import replay_toys

    yield replay_toys
    del sys.modules["replay_toys"]


def config(**env_kwargs):
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "two_length", **env_kwargs})
        .policy("replay_toys:ones")
        .runners(num_envs_per_runner=4)
        .evaluation(num_episodes=12, seed=3)
    )


def mlp_config(weights="weights.pt", deterministic=True):
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("rl_eval.policies.mlp:make_mlp", weights=weights, deterministic=deterministic)
        .runners(num_envs_per_runner=20)
        .evaluation(num_episodes=25, seed=1, gamma=0.9)
    )


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def save_weights(seed=0):
    """Write weights that fit the MLP to ``weights.pt``."""
    from rl_eval.policies.mlp import make_mlp

    env = gym.make("CartPole-v1")
    torch.manual_seed(seed)
    torch.save(make_mlp(env.observation_space, env.action_space).state_dict(), "weights.pt")


@pytest.mark.parametrize("deterministic", [True, False])
def test_weights_noise_and_inference_are_those_of_the_run(module, deterministic):
    """A sampled action depends on all of them."""
    save_weights()
    evaluate(mlp_config(deterministic=deterministic), output="run")
    for index in (0, 24):
        replayed = replay("run", index)
        assert replayed.identical
        assert replayed.numerics == {}
        assert replayed.again.discounted_return == replayed.recorded.discounted_return


def test_settings_of_ray_and_of_deadlines_are_left_out(module):
    """They hold for processes; the episode runs in this one."""
    evaluate(config(), output="run")
    manifest = Path("run/manifest.json")
    from rl_eval.log import Manifest

    read = Manifest.from_json(manifest.read_text())
    read.config["runners"] |= {"num_runners": 2, "address": "host:1", "custom_resources_per_runner": {"x": 1}}
    read.config["fault_tolerance"] |= {"step_timeout_s": 5.0, "reset_timeout_s": 5.0, "runner_timeout_s": 5.0}
    manifest.write_text(read.to_json())
    assert replay("run", 3, trust=True).identical


def test_a_run_with_keys_that_are_gone_is_replayed(module):
    """Older runs have recorded them, at values that change nothing; at others the run was another one."""
    result = evaluate(EvalConfig().environment("CartPole-v1").policy("random").evaluation(num_episodes=2))
    result.provenance["config"]["policy"] |= {"observation_filter": "NoFilter", "filters": None}
    assert replay(result, 1, trust=True).identical
    result.provenance["config"]["policy"]["observation_filter"] = "MeanStdFilter"
    with refused(ConfigError, "policy.observation_filter", value="MeanStdFilter"):
        replay(result, 1, trust=True)


def test_the_attempt_that_counted_runs_again(module):
    """Those before it failed, and may have killed or hung their runner."""
    result = evaluate(config(attempt_rates=[0.9]), output="run")
    index = next(record.index for record in result.episodes if record.attempts == 2)
    replayed = replay("run", index)
    assert replayed.identical
    assert replayed.again.attempts == 2
    assert replayed.again.faults == ()


def test_a_failed_episode_fails_again(module):
    """With the same error."""
    strict = config(attempt_rates=[0.9, 0.9]).fault_tolerance(max_attempts_per_episode=2)
    result = evaluate(strict, output="run")
    index = next(record.index for record in result.episodes if record.outcome == "failed")
    replayed = replay("run", index)
    assert replayed.identical
    assert replayed.again.outcome == "failed"
    assert replayed.again.faults[-1].message == result.table.faults[index][-1].message


def test_what_differs_is_named(module):
    """The environment has changed since."""
    evaluate(config().environment("replay_toys:shifted", env_kwargs={}), output="run")
    module.SHIFT = 2.0**-40
    replayed = replay("run", 4)
    assert not replayed.identical
    was, now = replayed.differences["episode_return"]
    assert now > was
    assert set(replayed.differences) == {"episode_return"}


def test_other_floats_are_said(module):
    """Then equality is not promised."""
    save_weights()
    result = evaluate(mlp_config())
    result.provenance["numerics"]["isa"] = "another"
    result.save("out")
    assert replay("out", 3).numerics["isa"][0] == "another"


@pytest.mark.parametrize("index", [-1, 7, 12])
def test_an_episode_without_a_record_is_refused(module, index):
    """It is not in the plan, or it did not finish."""
    result = evaluate(config())
    result.table.rows["outcome"][7] = 0
    with refused(UsageError, "episode"):
        replay(result, index)


# Weights


def test_changed_weights_are_refused(module):
    """The file was overwritten by a later checkpoint."""
    save_weights()
    evaluate(mlp_config(), output="run")
    save_weights(seed=1)
    with refused(WeightsError, "weights"):
        replay("run", 0)


# Live objects


def test_a_live_module_is_given_again(module):
    """Its name is in the provenance, and its weights are checked."""
    base = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=6)
    evaluate(base, make_net(), output="run")
    with refused(WeightsError, "policy"):
        replay("run", 2)
    net = make_net().train()
    assert replay("run", 2, policy=net).identical
    assert net.training
    net[0].weight.data += 1
    with refused(WeightsError, "weights"):
        replay("run", 2, policy=net)
    with refused(WeightsError, "weights"):
        replay("run", 2, policy=module.acting)


@pytest.mark.parametrize("given", ["local", "lambda", "array"])
def test_live_objects_of_a_config_are_given_again(module, given):
    """What has no name that can be imported is refused, and told how."""

    def local(context):
        return two_length(context)

    live = config()
    if given == "local":
        live.environment(local, env_kwargs={})
    elif given == "lambda":
        live.environment(lambda context: two_length(context), env_kwargs={})  # noqa: PLW0108
    else:
        live.environment(env_kwargs={"attempt_rates": np.zeros(2)})
    evaluate(live, output="run")
    with refused(ConfigError, "environment.env_kwargs.attempt_rates" if given == "array" else "environment.env"):
        replay("run", 2)
    assert replay("run", 2, config=live).identical
    assert replay("run", 2, config=live.build()).identical


def test_a_live_function_that_is_no_factory_is_given_again(module):
    """By its name it looks like one."""
    evaluate(config(), module.steering, output="run")
    with refused(ConfigError, "policy.policy_kwargs"):
        replay("run", 2)
    assert replay("run", 2, policy=module.steering).identical
    assert replay("run", 2, config=config().policy(module.steering)).identical


def test_another_config_is_refused(module):
    """It would be no surprise if the episode differed."""
    evaluate(config(), output="run")
    with refused(UsageError, "config", value="environment, gamma"):
        replay("run", 2, config=config(attempt_rates=[0.5]).evaluation(gamma=0.5))

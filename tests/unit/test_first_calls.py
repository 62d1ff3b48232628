"""The shortest calls: ``evaluate`` of an environment, keywords that are misspelt, and ``run --logger``."""

import functools
import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import rl_eval
from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, Evaluator, compare, evaluate, evaluate_policy, load
from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeTable
from rl_eval.results.requirements import Answer, parse_metric
from tests.refused import refused
from tests.unit.cli_world import call
from tests.unit.test_loggers import events


def run(*options):
    """Evaluate five episodes of the random policy from the command line."""
    return call("run", "--env", "CartPole-v1", "--policy", "random", "-n", "5", *options)


def zeros(observations):
    return np.zeros(len(observations), np.int64)


CONFIG = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=5, seed=3)


@pytest.mark.parametrize(
    "environment",
    ["CartPole-v1", functools.partial(gym.make, "CartPole-v1"), CartPoleEnv, CONFIG, CONFIG.build()],
    ids=["id", "callable", "class", "config", "settings"],
)
def test_an_environment_or_a_config_with_keywords(environment):
    """The same episodes whatever names the environment; keywords replace the values of a config."""
    result = evaluate(
        environment,
        zeros,
        num_episodes=7,
        seed=1,
        max_episode_steps=9,
        num_runners=0,
        num_envs_per_runner=3,
    )
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=7, seed=1, max_episode_steps=9)
    expected = evaluate(config, zeros)
    np.testing.assert_array_equal(result.table.rows["episode_return"], expected.table.rows["episode_return"])
    assert result.metrics["episode_len_max"] == 9


def test_keywords_are_those_of_the_settings():
    config = EvalConfig().environment("CartPole-v1").runners(num_envs_per_runner=2).policy(policy="random")
    before = config.to_dict()
    result = evaluate(config, num_episodes=3, deterministic=False)
    assert config.to_dict() == before
    built = config.evaluation(num_episodes=3).policy(deterministic=False)
    assert result.fingerprint == evaluate(built).fingerprint
    assert evaluate(built.build()).fingerprint == result.fingerprint
    with refused(ConfigError, "evaluation.num_episodes", value=0):
        evaluate("CartPole-v1", zeros, num_episodes=0)


@pytest.mark.parametrize("given", [{"environment": {"env": "CartPole-v1"}}, None, 3])
def test_neither_a_config_nor_an_environment(given):
    with refused(ConfigError, "config", value=type(given).__name__):
        evaluate(given, zeros)


@pytest.mark.parametrize(
    ("function", "args", "key", "near"),
    [
        (evaluate, ("CartPole-v1", zeros), "num_episode", "num_episodes"),
        (evaluate, ("CartPole-v1", zeros), "n", "num_episodes"),
        (evaluate, (CONFIG, zeros), "n_runners", "num_runners"),
        (evaluate_policy, (zeros, "CartPole-v1"), "n_eval_episode", "n_eval_episodes"),
        (EvalRunnerGroup, (CONFIG, zeros), "thread", "threaded"),
        (Evaluator, (CONFIG, zeros), "logger", "loggers"),
        (compare, (None, None), "forced", "force"),
    ],
    ids=lambda one: one if isinstance(one, str) else getattr(one, "__name__", ""),
)
def test_a_misspelt_keyword_names_the_nearest(function, args, key, near):
    with refused(ConfigError, key) as caught:
        function(*args, **{key: 1})
    assert f"did you mean {near!r}" in str(caught.value)


@pytest.mark.process
def test_run_logs_to_a_tracker(tmp_path, monkeypatch):
    """The metrics of the result, in the folder of the run."""
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    shown = run("--output", "a", "--json", "--logger", "tensorboard")
    assert shown.exit_code == 0
    ((step, mean),) = [(one.step, one.value) for one in events(tmp_path / "a").Scalars("eval/episode_return_mean")]
    assert (step, mean) == (0, pytest.approx(rl_eval.load("a").mean_return))


def test_a_tracker_that_is_not_installed_is_an_error_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = run("--logger", "mlflow")
    assert shown.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_a_tracker_that_fails_leaves_the_result(tmp_path, monkeypatch):
    """Its error is a note; the exit code is that of the result."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unknown://nowhere")
    shown = run("--output", "a", "--logger", "mlflow")
    assert shown.exit_code == 0
    assert "mlflow" in shown.stderr
    assert rl_eval.load("a").status == "complete"


def test_run_limits_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run("--output", "a", "--set", "evaluation.max_episode_steps=4", "-q")
    assert shown.exit_code == 0
    assert set(rl_eval.load("a").table.rows["length"]) == {4}


# One call from Python


def test_an_environment_object_is_evaluated_as_its_id():
    """Also a vector environment, in both modes; the object itself is left alone."""
    expected = evaluate("CartPole-v1", zeros, num_episodes=6).fingerprint
    env = gym.make("CartPole-v1")
    vectors = [gym.make_vec("CartPole-v1", 3, mode) for mode in ("sync", "vector_entry_point")]
    for one in (env, *vectors):
        assert evaluate(one, zeros, num_episodes=6).fingerprint == expected
    assert env.unwrapped.state is None
    with refused(ConfigError, "env_kwargs"):
        evaluate(env, zeros, env_kwargs={"sutton_barto_reward": True})


def test_arguments_of_a_section_can_be_passed():
    result = evaluate("CartPole-v1", zeros, num_episodes=3, env_kwargs={"sutton_barto_reward": True})
    assert result.mean_return == -1.0
    assert evaluate("CartPole-v1", zeros, num_episodes=3, return_bounds=(0, 500)).return_bounds == (0, 500)
    with refused(ConfigError, "max_failed_episodes") as caught:
        evaluate("CartPole-v1", zeros, max_failed_episodes=3)
    assert "EvalConfig().fault_tolerance(max_failed_episodes=...)" in str(caught.value)


def test_an_argument_without_a_place_is_an_error():
    with refused(ConfigError, "policy", value=10):
        evaluate("CartPole-v1", zeros, 10)


@pytest.mark.parametrize("number", ["10", True])
def test_text_is_not_a_number(number):
    with refused(ConfigError, "evaluation.num_episodes"):
        evaluate("CartPole-v1", zeros, num_episodes=number)


@pytest.mark.parametrize("env", ["CartPole-v1", CartPoleEnv, CartPoleEnv()])
def test_swapped_arguments_are_recognised(env):
    with refused(ConfigError, "policy"):
        evaluate(zeros, env)
    with refused(ConfigError, "policy"):
        evaluate_policy(env, zeros)


def test_a_policy_with_reset_is_no_environment():
    """Neither beside a config nor beside a function that builds the environment."""

    class Recurrent:
        def reset(self):
            """Forget the last episode."""

        def __call__(self, observations):
            return zeros(observations)

    for environment in (CONFIG, functools.partial(gym.make, "CartPole-v1")):
        assert evaluate(environment, Recurrent(), num_episodes=2).status == "complete"


def test_a_result_has_its_returns_and_suggests_names(tmp_path):
    result = evaluate("CartPole-v1", zeros, num_episodes=5, output=tmp_path / "run")
    assert result.returns.tolist() == [one.episode_return for one in result.episodes]
    assert result.lengths.tolist() == [one.length for one in result.episodes]
    assert result.std == pytest.approx(np.std(result.returns, ddof=1))
    with pytest.raises(AttributeError, match="'std'"):
        _ = result.std_return
    for saved in (load(tmp_path / "run"), EvalResult.load(tmp_path / "run")):
        assert saved.fingerprint == result.fingerprint
    assert parse_metric("mean_return >= 9").judge(result.metrics) is Answer.HOLDS


def test_a_mean_that_is_nan_warns_once_with_its_reason():
    result = evaluate("CartPole-v1", zeros, num_episodes=2)
    table = EpisodeTable(2)
    empty = EvalResult(
        table=table, plan=result.plan, status="failed", reason="nothing ran", timing=result.timing, provenance={}
    )
    with pytest.warns(RuntimeWarning, match="nothing ran"):
        assert math.isnan(empty.mean_return)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(empty.mean_return)

"""Evaluation inside a real PPO training: the right weights, exact numbers, nothing stale, nothing left behind."""

from __future__ import annotations

import gc
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ormsgpack")  # ray.rllib comes with ray; this comes with ray[rllib] alone.

import gymnasium as gym
import numpy as np
import ray
from ray import tune
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from rllib_worlds import Gated, mean_std, ppo
from waiting import eventually

from rl_eval import EvalConfig, VectorEvalRunner, evaluate
from rl_eval.errors import ConfigError
from rl_eval.integrations.rllib import eval_config_of, evaluation_function, session_of
from rl_eval.results.result import EvalPoint, EvalResult
from rl_eval.training.evaluator import Evaluator
from rl_eval.training.loggers import Logger
from tests.refused import refused

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:gymnasium.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LOADER = "rl_eval.integrations.rllib:load_policy"
DETERMINISTIC = {"explore": False, "num_envs_per_env_runner": 8}


def due(config: Any, episodes: int, function: Any = None, interval: int = 1, **changes: Any) -> Any:
    """Have evaluations of so many episodes in a config of RLlib."""
    return config.evaluation(
        evaluation_interval=interval,
        evaluation_duration=episodes,
        evaluation_config={**DETERMINISTIC, **changes},
        custom_evaluation_function=function,
    )


def runners_alive() -> int:
    """Runners of rl_eval in this cluster."""
    actors = ray._private.state.actors().values()
    return sum(actor["ActorClassName"] == "RunnerActor" and actor["State"] == "ALIVE" for actor in actors)


def again(algorithm: Any, config: EvalConfig, folder: Path) -> EvalResult:
    """The Algorithm's present policy, saved, and evaluated from its checkpoint in this process."""
    path = algorithm.save_to_path(str(folder / f"at_{algorithm.iteration}"))
    return evaluate(config.copy().policy(LOADER, policy_kwargs={"path": path}).runners(num_runners=0))


# ------------------------------------------------------------------------------ the config


class Talking(RLlibCallback):
    def on_episode_end(self, **kwargs: Any) -> None:
        """Log something."""


def test_evaluation_settings_are_translated() -> None:
    """What RLlib's evaluation would be told, in our words."""
    config = (
        ppo("CartPole-v1")
        .env_runners(num_cpus_per_env_runner=0.5, custom_resources_per_env_runner={"sim": 1})
        .training(gamma=0.9)
        .debugging(seed=7)
        .fault_tolerance(max_num_env_runner_restarts=4)
        .evaluation(
            evaluation_interval=5,
            evaluation_duration=33,
            evaluation_num_env_runners=2,
            evaluation_sample_timeout_s=50.0,
            evaluation_config={"explore": False, "env_config": {"max_episode_steps": 60}, "num_envs_per_env_runner": 3},
        )
    )
    settings = eval_config_of(config).build()
    assert settings.environment.env == "CartPole-v1"
    assert settings.environment.env_kwargs == {"max_episode_steps": 60}
    assert (settings.policy.deterministic, settings.policy.actions) == (True, "none")
    assert (settings.evaluation.num_episodes, settings.evaluation.seed, settings.evaluation.gamma) == (33, 7, 0.9)
    assert (settings.runners.num_runners, settings.runners.num_envs_per_runner) == (2, 3)
    assert settings.runners.num_cpus_per_runner == 0.5
    assert settings.runners.custom_resources_per_runner == {"sim": 1}
    assert settings.fault_tolerance.episode_timeout_s == 50
    assert settings.fault_tolerance.max_runner_restarts == 4


def test_rllibs_default_of_exploring_is_kept() -> None:
    """RLlib samples actions in evaluation unless it is told not to, and so do we."""
    assert not eval_config_of(ppo("CartPole-v1")).build().policy.deterministic


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"evaluation_duration_unit": "timesteps"}, "evaluation_duration_unit"),
        ({"evaluation_duration": "auto"}, "evaluation_duration"),
        ({"evaluation_parallel_to_training": True}, "evaluation_parallel_to_training"),
        ({"evaluation_unhealthy_workers_timeout_s": 9.0}, "evaluation_unhealthy_workers_timeout_s"),
        ({"evaluation_error_after_n_consecutive_skips": 3}, "evaluation_error_after_n_consecutive_skips"),
        ({"offline_evaluation_interval": 2}, "offline_evaluation_interval"),
        ({"evaluation_config": {"clip_actions": True}}, "evaluation_config.clip_actions"),
        ({"evaluation_config": {"env_runner_cls": VectorEvalRunner}}, "evaluation_config.env_runner_cls"),
        ({"evaluation_config": ppo("CartPole-v1").training(lr=0.5)}, "evaluation_config.lr"),
    ],
)
def test_what_cannot_be_honoured_is_named(changes: Any, key: str) -> None:
    config = ppo("CartPole-v1")
    if not hasattr(config, key.partition(".")[0]):
        pytest.skip(f"RLlib {ray.__version__} has no such key")
    config.evaluation(**changes)
    with refused(ConfigError, key):
        eval_config_of(config)
    if key != "evaluation_duration":
        assert eval_config_of(config, ignore=[key])


def test_what_rllibs_evaluation_inherits_is_named_too() -> None:
    """As in ``evaluation_config``."""
    with refused(ConfigError, "env_runner_cls"):
        eval_config_of(ppo("CartPole-v1").env_runners(env_runner_cls=VectorEvalRunner))
    with refused(ConfigError, "render_env"):
        eval_config_of(ppo("CartPole-v1").environment(render_env=True))


def test_other_settings_that_are_dropped_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    """Each by its name, once; those of the training, of the policy and with a counterpart are not among them."""
    config = ppo("CartPole-v1").fault_tolerance(ignore_env_runner_failures=True, max_num_env_runner_restarts=3)
    config.env_runners(gym_env_vectorize_mode="vector_entry_point", num_env_runners=3, rollout_fragment_length=7)
    config.environment(clip_rewards=True, clip_actions=True)
    eval_config_of(config, ignore=["clip_rewards"])
    (record,) = caplog.records
    assert record.args == ("gym_env_vectorize_mode, ignore_env_runner_failures",)
    caplog.clear()
    for plain in (PPOConfig(), DQNConfig(), SACConfig()):
        eval_config_of(plain.environment("CartPole-v1"))
    assert not caplog.records


def test_a_runner_of_ours_is_no_env_runner_of_rllib() -> None:
    with refused(ConfigError, "env_runner_cls", value="VectorEvalRunner"):
        ppo("CartPole-v1").env_runners(num_env_runners=0, env_runner_cls=VectorEvalRunner).build_algo()


def test_a_space_of_none_is_that_of_the_environment() -> None:
    """As RLlib has it, also where the training names its own."""
    config = ppo("CartPole-v1").environment(action_space=gym.spaces.Discrete(2))
    assert eval_config_of(config.copy().evaluation(evaluation_config={"action_space": None}))
    with refused(ConfigError, "evaluation_config.action_space"):
        eval_config_of(config.evaluation(evaluation_config={"action_space": gym.spaces.Discrete(3)}))


def test_callbacks_of_environment_runners_are_named() -> None:
    with refused(ConfigError, "callbacks.on_episode_end"):
        eval_config_of(ppo("CartPole-v1").callbacks(Talking))
    with refused(ConfigError, "callbacks.on_episode_start"):
        eval_config_of(ppo("CartPole-v1").callbacks(on_episode_start=lambda **kwargs: None))
    with refused(ConfigError, "policy.actions", value="unsquash"):
        evaluation_function(EvalConfig().environment("Pendulum-v1").policy(actions="unsquash"))
    with refused(ConfigError, "policy.weights", value="x.pt"):
        evaluation_function(EvalConfig().environment("Pendulum-v1").policy(weights="x.pt"))


def test_the_old_stack_is_named() -> None:
    old = ppo("CartPole-v1").api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    with refused(ConfigError, "enable_env_runner_and_connector_v2"):
        eval_config_of(old)


# ------------------------------------------------------------------------------ inside Algorithm.train()


def test_every_iteration_evaluates_its_own_weights_exactly(tmp_path: Path) -> None:
    """Filter statistics from two environment runners, our runners beside them, RLlib's keys and ours."""
    config = ppo("Pendulum-v1", mean_std).env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    ours = eval_config_of(due(config, 6)).runners(num_runners=1)
    config.evaluation(custom_evaluation_function=evaluation_function(ours))
    algorithm = config.build_algo()
    fingerprints = []
    for iteration in (1, 2):
        found = algorithm.train()["evaluation"]["env_runners"]
        result = again(algorithm, ours, tmp_path)
        assert found["fingerprint"] == result.fingerprint
        assert found["episode_return_mean"] == result.mean_return
        assert found["episode_return_ci_low"] == result.interval.low
        assert found["agent_episode_return_mean"] == {"default_agent": result.mean_return}
        assert found["module_episode_returns_mean"] == {"default_policy": result.mean_return}
        assert found["weights_seq_no"] == found["weights_version"] == iteration
        assert found["evaluated_at_env_steps"] == 400 * iteration
        assert (found["status"], found["num_episodes"], found["num_failed_episodes"]) == ("complete", 6, 0)
        assert found["num_env_steps_sampled_lifetime"] == 1200 * iteration
        assert found["result_is_new"] == 1
        fingerprints.append(found["fingerprint"])
    assert len(set(fingerprints)) == 2
    by_hand = algorithm.evaluate()["env_runners"]
    assert by_hand["fingerprint"] == fingerprints[-1]
    assert runners_alive() == 1
    algorithm.stop()
    assert eventually(lambda: runners_alive() == 0)


def test_numbers_are_never_reported_twice() -> None:
    """Between two evaluations an iteration has none, where RLlib repeats old ones and then NaN."""
    algorithm = due(ppo("CartPole-v1"), 5, evaluation_function(), interval=3).build_algo()
    assert ["evaluation" in algorithm.train() for _ in range(6)] == [False, False, True, False, False, True]
    assert [point.weights_version for point in session_of(algorithm).points] == [3, 6]
    algorithm.stop()


def test_evaluation_beside_training_says_how_old_it_is(tmp_path: Path) -> None:
    """Training does not wait; each result says whose weights it is about; the final policy is evaluated by stop()."""
    gate = tmp_path / "gate"
    config = ppo(Gated).environment(Gated, env_config={"gate": str(tmp_path)})
    due(config, 6, env_config={"gate": str(gate)})
    points: list[EvalPoint] = []
    ours = eval_config_of(config).runners(num_runners=1, num_envs_per_runner=2).evaluation(max_episode_steps=40)
    function = evaluation_function(ours, parallel=True, on_result=points.append)
    algorithm = config.evaluation(custom_evaluation_function=function).build_algo()

    steps = []

    def train() -> dict[str, Any]:
        result = algorithm.train()
        steps.append(result["num_env_steps_sampled_lifetime"])
        return result["evaluation"]["env_runners"]

    found = [train() for _ in range(3)]
    for skipped, row in enumerate(found):
        assert (row["status"], row["num_episodes"], row["result_is_new"]) == ("no_data", 0, 0)
        assert math.isnan(row["episode_return_mean"])
        assert row["num_evaluations_skipped"] == skipped
    session = session_of(algorithm)
    gate.touch()
    session.wait(120)
    row = train()
    assert (row["result_is_new"], row["num_episodes"], row["weights_seq_no"]) == (1, 6, 1)
    assert row["evaluated_at_env_steps"] == steps[0]
    assert row["fingerprint"] == points[0].result.fingerprint
    session.wait(120)
    gate.unlink()
    assert train()["weights_seq_no"] == 4
    row = train()
    assert (row["result_is_new"], row["weights_seq_no"], row["num_evaluations_skipped"]) == (0, 4, 3)
    gate.touch()
    algorithm.stop()
    assert [point.weights_version for point in points] == [1, 4, 5, 6]
    for point in points:
        assert {record.weights_version for record in point.result.episodes} == {point.weights_version}
    assert [point.step for point in points] == [steps[0], steps[3], steps[4], steps[5]]
    assert eventually(lambda: runners_alive() == 0)


def test_an_environment_registered_with_tune_reaches_the_runners(tmp_path: Path) -> None:
    """By value, with RLlib's context and the settings of evaluation_config."""

    def create(context: Any) -> gym.Env[Any, Any]:
        assert context.worker_index >= 0
        return gym.make("CartPole-v1", max_episode_steps=context["limit"])

    tune.register_env("short_cartpole", create)
    config = ppo("short_cartpole").environment("short_cartpole", env_config={"limit": 50})
    ours = eval_config_of(due(config, 6, env_config={"limit": 7}).evaluation(evaluation_num_env_runners=2))
    config.evaluation(evaluation_num_env_runners=0, custom_evaluation_function=evaluation_function(ours))
    algorithm = config.build_algo()
    found = algorithm.train()["evaluation"]["env_runners"]
    assert (found["episode_len_mean"], found["num_episodes"]) == (7.0, 6)
    assert found["fingerprint"] == again(algorithm, ours, tmp_path).fingerprint
    algorithm.stop()


@pytest.mark.slow
def test_a_module_that_draws_by_itself_is_refused_when_exploring() -> None:
    """DQN's epsilon-greedy draws come from a generator that is not the episode's; greedily it is evaluated."""
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .training(num_steps_sampled_before_learning_starts=10, train_batch_size=8)
        .evaluation(
            evaluation_duration=4,
            evaluation_config={"explore": True},
            custom_evaluation_function=evaluation_function(),
        )
    )
    algorithm = config.build_algo()
    algorithm.train()
    with refused(ConfigError, "policy.deterministic", value=False):
        algorithm.evaluate()
    algorithm.stop()
    config = config.copy(copy_frozen=False).evaluation(evaluation_config={"explore": False})
    algorithm = config.build_algo()
    algorithm.train()
    assert algorithm.evaluate()["env_runners"]["num_episodes"] == 4
    algorithm.stop()


def test_the_function_is_copied_and_pickled_with_its_config() -> None:
    function = evaluation_function(EvalConfig().environment("CartPole-v1"), parallel=True)
    config = ppo("CartPole-v1").evaluation(custom_evaluation_function=function)
    assert config.copy().custom_evaluation_function.parallel
    assert pickle.loads(pickle.dumps(function)).config == function.config


def test_an_evaluator_takes_algorithms_as_weights(tmp_path: Path) -> None:
    """Outside RLlib's hook too: each result is that of the weights at the time of submit."""
    algorithm = ppo("Pendulum-v1", mean_std).build_algo()
    algorithm.train()
    config = EvalConfig().environment("Pendulum-v1").policy(actions="none")
    config.evaluation(num_episodes=6).runners(num_envs_per_runner=4)
    with Evaluator(config, algorithm, busy_policy="queue") as evaluator:
        handles, expected = [], []
        for step in (1, 2):
            handles.append(evaluator.submit(algorithm, step))
            expected.append(again(algorithm, config, tmp_path).fingerprint)
            algorithm.train()
        assert [handle.result(120).fingerprint for handle in handles] == expected
    assert len(set(expected)) == 2
    algorithm.stop()


def test_an_algorithm_that_is_gone_leaves_no_runner() -> None:
    """Garbage collection ends what ``stop()`` was not called for."""
    config = due(ppo("CartPole-v1"), 2)
    ours = eval_config_of(config).runners(num_runners=1)
    algorithm = config.evaluation(custom_evaluation_function=evaluation_function(ours)).build_algo()
    algorithm.evaluate()
    assert runners_alive() == 1
    del algorithm
    gc.collect()
    assert eventually(lambda: runners_alive() == 0)


# ------------------------------------------------------------------------------ under Tune


def test_a_tune_trial_evaluates_on_runners_outside_its_placement_group(tmp_path: Path) -> None:
    """The trial's bundles are full; the runners take free CPUs, and end with the trial."""
    config = due(ppo("CartPole-v1"), 5)
    ours = eval_config_of(config).runners(num_runners=2).evaluation(return_bounds=(0, 500))
    config.evaluation(custom_evaluation_function=evaluation_function(ours))
    tuner = tune.Tuner(
        "PPO",
        param_space=config,
        run_config=tune.RunConfig(
            stop={"training_iteration": 2},
            storage_path=str(tmp_path),
            name="run",
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    )
    results = tuner.fit()
    assert not results.errors
    best = results.get_best_result("evaluation/env_runners/episode_return_mean", mode="max", scope="all")
    found = best.metrics["evaluation"]["env_runners"]
    assert (found["num_episodes"], found["weights_seq_no"], found["status"]) == (5, 2, "complete")
    assert eventually(lambda: runners_alive() == 0)
    loaded = ours.copy().policy(LOADER, policy_kwargs={"path": best.checkpoint.path}).runners(num_runners=0)
    assert evaluate(loaded).fingerprint == found["fingerprint"]
    assert np.isfinite(found["episode_return_ci_low"])


@pytest.mark.slow
def test_a_tune_trial_that_took_every_cpu_fails_in_bounded_time(tmp_path: Path) -> None:
    """Runners that find no place are an error of the trial, with what they asked for and what there is; no hang."""
    config = due(ppo("CartPole-v1").env_runners(num_env_runners=3), 5)
    ours = eval_config_of(config).runners(num_runners=1, runner_start_timeout_s=5)
    config.evaluation(custom_evaluation_function=evaluation_function(ours))
    run = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), name="full", verbose=0)
    errors = tune.Tuner("PPO", param_space=config, run_config=run).fit().errors
    assert len(errors) == 1
    assert "RunnerStartError" in str(errors[0])
    assert "1 CPU" in str(errors[0])
    assert eventually(lambda: runners_alive() == 0)


def test_a_callback_that_raises_does_not_end_the_training_and_old_points_go(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others hear of every point; the session keeps the last ones, and counts the episodes of all."""
    monkeypatch.setattr("rl_eval.integrations.rllib.evaluation._KEPT", 2)
    heard: list[int] = []

    def broken(point: EvalPoint) -> None:
        raise ValueError("no dashboard")

    function = evaluation_function(on_result=[broken, lambda point: heard.append(point.weights_version)])
    algorithm = due(ppo("CartPole-v1"), 5, function).build_algo()
    rows = [algorithm.train()["evaluation"]["env_runners"] for _ in range(4)]
    assert heard == [1, 2, 3, 4]
    assert [point.weights_version for point in session_of(algorithm).points] == [3, 4]
    assert [row["num_episodes_lifetime"] for row in rows] == [5, 10, 15, 20]
    assert sum(message.startswith("ValueError: no dashboard") for message in caplog.messages) == 4
    algorithm.stop()


def test_with_on_error_an_evaluation_that_cannot_run_ends_no_training() -> None:
    """Loggers of rl_eval are called with every result, beside RLlib's own reporting."""

    class Notes(Logger):
        def __init__(self) -> None:
            self.points: list[EvalPoint] = []
            self.closed = False

        def log(self, point: EvalPoint) -> None:
            self.points.append(point)

        def close(self) -> None:
            self.closed = True

    errors: list[BaseException] = []
    notes = Notes()
    broken = eval_config_of(ppo("CartPole-v1")).environment("Nowhere-v0").evaluation(num_episodes=2)
    for config, expected in ((broken, 0), (broken.copy().environment("CartPole-v1"), 1)):
        algorithm = (
            ppo("CartPole-v1")
            .evaluation(
                evaluation_interval=1,
                custom_evaluation_function=evaluation_function(config, on_error=errors.append, loggers=[notes]),
            )
            .build_algo()
        )
        algorithm.train()
        algorithm.stop()
        assert len(notes.points) == expected
    assert [type(error) for error in errors] == [ConfigError]
    assert notes.closed

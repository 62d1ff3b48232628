"""Tasks of EnvPool: a function of the index at any width, equal to an environment that EnvPool builds alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ConfigError
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused

envpool = pytest.importorskip("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
"""gymnasium says so of the bounds that EnvPool gives to its spaces."""

TASKS = {
    "CartPole-v1": (40, {}),
    "Hopper-v4": (40, {"max_episode_steps": 20}),
    "Pong-v5": (6, {"max_episode_steps": 30, "repeat_action_probability": 0.25}),
}
"""Episodes and settings of the tasks."""


def act(observations: Any) -> Any:
    """Push a pole to where it leans, swing a leg, or move a racket by the sum of the pixels."""
    if observations.dtype == np.uint8:
        return observations.reshape(len(observations), -1).sum(1, dtype=np.int64) % 6
    if observations.shape[1] == 4:
        return (observations[:, 2] > 0).astype(np.int64)
    return np.sin(3 * observations[:, :3]).astype(np.float32)


def config(task: str, width: int, runners: int = 0) -> EvalConfig:
    episodes, settings = TASKS[task]
    made = EvalConfig().environment(f"envpool:{task}", env_kwargs=settings).policy(act)
    made.evaluation(num_episodes=episodes, info_keys=["elapsed_step"])
    return made.runners(runner="batched", num_envs_per_runner=width, num_runners=runners)


@pytest.fixture(scope="module", params=list(TASKS))
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(task: str) -> EvalResult:
    return evaluate(config(task, 1))


def test_episodes_are_those_of_the_library(task: str, reference: EvalResult) -> None:
    for record in reference.episodes[:5]:
        env = envpool.make_gymnasium(task, num_envs=1, seed=[EpisodePlan(99, 0)[record.index].seed], **TASKS[task][1])
        (observation, _), total, length, ended = env.reset(), 0.0, 0, False
        while not ended:
            observation, reward, (terminated,), (truncated,), _ = env.step(act(observation))
            total, length, ended = total + float(reward[0]), length + 1, terminated or truncated
        assert (record.episode_return, record.length) == (total, length)
        assert (record.terminated, record.truncated) == (terminated, truncated)
        assert record.info["elapsed_step"] == length


@pytest.mark.parametrize("width", [4, 7, 32])
def test_no_width_changes_a_record(task: str, reference: EvalResult, width: int) -> None:
    result = evaluate(config(task, width))
    assert result.fingerprint == reference.fingerprint
    assert result.guarantee == "exact"
    assert result.determinism.passed
    assert [record.info for record in result.episodes] == [record.info for record in reference.episodes]


def test_no_runner_changes_a_record(task: str, reference: EvalResult, ray_cluster: None) -> None:
    for width, runners in ((4, 1), (7, 2)):
        assert evaluate(config(task, width, runners)).fingerprint == reference.fingerprint


def test_starts_and_lengths_differ() -> None:
    """Otherwise the tests above would prove little."""
    result = evaluate(config("CartPole-v1", 4))
    assert len({record.length for record in result.episodes}) > 10


def test_doctor_agrees() -> None:
    findings = [str(one) for one in check_simulator(config("CartPole-v1", 4).build())]
    assert any("exact" in text for text in findings), findings


def test_the_protocol_of_atari_is_in_the_result() -> None:
    (note,) = [one for one in evaluate(config("Pong-v5", 4)).notes if "EnvPool" in one]
    assert "repeat_action_probability=0.25, reward_clip=False, episodic_life=False" in note


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("Pnog-v5", {}, "environment.env"),
        ("CartPole-v1", {"frames": 4}, "environment.env_kwargs"),
        ("CartPole-v1", {"seed": 4}, "environment.env_kwargs"),
        ("CartPole-v1", {"batch_size": 1}, "environment.env_kwargs"),
        ("Hopper-v4", {"base_path": "/nowhere"}, "environment.env"),
    ],
    ids=["unknown", "setting", "seed", "asynchronous", "missing file"],
)
def test_what_envpool_cannot_build_is_rejected(name: str, settings: dict[str, Any], key: str) -> None:
    made = config("CartPole-v1", 4).environment(f"envpool:{name}", env_kwargs=settings)
    with refused(ConfigError, key=key):
        evaluate(made)

"""Environments of JAX: a function of the index at any width, equal to the library's own single environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeSpec
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit.pages_world import DOCS, blocks

jumanji = pytest.importorskip("jumanji")
import jax  # noqa: E402
from gymnasium.envs.functional_jax_env import FunctionalJaxVectorEnv  # noqa: E402
from gymnasium.experimental.functional import FuncEnv  # noqa: E402

from rl_eval.integrations.jumanji import simulator as jumanji_simulator  # noqa: E402
from rl_eval.runners.batched.functional import FunctionalSimulator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*_at_fork:pytest.PytestUnraisableExceptionWarning")
"""JAX warns of every process that Ray starts."""
EPISODES = 40
TIME_LIMIT = 30


def hungry(observations: Any) -> Any:
    """Move towards the fruit where that is allowed."""
    _, head, _, fruit, _ = np.moveaxis(observations["grid"], -1, 0)
    flat = [np.divmod(part.reshape(len(part), -1).argmax(1), part.shape[2]) for part in (head, fruit)]
    (row, column), (fruit_row, fruit_column) = flat
    wish = np.stack([row > fruit_row, column < fruit_column, row < fruit_row, column > fruit_column], 1)
    return (2 * observations["action_mask"] + wish).argmax(1)


def snake(width: int, runners: int = 0) -> EvalConfig:
    made = EvalConfig().environment("jumanji:Snake-v1", env_kwargs={"time_limit": TIME_LIMIT, "num_rows": 6})
    made.policy(hungry).evaluation(num_episodes=EPISODES)
    return made.runners(runner="batched", num_envs_per_runner=width, num_runners=runners)


@pytest.fixture(scope="module")
def reference() -> EvalResult:
    return evaluate(snake(1))


def test_episodes_are_those_of_the_library(reference: EvalResult) -> None:
    env = jumanji.make("Snake-v1", time_limit=TIME_LIMIT, num_rows=6)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    for record in reference.episodes[:10]:
        state, now = reset(jax.random.PRNGKey(EpisodePlan(EPISODES, 0)[record.index].seed))
        total, length = 0.0, 0
        while not now.last():
            (action,) = hungry({key: np.asarray(value)[None] for key, value in now.observation._asdict().items()})
            state, now = step(state, action)
            total, length = total + float(now.reward), length + 1
        assert (record.episode_return, record.length) == (total, length)
        assert record.terminated == (float(now.discount) == 0)


@pytest.mark.parametrize("width", [4, 7, 32])
def test_no_width_changes_a_record(reference: EvalResult, width: int) -> None:
    result = evaluate(snake(width))
    assert result.fingerprint == reference.fingerprint
    assert result.guarantee == "exact"
    assert result.determinism.passed
    assert len({record.episode_return for record in result.episodes}) > 1


def test_no_runner_changes_a_record(reference: EvalResult, ray_cluster: None) -> None:
    for width, runners in ((1, 1), (4, 1), (7, 2)):
        assert evaluate(snake(width, runners)).fingerprint == reference.fingerprint


def test_doctor_agrees() -> None:
    findings = [str(one) for one in check_simulator(snake(4).build())]
    assert any("exact" in text for text in findings), findings


@pytest.mark.parametrize("name", ["Snak-v1", "Connector-v3"], ids=["unknown", "several agents"])
def test_other_names_are_rejected(name: str) -> None:
    with refused(ConfigError, "environment.env", value=f"jumanji:{name}"):
        evaluate(snake(4).environment(f"jumanji:{name}", env_kwargs={}))


def test_arguments_may_be_lists() -> None:
    """Simulators with equal ones share what was compiled."""
    jumanji.register("Shaped-v0", entry_point=f"{__name__}:shaped")
    made = [jumanji_simulator("Shaped-v0", width, shape=[5, 6]) for width in (2, 3)]
    assert made[0].name == "jumanji:Shaped-v0"
    assert made[0].observation_space["grid"].shape == (5, 6, 5)
    assert made[0]._init is made[1]._init


@pytest.mark.parametrize("width", [7, 8])
def test_restarts_and_steps_have_one_library(width: int) -> None:
    """Arrays of JAX where no row is spare."""
    simulator = jumanji_simulator("Snake-v1", width)
    first = simulator.restart(np.arange(3), [EpisodeSpec(index, index) for index in range(3)])
    step = simulator.step(np.zeros(width, np.int32))
    kinds = {isinstance(nested["grid"], jax.Array) for nested in (first, step.observations)}
    assert kinds == {width == 8}


def test_only_infos_of_one_number_are_values() -> None:
    def start(key: Any) -> tuple[Any, Any]:
        return jax.numpy.zeros(1), jax.numpy.zeros(1)

    def step(state: Any, action: Any) -> tuple[Any, ...]:
        infos = {"height": state[0], "wide": jax.numpy.zeros(3), "nested": {"height": state[0]}}
        return state, state, 0.0, False, False, infos

    simulator = FunctionalSimulator(start, step, 8, gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2))
    simulator.restart(np.arange(8), [EpisodeSpec(0, index) for index in range(8)])
    made = simulator.step(np.zeros(8, np.int64))
    assert list(made.keys) == ["height"]
    assert made.values("wide") is None
    assert made.values("height")[0].shape == (8,)


def shaped(shape: list[int]) -> Any:
    return jumanji.environments.Snake(*shape)


def push(observations: Any) -> Any:
    return np.tanh(observations[:, ::-1])


def test_the_environment_of_the_page_has_the_same_bits_at_any_width(reader: Any) -> None:
    """It adds floats, which XLA does in another order for another number of rows."""
    (block,) = [one for one in blocks(DOCS / "batched.md") if one.title == "jax_drift.py"]
    Path(block.title).write_text(block.text)
    config = EvalConfig().environment("jax_drift:make_vec").policy(push).evaluation(num_episodes=EPISODES)
    results = [evaluate(config.copy().runners(runner="batched", num_envs_per_runner=width)) for width in (1, 7, 32)]
    assert len({result.fingerprint for result in results}) == 1
    assert all(result.determinism.passed for result in results)
    for name in ("terminated", "truncated", "success_at_end"):
        assert {getattr(record, name) for record in results[0].episodes} == {True, False}


class Decay(FuncEnv):
    """An environment for gymnasium's own vectorisation, which has one key for all slots."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Discrete(2)

    def initial(self, rng: Any, params: Any = None) -> Any:
        return jax.random.normal(rng, (2,))

    def transition(self, state: Any, action: Any, rng: Any, params: Any = None) -> Any:
        return 0.8 * state

    def observation(self, state: Any, rng: Any, params: Any = None) -> Any:
        return state

    def reward(self, state: Any, action: Any, next_state: Any, rng: Any, params: Any = None) -> Any:
        return state.sum()

    def terminal(self, state: Any, rng: Any, params: Any = None) -> Any:
        return abs(state).sum() < 0.3


def test_the_constructor_compiles_all() -> None:
    simulator = jumanji_simulator("Snake-v1", 5, num_rows=6)
    functions = [simulator._init, simulator._step]
    compiled = [one._cache_size() for one in functions]
    assert min(compiled) > 0
    simulator.restart(np.arange(5), [EpisodePlan(5, 0)[slot] for slot in range(5)])
    simulator.step(np.ones(5, np.int64))
    simulator.restart(np.array([2]), [EpisodePlan(5, 0)[2]])
    assert [one._cache_size() for one in functions] == compiled


def test_functional_environments_of_gymnasium_run_in_blocks_only() -> None:
    config = EvalConfig().environment(lambda num_envs: FunctionalJaxVectorEnv(Decay(), num_envs))
    config.policy(lambda observations: np.zeros(len(observations), int)).evaluation(num_episodes=8)
    config.runners(runner="batched", num_envs_per_runner=4)
    with refused(ConfigError, "environment.env"):
        evaluate(config)
    assert evaluate(config.runners(block=2)).guarantee == "layout"

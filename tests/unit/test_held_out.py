"""Held-out episodes: how a range of the plan travels through settings, groups, logs, results and comparisons."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, compare, evaluate, load, replay
from rl_eval.errors import ComparisonError, ConfigError, LogMismatch
from rl_eval.log.manifest import Manifest, checksum
from rl_eval.results.result import EvalResult
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit.games_world import Duel


def zeros():
    return lambda observations: np.zeros(len(observations), np.int64)


def make_config(**evaluation):
    evaluation = {"num_episodes": 12, "seed": 5} | evaluation
    made = EvalConfig().environment("rl_eval.testing:two_length").policy("tests.unit.test_held_out:zeros")
    return made.evaluation(**evaluation)


def returns(result):
    return [record.episode_return for record in result.episodes]


def test_held_out_episodes_are_those_of_a_longer_plan():
    """The same episodes, whichever way they are asked for; indices are positions in the plan."""
    whole = evaluate(make_config(num_episodes=20))
    configured = evaluate(make_config(num_episodes=8, first_index=12))
    with EvalRunnerGroup(make_config()) as group:
        selection, held_out = group.evaluate(), group.evaluate(num_episodes=8, first_index=12)
    assert returns(selection) + returns(held_out) == returns(whole)
    assert held_out.fingerprint == configured.fingerprint
    assert [record.index for record in held_out.episodes] == list(range(8))
    assert held_out.plan.first_index == 12


def test_a_result_and_a_log_come_back_with_their_range(tmp_path):
    """And an episode of them is replayed by its position."""
    result = evaluate(make_config(first_index=12), output=tmp_path / "log")
    result.save(tmp_path / "saved")
    for path in (tmp_path / "log", tmp_path / "saved"):
        loaded = load(path)
        assert loaded.plan.first_index == 12
        assert loaded.fingerprint == result.fingerprint
        assert replay(path, 3).identical


def test_a_log_is_continued_by_its_own_range_only(tmp_path):
    """The difference is named, also where two results are compared."""
    first = evaluate(make_config(), output=tmp_path)
    with refused(ComparisonError, "plan.first_index"):
        compare(first, evaluate(make_config(first_index=12)))
    with refused(LogMismatch, "output"):
        evaluate(make_config(first_index=12), output=tmp_path)


def test_a_range_beyond_the_permutation_is_refused():
    """When the settings are made, and by a group."""
    with refused(ConfigError, "evaluation.first_index", value=2147483640):
        make_config(first_index=2**31 - 8).build()
    with EvalRunnerGroup(make_config()) as group, refused(ConfigError, "evaluation.first_index", value=-1):
        group.evaluate(first_index=-1)


def test_what_was_written_before_there_were_ranges_is_read(tmp_path):
    """A manifest and a result without the field begin at 0, and the log is continued."""
    result = evaluate(make_config(), output=tmp_path)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text())
    assert body.pop("first_index") == 0
    head = {"format": body.pop("format")}
    del body["checksum"]
    path.write_text(json.dumps(head | {"checksum": checksum(body)} | body))
    assert Manifest.from_json(path.read_text()).first_index == 0
    assert load(tmp_path).fingerprint == result.fingerprint
    assert evaluate(make_config(), output=tmp_path).fingerprint == result.fingerprint
    described = result.to_dict()
    assert described["plan"].pop("first_index") == 0
    assert EvalResult.from_dict(described, result.table).plan_fingerprint == EpisodePlan(12, 5).fingerprint
    assert not Path(tmp_path, "damaged").exists()


# ------------------------------------------------------------------------------ environments that depend on the index


class Numbered(gym.Env):
    """An environment whose episodes return the index that it received."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)

    def begin_episode(self, index, seed, attempt):
        self.index = index

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(self.index), self.left == 0, False, {}


class Table(BatchSimulator):
    """A simulator with a table of initial states, by index."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.states, self.left = np.zeros((num_envs, 1), np.float32), np.zeros(num_envs, int)

    def restart(self, slots, specs):
        self.states[slots, 0], self.left[slots] = [spec.index for spec in specs], 3
        return self.states[slots]

    def step(self, actions):
        self.left -= 1
        return BatchStep(self.states, self.states[:, 0].astype(float), self.left == 0, np.zeros(self.num_envs, bool))

    def close(self):
        pass


def by_index(agent, spec):
    return "even" if spec.index % 2 == 0 else "odd"


RUNNERS = [
    (Numbered, "vector"),
    (Numbered, "single_agent"),
    pytest.param(Numbered, "subprocess", marks=pytest.mark.process),
    (Table, "batched"),
]


@pytest.mark.parametrize(("env", "runner"), RUNNERS)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_an_index_belongs_to_the_episode_and_not_to_the_part_of_the_plan(env, runner, slots):
    """An episode has the same outcome in every plan that contains it, and in every batch of a sampler."""
    config = EvalConfig().environment(env).policy("random").runners(runner=runner)
    config.evaluation(num_episodes=8)
    if runner != "single_agent":
        config.runners(num_envs_per_runner=slots)
    whole = evaluate(config)
    assert returns(whole) == [3.0 * index for index in range(8)]
    part = evaluate(config.copy().evaluation(num_episodes=3, first_index=5))
    assert returns(part) == returns(whole)[5:]
    assert [record.index for record in part.episodes] == [0, 1, 2]
    assert part.determinism.passed
    assert replay(part, 2, config=config.copy().evaluation(num_episodes=3, first_index=5)).identical
    with EvalRunnerGroup(config) as group:
        batches = [group.sample(num_env_steps=5, mode="truncate_episodes", as_arrays=True) for _ in range(4)]
    for key in ("collector.index", "next.reward"):
        assert np.concatenate([batch[key] for batch in batches]).tolist() == np.repeat(np.arange(7), 3)[:20].tolist()


def test_a_mapping_receives_the_index_of_the_episode():
    """The policies of an episode are the same in every plan that contains it."""
    policies = {"even": {"policy": "random"}, "odd": {"policy": "random"}}
    config = EvalConfig().environment(lambda: Duel(3)).policy(policies=policies, policy_mapping_fn=by_index)
    whole = evaluate(config.evaluation(num_episodes=6))
    part = evaluate(config.copy().evaluation(num_episodes=3, first_index=3))
    shown = [[row["policy"] for row in result.agents if row["seat"] == 0] for result in (whole, part)]
    assert shown[0][3:] == shown[1]
    assert len({*shown[0]}) == 2
    assert part.determinism.passed

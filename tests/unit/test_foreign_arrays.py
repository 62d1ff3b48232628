"""Functions of other array libraries as policies, and the recipe by which they sample, as the docs have it."""

import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from rl_eval import EvalConfig, evaluate
from rl_eval.policies.noise import EpisodeNoise
from tests.unit.pages_world import DOCS, blocks

CONFIG = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=8)


class Array:
    """An array that cannot be written to, and that numpy reads by ``__array__`` alone, as those of JAX."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        values = self._values.astype(dtype or self._values.dtype)
        values.flags.writeable = False
        return values


def follow(observations):
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int32)


def push(observations):
    return np.clip(-4 * observations[:, 2:], -3, 3).astype(np.float32)


@pytest.mark.parametrize(("env", "function"), [("CartPole-v1", follow), ("Pendulum-v1", push)])
def test_what_a_function_returns_may_be_an_array_of_another_library(env, function):
    """Indices, and actions that are clipped into their space."""
    config = EvalConfig().environment(env).evaluation(num_episodes=3)
    foreign = evaluate(config, lambda observations: Array(function(observations)))
    assert foreign.fingerprint == evaluate(config, function).fingerprint


@pytest.fixture
def sampling():
    names = {}
    [code] = [block.text for block in blocks(DOCS / "howto.md") if block.title == "sampling.py"]
    exec(code, names)
    return names["Sampling"]


def test_the_recipe_draws_from_the_distribution(sampling):
    logits = np.log([[0.2, 0.5, 0.3]])
    policy = sampling(lambda observations: Array(np.repeat(logits, len(observations), 0)))
    noise = EpisodeNoise(np.arange(20_000), np.zeros(20_000, np.int64))
    actions, _ = policy.act(np.zeros((20_000, 1)), None, np.ones(20_000, bool), noise)
    assert stats.chisquare(np.bincount(actions), np.array([0.2, 0.5, 0.3]) * 20_000).pvalue > 1e-4
    assert policy.act(np.zeros((2, 1)), None, np.ones(2, bool), None)[0].tolist() == [1, 1]


def test_the_recipe_gives_a_result_that_depends_on_no_layout(sampling):
    policy = sampling(lambda observations: Array(observations[:, 2:] * 4.0))
    config = CONFIG.copy().policy(deterministic=False)
    one, many = (evaluate(config.copy().runners(num_envs_per_runner=lanes), policy) for lanes in (1, 5))
    assert one.fingerprint == many.fingerprint
    assert one.fingerprint != evaluate(CONFIG, policy).fingerprint


KERNEL = [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
"""Weights of logits by which a network does what :func:`follow` does."""
NETWORK = '''
import flax.linen as nn


class Actor(nn.Module):
    """Logits of the actions."""

    actions: int

    @nn.compact
    def __call__(self, observations):
        return nn.Dense(self.actions)(observations)
'''


class Actor:
    """Looks like a module of flax: parameters are given with every call."""

    def __init__(self, actions):
        self.actions = actions

    def init(self, key, observations):
        return np.zeros((observations.shape[1], self.actions))

    def apply(self, params, observations):
        return observations @ params


def recipe_of_jax(reader, params):
    """Write the files of the page, which load parameters of this name; return the config."""
    for block in blocks(DOCS / "howto.md"):
        if block.title.startswith("jax"):
            (reader.folder / block.title).write_text(block.text.replace("/checkpoints/actor_1000000.msgpack", params))
    return EvalConfig.from_yaml("jax.yaml").evaluation(num_episodes=8)


def test_the_recipe_of_jax_runs_beside_a_stand_in(reader, monkeypatch):
    """The policy of the page's config is made from a file, and acts; a slow test has JAX itself."""
    np.save("params.npy", KERNEL)
    random, serialization = SimpleNamespace(key=lambda seed: seed), SimpleNamespace(from_bytes=from_bytes)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(random=random, jit=lambda function: function))
    monkeypatch.setitem(sys.modules, "flax", SimpleNamespace(serialization=serialization))
    monkeypatch.setitem(sys.modules, "my_network", SimpleNamespace(Actor=Actor))
    config = recipe_of_jax(reader, "params.npy")
    assert evaluate(config).fingerprint == evaluate(CONFIG, follow).fingerprint


@pytest.mark.slow
def test_the_recipe_of_jax_runs_with_jax(reader):
    """In every layout it does what the same rule does in numpy."""
    pytest.importorskip("jax")
    serialization = pytest.importorskip("flax.serialization")
    Path("my_network.py").write_text(NETWORK)
    params = {"params": {"Dense_0": {"kernel": np.float32(KERNEL), "bias": np.zeros(2, np.float32)}}}
    Path("actor.msgpack").write_bytes(serialization.to_bytes(params))
    config = recipe_of_jax(reader, "actor.msgpack")
    results = [evaluate(config.copy().runners(num_envs_per_runner=lanes)) for lanes in (1, 5)]
    assert {result.fingerprint for result in results} == {evaluate(CONFIG, follow).fingerprint}
    assert [result.determinism.passed for result in results] == [True, True]


def from_bytes(template, data):
    params = np.load(BytesIO(data))
    assert params.shape == template.shape
    return params

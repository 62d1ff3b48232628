"""Observation filters: exact merging, freezing, and a result that is a function of policy and filter."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate, replay
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.rllib.filters import (
    MeanStdFilter,
    Moments,
    load_filters,
    merged,
    save_filters,
    warm_up_filters,
)
from rl_eval.integrations.rllib.workers import RolloutWorkers
from rl_eval.policies.mlp import MLPActor
from rl_eval.policies.normalization import by_path
from rl_eval.wrappers import Normalized, frozen
from tests.refused import refused


class Drift(gym.Env[Any, Any]):
    """Walks by its actions, far from zero, and pays where it stands; with a part that is no Box."""

    observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,), np.float32), "k": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = self.np_random.normal((100.0, -3.0), (5.0, 0.1)).astype(np.float32)
        self.left = int(self.np_random.integers(2, 6))
        return {"x": self.x.copy(), "k": 0}, {}

    def step(self, action: Any) -> Any:
        self.x += np.float32(1 if action else -1)
        self.left -= 1
        return {"x": self.x.copy(), "k": self.left % 3}, float(self.x[0]), self.left == 0, False, {}


def sign(observations: Any) -> Any:
    return (observations["x"][:, 0] > 0).astype(np.int64)


def config(**runners: Any) -> EvalConfig:
    return EvalConfig().environment(Drift).runners(**runners).evaluation(num_episodes=20, determinism_check=0)


def of(mean: float) -> MeanStdFilter:
    return MeanStdFilter.of({"x": [mean, 0]}, {"x": [1, 1]})


# ------------------------------------------------------------------------------ statistics


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), min_size=1, max_size=8),
    st.floats(-1e4, 1e4),
    st.randoms(),
)
def test_merging_gives_what_a_single_pass_gives(parts: list[list[float]], shift: float, random: Any) -> None:
    """However the values are dealt out and in whatever order the parts are merged."""
    dealt = [np.array(part)[:, None] + shift for part in parts]
    values = np.concatenate(dealt)[:, 0]
    random.shuffle(dealt)
    found = merged(MeanStdFilter({"": Moments.of(part)}) for part in dealt).moments[""]
    mean = math.fsum(values) / len(values)
    m2 = math.fsum((value - mean) ** 2 for value in values)
    assert found.count == len(values)
    scale = max(abs(values).max(), 1e-9)
    assert abs(found.mean[0] - mean) <= 1e-12 * scale
    if len(values) > 1:
        assert abs(found.var[0] * (len(values) - 1) - m2) <= 1e-12 * max(m2, scale**2)


def test_a_filter_normalizes_by_mean_and_sample_deviation() -> None:
    """In float32, the same for a row wherever it stands."""
    values = np.random.default_rng(0).normal(7, 3, (50, 2))
    one = by_path(**frozen(MeanStdFilter({"x": Moments.of(values)})))["x"]
    got = one(values.astype(np.float32))
    due = (values.astype(np.float32) - values.mean(0)) / (values.std(0, ddof=1) + 1e-8)
    assert got.dtype == np.float32
    assert np.allclose(got, due, atol=1e-6)
    assert one(values.astype(np.float32)[7:8]).tobytes() == got[7:8].tobytes()
    grey = by_path(**frozen(MeanStdFilter.of(np.full((2, 2), 100), np.full((2, 2), 50))))[""]
    image = grey(np.full((1, 2, 2), 200, np.uint8))
    assert image.dtype == np.float32
    assert np.allclose(image, 2)


def reference(first: int, count: int) -> Moments:
    """All observations that were acted upon, in a single pass of a plain loop."""
    env, seen = Drift(), []
    plan = EvalConfig().environment(Drift).evaluation(num_episodes=count, first_index=first).build().plan()
    for index in range(first, first + count):
        observation, _ = env.reset(seed=int(plan.seeds[index - first]))
        ended = False
        while not ended:
            seen.append(observation["x"])
            observation, _, ended, _, _ = env.step(sign({"x": observation["x"][None]})[0])
    return Moments.of(np.array(seen))


def test_a_warm_up_collects_what_a_plain_loop_sees() -> None:
    """From held-out episodes, to 1e-12, and bit for bit the same in every layout."""
    layouts = [("single_agent", 1), ("vector", 3), ("vector", 8)]
    made = [config(runner=kind, num_envs_per_runner=lanes) for kind, lanes in layouts]
    first, *others = [warm_up_filters(one, sign, 12)["default_policy"] for one in made]
    due, found = reference(20, 12), first.moments["x"]
    assert found.count == due.count
    assert np.allclose(found.mean, due.mean, rtol=1e-12, atol=0)
    assert np.allclose(found.var, due.var, rtol=1e-12, atol=0)
    assert others == [first, first]


# ------------------------------------------------------------------------------ before a policy


def test_a_filter_is_part_of_what_is_evaluated() -> None:
    """It changes actions and the digest of the weights, and no evaluation moves it."""
    with EvalRunnerGroup(config(), Normalized(sign, **frozen(of(0.0))), threaded=False) as group:
        workers = RolloutWorkers(group)
        up, low = group.evaluate(), workers.get_filters()
        assert low == {"default_policy": of(0.0)}
        workers.sync_filters({"default_policy": of(1e4)}, version=7)
        down = group.evaluate()
        assert down.episodes[0].weights_version == 7
        workers.sync_filters(low)
        again = group.evaluate()
    assert up.mean_return > down.mean_return
    assert up.fingerprint == again.fingerprint != down.fingerprint
    digests = [result.provenance["weights"]["digest"] for result in (up, down, again)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("wrong", "at_start", "on_the_way"),
    [
        (MeanStdFilter.of({"x": [0, 0, 0]}, {"x": [1, 1, 1]}), "statistics['x']", "x/mean"),
        (MeanStdFilter.of([0], [1]), "statistics['']", "/count"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(wrong: MeanStdFilter, at_start: str, on_the_way: str) -> None:
    """A wrong shape or path, at the start and on the way to runners, which keep their filters."""
    with refused(WeightsError, at_start):
        evaluate(config(), Normalized(sign, **frozen(wrong)))
    with EvalRunnerGroup(config(), Normalized(sign, **frozen(of(0.0))), threaded=False) as group:
        workers = RolloutWorkers(group)
        with refused(WeightsError, on_the_way):
            workers.sync_filters({"default_policy": wrong})
        assert workers.get_filters() == {"default_policy": of(0.0)}
    with EvalRunnerGroup(config(), sign, threaded=False) as group, refused(WeightsError, "policy"):
        RolloutWorkers(group).sync_filters({"default_policy": of(0.0)})


def test_weights_and_filter_travel_together() -> None:
    """A module's weights and its filter are sent as one module, or a filter alone."""
    cartpole = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4, determinism_check=0)
    module, other = MLPActor(4, 2, hidden=(8,)), MLPActor(4, 2, hidden=(8,))
    one, two = (MeanStdFilter.of(np.zeros(4), np.full(4, std)) for std in (0.1, 0.2))
    with EvalRunnerGroup(cartpole, Normalized(module, **frozen(one)), threaded=False) as group:
        workers = RolloutWorkers(group)
        workers.sync_filters({"default_policy": two})
        (head,) = workers.for_policy(lambda policy: policy.module.head.weight.clone())  # type: ignore[attr-defined]
        assert torch.equal(head, module.head.weight)
        group.sync_weights(Normalized(other, **frozen(one)))
        assert workers.get_filters() == {"default_policy": one}
        digest = group.evaluate().provenance["weights"]["digest"]
    assert evaluate(cartpole, Normalized(other, **frozen(one))).provenance["weights"]["digest"] == digest


def test_filters_are_saved_and_named_in_a_config(tmp_path: Any) -> None:
    """The file holds them exactly; a replay of such a result is the same episode."""
    path = tmp_path / "filters.json"
    filters = warm_up_filters(config(), sign, 5)
    save_filters(filters, path)
    assert load_filters(path) == filters
    due = evaluate(config(), Normalized(sign, **frozen(filters["default_policy"])))
    named = config().policy(f"{__name__}:sign", normalizer=path)
    result = evaluate(named)
    assert [one.episode_return for one in result.episodes] == [one.episode_return for one in due.episodes]
    assert replay(result, 3, config=named).identical
    for text in ("{}x", '{"default_policy": 1}'):
        path.write_text(text)
        with refused(ConfigError, "policy.normalizer", value=str(path)):
            load_filters(path)
    with refused(ConfigError, "policy.normalizer"):
        load_filters(tmp_path / "none.json")

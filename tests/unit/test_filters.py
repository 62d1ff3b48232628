"""Observation filters: exact merging, freezing, and a result that is a function of policy and filter."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.policies.filters import (
    DEFAULT_POLICY,
    MeanStdFilter,
    Moments,
    NoFilter,
    filters_of,
    load_filters,
    merged,
    save_filters,
    with_filters,
    without_filters,
)


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
    made = EvalConfig().environment(Drift).policy(sign, observation_filter="MeanStdFilter")
    return made.runners(**runners).evaluation(num_episodes=20, determinism_check=0)


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
    assert abs(found.m2[0] - m2) <= 1e-12 * max(m2, scale**2)


def test_a_filter_normalizes_by_mean_and_sample_deviation() -> None:
    """In the dtype of the observations, Boxes alone, the same for a row wherever it stands."""
    values = np.random.default_rng(0).normal(7, 3, (50, 2))
    one = MeanStdFilter({"x": Moments.of(values)})
    batch = {"x": values.astype(np.float32), "k": np.arange(50)}
    got = one(batch)
    due = (values.astype(np.float32) - values.mean(0)) / (values.std(0, ddof=1) + 1e-8)
    assert got["x"].dtype == np.float32
    assert np.allclose(got["x"], due, atol=1e-6)
    assert got["k"] is batch["k"]
    alone = one({"x": batch["x"][7:8], "k": batch["k"][7:8]})["x"]
    assert alone.tobytes() == got["x"][7:8].tobytes()
    image = MeanStdFilter.of(np.full((2, 2), 100), np.full((2, 2), 50))(np.full((1, 2, 2), 200, np.uint8))
    assert image.dtype == np.float32
    assert np.allclose(image, 2)
    assert MeanStdFilter()(batch) is batch
    assert NoFilter()(batch) is batch


# ------------------------------------------------------------------------------ warm-up


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


@pytest.mark.parametrize(("kind", "lanes"), [("single_agent", 1), ("vector", 3), ("vector", 8)])
def test_a_warm_up_collects_what_a_plain_loop_sees(kind: str, lanes: int) -> None:
    """From held-out episodes, to 1e-12, and bit for bit the same in every layout."""
    with EvalRunnerGroup(config(runner=kind, num_envs_per_runner=lanes), threaded=False) as group:
        (one,) = group.warm_up_filters(12).values()
    due = reference(20, 12)
    found = one.moments["x"]  # type: ignore[union-attr]
    assert found.count == due.count
    assert np.allclose(found.mean, due.mean, rtol=1e-12, atol=0)
    assert np.allclose(found.std, due.std, rtol=1e-12, atol=0)
    with EvalRunnerGroup(config(num_envs_per_runner=2), threaded=False) as other:
        assert other.warm_up_filters(12) == {DEFAULT_POLICY: one}


def test_frozen_filters_never_move() -> None:
    """Evaluations leave them as they are, and their numbers repeat; nothing is observed any more."""
    with EvalRunnerGroup(config(num_envs_per_runner=3), threaded=False) as group:
        filters = group.warm_up_filters(6)
        first, second = group.evaluate(), group.evaluate()
        assert group.get_filters() == filters
        assert first.fingerprint == second.fingerprint
        assert not first.artifacts
        assert first.provenance["weights"] == second.provenance["weights"]
        again = group.warm_up_filters(6)
        assert again == filters


def test_without_statistics_nothing_is_evaluated() -> None:
    """The error says where to get them."""
    with pytest.raises(UsageError, match=r"warm_up_filters\(\)"):
        evaluate(config())


# ------------------------------------------------------------------------------ syncing and identity


def of(mean: float) -> dict[str, Any]:
    return {DEFAULT_POLICY: MeanStdFilter.of({"x": [mean, 0]}, {"x": [1, 1]})}


def test_a_filter_is_part_of_what_is_evaluated() -> None:
    """It changes actions and the digest of the weights, and a new version says so; equal filters have equal digests."""
    with EvalRunnerGroup(config(), threaded=False) as group:
        assert group.sync_filters(of(0.0)) == 1
        up, low = group.evaluate(), group.get_filters()
        assert group.sync_filters(of(1e4)) == 2
        down = group.evaluate()
        group.sync_filters(low)
        again = group.evaluate()
    assert up.metrics["episode_return_mean"] > down.metrics["episode_return_mean"]
    assert up.fingerprint == again.fingerprint != down.fingerprint
    digests = [result.provenance["weights"]["digest"] for result in (up, down, again)]
    assert digests[0] == digests[2] != digests[1]
    assert config().build().identity()["observation_filter"] == "MeanStdFilter"
    assert "observation_filter" not in EvalConfig().environment(Drift).build().identity()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    """A wrong shape, a wrong path, an unknown policy, and a policy that has no filter."""
    with EvalRunnerGroup(config(), threaded=False) as group:
        group.sync_filters(of(0.0))
        for wrong, problem in [
            (MeanStdFilter.of({"x": [0, 0, 0]}, {"x": [1, 1, 1]}), r"shape \(3,\), but observations have \(2,\)"),
            (MeanStdFilter.of([0, 0], [1, 1]), r"statistics of '', but the Boxes of the space are \['x'\]"),
        ]:
            with pytest.raises(WeightsError, match=problem):
                group.sync_filters({DEFAULT_POLICY: wrong})
            assert group.get_filters() == of(0.0)
        with pytest.raises(ConfigError, match="'other' has no filter"):
            group.sync_filters({"other": NoFilter()})
    with EvalRunnerGroup(EvalConfig().environment(Drift), sign, threaded=False) as group:
        assert group.get_filters() == {}
        with pytest.raises(ConfigError, match="has no filter"):
            group.sync_filters(of(0.0))


def test_weights_keep_the_filter_and_a_filter_keeps_the_weights() -> None:
    """A module's weights and its filter are replaced each on its own."""
    import torch

    from rl_eval.policies.mlp import MLPActor

    cartpole = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4, determinism_check=0)
    cartpole.policy(observation_filter="MeanStdFilter")
    module, other = MLPActor(4, 2, hidden=(8,)), MLPActor(4, 2, hidden=(8,))
    one = {DEFAULT_POLICY: MeanStdFilter.of(torch.zeros(4), torch.full((4,), 0.1))}

    def head(runner: Any) -> Any:
        return runner.policy.module.state_dict()["head.weight"].clone()

    with EvalRunnerGroup(cartpole, module, threaded=False) as group:
        with pytest.raises(UsageError, match="no statistics"):
            group.submit(weights=other)
        group.sync_filters(one)
        assert torch.equal(group.foreach_runner(head)[0], module.head.weight)
        group.sync_weights(other, version=7)
        assert group.evaluate().episodes[0].weights_version == 7
        assert torch.equal(group.foreach_runner(head)[0], other.head.weight)
        assert group.get_filters() == one
        digest = group.evaluate().provenance["weights"]["digest"]
    with EvalRunnerGroup(cartpole, other, threaded=False) as group:
        group.sync_filters(one)
        assert group.evaluate().provenance["weights"]["digest"] == digest


def test_filters_are_saved_and_restored_exactly(tmp_path: Any) -> None:
    """By a file in the config, and a replay of such a result is the same episode."""
    from rl_eval import replay

    path = tmp_path / "filters.json"
    with EvalRunnerGroup(config(), threaded=False) as group:
        filters = group.warm_up_filters(5)
        save_filters(filters, path)
        due = group.evaluate()
    assert load_filters(path) == filters
    (tmp_path / "config.yaml").write_text("policy: {observation_filter: MeanStdFilter, filters: filters.json}\n")
    named = EvalConfig.from_yaml(tmp_path / "config.yaml").environment(Drift).policy(sign)
    named.evaluation(num_episodes=20, determinism_check=0)
    result = evaluate(named)
    assert result.fingerprint == due.fingerprint
    assert replay(result, 3, config=named).identical
    path.write_text("{}x")
    with pytest.raises(ConfigError, match="is no file of"):
        evaluate(named)
    with pytest.raises(ConfigError, match="observation_filter is NoFilter"):
        evaluate(EvalConfig().environment(Drift).policy(sign, filters=path))


def test_snapshots_give_back_what_was_put_in() -> None:
    """Weights and filters come apart again, also where filters stand between weights."""
    import torch

    from rl_eval.weights import snapshot_weights

    bare = snapshot_weights({"a": torch.arange(5), "z": torch.ones(3)}, 3)
    filters = {DEFAULT_POLICY: MeanStdFilter.of(np.array(2.0), np.array(3.0))}
    both = with_filters(bare, filters, 3)
    assert filters_of(both) == filters
    assert filters_of(bare) == {}
    assert without_filters(both).digest == bare.digest
    tensors = {"a": torch.arange(5), "z": torch.ones(3)}
    mixed = {
        entry.name: torch.from_numpy(both.buffer[entry.offset : entry.offset + entry.num_bytes].copy())
        .view(getattr(torch, entry.dtype))
        .view(entry.shape)
        for entry in both.entries
    }
    shuffled = snapshot_weights({**mixed, **tensors}, 3)
    assert filters_of(shuffled) == filters
    assert without_filters(shuffled).digest == bare.digest
    assert filters_of(with_filters(both, {DEFAULT_POLICY: MeanStdFilter()}, 4)) == {DEFAULT_POLICY: MeanStdFilter()}

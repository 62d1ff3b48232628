"""Off-policy estimates against exact values, and the data that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from torch import nn

from benchmarks.off_policy import TabularPolicy, random_world
from rl_eval import EvalConfig
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, PolicyError, UsageError
from rl_eval.ope import ActionValues, LoggedEpisodes, estimate, load_episodes
from rl_eval.ope.data import _UNPACKED, places_of
from rl_eval.ope.estimators import (
    MODEL_FREE,
    UNWEIGHTED,
    WHOLE_EPISODES,
    WITH_MODEL,
    Inputs,
    effective_sample_size,
    largest_share,
    ratio_sums,
)
from rl_eval.ope.fitted_q import fitted_action_values
from rl_eval.ope.target import check_unchanged_actions, target_log_probs, target_policy
from rl_eval.policies import CallablePolicy
from rl_eval.policies.module import ModulePolicy
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.policies.normalization import NormalizedPolicy
from tests.refused import refused
from tests.unit.cli_world import call, make_folder, printed
from tests.unit.pages_world import blocks, pages

WORLDS = 200
ESTIMATORS = (*MODEL_FREE, *WITH_MODEL)
UNBIASED = ("trajectory_is", "per_decision_is", "doubly_robust")
GAMMA = 0.9


@cache
def whole(seed):
    """Return a world, every episode that can happen in it, and their probabilities."""
    world = random_world(seed)
    return world, *world.trajectories()


def inputs_of(world, episodes, policy=None, values=None, gamma=GAMMA):
    policy = TabularPolicy(world.target) if policy is None else policy
    return Inputs.of(episodes, target_log_probs(policy, episodes), gamma, values)


def value_of(ratios, shares):
    """Return a sum of ratios if episodes count by their shares."""
    whole = np.broadcast_to(ratios.denominators, ratios.numerators.shape)
    return ((shares @ ratios.numerators) / (shares @ whole)).sum()


# Exact values: the mean over every episode that can happen


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_have_the_exact_value_as_their_mean_or_limit(name):
    """In 200 random worlds, with every possible episode weighted by its probability, and any model's values."""
    for seed in range(WORLDS):
        (world, episodes, shares), rng = whole(seed), np.random.default_rng(seed)
        assert shares.sum() == pytest.approx(1, abs=1e-12)
        q = rng.normal(size=(world.horizon, *world.rewards.shape))  # Any model will do.
        at = (episodes.step_numbers(), episodes.observations)
        values = ActionValues(q[(*at, episodes.actions)], (world.target[at[1]] * q[at]).sum(1))
        ratios = ratio_sums(inputs_of(world, episodes, values=values))[name]
        assert value_of(ratios, shares) == pytest.approx(world.values(GAMMA)[1], abs=1e-10)
        if name in UNBIASED:
            assert shares @ ratios.influences() == pytest.approx(world.values(GAMMA)[1], abs=1e-10)


def test_the_exact_mean_weight_is_1_at_every_step():
    """Also at steps that many episodes do not reach."""
    for seed in range(WORLDS):
        world, episodes, shares = whole(seed)
        assert shares @ inputs_of(world, episodes).after == pytest.approx(np.ones(3), abs=1e-12)


# Special cases


def test_equal_policies_give_the_mean_return():
    """All weights are 1; with values that do not depend on the action the doubly robust ones too."""
    for seed in range(WORLDS):
        world = random_world(seed)
        policy, episodes = TabularPolicy(world.behaviour), world.sample(40, np.random.default_rng(seed))
        values = np.random.default_rng(seed).normal(size=len(episodes.rewards))
        inputs = inputs_of(world, episodes, policy, ActionValues(values, values))
        mean = episodes.padded(episodes.rewards) @ GAMMA ** np.arange(episodes.lengths.max())
        for name in ESTIMATORS:
            assert ratio_sums(inputs)[name].value() == pytest.approx(mean.mean(), abs=1e-12), name
    found = estimate(episodes, policy, gamma=GAMMA, values=ActionValues(values, values))
    for name in ESTIMATORS:
        assert found[name].weights.effective_sample_size == pytest.approx(40)
        assert found[name].interval.low == pytest.approx(found["behaviour"].interval.low, abs=1e-9)


@pytest.mark.parametrize("name", ["weighted_is", "weighted_per_decision_is", "weighted_doubly_robust"])
def test_weighted_estimators_return_what_every_episode_returns(name):
    """Division by the mean weight makes them averages; the others have the mean weight's error."""
    world = random_world(1)
    moves = world.moves[..., :-1] / world.moves[..., :-1].sum(2, keepdims=True)
    world = replace(
        world, moves=np.concatenate([moves, np.zeros((3, 2, 1))], axis=2), rewards=np.ones_like(world.rewards)
    )
    episodes = world.sample(50, np.random.default_rng(0))
    constant = np.full(len(episodes.rewards), 2.0)
    inputs = inputs_of(world, episodes, values=ActionValues(constant, constant))
    assert ratio_sums(inputs)[name].value() == pytest.approx(1 + GAMMA + GAMMA**2, abs=1e-12)
    assert abs(ratio_sums(inputs)["trajectory_is"].value() - (1 + GAMMA + GAMMA**2)) > 0.01


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_influence_of_an_episode_is_what_more_of_it_would_change(name):
    """By differences: intervals rest on it."""
    world = random_world(1)
    episodes, step = world.sample(20, np.random.default_rng(0)), 1e-6
    ratios = ratio_sums(inputs_of(world, episodes, values=world.action_values(episodes, GAMMA)))[name]
    assert ratios.influences().mean() == pytest.approx(ratios.value())
    for index, influence in enumerate(ratios.influences()):
        more = np.full(20, (1 - step) / 20) + step * (np.arange(20) == index)
        assert (value_of(ratios, more) - ratios.value()) / step == pytest.approx(
            influence - ratios.value(), rel=1e-3, abs=1e-4
        )


def test_the_effective_sample_size_is_that_of_the_weights_in_use():
    """Of whole episodes, or the least over the steps."""
    world = random_world(1)
    episodes = world.sample(300, np.random.default_rng(0))
    logarithms = inputs_of(world, episodes).logarithms
    found = estimate(episodes, TabularPolicy(world.target), values=world.action_values(episodes, 1.0))
    for name in ESTIMATORS:
        relevant = logarithms[:, -1:] if name in WHOLE_EPISODES else logarithms
        assert found[name].weights.effective_sample_size == effective_sample_size(relevant)
    assert effective_sample_size(logarithms) < effective_sample_size(logarithms[:, -1:])


def steps_of(lengths, **columns):
    """Columns of episodes of these lengths, whose observation is the step and whose actions were certain."""
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = places_of(episode)
    return {
        "episode": episode,
        "step": step,
        "observation": step,
        "action": np.zeros(len(step), int),
        "reward": step.astype(float),
        "terminated": np.append(np.diff(episode) != 0, True),
        "truncated": np.zeros(len(step), bool),
        "action_log_prob": np.zeros(len(step)),
        **columns,
    }


def two_lengths(count):
    """Half of the episodes end at once with nothing; the others go on to a reward of 1, as the target always does."""
    steps = steps_of(1 + np.arange(count) % 2)
    return steps | {"action": steps["episode"] % 2, "action_log_prob": np.where(steps["step"] == 0, np.log(0.5), 0.0)}


def one_step(count, **columns):
    """Episodes of one step each."""
    return load_episodes(steps_of([1] * count, **{"action_log_prob": np.full(count, -1.0)} | columns))


ALWAYS_ON = TabularPolicy(np.array([[0.0, 1.0], [0.0, 1.0]]))


@pytest.mark.parametrize("name", MODEL_FREE)
def test_episodes_that_end_early_keep_their_weight(name):
    """The truth is 1; a mean weight over only those that are still running gives one half."""
    episodes = LoggedEpisodes.from_steps(two_lengths(400))
    found = estimate(episodes, ALWAYS_ON, values=None)
    assert found[name].value == pytest.approx(1.0)
    inputs = inputs_of(None, episodes, ALWAYS_ON, gamma=1.0)
    weights, alive = inputs.after, episodes.padded(np.ones(len(episodes.rewards))) > 0
    over_survivors = (weights * inputs.rewards).mean(0) / [weights[alive[:, step], step].mean() for step in range(2)]
    assert over_survivors.sum() == pytest.approx(0.5)


def test_long_episodes_stay_in_range():
    """A thousand steps with ratios of 2 and 1/2 have weights of up to 2 to the power of 1000."""
    rng = np.random.default_rng(0)
    logs = rng.choice([-1.0, 1.0], (50, 1000)).cumsum(1) * np.log(2)
    assert 1 <= effective_sample_size(logs) < 50
    assert effective_sample_size(np.log([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(16 / 10)  # The least of 2 and 1.6.
    assert largest_share(np.log([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(0.75)
    assert effective_sample_size(logs + 5000) == pytest.approx(effective_sample_size(logs))
    assert largest_share(logs + 5000) == pytest.approx(largest_share(logs))


def test_densities_may_exceed_1():
    """A continuous action's log-density may be positive."""
    steps = two_lengths(40)
    steps["action"] = steps["action"].astype(float)
    steps["action_log_prob"] += 3.0

    class Same:
        def log_prob(self, observations, actions):
            return LoggedEpisodes.from_steps(steps).log_probs

    found = estimate(LoggedEpisodes.from_steps(steps), Same(), values=None)
    assert found["trajectory_is"].value == found["behaviour"].value == 0.5


# Refusals


def test_a_small_effective_sample_size_gives_no_estimate():
    """The size is told, the number is not."""
    found = estimate(LoggedEpisodes.from_steps(two_lengths(18)), ALWAYS_ON, values=None)
    assert not found.identified
    for name in MODEL_FREE:
        assert np.isnan(found[name].value)
        assert found[name].weights.effective_sample_size == pytest.approx(9)
        assert found[name].verdict == "not identified"
        assert all(told in str(found) for told in (name, found[name].verdict))
    json.dumps(found.to_dict(), allow_nan=False)


def test_missing_support_gives_no_estimate():
    """If no logged action is the target's; and if the target does what is not in the data half of the time."""
    steps = two_lengths(400)
    turned = TabularPolicy(np.array([[0.0, 1.0], [1.0, 0.0]]))  # The data never stop after the first step.
    longer = {name: column[steps["episode"] % 2 == 1] for name, column in steps.items()}
    found = estimate(load_episodes(longer), turned, values=None)["per_decision_is"]
    assert found.weights.effective_sample_size == 0
    assert found.verdict == "not identified"
    steps["action_log_prob"] = np.zeros(len(steps["step"]))
    half = estimate(load_episodes(steps), TabularPolicy(np.full((2, 2), 0.5)), values=None)
    assert not half.identified
    assert half["trajectory_is"].weights.mean_weight_interval.high < 1


def test_equal_returns_have_no_interval():
    """As for mean returns. Episodes of weight 0 are not among the values."""
    few = estimate(one_step(12, reward=np.full(12, 3.0)), TabularPolicy(np.array([[np.exp(-1), 1 - np.exp(-1)]])))
    assert [(one.value, one.interval.exists) for one in few.estimates if one.name in ("behaviour", "weighted_is")] == [
        (3.0, False),
        (3.0, False),
    ]
    steps = two_lengths(36)
    mostly = estimate(load_episodes(steps), ALWAYS_ON, values=None)["weighted_is"]
    assert mostly.verdict == "identified"
    assert mostly.weights.effective_sample_size == pytest.approx(18)
    assert (mostly.value, mostly.interval.exists) == (1.0, False)
    assert not estimate(load_episodes(two_lengths(44)), ALWAYS_ON, values=None)["weighted_is"].interval.exists


def two_arms(rounds, count, rng):
    """Return episodes of two arms, drawn with equal probability. The better arm has the reward 1."""
    action = rng.integers(0, 2, rounds * count)
    columns = {"observation": np.zeros(len(action), int), "action": action, "reward": np.where(action == 1, 1.0, 0.5)}
    return load_episodes(steps_of([rounds] * count) | columns | {"action_log_prob": np.full(len(action), np.log(0.5))})


def test_estimates_without_division_need_a_mean_weight_that_is_known():
    """The sample size is large in data sets with many matches, in which these estimates are too high."""
    rng, better = np.random.default_rng(3), TabularPolicy(np.array([[0.0, 1.0]]))
    weighted, unweighted = [], []
    for _ in range(40):
        found = estimate(two_arms(3, 80, rng), better, values=None)
        weighted += [one.value for one in found if one.name == "weighted_is" and one.verdict == "identified"]
        unweighted += [one.value for one in found if one.name in UNWEIGHTED and one.verdict == "identified"]
    assert len(weighted) > 10
    assert np.mean(weighted) == pytest.approx(3)
    assert not unweighted
    found = estimate(two_arms(1, 400, rng), better, values=None)
    assert all(found[name].value == pytest.approx(1, abs=0.15) for name in MODEL_FREE)


def test_weights_above_1_give_no_estimate():
    """The log-probabilities are those of another policy than the one that acted."""
    steps = two_lengths(400)
    steps["action_log_prob"] -= 0.5
    found = estimate(load_episodes(steps), TabularPolicy(np.array([[0.5, 0.5], [0, 1]])), values=None)
    assert not found.identified
    assert found["weighted_is"].weights.mean_weight_interval.low > 1


@pytest.mark.parametrize(("acted", "acts"), [(1.0, 0.5), (1 / 3, 1.0)])
@pytest.mark.parametrize("others", [0, 5])
def test_equal_weights_other_than_1_give_no_estimate(acted, acts, others):
    """They have no interval, but their mean is not 1."""
    probabilities = np.full(100, acted)
    probabilities[:others] *= 0.8
    steps = one_step(100, action=np.ones(100, int), action_log_prob=np.log(probabilities))
    policy = TabularPolicy(np.array([[1 - acts, acts], [1 - acts, acts]]))
    assert not estimate(steps, policy, values=None).identified


def changed(name, row, value):
    column = two_lengths(6)[name].astype(float)
    column[row] = value
    return {name: column}


SHUFFLED = np.array([0, 2, 1, 3, 4, 5, 6, 7, 8])
BAD = [
    ("action_log_prob", None, {"action_log_prob": None}),
    ("action_log_prob", 1, changed("action_log_prob", 2, np.nan)),
    ("action_log_prob", 0, changed("action_log_prob", 0, 0.5)),
    ("action_log_prob", 3, changed("action_log_prob", 4, -np.inf)),
    ("action_log_prob", 3, changed("action_log_prob", 5, np.inf)),
    ("reward", 3, changed("reward", 4, np.inf)),
    ("observation", 3, changed("observation", 4, np.nan)),
    ("step", 1, {name: v[SHUFFLED] for name, v in two_lengths(6).items()}),
    ("step", 1, {name: np.delete(v, 1, 0) for name, v in two_lengths(6).items()}),
    ("episode", 0, changed("episode", 8, 0)),
    ("episode", None, changed("episode", 0, 0.5)),
    ("truncated", 5, changed("terminated", 8, 0)),
    ("episode", 1, changed("truncated", 1, 1)),
    ("weights_version", 3, {"weights_version": [1] * 4 + [2] * 5}),
    ("behaviour", 3, {"behaviour": [1] * 4 + [2] * 5}),
    ("reward", None, {"reward": np.zeros((9, 2))}),
    ("action", None, {"action": np.array(["left"] * 9)}),
    ("episode", None, {name: v[:0] for name, v in two_lengths(6).items()}),
]


@pytest.mark.parametrize(("key", "episode", "columns"), BAD)
def test_bad_data_are_refused_by_episode(key, episode, columns):
    """The column and the episode are named."""
    with refused(UsageError, key, episode=episode):
        load_episodes({name: column for name, column in (two_lengths(6) | columns).items() if column is not None})


def test_logged_episodes_cannot_be_changed():
    """Neither through the value nor through the arrays that it was made of."""
    steps = two_lengths(6)
    episodes = LoggedEpisodes.from_steps(steps)
    steps["reward"][:] = 7
    assert episodes.rewards.max() == 1
    with pytest.raises(ValueError, match="read-only"):
        episodes.rewards[0] = 1


# Reading


def tensordict_of(columns):
    from tensordict import TensorDict  # It takes seconds to load.

    names = {
        "episode": ("collector", "traj_ids"),
        "step": ("collector", "step"),
        **{name: ("next", name) for name in ("reward", "terminated", "truncated")},
    }
    data = TensorDict({}, batch_size=[len(columns["step"])])
    for name, column in columns.items():
        tensor = torch.from_numpy(np.asarray(column))
        data[names.get(name, name)] = tensor.unsqueeze(-1) if isinstance(names.get(name), tuple) else tensor
    data["terminated"] = torch.zeros(len(columns["step"]), 1, dtype=torch.bool)  # Of the step before.
    data["next", "observation"] = data["observation"].roll(-1, 0)
    return data


@pytest.mark.parametrize("padded", [False, True])
def test_a_tensordict_reads_as_the_columns_do(tmp_path, padded):
    """In a row, with or without step numbers; padded with a mask; and from disk."""
    columns = two_lengths(6)
    np.savez(tmp_path / "data.npz", **columns)
    expected = load_episodes(tmp_path / "data.npz")
    data = tensordict_of(columns)
    if padded:
        lengths = expected.lengths.tolist()
        rows = torch.zeros(6, 2, dtype=torch.long)
        mask = torch.arange(2) < torch.tensor(lengths)[:, None]
        rows[mask] = torch.arange(9)
        data = data[rows]
        data["collector", "mask"] = mask
    else:
        del data["collector", "step"]
    data.memmap(tmp_path / "folder")
    for found in (load_episodes(data), load_episodes(str(tmp_path / "folder"))):
        for name in ("observations", "actions", "rewards", "log_probs", "lengths", "terminated", "ids"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_steps_without_numbers_have_to_lead_to_one_another():
    """Else shuffled ones could not be told from others."""
    data = tensordict_of(two_lengths(6) | {"observation": np.arange(9.0)})
    del data["collector", "step"]
    assert load_episodes(data).step_numbers().tolist() == two_lengths(6)["step"].tolist()
    with refused(UsageError, "next_observation", value=1, episode=1):
        load_episodes(data[torch.from_numpy(SHUFFLED)])
    del data["next", "observation"]
    with refused(UsageError, "step"):
        load_episodes(data)


def test_a_minari_dataset_reads_as_the_columns_do():
    """One observation more than actions; infos have an entry for the reset."""
    columns = two_lengths(6)
    names = {"observations": "observation", "actions": "action", "rewards": "reward"}
    names |= {"terminations": "terminated", "truncations": "truncated"}

    class Dataset:
        def __init__(self, versions=(1,) * 6, **of_the_fourth):
            self.storage, self.versions, self.of_the_fourth = self, versions, of_the_fourth

        def get_episode_metadata(self, indices):
            return ({"weights_version": self.versions[index]} for index in indices)

        def iterate_episodes(self):
            for number in range(6):
                rows = columns["episode"] == number
                parts = {theirs: columns[ours][rows] for theirs, ours in names.items()}
                parts["observations"] = np.append(parts["observations"], 99)
                parts["infos"] = {"action_log_prob": np.append(np.nan, columns["action_log_prob"][rows])}
                yield SimpleNamespace(id=number, **parts | (self.of_the_fourth if number == 3 else {}))

    found, expected = load_episodes(Dataset()), load_episodes(columns)
    assert np.array_equal(found.observations, expected.observations)
    assert np.array_equal(found.log_probs, expected.log_probs)
    for dataset, key, episode in (
        (Dataset(infos={}), "action_log_prob", 3),
        (Dataset(observations={"a": 1, "b": 2}), "observations", 3),
        (Dataset(versions=(1, 1, 2, 2, 2, 2)), "weights_version", 2),
    ):
        with refused(UsageError, key, episode=episode):
            load_episodes(dataset)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_arrays_are_read(tmp_path, save):
    columns = two_lengths(6)
    columns["observation"] = np.random.default_rng(0).random((len(columns["step"]), 100_000))
    save(tmp_path / "data.npz", **columns)
    assert np.array_equal(load_episodes(tmp_path / "data.npz").observations, columns["observation"])


def test_constant_arrays_are_read_without_compression(tmp_path):
    """Compressed, they look like a file that is made to take all memory. The error says what to do."""
    columns = two_lengths(6)
    columns["observation"] = np.zeros((len(columns["step"]), 500_000))
    np.savez_compressed(tmp_path / "small.npz", **columns)
    with refused(UsageError, "data", fix=_UNPACKED):
        load_episodes(tmp_path / "small.npz")
    np.savez(tmp_path / "data.npz", **columns)
    assert len(load_episodes(tmp_path / "data.npz")) == 6


def test_what_holds_no_logged_episodes_is_refused(tmp_path):
    """No file, no archive, objects, a folder of anything."""
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", episode=np.array([{}]))
    for name in ("none.npz", "text.npz", "one.npy", "objects.npz", "."):
        with refused(UsageError, "data"):
            load_episodes(tmp_path / name)
    with refused(UsageError, "data", value="int"):
        load_episodes(3)


# The target policy


class Gaussian(nn.Linear):
    """Half of the outputs are means, the others logarithms of spreads."""

    def forward(self, observations):
        return super().forward(observations).chunk(2, 1)


@pytest.mark.parametrize(
    ("space", "outputs"),
    [
        (gym.spaces.Discrete(4, start=2), 4),
        (gym.spaces.MultiDiscrete([2, 3], start=[1, 0]), 5),
        (gym.spaces.MultiBinary(3), 3),
        (gym.spaces.Box(-1, 1, (2,)), 4),
    ],
    ids=["Discrete", "MultiDiscrete", "MultiBinary", "Box"],
)
def test_a_module_tells_of_any_action_what_it_tells_when_it_draws_it(space, outputs):
    """That is torch's, as the tests of samples show; without sampling an action is certain or impossible."""
    box = isinstance(space, gym.spaces.Box)
    net, live = (Gaussian if box else nn.Linear)(3, outputs), np.ones(20, bool)
    observations = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    drawing, fixed = (ModulePolicy(net, space, deterministic=known) for known in (False, True))
    with torch.no_grad():
        actions = drawing.act(observations, None, live, EpisodeNoise(np.arange(20), np.zeros(20, int)))[0]
        assert drawing.log_prob(observations, actions) == pytest.approx(drawing.outputs["action_log_prob"])
        if box:
            with refused(ConfigError, "policy.deterministic", value=True):
                fixed.log_prob(observations, actions)
        else:
            taken = fixed.act(observations, None, live, None)[0]
            assert (fixed.log_prob(observations, taken) == 0).all()
            assert set(fixed.log_prob(observations, actions)) == {0.0, -np.inf}
        with refused(PolicyError, "actions", value="(20, 7)"):
            fixed.log_prob(observations, np.zeros((20, 7)))
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            with refused(PolicyError, "actions", value=9):
                fixed.log_prob(observations, np.full_like(actions, 9))


def test_a_normalizer_before_the_target_policy_is_part_of_it():
    """Its log-probabilities are those that the policy gives to normalized observations."""
    policy = TabularPolicy(np.array([[0.9, 0.1], [0.2, 0.8]]))
    statistics = {"": lambda observations: 1 - observations}
    turned = NormalizedPolicy(policy, lambda: statistics)
    observations, actions = np.array([0, 1, 1]), np.array([0, 0, 1])
    assert np.array_equal(turned.log_prob(observations, actions), policy.log_prob(1 - observations, actions))
    assert not hasattr(NormalizedPolicy(CallablePolicy(abs), dict), "log_prob")


def test_a_policy_without_log_probabilities_is_refused():
    """None can be guessed from what it does; nor from what it does in an unknown state."""
    episodes = LoggedEpisodes.from_steps(two_lengths(6))

    class WithState(TabularPolicy):
        def initial_state(self, batch_size):
            return None

    class Wrong(TabularPolicy):
        def log_prob(self, observations, actions):
            return np.full((len(actions), 2), self.table[0, 0])

    for policy, key in (
        (lambda observations: observations, "policy"),
        (WithState(np.zeros((2, 2))), "policy"),
        (Wrong(np.zeros((2, 2))), "log_prob"),
        (Wrong(np.full((2, 2), np.nan)), "log_prob"),
        (TabularPolicy(np.zeros((1, 2))), "policy"),
        (TabularPolicy(np.full((2, 2), np.nan)), "log_prob"),
    ):
        with refused(UsageError, key):
            estimate(episodes, policy, values=None)
    with refused(UsageError, "gamma", value=1.5):
        estimate(episodes, ALWAYS_ON, gamma=1.5)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.Box(-np.inf, np.inf, (2,))], ids=str)
def test_a_module_is_a_target_policy_that_samples(space, monkeypatch):
    """Its action space is that of the data, and it stays as it was."""
    monkeypatch.setattr("rl_eval.ope.fitted_q._LEAST_UPDATES", 20)
    discrete = isinstance(space, gym.spaces.Discrete)
    net, rng = nn.Linear(1, 3) if discrete else Gaussian(1, 4), np.random.default_rng(0)
    actions = rng.integers(0, 3, 300) if discrete else rng.normal(size=(300, 2))
    densities = -0.5 * (actions**2).sum(-1) - np.log(2 * np.pi)
    episodes = one_step(
        300,
        observation=rng.normal(scale=0.1, size=(300, 1)).astype(np.float32),
        action=actions,
        reward=rng.normal(size=300),
        action_log_prob=np.full(300, np.log(1 / 3)) if discrete else densities,
    )
    found = estimate(episodes, net)
    assert net.training
    assert found.to_dict() == estimate(episodes, ModulePolicy(net, space, deterministic=False)).to_dict()
    assert np.isfinite(found["weighted_is"].value)


@pytest.mark.parametrize(
    ("actions", "shape"),
    [(np.zeros((4, 2), int), "(2,)"), (np.zeros(4, int), "(1,)")],
)
def test_a_module_that_does_not_fit_the_data_is_refused(actions, shape):
    """In a sentence that names the shapes."""
    with refused(UsageError, "policy") as caught:
        estimate(one_step(4, observation=np.zeros((4, 1)), action=actions), torch.nn.Conv2d(1, 1, 3))
    assert shape in caught.value.value
    assert shape in str(caught.value)


# Fitted values


def test_fitted_values_are_near_the_exact_ones_and_make_estimates_better():
    """In one world; they are the same each time and leave the global generators alone."""
    world, gamma = random_world(3), 0.5
    episodes, policy = world.sample(400, np.random.default_rng(0)), TabularPolicy(world.target)
    before = torch.random.get_rng_state()
    fitted = fitted_action_values(episodes, policy, gamma, updates=400)
    assert torch.equal(before, torch.random.get_rng_state())
    twice = [fitted_action_values(episodes, policy, gamma, updates=5).q for _ in range(2)]
    assert np.array_equal(*twice)
    exact = world.action_values(episodes, gamma)
    assert np.corrcoef(fitted.q, exact.q)[0, 1] > 0.98
    assert np.abs(fitted.q - exact.q).mean() < 0.15 * exact.q.std()
    found = estimate(episodes, policy, gamma=gamma, values=fitted)
    assert abs(found["fitted_q"].value - world.values(gamma)[1]) < 0.15
    width = {name: found[name].interval.high - found[name].interval.low for name in ESTIMATORS}
    assert width["doubly_robust"] < 0.8 * width["per_decision_is"]
    assert found["fitted_q"].verdict == "model"


def test_no_fit_sees_the_rewards_of_the_episodes_that_it_predicts():
    """Other rewards in half of the episodes change the values of the other half only."""
    world = random_world(0)
    episodes = world.sample(20, np.random.default_rng(0))
    first = episodes.rows_of(np.arange(20) % 2 == 0)
    others = replace(episodes, rewards=np.where(first, 10 * episodes.rewards, episodes.rewards))
    one, two = (fitted_action_values(e, TabularPolicy(world.target), GAMMA, updates=5) for e in (episodes, others))
    for before, after in zip(one, two, strict=True):
        assert np.array_equal(before[first], after[first])
        assert not np.isclose(before[~first], after[~first]).any()


# The documentation


class Tilted(nn.Module):
    """Takes action 1 with a probability of its own."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, observations):
        return torch.log(torch.tensor([1 - self.share, self.share])).expand(len(observations), 2)


def tilted(share=0.6):
    return Tilted(share)


@pytest.mark.skipif(find_spec("minari") is None, reason="Minari is for Python 3.11 and newer")
def test_the_example_of_the_documentation_prints_what_it_shows(reader, capsys, monkeypatch):
    """``docs/trajectories.md``, line by line, with two coins as policies."""
    [page] = pages("tests/unit/test_ope.py")
    monkeypatch.setattr("rl_eval.ope.fitted_q._LEAST_UPDATES", 20)
    for name, share in (("behaviour", 0.6), ("target", 0.5)):
        policy = {"policy": f"{__name__}:tilted", "policy_kwargs": {"share": share}, "deterministic": False}
        config = {"environment": {"env": "CartPole-v1"}, "policy": policy, "runners": {"num_runners": 0}}
        (reader.folder / f"{name}.yaml").write_text(
            yaml.safe_dump(config | {"evaluation": {"num_episodes": 30, "max_episode_steps": 4}})
        )
    reader.follow(page)
    assert capsys.readouterr().out in [block.text for block in blocks(page)]


# The command line


def test_the_command_estimates_what_the_simulation_measures(tmp_path, monkeypatch):
    """A behaviour policy that is half random in the toy environment; the target's value is known by running it."""
    folder = make_folder(tmp_path, monkeypatch)
    rng = np.random.default_rng(0)
    columns = steps_of(rng.integers(10, 20, 300))
    action = rng.integers(0, 2, len(columns["step"]))
    columns |= {"action": action, "reward": action, "action_log_prob": np.full(len(action), np.log(0.5))}
    columns["observation"] = columns["step"][:, None].astype(np.float32)
    np.savez(folder / "data.npz", **columns)
    args = ("toy.yaml", "--set", f"policy.policy={__name__}:tilted", "--set", "policy.deterministic=false")
    outcome = call("ope", "data.npz", *args, "--no-fit", "--gamma", "0.9", "--json")
    assert outcome.exit_code == 0, outcome.output
    found = {one["name"]: one for one in printed("ope", outcome.stdout)["estimates"]}
    assert list(found) == ["behaviour", *MODEL_FREE, "simulation"]
    for name in MODEL_FREE:
        assert found[name]["verdict"] == "identified"
        assert found[name]["interval"]["low"] < found["simulation"]["value"] < found[name]["interval"]["high"]
    shown = call("ope", "data.npz", *args, "--no-fit", "--no-simulation").stdout
    assert "weighted_per_decision_is" in shown
    assert "simulation " not in shown.replace("- simulation", "")
    np.savez(folder / "few.npz", **{name: column[columns["episode"] < 5] for name, column in columns.items()})
    outcome = call("ope", "few.npz", *args, "--no-fit", "--no-simulation", "--json")
    assert outcome.exit_code == ExitCode.USAGE
    refused = {one["name"]: one for one in printed("ope", outcome.stdout)["estimates"]}
    assert "below 10" in refused["trajectory_is"]["reason"]
    assert refused["trajectory_is"]["value"] is None


FLAT, LONGER = {"action": np.zeros((4, 2), np.float32)}, steps_of([2, 2])


@pytest.mark.parametrize(
    ("env", "size", "columns", "key"),
    [
        ("CartPole-v1", 3, {}, "observations"),
        ("Pendulum-v1", 3, FLAT, "actions"),
        ("Acrobot-v1", 6, LONGER, "evaluation.max_episode_steps"),
    ],
)
def test_episodes_of_another_environment_are_refused(env, size, columns, key):
    """By the shapes of its spaces, and by its limit of steps."""
    config = EvalConfig().environment(env).policy("rl_eval.policies.mlp:make_mlp").evaluation(max_episode_steps=1)
    episodes = one_step(4, **columns | {"observation": np.zeros((4, size), np.float32)})
    with refused(UsageError, key):
        target_policy(config.build(), episodes)


def test_actions_that_were_changed_before_they_were_stored_are_refused():
    """The stored log-probability is that of the action as drawn."""
    steps = two_lengths(6)
    episodes = LoggedEpisodes.from_steps({**steps, "action": steps["action"].astype(np.float32)[:, None]})
    space = gym.spaces.Box(-1.0, 1.0, (1,))
    with refused(UsageError, "policy.actions", value="clip"):
        check_unchanged_actions(episodes, space, "clip")
    with refused(UsageError, "policy.actions", value="unsquash"):
        check_unchanged_actions(episodes, space, "unsquash")
    check_unchanged_actions(episodes, space, "none")
    check_unchanged_actions(episodes, gym.spaces.Box(-2, 2, (1,)), "clip")
    check_unchanged_actions(episodes, gym.spaces.Discrete(2), "clip")


class _RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_with_a_pickle_is_refused(tmp_path: Path, linked: bool) -> None:
    """Of a field that is not a tensor, also behind a link: nothing of it runs."""
    tensordict = pytest.importorskip("tensordict")
    folder, mark = tmp_path / "steps", tmp_path / "ran"
    data = tensordict.TensorDict({"reward": torch.zeros(3)}, [3])
    data["other"] = tensordict.NonTensorData(_RunsCode(mark), batch_size=[3])
    data.memmap(folder)
    if linked:
        (folder / "other").rename(tmp_path / "elsewhere")
        (folder / "other").symlink_to(tmp_path / "elsewhere")
    mark.unlink(missing_ok=True)
    with refused(UsageError, "data", value=str(folder)):
        load_episodes(folder)
    assert not mark.exists()

"""Environments of several agents: the same records in every layout, the sums of a plain loop, and clear errors."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
import yaml
from agents_world import (
    BODY,
    MOVES,
    Auction,
    Counting,
    Crowd,
    FaultyCrowd,
    Noisy,
    auction_config,
    batched_config,
    by_index,
    by_kind,
    crowd_config,
)
from tensordict import TensorDict

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, compare, evaluate, load, replay
from rl_eval.backends.pickling import pickled_settings
from rl_eval.errors import ConfigError, EvalError, WeightsError
from rl_eval.integrations.rllib.workers import RolloutWorkers
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.recording.export import export_trajectories
from rl_eval.records.agents import agent_columns, agent_rows
from rl_eval.records.episode import EpisodeSpec
from rl_eval.reports.pages import headlines
from rl_eval.reports.report import overview
from rl_eval.results.stats.interval import mean_interval
from rl_eval.runners.multi_agent.inference import seat_seeds
from rl_eval.weights import save_weights_file, snapshot_weights
from tests.refused import refused, result_of, untold
from tests.unit.games_world import Duel, Level
from tests.unit.pages_world import Reader, pages


def bits(result: EvalResult) -> tuple[str, bytes]:
    """Everything that must not depend on the layout: the team's outcome, and what each agent did."""
    assert result.status == "complete", result.reason
    return result.fingerprint, result.table.infos.tobytes()


def agents_of(result: EvalResult, index: int) -> dict[str, dict[str, float]]:
    """What a record says of each agent that appeared."""
    found: dict[str, dict[str, float]] = {}
    for key, value in result.episodes[index].info.items():
        name, _, agent = key.partition("/")
        if not np.isnan(value):
            found.setdefault(agent, {})[name] = value
    return found


# ---------------------------------------------------------------------- invariance

WORLDS = {
    "agents that come and die": crowd_config,
    "policies that take turns": lambda **runners: crowd_config(by_index, **runners),
    "one agent at a time": auction_config,
    "one policy for all": lambda **runners: (
        EvalConfig()
        .environment(Crowd)
        .policy(Counting(1), deterministic=False)
        .evaluation(num_episodes=20)
        .runners(runner="multi_agent", **runners)
    ),
}


@pytest.mark.parametrize("world", WORLDS)
def test_records_do_not_depend_on_the_number_of_slots(world: str) -> None:
    """One batch per policy over all slots and agents, with noise and state of each agent's own."""
    whole = bits(evaluate(WORLDS[world](num_envs_per_runner=1)))
    for slots in (3, 16):
        assert bits(evaluate(WORLDS[world](num_envs_per_runner=slots))) == whole


class Alone(Crowd):
    """Notes when two are built at the same time, which many simulators do not survive."""

    building = overlapping = 0

    def __init__(self) -> None:
        Alone.building += 1
        Alone.overlapping += Alone.building > 1
        time.sleep(0.05)
        super().__init__()
        Alone.building -= 1


def test_no_two_environments_are_built_at_the_same_time() -> None:
    """The agents are asked for in the caller's thread, and runners of a group are built in another."""
    Alone.overlapping = 0
    with EvalRunnerGroup(crowd_config(num_envs_per_runner=2).environment(Alone)) as group:
        assert group.evaluate(num_episodes=2).status == "complete"
    assert not Alone.overlapping


def test_other_noise_for_every_agent_step_and_episode() -> None:
    """Seeds of seats are distinct, and depend on nothing but episode and seat."""
    seeds = [seed for episode in range(100) for seed in seat_seeds(episode, 8)]
    assert len(set(seeds)) == 800
    assert seat_seeds(7, 8)[:3] == seat_seeds(7, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_faults_change_no_record() -> None:
    """Half of the first attempts raise, and are run again with their seeds; nobody's sums are mixed up."""
    whole = bits(evaluate(crowd_config()))
    config = crowd_config(num_envs_per_runner=8).environment(FaultyCrowd, env_kwargs={"raising": True})
    result = evaluate(config)
    assert bits(result) == whole
    assert len(result.faults) == 20


class ZeroSum(Crowd):
    """What the doves win, the hawks lose; a bit of it comes from a generator of the process, if there is one."""

    luck: np.random.Generator | None = None

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        won = 1.0 if self.luck is None else float(self.luck.integers(10))
        shares = dict.fromkeys(rewards, 0.0)
        if len(shares) > 1:
            first, second, *_ = shares
            shares |= {first: won, second: -won}
        return observations, shares, *rest


def test_the_fingerprint_and_the_check_are_about_every_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gains and losses cancel, the team's return is the same whoever wins."""
    config = crowd_config().environment(ZeroSum).evaluation(determinism_check=0.1)
    result = evaluate(config)
    assert result.determinism.passed
    assert set(result.table.rows["episode_return"]) == {0.0}

    tampered = evaluate(config)
    index = next(index for index, row in enumerate(tampered.table.infos) if np.nansum(np.abs(row)))
    returns = [key for key in tampered.table.info_keys if key.startswith("return/")]
    places = [tampered.table.info_keys.index(key) for key in returns]
    tampered.table.infos[index, places] *= -1
    assert tampered.fingerprint != result.fingerprint
    assert replay(result, index, config=config).identical
    found = replay(tampered, index, config=config)
    assert not found.identical
    assert set(found.differences) <= set(returns)

    monkeypatch.setattr(ZeroSum, "luck", np.random.default_rng(0))
    lucky = evaluate(config)
    assert set(lucky.table.rows["episode_return"]) == {0.0}
    assert not lucky.determinism.passed
    assert lucky.determinism.first.cause == "environment"
    assert re.search("return/.*environment", str(lucky.determinism))
    assert len(lucky.notes) == len(result.notes) + 1


# ---------------------------------------------------------------------- truth


class Leaving:
    """Two agents are rewarded with 1 per step alive; one leaves after step 1 of 3."""

    possible_agents = ("brief", "long")

    def __init__(self, *, cut: bool = False) -> None:
        self.cut = cut

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return BODY

    def action_space(self, agent: str) -> gym.Space[Any]:
        return MOVES

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time = ["brief", "long"], 0
        return {agent: np.zeros(3, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        heard = list(self.agents)
        ended = {"brief": self.time == 1, "long": self.time == 3}
        self.agents = [agent for agent in heard if not ended[agent]]
        flags = {agent: ended[agent] for agent in heard}, dict.fromkeys(heard, False)
        if self.cut:
            flags = flags[1], flags[0]
        observations = {agent: np.zeros(3, np.float32) for agent in heard}
        return observations, dict.fromkeys(heard, 1.0), *flags, {}

    def close(self) -> None:
        pass


def still(observations: Any) -> Any:
    """Act with 0."""
    return np.zeros(len(observations), np.int64)


def leaving_config(**env_kwargs: Any) -> EvalConfig:
    config = EvalConfig().environment(Leaving, env_kwargs=env_kwargs).policy(policies={"brief": still, "long": still})
    return config.evaluation(num_episodes=4)


class Reporting(Leaving):
    """Agents report success in the last two of three steps, as the argument says."""

    def __init__(self, reports: list[dict[str, Any]]) -> None:
        super().__init__()
        self.reports = reports

    def step(self, actions: Any) -> Any:
        *others, _ = super().step(actions)
        return *others, self.reports[self.time - 2] if self.time > 1 else {}


@pytest.mark.parametrize(
    ("reports", "once", "at_end", "noted"),
    [
        ([{"brief": {"success": True}, "long": {"success": None}}, {}], True, True, False),
        ([{"brief": {"is_success": True, "success": False}}, {"long": {"success": False}}], True, False, False),
        ([{"brief": {"success": True}, "long": {"success": False}}, {"long": {"success": 1}}], True, True, False),
        ([{"__common__": {"success": None}, "long": {"success": True}}, {}], True, True, False),
        ([{"long": {"success": "False"}}, {}], None, None, True),
        ([{"long": {"success": np.nan}, "brief": {"success": True}}, {}], None, None, True),
        ([{"long": {"success": np.array([True, False])}}, {}], None, None, True),
    ],
)
def test_success_of_agents_is_read_as_that_of_a_single_agent(reports: Any, once: Any, at_end: Any, noted: bool) -> None:
    """None is no report; a step succeeds if all agents that report succeed; other values get a note."""
    result = evaluate(leaving_config(reports=reports).environment(Reporting))
    record = result.episodes[0]
    assert (record.success_once, record.success_at_end) == (once, at_end)
    assert any("neither true nor false" in note for note in result.notes) == noted


class Repeating(Leaving):
    """Names with a slash, rewards and flags as arrays of one, and the flags of those that left in every step."""

    possible_agents = ("brief/1", "long/1")

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time = list(self.possible_agents), 0
        return {agent: np.zeros(3, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        heard = list(self.agents)
        self.agents = {1: heard[1:], 2: heard, 3: []}[self.time]
        observations = {agent: np.zeros(3, np.float32) for agent in heard}
        terminated = {"brief/1": np.array([True]), "long/1": np.array([False])}
        truncated = {"brief/1": False, "long/1": self.time == 3}
        rewards, infos = dict.fromkeys(heard, np.array([1.5])), {agent: {"score": self.time} for agent in heard}
        return observations, rewards, terminated, truncated, infos


def test_names_with_a_slash_arrays_of_one_and_repeated_flags() -> None:
    """The episode has the flags of the agents that end in its last step."""
    config = EvalConfig().environment(Repeating).policy(still).runners(runner="multi_agent")
    config.evaluation(num_episodes=2, info_keys=["brief/1/score", "long/1/score"])
    with EvalRunnerGroup(config, threaded=False) as group:
        record, batch = group.evaluate().episodes[0], group.sample(2, as_arrays=True)
    assert (record.info["brief/1/score"], record.info["long/1/score"]) == (1, 3)
    assert (record.terminated, record.truncated) == (False, True)
    assert batch["next.info.reward/brief/1"].tolist() == [1.5, 0, 0] * 2
    assert batch["next.reward"].tolist() == [3, 1.5, 1.5] * 2


class Buffered:
    """Policy that returns the same array in every pass, with new values."""

    def __init__(self) -> None:
        self.moves = np.zeros(256, np.int64)

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        count = len(observations)
        np.argmax(observations, axis=1, out=self.moves[:count])
        return self.moves[:count], None


def test_a_policy_of_two_ids_may_return_the_same_array_in_every_pass() -> None:
    def copied(observations: Any) -> Any:
        return observations.argmax(1)

    def made(policy: Any) -> EvalConfig:
        return crowd_config().policy(policies={"hawk": policy, "dove": policy}, deterministic=True)

    assert bits(evaluate(made(Buffered()))) == bits(evaluate(made(copied)))


class Quick:
    """Game that is over after the first move. The seed decides who wins; black never acts."""

    possible_agents = ("white", "black")

    def agent_iter(self) -> None: ...

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return BODY

    def action_space(self, agent: str) -> gym.Space[Any]:
        return MOVES

    def reset(self, seed: int, options: Any = None) -> None:
        self.agents, self.agent_selection, self.over = ["white", "black"], "white", False
        self.points = {"white": float(seed % 2 == 0), "black": float(seed % 2)}

    def last(self) -> Any:
        return np.zeros(3, np.float32), self.points[self.agent_selection] * self.over, self.over, False, {}

    def step(self, action: Any) -> None:
        if self.over:
            self.agents.remove(self.agent_selection)
            self.agent_selection = "black"
        self.over = True

    def close(self) -> None: ...


def test_an_agent_that_never_acts_has_a_row_in_every_episode() -> None:
    """Also if its return is 0, which is a loss."""
    result = evaluate(EvalConfig().environment(Quick).policy(policies={"white": still, "black": still}))
    odd = np.mean([record.seed % 2 for record in result.episodes])
    assert len(result.agents) == 200
    assert (result.metrics["win_rate/black"], result.metrics["loss_rate/black"]) == (odd, 1 - odd)
    interval = mean_interval([record.seed % 2 for record in result.episodes], bounds=(0, 1))
    assert result.metrics["win_rate_ci_low/black"] == interval.low < odd < interval.high
    assert result.metrics["win_rate_ci_high/black"] == interval.high


def test_an_agent_that_leaves_early_keeps_its_own_return() -> None:
    """Returns 1 and 3, team 4, lengths 1 and 3; the episode ends when all agents are done."""
    result = evaluate(leaving_config())
    record = result.episodes[0]
    assert (record.episode_return, record.length, record.terminated, record.truncated) == (4.0, 3, True, False)
    brief = {"return": 1.0, "length": 1.0, "terminated": 1.0, "truncated": 0.0, "policy": 0.0}
    long = {"return": 3.0, "length": 3.0, "terminated": 1.0, "truncated": 0.0, "policy": 1.0}
    assert agents_of(result, 0) == {"brief": brief, "long": long}


@pytest.mark.parametrize(
    ("cut", "limit", "total", "by", "ends"),
    [
        (True, None, 4.0, "environment", [(0.0, 1.0), (0.0, 1.0)]),
        (False, 2, 3.0, "max_episode_steps", [(1.0, 0.0), (0.0, 1.0)]),
    ],
)
def test_an_episode_that_is_cut_cuts_those_who_live(cut: bool, limit: Any, total: float, by: str, ends: Any) -> None:
    """By the environment's flags, or by ``max_episode_steps``, which leaves alone who had ended."""
    result = evaluate(leaving_config(cut=cut).evaluation(max_episode_steps=limit))
    record, agents = result.episodes[0], agents_of(result, 0).values()
    assert (record.episode_return, record.terminated, record.truncated, record.truncated_by) == (total, False, True, by)
    assert [(agent["terminated"], agent["truncated"]) for agent in agents] == ends


class Seats:
    """Chooses moves one row at a time; policies get the state and noise of a seat that the contract promises them."""

    def __init__(self, agents: Any, seed: int) -> None:
        self.seeds = dict(zip(agents, seat_seeds(seed, len(agents)), strict=True))
        self.moves: dict[str, int] = dict.fromkeys(agents, 0)
        self.states: dict[str, Any] = {}

    def move(self, agent: str, policy: Any, observation: Any) -> int:
        if not self.moves[agent]:
            self.states[agent] = policy.initial_state(1) if hasattr(policy, "initial_state") else None
        noise = EpisodeNoise(np.array([self.seeds[agent]]), np.array([self.moves[agent]]))
        batch = tree.map_structure(lambda part: part[None], observation)
        action, self.states[agent] = policy.act(batch, self.states[agent], np.ones(1, bool), noise)
        self.moves[agent] += 1
        return int(action[0])


def plain_parallel(env: Any, policies: dict[str, Any], mapping: Any, index: int, seed: int) -> dict[str, float]:
    """PettingZoo's loop."""
    seats = Seats(env.possible_agents, seed)
    observations, _ = env.reset(seed=seed)
    returns: dict[str, float] = {}
    while env.agents:
        actions = {}
        for agent in env.agents:
            policy = policies[mapping(agent, EpisodeSpec(index, seed))]
            actions[agent] = seats.move(agent, policy, observations[agent])
        observations, rewards, *_ = env.step(actions)
        for agent, reward in rewards.items():
            returns[agent] = returns.get(agent, 0.0) + reward
    return {agent: value for agent, value in returns.items() if seats.moves[agent] or value}


@pytest.mark.parametrize("mapping", [lambda agent, spec: agent.partition("_")[0], by_index])
def test_returns_are_those_of_a_plain_loop(mapping: Any) -> None:
    """Every agent of 100 episodes has the return that PettingZoo's own loop gives it."""
    result = evaluate(crowd_config(mapping, num_envs_per_runner=7).evaluation(num_episodes=100))
    policies, env = {"hawk": Counting(1), "dove": Noisy(2)}, Crowd()
    for record in result.episodes:
        due = plain_parallel(env, policies, mapping, record.index, record.seed)
        ours = {name: agent["return"] for name, agent in agents_of(result, record.index).items()}
        assert {name: value for name, value in ours.items() if name in due} == due
        assert record.episode_return == sum(ours.values())


def plain_aec(env: Any, policies: dict[str, Any], seed: int, limit: int = 1000) -> dict[str, float]:
    """PettingZoo's loop for environments where one agent acts at a time; rewards still due after a cut are added."""
    seats, returns = Seats(env.possible_agents, seed), dict.fromkeys(env.possible_agents, 0.0)
    env.reset(seed=seed)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        if terminated or truncated:
            env.step(None)
            continue
        if sum(seats.moves.values()) == limit:
            due = {other: reward for other, reward in env._cumulative_rewards.items() if other != agent}
            return {other: value + due.get(other, 0.0) for other, value in returns.items()}
        env.step(seats.move(agent, policies[agent], observation))
    return returns


@pytest.mark.parametrize("limit", [None, 4])
def test_turns_are_those_of_a_plain_loop(limit: int | None) -> None:
    """100 of 100 episodes, with a policy whose state must stand still while others move; a cut loses no reward."""
    config = auction_config(num_envs_per_runner=7).evaluation(num_episodes=100, max_episode_steps=limit)
    result = evaluate(config)
    policies, env = {"ann": Noisy(1), "bob": Counting(2), "cyd": Noisy(3)}, Auction()
    for record in result.episodes:
        ours = {name: agent["return"] for name, agent in agents_of(result, record.index).items()}
        due = plain_aec(env, policies, record.seed, limit or 1000)
        assert ours == {name: value for name, value in due.items() if name in ours}
        assert len(ours) == 3
        cut = result.agents[(result.agents["index"] == record.index) & (result.agents["agent"] == "cyd")]
        assert cut["truncated"].all()


# ---------------------------------------------------------------------- weights


class Logits(torch.nn.Module):
    """Logits of the moves of a body."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        torch.nn.init.constant_(self.layer.weight, bias / 10)
        torch.nn.init.constant_(self.layer.bias, bias)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(observations)


def modules_config(first: Any, second: Any) -> EvalConfig:
    config = crowd_config().policy(policies={"hawk": first, "dove": second})
    return config.evaluation(num_episodes=20)


def peaked(move: int) -> Logits:
    """A module that nearly always makes one move."""
    module = Logits()
    with torch.no_grad():
        module.layer.bias[move] = 20.0
    return module


def test_weights_are_sent_to_one_policy_and_the_others_keep_theirs() -> None:
    """A partial ``sync_weights`` gives what a group built with those weights gives, and so does a replaced runner."""
    want = evaluate(modules_config(peaked(3), peaked(1)))
    with EvalRunnerGroup(modules_config(peaked(0), peaked(1))) as group:
        before = group.evaluate()
        assert group.sync_weights({"hawk": peaked(3)}) == 1
        after = group.evaluate()
        assert group.published_weights is not None
        sent = group.published_weights.snapshot
    assert before.fingerprint != after.fingerprint == want.fingerprint
    assert {entry.name.partition(".")[0] for entry in sent.entries} == {"hawk", "dove"}
    assert after.episodes[0].weights_version == 1
    assert after.provenance["weights"]["digest"] == want.provenance["weights"]["digest"]


def test_weights_for_nobody_are_refused() -> None:
    """The message names the policies; weights that do not fit change nothing."""
    with EvalRunnerGroup(modules_config(peaked(0), {"policy": still, "deterministic": True})) as group:
        before = group.evaluate().fingerprint
        with refused(WeightsError, "eagle.layer.bias") as caught:
            group.sync_weights({"eagle": peaked(3)})
        assert all(name in str(caught.value) for name in ("'dove'", "'hawk'"))
        with refused(WeightsError, "policy.policies.dove"):
            group.sync_weights({"dove": peaked(3)})
        assert group.evaluate().fingerprint == before


def test_each_agent_says_which_version_of_its_policys_weights_it_had(tmp_path: Path) -> None:
    """Of two that were sent at different times, and of one that never was; also from the log."""

    def versions(result: EvalResult) -> dict[str, set[int]]:
        rows = result.agents
        return {name: set(rows["weights_version"][rows["policy"] == name].tolist()) for name in ("hawk", "dove")}

    with EvalRunnerGroup(modules_config(peaked(3), peaked(1)), threaded=False) as group:
        assert versions(group.evaluate()) == {"hawk": {0}, "dove": {0}}
        group.sync_weights({"hawk": peaked(2)})
        assert versions(group.evaluate()) == {"hawk": {1}, "dove": {0}}
        group.sync_weights({"dove": peaked(2)}, version=7)
        result = group.evaluate(output=tmp_path)
        assert versions(result) == versions(load(tmp_path)) == {"hawk": {1}, "dove": {7}}
        assert {record.weights_version for record in result.episodes} == {7}


def test_weights_files_and_live_policies_stand_side_by_side(tmp_path: Path) -> None:
    """A file for one policy, a live module for another; the caller's modules are left alone."""
    save_weights_file(snapshot_weights(peaked(3), 0), tmp_path / "hawk.safetensors")
    live = peaked(1).train()
    config = modules_config({"policy": Logits(1.0), "weights": str(tmp_path / "hawk.safetensors")}, live)
    result = evaluate(config)
    assert result.fingerprint == evaluate(modules_config(peaked(3), peaked(1))).fingerprint
    assert live.training
    given = evaluate(modules_config(Logits(1.0), Logits(2.0)), {"hawk": peaked(3), "dove": peaked(1)})
    assert given.fingerprint == result.fingerprint


def test_batched_inference_of_one_policy_is_labelled() -> None:
    """Each policy has its own form, device and distribution; the note says which one is not exact."""
    result = evaluate(batched_config())
    assert result.status == "complete"
    assert any(untold(note, "'dove'", "policy.inference", "batched") == [] for note in result.notes)
    assert result.provenance["numerics"]["dove/reference"] == "batched"
    assert result.provenance["numerics"]["hawk/reference"] == "block of 16"


def test_each_policy_is_on_its_own_device_and_the_numerics_say_on_which() -> None:
    def devices(runner: Any) -> dict[str, set[str]]:
        return {
            name: {one.device.type for one in policy.module.parameters()} for name, policy in runner.policies.items()
        }

    given = {"hawk": {"policy": peaked(1), "device": "meta"}, "dove": {"policy": peaked(2)}}
    with EvalRunnerGroup(crowd_config().policy(policies=given), threaded=False) as group:
        assert group.foreach_runner(devices) == [{"hawk": {"meta"}, "dove": {"cpu"}}]
    numerics = evaluate(modules_config(peaked(3), peaked(1))).provenance["numerics"]
    assert numerics["hawk/device"] == numerics["dove/device"] == "cpu"


# ---------------------------------------------------------------------- results


def test_the_agents_of_a_result_are_read_by_seat(tmp_path: Path) -> None:
    """One row per episode and agent, with its policy; also from disk; numbers by agent and by policy."""
    result = evaluate(crowd_config(by_index), output=tmp_path / "log")
    result.save(tmp_path / "saved")
    for one in (result, EvalResult.load(tmp_path / "saved"), load(tmp_path / "log")):
        np.testing.assert_array_equal(one.agents, result.agents)
    rows = result.agents
    for row in rows[:50]:
        assert Crowd.possible_agents[row["seat"]] == row["agent"]
        assert row["policy"] == by_index(row["agent"], EpisodeSpec(int(row["index"]), 0))
    sums = np.bincount(rows["index"], rows["return"])
    np.testing.assert_allclose(sums, [record.episode_return for record in result.episodes], rtol=1e-12)
    hawks = rows[rows["policy"] == "hawk"]
    assert result.metrics["module_episode_returns_mean/hawk"] == pytest.approx(hawks["return"].mean())
    assert result.metrics["policy_reward_mean/hawk"] == result.metrics["module_episode_returns_mean/hawk"]
    own = rows[rows["agent"] == "dove_1"]
    assert result.metrics["agent_episode_returns_mean/dove_1"] == pytest.approx(own["return"].mean())
    capita = [hawks["return"][hawks["index"] == index].mean() for index in np.unique(hawks["index"])]
    assert result.metrics["policy_per_capita_return_mean/hawk"] == pytest.approx(np.mean(capita))
    assert result.metrics["policy_episode_len_mean/hawk"] == pytest.approx(hawks["length"].mean())
    for ending in ("terminated", "truncated"):
        assert result.metrics[f"policy_{ending}_rate/hawk"] == pytest.approx(hawks[ending].mean())


def test_wins_draws_and_losses_are_counted_by_episode() -> None:
    """The greatest return wins, a shared one is a draw, and an agent alone has no opponent."""
    columns = agent_columns(["a", "b"])
    infos = np.array([[r, 1, 1, 0, 0, s, 1, 1, 0, 1] for r, s in ((1.0, -1.0), (0.0, 0.0), (-2.0, 3.0))])
    infos = np.vstack([infos, [5.0, 1, 1, 0, 0, *[np.nan] * 5]])
    rows = agent_rows(np.arange(4), infos, columns, ["p", "q"], [0, 3])
    assert rows["outcome"].tolist() == [1, -1, 0, 0, -1, 1, 0]
    assert rows["index"].tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert rows["weights_version"].tolist() == [0, 3, 0, 3, 0, 3, 0]


@pytest.mark.parametrize("names", [("seat_0", "seat_1"), ("one",)])
def test_a_zero_sum_game_is_headed_by_the_returns_of_policies_or_agents(names: tuple[str, ...]) -> None:
    """The sum of the returns is 0 in every game, whoever wins. With one policy, so is the policy's."""
    policies = {name: Level(place) for place, name in enumerate(names)}
    config = EvalConfig().environment(Duel).policy(policies=policies).evaluation(num_episodes=40, determinism_check=0)
    result = evaluate(config)
    assert (result.is_zero_sum, result.mean_return) == (True, 0.0)
    assert len(result.notes) == 1
    for column, shown in (("policy", names), ("agent", Duel().possible_agents)):
        parts = result.returns_by(column)
        assert list(parts) == list(shown)
        for name, (mean, interval) in parts.items():
            own = result.agents["return"][result.agents[column] == name].reshape(40, -1).mean(axis=1)
            assert (mean, interval) == (own.mean(), mean_interval(own))
    lines = headlines(result)
    assert {line.label.removeprefix("return of ") for line in lines} == {"seat_0", "seat_1"}
    assert float(lines[0].strong) == pytest.approx(-float(lines[1].strong))
    assert compare(result, result).verdict.startswith("no verdict")
    table = overview({"x": result, "y": result}).sections[-1]
    shown = table.rows[0][list(table.headings).index("mean return")]
    assert all(f"{line.label.removeprefix('return of ')} {line.strong} " in shown for line in lines)


def test_a_team_with_equal_returns_is_not_a_zero_sum_game() -> None:
    """The return of a team is the sum over its agents, even if the sum is always the same."""
    result = evaluate(crowd_config())
    assert not result.is_zero_sum
    assert [line.label for line in headlines(result)] == ["mean return"]


def test_an_evaluation_of_one_agent_has_no_agents() -> None:
    """Nothing is added to what it reports."""
    config = EvalConfig().environment("CartPole-v1").policy(still).evaluation(num_episodes=2, determinism_check=0)
    result = evaluate(config)
    assert len(result.agents) == 0
    assert not any("/" in key for key in result.metrics)


def test_a_replay_has_the_weights_of_every_policy(tmp_path: Path) -> None:
    """Those of the live modules, if they are still what they were; others are refused."""
    config = modules_config(peaked(3), peaked(1))
    evaluate(config, output=tmp_path)
    assert replay(tmp_path, 4, config=config).differences == {}
    assert replay(tmp_path, 4, config=config, policy={"hawk": peaked(3)}).differences == {}
    with refused(WeightsError, "weights"):
        replay(tmp_path, 4, config=config, policy={"hawk": peaked(2)})


# ---------------------------------------------------------------------- errors


class Broken(Crowd):
    """One thing is wrong in the second step, or in the reset."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        if self.fault == "ends in reset":
            self.agents = []
        if self.fault == "stranger":
            self.agents.append("eagle_0")
            observations["eagle_0"] = np.zeros(3, np.float32)
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.fault == "nan reward":
            rewards["hawk_0"] = float("nan")
        if self.fault == "text reward":
            rewards["hawk_0"] = "1.0"
        if self.fault == "masked reward":
            rewards["hawk_0"] = np.ma.masked
        if self.fault == "time as reward":
            rewards["hawk_0"] = np.timedelta64(1)
        if self.fault == "nan observation":
            observations["hawk_0"] = np.full(3, np.nan, np.float32)
        if self.fault == "wrong shape":
            observations["hawk_0"] = np.zeros(4, np.float32)
        if self.fault == "gone" and self.time > 1:
            observations |= dict.fromkeys(self.possible_agents, np.zeros(3, np.float32))
        if self.fault == "unseen":
            observations.pop("hawk_0")
        if self.fault == "four values":
            return observations, rewards, terminated, infos
        return observations, rewards, terminated, truncated, infos


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ends in reset", "in reset after 0 steps: EnvError"),
        ("stranger", "'eagle_0'.* hawk_0.*environment.agents"),
        ("nan reward", "reward.*'hawk_0'.*nan"),
        ("text reward", "reward.*'hawk_0'.*'1.0'.*str"),
        ("masked reward", "reward.*'hawk_0'.*masked"),
        ("time as reward", "reward.*'hawk_0'.*timedelta64"),
        ("nan observation", "'hawk_0'.*observation.*NaN"),
        ("wrong shape", r"'hawk_0'.*\(4,\)"),
        ("gone", "observation of agent"),
        ("unseen", "'hawk_0'.*observation"),
        ("four values", r"step\(\).* 4 values"),
    ],
)
def test_what_an_environment_breaks_is_its_fault_and_no_number(fault: str, message: str) -> None:
    """Each attempt has a fault that says what is wrong and with whom; no episode has a return."""
    config = crowd_config().environment(Broken, env_kwargs={"fault": fault}).evaluation(num_episodes=3)
    result = result_of(evaluate, config.fault_tolerance(fail_fast=False))
    told = [str(one) for one in result.faults]
    assert any(re.search(message, text) for text in told), told[0]
    assert {one.cause for one in result.faults} == {"env"}
    completed = [record for record in result.episodes if record.outcome == "completed"]
    assert len(completed) < 3
    assert len(result.agents) == sum(len(agents_of(result, record.index)) for record in completed)


def plain_crowd(seed: int, actions: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Step a Crowd with recorded actions; return what came before and after each step."""
    env, steps = Crowd(), []
    seen, _ = env.reset(seed)
    while env.agents:
        acting = list(env.agents)
        taken = {agent: int(actions[agent][len(steps)]) for agent in acting}
        after, rewards, *_ = env.step(taken)
        steps.append((seen, acting, rewards, {agent: after[agent] for agent in env.agents}))
        seen = after
    return steps


def test_trajectories_of_several_agents_are_what_a_plain_loop_sees() -> None:
    """Agent by agent: a mask says who acts, and an agent that is not there has zeros."""
    with EvalRunnerGroup(crowd_config(num_envs_per_runner=4), threaded=False) as group:
        batch = group.sample(6, as_arrays=True)
        result = group.evaluate(num_episodes=6)
    plan = crowd_config().build().plan()
    for index in range(6):
        mine = {key: array[batch["collector.index"] == index] for key, array in batch.items()}
        steps = plain_crowd(int(plan.seeds[index]), {a: mine[f"agents.{a}.action"] for a in Crowd.possible_agents})
        assert len(steps) == len(mine["next.reward"])
        for agent in Crowd.possible_agents:
            acting = [agent in acted for _, acted, _, _ in steps]
            assert mine[f"agents.{agent}.acting"].tolist() == acting
            rewards = [given.get(agent, 0.0) for _, _, given, _ in steps]
            assert mine[f"next.info.reward/{agent}"].tolist() == rewards
            for row, (seen, acted, _, after) in enumerate(steps):
                before = seen[agent] if agent in acted else np.zeros(3)
                np.testing.assert_array_equal(mine[f"agents.{agent}.observation"][row], before)
                np.testing.assert_array_equal(
                    mine[f"next.agents.{agent}.observation"][row], after.get(agent, np.zeros(3))
                )
        for name, agent in agents_of(result, index).items():
            assert agent["return"] == sum(mine[f"next.info.reward/{name}"].tolist())


def test_rewards_that_a_cut_came_before_are_in_the_last_step() -> None:
    """As they are in the record: in turn, an agent gets its rewards when it is to act again."""
    config = auction_config().evaluation(max_episode_steps=4, gamma=0.5)
    with EvalRunnerGroup(config, threaded=False) as group:
        batch, result = group.sample(12, as_arrays=True), group.evaluate(num_episodes=12)
    for record in result.episodes:
        mine = batch["collector.index"] == record.index
        rewards = batch["next.reward"][mine]
        assert rewards.sum() == pytest.approx(record.episode_return)
        assert (rewards * 0.5 ** np.arange(len(rewards))).sum() == pytest.approx(record.discounted_return)
        for agent, found in agents_of(result, record.index).items():
            assert batch[f"next.info.reward/{agent}"][mine].sum() == pytest.approx(found["return"])


class Telling:
    """Tells from its second call on what it thought."""

    def __init__(self) -> None:
        self.outputs: Any = None

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        thought = np.abs(observations).sum(1)
        self.outputs = {"thought": thought}
        return np.minimum(thought, 3).astype(np.int64), None


def test_what_the_policy_of_an_agent_tells_is_kept_with_its_steps() -> None:
    config = crowd_config().policy(policies={"hawk": {"policy": Telling()}, "dove": {"policy": Noisy(2)}})
    with EvalRunnerGroup(config, threaded=False) as group:
        batch = group.sample(5)
    for agent in Crowd.possible_agents[:2]:
        steps = batch["agents", agent]
        due = steps["observation"].abs().sum(-1)
        torch.testing.assert_close(steps["thought"], due)
        assert not steps["thought"][~steps["acting"]].any()
    assert "thought" not in set(batch["agents", "dove_0"].keys())


@pytest.mark.parametrize("to", ["npz", "tensordict"])
def test_trajectories_of_several_agents_are_exported(tmp_path: Path, to: str) -> None:
    """Each episode is proved by what every agent did."""
    config = auction_config().evaluation(num_episodes=3)
    with EvalRunnerGroup(config, threaded=False) as group:
        result, expected = group.evaluate(), group.sample(3, as_arrays=True)
    done = export_trajectories(result, to, tmp_path / "steps", config=config)
    found = np.load(done.path) if to == "npz" else TensorDict.load_memmap(done.path).flatten_keys(".")
    assert set(found.keys()) == set(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[key]).reshape(array.shape), array, err_msg=key)


def test_minari_cannot_hold_trajectories_of_several_agents() -> None:
    """Its format has one agent."""
    pytest.importorskip("minari")
    config = auction_config().evaluation(num_episodes=1)
    with refused(ConfigError, "to", value="minari"):
        export_trajectories(evaluate(config), "minari", "auction-v0", config=config)


class Staying(Auction):
    """Agents that have ended stay among the agents, against PettingZoo's contract."""

    def step(self, action: Any) -> Any:
        return None if action is None else super().step(action)


def test_an_agent_that_does_not_leave_is_a_fault_and_not_an_endless_loop() -> None:
    result = evaluate(auction_config().environment(Staying).evaluation(num_episodes=2))
    assert result.status == "failed"
    assert re.search(r"agent '\w+' has ended and was stepped with None, but it is still", result.faults[0].message)


def test_an_illegal_move_is_the_policys_fault() -> None:
    """It is not taken, and the message names agent, move and what the mask allows."""
    cheat = {"policy": lambda seen: still(seen["action_mask"]), "deterministic": True}
    config = auction_config().policy(policies={"ann": Noisy(1), "bob": cheat, "cyd": Noisy(3)})
    result = evaluate(config.evaluation(num_episodes=10))
    assert result.status in ("partial", "failed")
    fault = result.faults[0]
    assert (fault.cause, fault.phase) == ("policy", "act")
    assert all(part in fault.message for part in ("'bob'", "action 0", "[1, 2, 3]")), fault.message


def test_a_policy_with_masks_that_raises_is_a_fault_and_not_the_end() -> None:
    """Although no row of its batch has an action."""

    def fail(seen: Any) -> Any:
        raise ValueError("the policy fails")

    bob = {"policy": fail, "deterministic": True}
    config = auction_config(num_envs_per_runner=1).policy(policies={"ann": Noisy(1), "bob": bob, "cyd": Noisy(3)})
    result = evaluate(config.evaluation(num_episodes=3).fault_tolerance(fail_fast=False))
    assert {(fault.cause, fault.error_type) for fault in result.faults} == {("policy", "ValueError")}


class MaskedInfo(Crowd):
    """Masks are in the infos."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return masked(*super().reset(seed, options))

    def step(self, actions: Any) -> Any:
        assert set(map(int, actions.values())) <= {1, 2}
        return masked(*super().step(actions))


def masked(*returned: Any) -> Any:
    *others, infos = returned
    return *others, {agent: {"action_mask": np.array([0, 1, 1, 0], np.int8)} for agent in infos}


def test_masks_in_the_info_are_handed_over_on_request() -> None:
    """``environment.action_masks`` puts them into the observation, where policies look for them."""
    result = evaluate(crowd_config().environment(MaskedInfo, action_masks=True).evaluation(num_episodes=5))
    assert result.status == "complete", result.reason
    bare = result_of(evaluate, crowd_config().environment(Crowd, action_masks=True).evaluation(num_episodes=5))
    assert (bare.faults[0].cause, bare.faults[0].error_type) == ("env", "EnvError")
    assert "action_mask" in bare.faults[0].message


class TwoKinds(Crowd):
    """Doves have more to choose from."""

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(5) if agent.startswith("dove") else MOVES


class Unsaid(Crowd):
    """Does not say which agents may appear."""

    possible_agents = ()

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.possible_agents = Crowd.possible_agents
        return super().reset(seed, options)


def no_answer(agent: str, spec: Any) -> str:
    raise LookupError(agent)


def any_of_both(agent: str, spec: Any) -> str:
    return random.choice(["hawk", "dove"])


def test_what_cannot_be_pickled_is_named_by_its_key() -> None:
    """Of all that travels to runners; before any cluster is looked for."""
    lock = threading.Lock()
    settings = crowd_config().policy(policy_mapping_fn=lambda agent, spec: lock and agent).build()
    with refused(ConfigError, "policy.policy_mapping_fn"):
        pickled_settings(settings, None)
    with refused(ConfigError, "the policy"):
        pickled_settings(crowd_config().build(), lock)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"policies": {"hawk": Noisy(1)}, "policy_mapping_fn": by_kind}, "policy.policy_mapping_fn"),
        ({"policy_mapping_fn": None}, "policy.policies"),
        ({"policies": {"hawk": Noisy(1), "dove": Noisy(2), "owl": Noisy(3)}}, "policy.policies"),
        ({"policy_mapping_fn": lambda agent, spec: "eagle"}, "policy.policy_mapping_fn"),
        ({"policy_mapping_fn": no_answer}, "policy.policy_mapping_fn"),
        ({"policy_mapping_fn": any_of_both}, "policy.policy_mapping_fn"),
        ({"policy_mapping_fn": 7}, None),
        ({"policy": still}, "policy.policy"),
        ({"policies": {"hawk": Noisy(1), "dove": None}}, "policy.policies.dove.policy"),
        ({"policies": {"hawk": Noisy(1), "dove": {"policies": {"x": still}}}}, None),
        ({"policies": {"hawk": Noisy(1), "dove": {"polcy": still}}}, None),
        ({"policies": {"hawk.2": Noisy(1), "hawk": Noisy(2)}}, "policy.policies.hawk.2"),
    ],
)
def test_a_wrong_cast_is_refused_before_anything_runs(change: dict[str, Any], key: str | None) -> None:
    """The message names agent or policy, and the key to change."""
    config = crowd_config().policy(**change)
    with refused(ConfigError, key):
        evaluate(config)


SINGLE = EvalConfig().environment(Crowd).policy(still).evaluation(num_episodes=2)


@pytest.mark.parametrize(
    ("config", "policy", "key"),
    [
        (SINGLE, None, "environment.env"),
        (
            SINGLE.copy().policy(policy_mapping_fn=by_kind),
            None,
            "policy.policy_mapping_fn",
        ),
        (crowd_config(runner="vector"), None, None),
        (crowd_config(runner="subprocess", num_runners=1), None, None),
        (crowd_config().environment(wrappers=["gymnasium.wrappers:ClipReward"]), None, None),
        (crowd_config(), still, "policy"),
        (crowd_config(), {"hawq": still}, "policy"),
        (
            crowd_config(by_index).environment(TwoKinds),
            None,
            "policy.policies.hawk",
        ),
        (crowd_config().environment(Unsaid), None, "environment.agents"),
        (
            SINGLE.copy().environment("CartPole-v1").runners(runner="multi_agent"),
            None,
            "environment.env",
        ),
    ],
)
def test_one_agent_and_several_are_not_mixed_up(config: EvalConfig, policy: Any, key: str | None) -> None:
    """Nothing is ignored: the message names what contradicts what, and what helps."""
    with refused(ConfigError, key):
        evaluate(config, policy)


def test_policies_are_reached_by_id() -> None:
    """The names are those of the config."""
    with EvalRunnerGroup(crowd_config()) as group:
        workers = RolloutWorkers(group)
        assert workers.foreach_policy(lambda policy, name: (name, type(policy).__name__)) == [
            [("hawk", "Counting"), ("dove", "Noisy")]
        ]
        with refused(EvalError, "policy_id", value="hwak"):
            workers.for_policy(id, "hwak")


def test_agents_may_be_listed_and_have_spaces_of_their_own() -> None:
    """In the config; then the environment is not asked, and not built where the evaluation is started."""
    listed = crowd_config().environment(Unsaid, agents=Crowd.possible_agents)
    assert bits(evaluate(listed)) == bits(evaluate(crowd_config()))
    assert evaluate(crowd_config().environment(TwoKinds)).status == "complete"


def test_a_config_of_several_policies_goes_through_yaml(tmp_path: Path) -> None:
    """Names and shared keys survive; a relative path of weights is the file's."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "environment: {env: 'parallel:classic/rps-v2'}\n"
        "policy:\n"
        "  deterministic: false\n"
        "  policies:\n"
        "    player_0: {policy: 'my_pkg:make', weights: a.safetensors}\n"
        "    player_1: {policy: 'my_pkg:make', deterministic: true}\n"
    )
    settings = EvalConfig.from_yaml(path).build()
    assert settings.runners.runner == "multi_agent"
    assert settings.policy.policies["player_0"].weights == str(tmp_path / "a.safetensors")
    assert [one.deterministic for one in settings.policy.policies.values()] == [False, True]
    again = EvalConfig.from_dict(yaml.safe_load(EvalConfig.from_yaml(path).to_yaml())).build()
    assert again == settings


def test_the_examples_of_the_page_run(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as somebody who reads it would."""
    [page] = pages("tests/unit/test_multi_agent.py")
    reader.follow(page)
    names = reader.names
    assert names["swapped"].status == names["after"].status == "complete"
    assert names["before"].fingerprint != names["after"].fingerprint
    printed = capsys.readouterr().out
    assert "('index', 'seat', 'agent', 'policy', 'weights_version', 'return', 'length'," in printed
    assert "by policy" in names["swapped"].details


# ------------------------------------------------------------------------------ observers


class Rewards:
    """Keeps the team's reward of every step."""

    def __init__(self, env: Any) -> None:
        self.rewards: list[float] = []

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        self.rewards = []

    def on_step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        self.rewards.append(reward)

    def on_episode_end(self, record: Any) -> Any:
        return record.length, record.episode_return, list(self.rewards)


def test_an_observer_sees_the_steps_of_the_team() -> None:
    """As many as the record has, in every number of slots, and together they are its return."""
    seen = []
    for slots in (1, 4):
        config = crowd_config().runners(num_envs_per_runner=slots).evaluation(num_episodes=6, observers=[Rewards])
        seen.append(evaluate(config).artifacts)
    assert list(seen[0]) == [*range(6)]
    assert seen[0] == seen[1]
    for artifacts in seen[0].values():
        (length, total, rewards), *_ = artifacts.values()
        assert len(rewards) == length
        assert sum(rewards) == pytest.approx(total)

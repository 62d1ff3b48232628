"""Environments of several agents: the same records in every layout, the sums of a plain loop, and clear errors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.multi_agent.inference import seat_seeds
from tests.unit.agents_world import (
    BODY,
    MOVES,
    Auction,
    Counting,
    Crowd,
    Noisy,
    auction_config,
    by_index,
    crowd_config,
)


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
}


@pytest.mark.parametrize("world", WORLDS)
def test_records_do_not_depend_on_the_number_of_slots(world: str) -> None:
    """One batch per policy over all slots and agents, with noise and state of each agent's own."""
    whole = bits(evaluate(WORLDS[world](num_envs_per_runner=1)))
    for slots in (3, 16):
        assert bits(evaluate(WORLDS[world](num_envs_per_runner=slots))) == whole


def test_a_single_policy_plays_all_agents() -> None:
    """Without ``policies``, the policy of the section is everybody's, in every layout the same."""
    config = EvalConfig().environment(Crowd).policy(Counting(1), deterministic=False).evaluation(num_episodes=20)
    seen = {bits(evaluate(config.copy().runners(runner="multi_agent", num_envs_per_runner=n))) for n in (1, 5)}
    assert len(seen) == 1


def test_other_noise_for_every_agent_step_and_episode() -> None:
    """Seeds of seats are distinct, and depend on nothing but episode and seat."""
    seeds = [seed for episode in range(100) for seed in seat_seeds(episode, 8)]
    assert len(set(seeds)) == 800
    assert seat_seeds(7, 8)[:3] == seat_seeds(7, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


class Raising(Crowd):
    """The first attempt of every second episode raises in its second step."""

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.doomed = index % 2 == 0 and attempt == 1

    def step(self, actions: Any) -> Any:
        if self.doomed and self.time == 1:
            raise RuntimeError("planted")
        return super().step(actions)


@pytest.mark.parametrize("slots", [1, 8])
def test_faults_change_no_record(slots: int) -> None:
    """Half of the first attempts raise, and are run again with their seeds; nobody's sums are mixed up."""
    whole = bits(evaluate(crowd_config()))
    result = evaluate(crowd_config(num_envs_per_runner=slots).environment(Raising))
    assert bits(result) == whole
    assert len(result.faults) == 20


def test_the_determinism_check_sees_several_agents() -> None:
    """A pure world passes; one that ignores its seed is named in the determinism line, with its place."""
    assert evaluate(crowd_config().evaluation(determinism_check=0.1)).determinism.passed

    class Unseeded(Crowd):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(None, options)

    result = evaluate(crowd_config().environment(Unseeded).evaluation(determinism_check=0.1))
    assert str(result.determinism).startswith("NOT a function of its seed")
    assert any("numbers depend on the layout" in note for note in result.notes)


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


def test_an_agent_that_leaves_early_keeps_its_own_return() -> None:
    """Returns 1 and 3, team 4, lengths 1 and 3; the episode ends when all agents are done."""
    result = evaluate(leaving_config())
    record = result.episodes[0]
    assert (record.episode_return, record.length, record.terminated, record.truncated) == (4.0, 3, True, False)
    brief = {"return": 1.0, "length": 1.0, "terminated": 1.0, "truncated": 0.0, "policy": 0.0}
    long = {"return": 3.0, "length": 3.0, "terminated": 1.0, "truncated": 0.0, "policy": 1.0}
    assert agents_of(result, 0) == {"brief": brief, "long": long}


def test_an_episode_that_the_environment_cuts_is_truncated() -> None:
    """The flags of the last step are the episode's; every agent has its own."""
    record = evaluate(leaving_config(cut=True)).episodes[0]
    assert (record.terminated, record.truncated, record.truncated_by) == (False, True, "environment")


def test_an_episode_that_is_cut_by_us_cuts_those_who_live() -> None:
    """``max_episode_steps`` truncates who is there, and leaves alone who had ended."""
    result = evaluate(leaving_config().evaluation(max_episode_steps=2))
    assert (result.episodes[0].episode_return, result.episodes[0].truncated_by) == (3.0, "max_episode_steps")
    agents = agents_of(result, 0)
    assert [(agents[name]["terminated"], agents[name]["truncated"]) for name in agents] == [(1.0, 0.0), (0.0, 1.0)]


def plain_parallel(env: Any, policies: dict[str, Any], mapping: Any, index: int, seed: int) -> dict[str, float]:
    """PettingZoo's loop, with one row per policy call; policies get the noise that the contract promises them."""
    from rl_eval.policies.noise import EpisodeNoise

    seats = dict(zip(env.possible_agents, seat_seeds(seed, len(env.possible_agents)), strict=True))
    states: dict[str, Any] = {}
    moves: dict[str, int] = dict.fromkeys(seats, 0)
    observations, _ = env.reset(seed=seed)
    returns = {}
    while env.agents:
        actions = {}
        for agent in env.agents:
            policy = policies[mapping(agent, EpisodeSpec(index, seed))]
            if agent not in states:
                states[agent] = policy.initial_state(1) if hasattr(policy, "initial_state") else None
            noise = EpisodeNoise(np.array([seats[agent]]), np.array([moves[agent]]))
            live = np.ones(1, bool)
            action, states[agent] = policy.act(observations[agent][None], states[agent], live, noise)
            moves[agent] += 1
            actions[agent] = int(action[0])
        observations, rewards, *_ = env.step(actions)
        for agent, reward in rewards.items():
            returns[agent] = returns.get(agent, 0.0) + reward
    return {agent: value for agent, value in returns.items() if moves[agent] or value}


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


def plain_aec(env: Any, policies: dict[str, Any], seed: int) -> dict[str, float]:
    """PettingZoo's loop for environments where one agent acts at a time."""
    from rl_eval.policies.noise import EpisodeNoise

    seats = dict(zip(env.possible_agents, seat_seeds(seed, len(env.possible_agents)), strict=True))
    moves, states, returns = dict.fromkeys(seats, 0), {}, dict.fromkeys(seats, 0.0)
    env.reset(seed=seed)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        if terminated or truncated:
            env.step(None)
            continue
        policy = policies[agent]
        if agent not in states:
            states[agent] = policy.initial_state(1) if hasattr(policy, "initial_state") else None
        noise = EpisodeNoise(np.array([seats[agent]]), np.array([moves[agent]]))
        batch = {name: part[None] for name, part in observation.items()}
        action, states[agent] = policy.act(batch, states[agent], np.ones(1, bool), noise)
        moves[agent] += 1
        env.step(action[0])
    return returns


def test_turns_are_those_of_a_plain_loop() -> None:
    """100 of 100 episodes, with a policy whose state must stand still while others move."""
    result = evaluate(auction_config(num_envs_per_runner=7).evaluation(num_episodes=100))
    policies, env = {"ann": Noisy(1), "bob": Counting(2), "cyd": Noisy(3)}, Auction()
    for record in result.episodes:
        ours = {name: agent["return"] for name, agent in agents_of(result, record.index).items()}
        assert ours == plain_aec(env, policies, record.seed)

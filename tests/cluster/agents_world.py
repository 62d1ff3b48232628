"""Worlds of several agents with PettingZoo's methods and without PettingZoo: agents that come, act in turn, and die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig

BODY = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
MOVES = gym.spaces.Discrete(4)


class Crowd:
    """Parallel API: six agents of two kinds; some come late, all die or are cut at times that the seed decides."""

    possible_agents = ("hawk_0", "hawk_1", "dove_0", "dove_1", "dove_2", "dove_3")

    def __init__(self, longest: int = 12) -> None:
        self.longest = longest
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return BODY

    def action_space(self, agent: str) -> gym.Space[Any]:
        return MOVES

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.rng = np.random.default_rng(seed)
        self.born = {agent: int(self.rng.integers(0, 3)) for agent in self.possible_agents} | {"hawk_0": 0}
        self.dies = {agent: self.born[agent] + int(self.rng.integers(1, self.longest)) for agent in self.born}
        self.dies["hawk_0"] = max(self.dies["hawk_0"], 3)
        self.body = {agent: self.rng.normal(size=3).astype(np.float32) for agent in self.born}
        self.time = 0
        self.agents = [agent for agent in self.possible_agents if self.born[agent] == 0]
        return {agent: self.body[agent] for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self.agents)
        self.time += 1
        heard = [*self.agents, *(agent for agent in self.possible_agents if self.born[agent] == self.time)]
        crowd = np.float32(sum(int(action) for action in actions.values()))
        rewards, terminated, truncated = {}, {}, {}
        for agent in heard:
            push = np.float32(actions.get(agent, 0)) * np.array([1.0, -0.5, 0.25], np.float32)
            self.body[agent] = np.tanh(self.body[agent] + push - np.float32(0.05) * crowd)
            rewards[agent] = float(self.body[agent].sum()) if agent in actions else 0.0
            terminated[agent] = self.time >= self.dies[agent]
            truncated[agent] = not terminated[agent] and self.time >= self.longest
        self.agents = [agent for agent in heard if not (terminated[agent] or truncated[agent])]
        observations = {agent: self.body[agent].copy() for agent in heard}
        return observations, rewards, terminated, truncated, {agent: {} for agent in heard}

    def close(self) -> None:
        self.agents = []


class Auction:
    """AEC API: three agents bid in turn, each leaves after some bids, one of them cut; moves are masked."""

    possible_agents = ("ann", "bob", "cyd")

    def __init__(self, rounds: int = 4) -> None:
        self.rounds = rounds
        space = {"observation": BODY, "action_mask": gym.spaces.Box(0, 1, (4,), np.int8)}
        self.seen = gym.spaces.Dict(space)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self.seen

    def action_space(self, agent: str) -> gym.Space[Any]:
        return MOVES

    def agent_iter(self) -> Any:
        while self.agents:
            yield self.agent_selection

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.left = {agent: int(self.rng.integers(1, self.rounds + 1)) for agent in self.agents}
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.pot = self.rng.normal(size=3).astype(np.float32)
        self.mask = np.ones(4, np.int8)

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        agent = self.agent_selection
        seen = {"observation": self.pot.copy(), "action_mask": self.mask.copy()}
        flags = self.terminations[agent], self.truncations[agent]
        return seen, self._cumulative_rewards[agent], *flags, self.infos[agent]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        place = self.agents.index(agent)
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            self.agents.remove(agent)
            for kept in (self.terminations, self.truncations, self.infos, self._cumulative_rewards):
                del kept[agent]
            place -= 1
        else:
            assert self.mask[action]
            self._cumulative_rewards[agent] = 0.0
            self.pot = np.tanh(self.pot + np.float32(action) * np.array([0.3, -0.2, 0.1], np.float32))
            for other in self.agents:
                self._cumulative_rewards[other] += float(self.pot[0]) * (1.0 if other == agent else -0.5)
            self.left[agent] -= 1
            (self.truncations if agent == "cyd" else self.terminations)[agent] = self.left[agent] == 0
            self.mask = np.ones(4, np.int8)
            self.mask[int(action)] = 0
        if self.agents:
            self.agent_selection = self.agents[(place + 1) % len(self.agents)]

    def close(self) -> None:
        self.agents = []


class Noisy:
    """Samples moves from logits that its observation and its own weights give; keeps to a mask if there is one."""

    def __init__(self, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(size=(3, 4))

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        body = observations["observation"] if isinstance(observations, dict) else observations
        logits = (body[:, :, None].astype(np.float64) * self.weights).sum(1)
        if noise is not None:
            logits -= np.log(-np.log(noise.uniform(4)))
        if isinstance(observations, dict):
            logits = np.where(observations["action_mask"] > 0, logits, -np.inf)
        return logits.argmax(1), None


class Counting(Noisy):
    """Adds the number of its own earlier moves in this episode to what it sees: it has a state."""

    def initial_state(self, batch_size: int) -> Any:
        return np.zeros((batch_size, 1))

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        masked = isinstance(observations, dict)
        body = observations["observation"] if masked else observations
        logits = (body[:, :, None].astype(np.float64) * self.weights).sum(1) + np.sin(state) * self.weights[0]
        logits -= np.log(-np.log(noise.uniform(4)))
        if masked:
            logits = np.where(observations["action_mask"] > 0, logits, -np.inf)
        return logits.argmax(1), state + 1.0


def by_kind(agent: str, spec: Any) -> str:
    return agent.partition("_")[0]


def by_index(agent: str, spec: Any) -> str:
    """Policies take turns: who plays whom depends on the episode."""
    return ("hawk", "dove")[(spec.index + int(agent[-1])) % 2]


def crowd_config(mapping: Any = by_kind, **runners: Any) -> EvalConfig:
    config = EvalConfig().environment(Crowd).evaluation(num_episodes=40, determinism_check=0)
    policies = {"hawk": {"policy": Counting(1)}, "dove": {"policy": Noisy(2)}}
    return config.policy(policies=policies, policy_mapping_fn=mapping, deterministic=False).runners(**runners)


def auction_config(**runners: Any) -> EvalConfig:
    config = EvalConfig().environment(Auction).evaluation(num_episodes=40, determinism_check=0)
    policies = {"ann": Noisy(1), "bob": Counting(2), "cyd": Noisy(3)}
    return config.policy(policies=policies, deterministic=False).runners(**runners)


class _Faulty:
    """Raises in half of the first attempts, or kills its process in one episode, once."""

    def __init__(self, folder: str = "", *, raising: bool = False) -> None:
        super().__init__()
        self.folder, self.raising, self.doomed, self.index, self.calls = folder, raising, False, 0, 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.index, self.calls = index, 0
        self.doomed = self.raising and index % 2 == 0 and attempt == 1

    def step(self, action: Any) -> Any:
        self.calls += 1
        if self.doomed and self.calls == 2:
            raise RuntimeError("planted")
        if self.folder and self.index == 7 and self.calls == 2 and _first_time(Path(self.folder, "killed")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)  # type: ignore[misc]


class FaultyCrowd(_Faulty, Crowd):
    """Parallel."""


class FaultyAuction(_Faulty, Auction):
    """One agent at a time."""


def rllib_crowd(*, folder: str = "", raising: bool = False) -> Any:
    """The crowd as RLlib's ``MultiAgentEnv``: live agents have an observation, and ``__all__`` ends the episode."""
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    class RLlibCrowd(MultiAgentEnv):
        def __init__(self) -> None:
            super().__init__()
            self.crowd = FaultyCrowd(folder, raising=raising)
            self.begin_episode = self.crowd.begin_episode
            self.possible_agents = list(Crowd.possible_agents)
            self.observation_spaces = dict.fromkeys(self.possible_agents, BODY)
            self.action_spaces = dict.fromkeys(self.possible_agents, MOVES)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.crowd.reset(seed)

        def step(self, action_dict: dict[str, Any]) -> Any:
            observations, rewards, terminated, truncated, infos = self.crowd.step(action_dict)
            over = not self.crowd.agents
            cut = over and any(truncated.values())
            return (
                observations,
                rewards,
                {**terminated, "__all__": over and not cut},
                {**truncated, "__all__": cut},
                infos,
            )

    return RLlibCrowd()


def _first_time(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def batched_config() -> EvalConfig:
    """One policy is exact, and the other acts in batches of whichever agents live, to which it is indifferent."""
    policies = {"hawk": {"policy": Counting(1)}, "dove": {"policy": Noisy(2), "inference": "batched"}}
    return crowd_config().policy(policies=policies)


WORLDS: dict[str, tuple[Any, Any]] = {
    "agents that come and die": (crowd_config, FaultyCrowd),
    "policies that take turns": (lambda: crowd_config(by_index), FaultyCrowd),
    "one agent at a time": (auction_config, FaultyAuction),
    "one policy in batches": (batched_config, FaultyCrowd),
    "RLlib's MultiAgentEnv": (crowd_config, rllib_crowd),
}


def faulty_config(world: str, **env_kwargs: Any) -> EvalConfig:
    """Return the config of a world with planted faults."""
    make, env = WORLDS[world]
    config: EvalConfig = make()
    return config.environment(env, env_kwargs=env_kwargs)

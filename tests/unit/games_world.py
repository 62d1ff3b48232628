"""Games with known truth, with PettingZoo's methods: tic-tac-toe, and duels whose odds are planted."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe:
    """AEC API: the win is 1, the loss -1, and illegal moves are masked."""

    possible_agents = ("first", "second")

    def observation_space(self, agent: str) -> gym.Space[Any]:
        board = gym.spaces.Box(-1, 1, (9,), np.int8)
        return gym.spaces.Dict({"observation": board, "action_mask": gym.spaces.Box(0, 1, (9,), np.int8)})

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(9)

    def agent_iter(self) -> Any:
        while self.agents:
            yield self.agent_selection

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "first"
        self.board = [0] * 9
        self.rewards = self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def observe(self, agent: str) -> dict[str, Any]:
        side = 1 if agent == "first" else -1
        board = np.array(self.board, np.int8)
        return {"observation": side * board, "action_mask": (board == 0).astype(np.int8)}

    def last(self) -> tuple[Any, ...]:
        at = self.agent_selection
        return self.observe(at), self._cumulative_rewards[at], self.terminations[at], self.truncations[at], {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        other = "second" if agent == "first" else "first"
        if self.terminations[agent]:
            self.agents.remove(agent)
            self.agent_selection = other
            return
        side = 1 if agent == "first" else -1
        assert self.board[action] == 0
        self.board[action] = side
        self.rewards = dict.fromkeys(self.possible_agents, 0.0)
        won = any(self.board[i] == self.board[j] == self.board[k] == side for i, j, k in LINES)
        if won:
            self.rewards = {agent: 1.0, other: -1.0}
        if won or 0 not in self.board:
            self.terminations = dict.fromkeys(self.possible_agents, True)
        self._cumulative_rewards = dict(self.rewards)
        self.agent_selection = other

    def close(self) -> None:
        pass


class RandomMover:
    """Plays any legal move, each equally likely."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        masks = observations["action_mask"]
        return np.where(masks > 0, noise.uniform(9), -1.0).argmax(axis=1), None


LEVELS = (-1.0, -0.3, 0.2, 1.1)
"""Strengths of the actions in a duel."""


class Duel:
    """Parallel API: one step; who wins is drawn with Bradley-Terry odds, and the first seat may be worth something.

    The draw belongs to the seed and the seat, so a seed that is lucky for the first seat is so for whoever sits there.
    """

    def __init__(self, seats: int = 2, bonus: float = 0.0, draws: float = 0.0) -> None:
        self.possible_agents = tuple(f"seat_{number}" for number in range(seats))
        self.bonus, self.draws = bonus, draws

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(len(LEVELS))

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        rng = np.random.default_rng(seed)
        self.luck, self.drawn = rng.gumbel(size=len(self.possible_agents)), rng.random() < self.draws
        self.agents = list(self.possible_agents)
        return self._seen(), {}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        strengths = self.luck + [LEVELS[actions[agent]] for agent in self.possible_agents]
        strengths[0] += self.bonus
        best = self.possible_agents[int(strengths.argmax())]
        rewards = {agent: 0.0 if self.drawn else 1.0 if agent == best else -1.0 for agent in self.possible_agents}
        over = dict.fromkeys(self.possible_agents, True)
        self.agents = []
        return self._seen(), rewards, over, dict.fromkeys(over, False), {}

    def _seen(self) -> dict[str, Any]:
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}

    def close(self) -> None:
        pass


class Level:
    """Always plays one strength of a duel."""

    def __init__(self, level: int) -> None:
        self.level = level

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        return np.full(len(observations), self.level), None


def duel_config(levels: dict[str, int], matchups: Any, num_episodes: int, **evaluation: Any) -> EvalConfig:
    """Configure duels between policies of given levels."""
    policies = {
        name: {"policy": "tests.unit.games_world:Level", "policy_kwargs": {"level": at}} for name, at in levels.items()
    }
    return (
        EvalConfig()
        .environment("tests.unit.games_world:Duel")
        .policy(policies=policies)
        .evaluation(num_episodes=num_episodes, matchups=matchups, determinism_check=0, **evaluation)
        .runners(num_envs_per_runner=64)
    )

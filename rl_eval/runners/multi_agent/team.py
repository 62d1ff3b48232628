"""One multi-agent environment as one episode: the team's reward, and an ending when all agents are done.

What every agent did is counted beside: its return, its length, how it ended. So the runner's base, which steps an
environment and sums rewards, serves any number of agents.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from math import isfinite, nan
from typing import Any, Final, final

import gymnasium as gym
import numpy as np

from rl_eval.errors import ConfigError, EnvError
from rl_eval.records.agents import AGENT_COLUMNS
from rl_eval.runners.lane import episode_hook
from rl_eval.runners.multi_agent.turns import AgentsEnv, Turn

__all__ = ["TeamEnv"]

_COMMON: Final = "__common__"
"""Where RLlib keeps what no agent's info is."""
_SUCCESS: Final = ("is_success", "success")


@final
class TeamEnv:
    """Environment of several agents that is reset and stepped like one of a single agent.

    Observations and actions are dicts by agent, of the agents that are to act; the reward is the sum over agents.

    Args:
        env: The environment.
        agents: Names of the agents in the order of seats; empty for the environment's possible agents.
        masks: Whether an agent's mask of actions is in its info, and is to be put into its observation.
        info_keys: Scalars to read from ``info``: a key of what agents have in common, or ``<agent>/<key>``.

    Raises:
        ConfigError: The environment does not say which agents may appear, or has no such agents.
    """

    rewards: Mapping[Any, Any]
    """Rewards of the last step, by agent."""
    unread: Mapping[Any, Any]
    """Rewards that agents would have got with their next turns, where the episode was cut before."""

    def __init__(self, env: AgentsEnv, agents: Sequence[str], *, masks: bool, info_keys: Sequence[str]) -> None:
        self._env = env
        self.agents = _seats(env, agents)
        self._seat = {agent: seat for seat, agent in enumerate(self.agents)}
        self._masks = masks
        self._wanted = [(key, *key.split("/", 1)) for key in info_keys if "/" in key]
        self._begin()

    # ------------------------------------------------------------------ spaces

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent: what its policy gets, and what it returns.

        Raises:
            ConfigError: Masks were asked for, and the agent's actions are not discrete.
        """
        observations, actions = self._env.spaces(agent)
        if not self._masks:
            return observations, actions
        if not isinstance(actions, gym.spaces.Discrete):
            raise ConfigError(
                f"environment.action_masks is true, but agent {agent!r} acts in {actions}: only Discrete actions have "
                "masks, so leave it out"
            )
        mask = gym.spaces.Box(0, 1, (int(actions.n),), np.int8)
        return gym.spaces.Dict({"observation": observations, "action_mask": mask}), actions

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Spaces of all agents."""
        return gym.spaces.Dict({str(agent): self.spaces(agent)[0] for agent in self.agents})

    @property
    def action_space(self) -> gym.Space[Any]:
        """Spaces of all agents."""
        return gym.spaces.Dict({str(agent): self.spaces(agent)[1] for agent in self.agents})

    # ------------------------------------------------------------------ episodes

    def reset(self, seed: int) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Begin an episode; return the observations of the agents that act first."""
        self._begin()
        turn = self._env.reset(seed)
        if turn.over:
            raise EnvError("the episode ended in reset(): no agent is left to act")
        return self._observations(turn), {}

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], float, bool, bool, dict[str, Any]]:
        """Step; return the observations of the agents that act next, and the sum of the rewards."""
        for agent in actions:
            self._lengths[self._seat[agent]] += 1
        turn = self._env.step(actions)
        self._steps += 1
        self.rewards = turn.rewards
        if self._ended:
            self._refuse_the_gone(turn)
        reward = self._take_rewards(turn.rewards)
        ending = self._take_endings(turn)
        info = self._info(turn.infos) if any(turn.infos.values()) else {}
        if turn.over:
            return {}, reward, *ending, info
        return self._observations(turn), reward, False, False, info

    def settle(self, terminated: bool, truncated: bool) -> tuple[float, float]:
        """End the episode: agents that have not ended end as it does.

        Returns:
            The return of the team, and what part of it no step has had.
        """
        if not (terminated or truncated):
            self.unread = self._env.unread_rewards()
        unread = self._take_rewards(self.unread)
        ending = float(terminated), float(truncated or not terminated)
        for seat, agent in enumerate(self.agents):
            if agent not in self._ended:
                self._endings[seat] = ending
        return reduce(operator.add, self._returns, 0.0), unread  # Since Python 3.12, sum() rounds otherwise.

    def columns(self, policies: Sequence[int]) -> list[float]:
        """Return the values of :func:`rl_eval.records.agents.agent_columns`.

        Args:
            policies: Number of the policy of each seat.
        """
        values: list[float] = []
        for seat, present in enumerate(self._present):
            counted = (self._returns[seat], self._lengths[seat], *self._endings[seat], policies[seat])
            values += map(float, counted) if present else [nan] * len(AGENT_COLUMNS)
        return values

    @property
    def begin_episode(self) -> Any:
        """Hook of :class:`rl_eval.EpisodeAware`, if the environment has it."""
        return episode_hook(self.unwrapped)

    @property
    def unwrapped(self) -> Any:
        """The user's environment."""
        return getattr(self._env, "env", self._env)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    # ------------------------------------------------------------------ what agents did

    def _begin(self) -> None:
        count = len(self.agents)
        self._steps = 0
        self._returns = [0.0] * count
        self._lengths = [0] * count
        self._endings = [(0.0, 0.0)] * count
        self._present = [False] * count
        self.rewards = self.unread = {}
        self._ended: dict[Any, int] = {}
        """Step of the ending of each agent that has ended."""

    def _observations(self, turn: Turn) -> dict[Any, Any]:
        """Return the observations of the agents that are to act."""
        acting = {}
        for agent in turn.acting:
            seat = self._seat.get(agent)
            if seat is None:
                raise EnvError(self._stranger(agent))
            if agent in self._ended:
                raise EnvError(f"agent {agent!r} is to act, but it ended in step {self._ended[agent]}")
            if agent not in turn.observations:
                raise EnvError(f"agent {agent!r} is to act, but has no observation: return one for every live agent")
            self._present[seat] = True
            acting[agent] = self._masked(turn, agent) if self._masks else turn.observations[agent]
        return acting

    def _masked(self, turn: Turn, agent: Any) -> dict[str, Any]:
        try:
            mask = turn.infos[agent]["action_mask"]
        except (KeyError, TypeError):
            raise EnvError(
                f"environment.action_masks is true, but the info of agent {agent!r} has no action_mask"
            ) from None
        return {"observation": turn.observations[agent], "action_mask": mask}

    def _take_rewards(self, rewards: Mapping[Any, Any]) -> float:
        """Add rewards to the returns of their agents; return their sum."""
        total = 0.0
        for agent, reward in rewards.items():
            if type(reward) is not float or not isfinite(reward):
                reward = _number(agent, reward)
            seat = self._seat.get(agent)
            if seat is None:
                raise EnvError(self._stranger(agent))
            self._returns[seat] += reward
            self._present[seat] = self._present[seat] or reward != 0.0
            total += reward
        return total

    def _take_endings(self, turn: Turn) -> tuple[bool, bool]:
        """Note which agents have ended; return whether the episode is terminated and truncated, if it is over."""
        now = [False, False]
        for position, (word, flags) in enumerate((("terminated", turn.terminated), ("truncated", turn.truncated))):
            for agent, value in flags.items():
                if value is not False and _flag(word, agent, value):
                    self._end(agent, position)
                    now[position] = True
        if turn.ending is not None:
            now = [_flag("terminated", "__all__", turn.ending[0]), _flag("truncated", "__all__", turn.ending[1])]
        if turn.over and not any(now):
            raise EnvError("no agent is left, but none was terminated or truncated in the last step")
        return now[0], now[1]

    def _end(self, agent: Any, position: int) -> None:
        seat = self._seat.get(agent)
        if seat is None:
            raise EnvError(self._stranger(agent))
        if self._ended.setdefault(agent, self._steps) != self._steps:
            return  # Some environments repeat it to the end.
        flags = list(self._endings[seat])
        flags[position] = 1.0
        self._endings[seat] = flags[0], flags[1]

    def _refuse_the_gone(self, turn: Turn) -> None:
        """Refuse observations and rewards of agents that ended in an earlier step."""
        for agent, step in self._ended.items():
            if agent in turn.observations:
                raise EnvError(
                    f"step {self._steps} returned an observation of agent {agent!r}, which ended in step {step}"
                )
            if turn.rewards.get(agent, 0.0) != 0.0:
                raise EnvError(
                    f"step {self._steps} returned the reward {turn.rewards[agent]!r} for agent {agent!r}, which "
                    f"ended in step {step}"
                )

    def _info(self, infos: Mapping[Any, Any]) -> dict[str, Any]:
        """Return what the whole episode's info is: success, and the scalars that were asked for."""
        info = dict(infos.get(_COMMON) or {})
        given = {str(agent): part for agent, part in infos.items() if agent != _COMMON and part}
        for key, agent, name in self._wanted:
            if name in given.get(agent, ()):
                info[key] = given[agent][name]
        reported = [part[key] for part in given.values() for key in _SUCCESS if key in part]
        if reported and not any(key in info for key in _SUCCESS):
            info["is_success"] = all(reported)
        return info

    def _stranger(self, agent: Any) -> str:
        return (
            f"agent {agent!r} appeared, but the environment's possible agents are {_listed(self.agents)}: list every "
            "agent that may appear in environment.agents"
        )


def _seats(env: AgentsEnv, names: Sequence[str]) -> tuple[Any, ...]:
    possible = env.possible_agents
    if not names:
        if not possible:
            raise ConfigError(
                f"{type(env).__name__} has no possible_agents, so it is not known which agents may appear: list "
                "them in environment.agents"
            )
        return possible
    known = {str(agent): agent for agent in possible}
    return tuple(known.get(name, name) for name in names)


def _listed(agents: Sequence[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, agents[:most]))
    return shown if len(agents) <= most else f"{shown} and {len(agents) - most} more"


def _number(agent: Any, value: Any) -> float:
    """Return a reward as a float."""
    try:
        number = float(value.item() if getattr(value, "shape", None) else value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or isinstance(value, (str, bytes)):
        raise EnvError(f"the reward of agent {agent!r} is {value!r} of type {type(value).__name__}, which is no number")
    if not isfinite(number):
        raise EnvError(f"the reward of agent {agent!r} is {number}, which is not a finite number")
    return number


def _flag(word: str, agent: Any, value: Any) -> bool:
    """Return an agent's ending as a bool."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in {0, 1}):
        return bool(value)
    raise EnvError(f"{word} of agent {agent!r} is {value!r}, which is neither true nor false")

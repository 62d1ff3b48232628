"""Turns of a multi-agent environment: what a runner needs of one, whatever its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym

__all__ = ["AgentsEnv", "Turn"]


class Turn(NamedTuple):
    """What a reset or a step returned, by agent."""

    observations: Mapping[Any, Any]
    """As far as there are any, also of agents that have just ended."""
    acting: tuple[Any, ...]
    """Agents that must act next, in the environment's order; each has an observation."""
    rewards: Mapping[Any, Any]
    terminated: Mapping[Any, Any]
    truncated: Mapping[Any, Any]
    infos: Mapping[Any, Any]
    over: bool
    """Whether all agents are done."""
    ending: tuple[Any, Any] | None = None
    """Whether the whole episode was terminated and truncated, where the environment says so itself."""


class AgentsEnv(Protocol):
    """Environment of several agents, each of which acts when it is its turn."""

    possible_agents: tuple[Any, ...]
    """Every agent that may appear, in the order of seats."""

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the observation space and the action space of an agent."""

    def reset(self, seed: int) -> Turn:
        """Begin an episode."""

    def step(self, actions: Mapping[Any, Any]) -> Turn:
        """Take the actions of the acting agents."""

    def unread_rewards(self) -> Mapping[Any, Any]:
        """Return the rewards that agents have got and no turn has had, for an episode that is cut now."""
        return {}

    def close(self) -> None:
        """Free what the environment holds."""

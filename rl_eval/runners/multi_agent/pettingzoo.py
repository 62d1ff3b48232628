"""PettingZoo's two APIs as turns: Parallel, where all agents act at once, and AEC, where one acts at a time.

Both are recognized by their methods; PettingZoo itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import gymnasium as gym

from rl_eval.errors import EnvError
from rl_eval.runners.multi_agent.turns import AgentsEnv, Turn

__all__ = ["AECAgents", "ParallelAgents"]


class _PettingZooAgents(AgentsEnv):
    """What both APIs have in common."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents: tuple[Any, ...] = tuple(getattr(env, "possible_agents", None) or ())

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """See :class:`AgentsEnv`."""
        return self.env.observation_space(agent), self.env.action_space(agent)

    def close(self) -> None:
        """See :class:`AgentsEnv`."""
        self.env.close()


@final
class ParallelAgents(_PettingZooAgents):
    """A ``pettingzoo.ParallelEnv``, whose live agents all act in each step."""

    def reset(self, seed: int) -> Turn:
        """See :class:`AgentsEnv`."""
        result = self.env.reset(seed=seed)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise EnvError(_broken("reset", "(observations, infos)", result))
        observations, infos = result
        agents = tuple(self.env.agents)
        return Turn(observations, agents, {}, {}, {}, infos, over=not agents)

    def step(self, actions: Mapping[Any, Any]) -> Turn:
        """See :class:`AgentsEnv`."""
        result = self.env.step(actions)
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            due = "(observations, rewards, terminations, truncations, infos)"
            raise EnvError(_broken("step", due, result))
        observations, rewards, terminated, truncated, infos = result
        alive = tuple(
            [agent for agent in self.env.agents if not (terminated.get(agent, False) or truncated.get(agent, False))]
        )
        return Turn(observations, alive, rewards, terminated, truncated, infos, over=not alive)


@final
class AECAgents(_PettingZooAgents):
    """A ``pettingzoo.AECEnv``: agents act one at a time, and get their rewards when it is their turn.

    Agents that are done are stepped with None, as PettingZoo's own loop does; that counts as no step.
    """

    def reset(self, seed: int) -> Turn:
        """See :class:`AgentsEnv`."""
        self.env.reset(seed=seed)
        return self._next_turn()

    def step(self, actions: Mapping[Any, Any]) -> Turn:
        """See :class:`AgentsEnv`."""
        self.env.step(actions[self.env.agent_selection])
        return self._next_turn()

    def unread_rewards(self) -> Mapping[Any, Any]:
        """See :class:`AgentsEnv`."""
        collected = getattr(getattr(self.env, "unwrapped", self.env), "_cumulative_rewards", {})
        return {agent: reward for agent, reward in collected.items() if agent != self.env.agent_selection}

    def _next_turn(self) -> Turn:
        """Let agents that are done leave, until one is to act or none is left."""
        rewards, terminated, truncated, infos = {}, {}, {}, {}
        while self.env.agents:
            agent = self.env.agent_selection
            observation, rewards[agent], terminated[agent], truncated[agent], infos[agent] = self.env.last()
            if not (terminated[agent] or truncated[agent]):
                return Turn({agent: observation}, (agent,), rewards, terminated, truncated, infos, over=False)
            self.env.step(None)
            if agent in self.env.agents:
                raise EnvError(
                    f"agent {agent!r} has ended and was stepped with None, but it is still among the agents: "
                    "step(None) has to remove it, as PettingZoo's _was_dead_step does"
                )
        return Turn({}, (), rewards, terminated, truncated, infos, over=True)


def _broken(method: str, due: str, result: Any) -> str:
    shown = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
    return f"{method}() returned {shown}: PettingZoo's contract is {due}, each a dict by agent"

"""Adapter for RLlib's ``MultiAgentEnv``. Agents with an observation act next; ``__all__`` ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import gymnasium as gym
from typing_extensions import override

from rl_eval.errors import EnvError
from rl_eval.runners.multi_agent.team import AgentsEnv, Turn

_ALL: Final = "__all__"


@final
class RLlibAgents(AgentsEnv):
    """Adapter for a ``ray.rllib.env.multi_agent_env.MultiAgentEnv``.

    Args:
        env: The environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = _seats(env)

    @override
    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        return self.env.get_observation_space(agent), self.env.get_action_space(agent)

    @override
    def reset(self, seed: int) -> Turn:
        observations, infos = self.env.reset(seed=seed)
        return Turn(observations, tuple(observations), {}, {}, {}, infos, over=not observations)

    @override
    def step(self, actions: Mapping[Any, Any]) -> Turn:
        result = self.env.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            due = "(observations, rewards, terminateds, truncateds, infos)"
            problem = "step() did not return five values"
            raise EnvError(problem, key="step", fix=f"Return {due}, each a dict by agent, as for RLlib.")
        observations, rewards, terminateds, truncateds, infos = result
        if _ALL not in terminateds or _ALL not in truncateds:
            problem = "step() returned terminateds or truncateds without '__all__', which ends an episode in RLlib"
            raise EnvError(problem, key="__all__", fix="Return '__all__' in both dicts.")
        ending = terminateds[_ALL], truncateds[_ALL]
        terminated, truncated = _without_all(terminateds), _without_all(truncateds)
        acting = [agent for agent in observations if not (terminated.get(agent) or truncated.get(agent))]
        over = bool(ending[0] or ending[1])
        return Turn(
            observations,
            () if over else tuple(acting),
            rewards,
            terminated,
            truncated,
            infos,
            over,
            ending if over else None,
            # An agent whose end is reported has a row, even if it never acted and its reward is 0.
            present=[agent for flags in (terminated, truncated) for agent, flag in flags.items() if flag],
        )

    @override
    def close(self) -> None:
        self.env.close()


def as_agents_env(value: Any) -> RLlibAgents | None:
    """Return an adapter for an RLlib environment of several agents; None for any other object of RLlib."""
    return RLlibAgents(value) if hasattr(value, "get_observation_space") else None


def _seats(env: Any) -> tuple[Any, ...]:
    """Return all agents that may take part in an episode.

    If RLlib read the agents from a set, sort them by name, because the order of a set differs between processes.
    """
    possible = list(env.possible_agents) or list(env.observation_spaces or ())
    unordered = getattr(env, "_agent_ids", None)
    return tuple(sorted(possible, key=str) if isinstance(unordered, set) and possible == list(unordered) else possible)


def _without_all(flags: Mapping[Any, Any]) -> dict[Any, Any]:
    return {agent: flag for agent, flag in flags.items() if agent != _ALL}

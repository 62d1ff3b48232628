"""RLModules with the connectors between them and their agents, as RLlib's pipelines have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from ray.rllib.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

from rl_eval.errors import ConfigError
from rl_eval.integrations.rllib.observations import NoEpisode
from rl_eval.integrations.rllib.policy import RLModulePolicy

__all__ = ["Pipelines", "check_separate"]


class Pipelines(NamedTuple):
    """RLlib's connector pipelines before and behind the modules."""

    env_to_module: Any
    module_to_env: Any

    def policy(
        self, module_id: str, module: Any, statistics: Mapping[str, torch.Tensor] | None = None
    ) -> RLModulePolicy:
        """Return the policy of one module; see :class:`RLModulePolicy`.

        Raises:
            ConfigError: The module plays agents with different spaces, or several with filters of their own.
        """
        agent = self.agent(module_id)
        return RLModulePolicy(
            module,
            self.env_to_module.connectors,
            self.module_to_env.connectors,
            self.spaces(agent),
            statistics,
            agent,
        )

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent of the environment; of the environment itself for None."""
        spaces = self.env_to_module.input_observation_space, self.env_to_module.input_action_space
        return spaces if agent is None else (spaces[0][agent], spaces[1][agent])

    def agent(self, module_id: str) -> Any:
        """Return an agent whose parts of the connectors are a module's; None if there is but one agent.

        Raises:
            ConfigError: As for :meth:`policy`.
        """
        mapping = next((p for p in self.env_to_module.connectors if type(p) is AgentToModuleMapping), None)
        if mapping is None:
            return None
        first, *others = agents = self._agents(module_id, mapping._agent_to_module_mapping_fn)
        for other in others:
            if self.spaces(other) != self.spaces(first):
                raise ConfigError(
                    f"the module {module_id!r} may play the agents {first!r} and {other!r}, whose spaces differ: "
                    f"{self.spaces(first)} and {self.spaces(other)}"
                )
        if others and any(type(piece) is MeanStdFilter for piece in self.env_to_module.connectors):
            raise ConfigError(
                f"the module {module_id!r} may play the agents {agents}, for each of which the connector piece "
                "MeanStdFilter has statistics of its own: rl_eval evaluates it with a module for each agent only"
            )
        return first

    def _agents(self, module_id: str, mapping_fn: Any) -> list[Any]:
        """Return the agents that a module plays; all of them if it has none, or if that depends on the episode."""
        agents = list(self.env_to_module.input_observation_space.spaces)
        unknown = NoEpisode("policy_mapping_fn", "it must be a function of the agent alone")
        try:
            return [agent for agent in agents if mapping_fn(agent, unknown) == module_id] or agents
        except ConfigError:
            return agents


def check_separate(kind: type) -> None:
    """Make sure that the parts of a MultiRLModule act each for itself.

    Raises:
        ConfigError: Its class has code of its own, such as an encoder that its parts share.
    """
    if kind is not MultiRLModule:
        raise ConfigError(
            f"the {kind.__name__} is a MultiRLModule with code of its own, and rl_eval runs each RLModule for itself: "
            "use RLlib's MultiRLModule"
        )

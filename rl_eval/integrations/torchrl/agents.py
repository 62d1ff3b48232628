"""Adapter for a TorchRL environment with several agents, which act in turns. Groups are split into agents.

=================  =============================================================================================
item               rule
=================  =============================================================================================
agents             agents of ``group_map``, group by group
seed               ``set_seed(seed, static_seed=True)``, then ``reset()``; same episode as ``env.rollout``
observation        the agent's row of its group's observations, without keys outside the group
acting             agents that are not done; in a group with a ``mask``, only those that the mask marks
reward             the agent's row of ``(group, "reward")``
terminated,        the agent's row of ``(group, "terminated")`` and ``(group, "truncated")``
truncated
end of episode     ``done`` at the root
=================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl.env import (
    action_space,
    action_writer,
    nested_space,
    observation_space,
    peel,
    refuse_batch,
    seen_keys,
)
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers
from rl_eval.integrations.torchrl.policy import Key, array_of, nested
from rl_eval.runners.multi_agent.team import AgentsEnv, Turn

_MASK: Final = "mask"
"""Key of a group's flags for the agents that act."""


class _Seat(NamedTuple):
    """Position of an agent in the tensors of its group."""

    group: str
    row: int


@final
class TorchRLAgents(AgentsEnv):
    """A TorchRL environment with groups of agents.

    Args:
        env: Single environment, built for the evaluation. Its normalizers are frozen.

    Raises:
        ConfigError: A normalizer has no statistics, or a group lacks the key ``action``, ``reward``, ``terminated`` or
            ``truncated``.
    """

    def __init__(self, env: EnvBase) -> None:
        freeze_normalizers(env)
        check_initialized(env, "the environment", "environment.env")
        self.env = env
        groups: Mapping[str, list[str]] = peel(env)[1].group_map
        self._seats = {agent: _Seat(group, row) for group, names in groups.items() for row, agent in enumerate(names)}
        self.possible_agents = tuple(self._seats)
        self._groups = tuple(groups)
        seen = seen_keys(env)
        self._paths = {group: _paths(seen, group) for group in self._groups}
        self._masked = {group for group in self._groups if (group, _MASK) in seen}
        keys = {*env.action_keys, *env.reward_keys, *env.done_keys}
        needed = {(group, name) for group in groups for name in ("action", "reward", "terminated", "truncated")}
        if missing := needed - keys:
            problem = f"the TorchRL environment lacks the keys {sorted(missing)}; it has {sorted(keys, key=str)}"
            raise ConfigError(problem, key="environment.env", value=sorted(missing))
        self._write = {agent: action_writer(self._action_spec(agent)) for agent in self._seats}
        self._gone: set[str] = set()
        self._current: TensorDictBase | None = None

    @override
    def spaces(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        group, row = self._seats[agent]
        specs = self.env.full_observation_spec
        seen = {path: observation_space(specs[(group, *keys)][row]) for keys, path in self._paths[group].items()}
        return nested_space(seen), action_space(self._action_spec(agent))

    @override
    def reset(self, seed: int) -> Turn:
        self._gone = set()
        with torch.no_grad():
            self.env.set_seed(seed, static_seed=True)
            self._current = self.env.reset()
        observations = self._observations(self._current)
        return Turn(observations, tuple(observations), {}, {}, {}, {}, over=not observations)

    @override
    def step(self, actions: Mapping[str, Any]) -> Turn:
        assert self._current is not None, "step() was called before reset()"
        for group in self._groups:
            # Agents without an action get zeros, which the environment does not read.
            self._current.set((group, "action"), self.env.full_action_spec[group, "action"].zero())
        for agent, action in actions.items():
            group, row = self._seats[agent]
            self._current[group, "action"][row] = self._write[agent](action)
        with torch.no_grad():
            stepped = self.env.step(self._current)
            self._current = self.env.step_mdp(stepped)
        following = stepped["next"]
        present = {agent: seat for agent, seat in self._seats.items() if agent not in self._gone}
        rewards, terminated, truncated = (
            {agent: following[group, name][row].item() for agent, (group, row) in present.items()}
            for name in ("reward", "terminated", "truncated")
        )
        self._gone |= {agent for agent in present if terminated[agent] or truncated[agent]}
        over = bool(following["done"])
        observations = {} if over else self._observations(following)
        ending = (bool(following["terminated"]), bool(following["truncated"])) if over else None
        # TorchRL sets both flags of an agent that the environment does not mention.
        ended = [agent for agent in present if terminated[agent] != truncated[agent]]
        return Turn(observations, tuple(observations), rewards, terminated, truncated, {}, over, ending, ended)

    @override
    def close(self) -> None:
        self.env.close(raise_if_closed=False)

    def _observations(self, data: TensorDictBase) -> dict[str, Any]:
        """Return the observations of the agents that act next."""
        return {
            agent: self._observation(data, seat)
            for agent, seat in self._seats.items()
            if agent not in self._gone and (seat.group not in self._masked or bool(data[seat.group, _MASK][seat.row]))
        }

    def _observation(self, data: TensorDictBase, seat: _Seat) -> Any:
        paths = self._paths[seat.group].items()
        return nested({path: array_of(data[(seat.group, *keys)][seat.row]) for keys, path in paths})

    def _action_spec(self, agent: str) -> Any:
        group, row = self._seats[agent]
        return self.env.full_action_spec[group, "action"][row]


def as_agents_env(value: Any) -> TorchRLAgents | None:
    """Return the agents of a TorchRL environment with groups; None for other values.

    Raises:
        ConfigError: The value is a batch of environments, or :class:`TorchRLAgents` rejects it.
    """
    if not isinstance(value, EnvBase):
        return None
    refuse_batch(value)
    return TorchRLAgents(value) if hasattr(peel(value)[1], "group_map") else None


def _paths(keys: Sequence[Key], group: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the path in an agent's observation for each key of its group's observations.

    If ``observation`` is the only key, its path is ``()``.
    """
    parts = [key[1:] for key in keys if isinstance(key, tuple) and key[0] == group and key[1:] != (_MASK,)]
    return {part: () if parts == [("observation",)] else part for part in parts}

"""TorchRL environment of several agents as turns: its groups, taken apart into agents.

=================  =============================================================================================
what               rule
=================  =============================================================================================
agents             those of ``group_map``, group by group
seed               ``set_seed(seed, static_seed=True)``, then ``reset()``: an episode is that of ``env.rollout``
observation        an agent's row of its group's observations, without what the whole environment has in common
acting             agents that are not done, where the group has a ``mask`` those that it names
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

from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl.env import as_array, nested_space, peel, seen_keys
from rl_eval.integrations.torchrl.keys import Key, nested
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers
from rl_eval.integrations.torchrl.spaces import action_space, action_writer, observation_space
from rl_eval.runners.multi_agent.turns import AgentsEnv, Turn

__all__ = ["TorchRLAgents", "as_agents_env"]

_MASK: Final = "mask"
"""What groups call the flags of the agents that act."""
_ALONE: Final = ("observation",)
"""Path of observations that have no other part."""


class _Seat(NamedTuple):
    """Place of an agent in the environment's tensors."""

    group: str
    row: int


@final
class TorchRLAgents(AgentsEnv):
    """A TorchRL environment with groups of agents.

    Args:
        env: A single environment, made for the evaluation: its normalizers are frozen.

    Raises:
        ConfigError: A normalizer has no statistics, or a group other keys than those above.
    """

    def __init__(self, env: EnvBase) -> None:
        freeze_normalizers(env)
        check_initialized(env, "the environment")
        self.env = env
        groups: Mapping[str, list[str]] = peel(env)[1].group_map
        self._seats = {agent: _Seat(group, row) for group, names in groups.items() for row, agent in enumerate(names)}
        self.possible_agents = tuple(self._seats)
        self._groups = tuple(groups)
        seen = seen_keys(env)
        self._paths = {group: _paths(seen, group) for group in self._groups}
        self._masked = {group for group in self._groups if (group, _MASK) in seen}
        for group in self._groups:
            _check_group(env, group)
        self._write = {agent: action_writer(self._action_spec(agent)) for agent in self._seats}
        self._gone: set[str] = set()
        self._current: TensorDictBase | None = None

    def spaces(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """See :class:`~rl_eval.runners.multi_agent.turns.AgentsEnv`."""
        group, row = self._seats[agent]
        specs = self.env.full_observation_spec
        spaces: dict[tuple[str, ...], gym.Space[Any]] = {
            path: observation_space(specs[(group, *path)][row]) for path in self._paths[group]
        }
        alone = len(spaces) == 1 and _ALONE in spaces
        return spaces[_ALONE] if alone else nested_space(spaces), action_space(self._action_spec(agent))

    def reset(self, seed: int) -> Turn:
        """See :class:`~rl_eval.runners.multi_agent.turns.AgentsEnv`."""
        self._gone = set()
        with torch.no_grad():
            self.env.set_seed(seed, static_seed=True)
            self._current = self.env.reset()
        observations = self._observations(self._current)
        return Turn(observations, tuple(observations), {}, {}, {}, {}, over=not observations)

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """See :class:`~rl_eval.runners.multi_agent.turns.AgentsEnv`."""
        following = self._stepped(actions)
        present = [agent for agent in self._seats if agent not in self._gone]
        rewards = {agent: self._of(following, agent, "reward").item() for agent in present}
        terminated, truncated = (
            {agent: bool(self._of(following, agent, name)) for agent in present} for name in ("terminated", "truncated")
        )
        self._gone |= {agent for agent in present if terminated[agent] or truncated[agent]}
        over = bool(following["done"])
        observations = {} if over else self._observations(following)
        ending = (bool(following["terminated"]), bool(following["truncated"])) if over else None
        return Turn(observations, tuple(observations), rewards, terminated, truncated, {}, over, ending)

    def close(self) -> None:
        """See :class:`~rl_eval.runners.multi_agent.turns.AgentsEnv`."""
        if not self.env.is_closed:
            self.env.close(raise_if_closed=False)

    def _stepped(self, actions: Mapping[str, Any]) -> TensorDictBase:
        """Step, and return what follows; agents that have no action are given zeros, which nobody reads."""
        assert self._current is not None, "reset() comes before step()"
        for group in self._groups:
            self._current.set((group, "action"), self.env.full_action_spec[group, "action"].zero())
        for agent, action in actions.items():
            group, row = self._seats[agent]
            self._current[group, "action"][row] = self._write[agent](action)
        with torch.no_grad():
            stepped = self.env.step(self._current)
            self._current = self.env.step_mdp(stepped)
        following: TensorDictBase = stepped["next"]
        return following

    def _observations(self, data: TensorDictBase) -> dict[str, Any]:
        """Return the observations of the agents that are to act."""
        return {
            agent: self._observation(data, seat)
            for agent, seat in self._seats.items()
            if agent not in self._gone and (seat.group not in self._masked or bool(data[seat.group, _MASK][seat.row]))
        }

    def _observation(self, data: TensorDictBase, seat: _Seat) -> Any:
        paths = self._paths[seat.group]
        leaves = {path: as_array(data[(seat.group, *path)][seat.row]) for path in paths}
        return leaves[_ALONE] if paths == [_ALONE] else nested(leaves)

    def _of(self, data: TensorDictBase, agent: str, name: str) -> torch.Tensor:
        group, row = self._seats[agent]
        tensor: torch.Tensor = data[group, name][row]
        return tensor

    def _action_spec(self, agent: str) -> Any:
        group, row = self._seats[agent]
        return self.env.full_action_spec[group, "action"][row]


def as_agents_env(value: Any) -> TorchRLAgents | None:
    """Return a TorchRL environment with groups of agents as a runner steps it; None for anything else.

    Raises:
        ConfigError: It is a batch of environments, or as for :class:`TorchRLAgents`.
    """
    if not isinstance(value, EnvBase):
        return None
    if value.batch_size:
        raise ConfigError(
            f"the TorchRL environment is a batch of shape {tuple(value.batch_size)}; rl_eval runs each episode in an "
            "environment of its own: give a factory of single ones (batch_size=[])"
        )
    return TorchRLAgents(value) if hasattr(peel(value)[1], "group_map") else None


def _paths(keys: Sequence[Key], group: str) -> list[tuple[str, ...]]:
    """Return where in a group the parts of an observation are."""
    return [key[1:] for key in keys if isinstance(key, tuple) and key[0] == group and key[1:] != (_MASK,)]


def _check_group(env: EnvBase, group: str) -> None:
    keys = {
        "action": env.action_keys,
        "reward": env.reward_keys,
        "terminated": env.done_keys,
        "truncated": env.done_keys,
    }
    for name, known in keys.items():
        if (group, name) not in known:
            raise ConfigError(
                f"the TorchRL environment's group {group!r} has no key {(group, name)!r}, by which rl_eval reads what "
                f"its agents do; there are {known}"
            )

"""Mapping of agents to policies by episode, and several policies as one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import EvalSettings, PolicySection
from rl_eval.errors import ConfigError, WeightsError, nearest, summary_of
from rl_eval.protocols import NoiseSource, Policy
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.multi_agent.team import TeamEnv
from rl_eval.weights import module_of

__all__ = ["DEFAULT_POLICY", "PolicyMapping", "SeveralPolicies", "sections_of"]


@final
class SeveralPolicies:
    """Policies by id."""

    def __init__(self, by_name: Mapping[str, Policy]) -> None:
        self.by_name = by_name

    @cached_property
    def module(self) -> Any:
        """A module whose parts are those of the policies that have one; None if none has."""
        having = [name for name, policy in self.by_name.items() if module_of(policy) is not None]
        return self.modules(having) if having else None

    def modules(self, names: Iterable[str]) -> Any:
        """Return a module whose parts are those of some policies, by id.

        Raises:
            WeightsError: One has none.
        """
        import torch

        whole = torch.nn.Module()
        for name in names:
            module = module_of(self.by_name[name])
            if module is None:
                raise WeightsError(
                    f"policy {name!r} is a {type(self.by_name[name]).__name__}, not an nn.Module, and has no "
                    "weights to set: give it as an nn.Module, or as a Policy with an attribute `module`"
                )
            whole._modules[name] = module  # An id may have a dot, or be the name of a method.
        return whole

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Refuse: each policy acts for its own agents."""
        raise NotImplementedError("several policies have no action in common")


DEFAULT_POLICY: Final = "default_policy"
"""Name of the only policy."""

_SCANNED: Final = 1000
"""Episodes that are looked at to see which agents a policy plays."""
_ASKED_TWICE: Final = 32
"""Times that the function is asked twice about an episode, to see that it says the same."""
_SPACES: Final = ("observation spaces", "action spaces")

Spaces = tuple[gym.Space[Any], gym.Space[Any]]


def sections_of(section: PolicySection) -> Mapping[str, PolicySection]:
    """Return the policies by id: those of ``policy.policies``, else the one of the section."""
    return section.policies or {DEFAULT_POLICY: section}


@final
class PolicyMapping:
    """Policy of every seat, fixed for an episode before it begins.

    Raises:
        ConfigError: The function cannot be imported, an agent has no policy, a policy no agent, or agents of one policy
            have different spaces.
    """

    def __init__(self, settings: EvalSettings, team: TeamEnv) -> None:
        given = settings.policy.policy_mapping_fn
        self._function: Any = import_attribute("policy.policy_mapping_fn", given) if isinstance(given, str) else given
        self._names = tuple(sections_of(settings.policy))
        self._plan = settings.plan()
        self.agents = team.agents
        self._spaces_of = {agent: team.spaces(agent) for agent in self.agents}
        self._players: dict[str, Any] = {}
        """An agent of each policy, whose spaces are the policy's."""
        self.owners: dict[Any, str] = {}
        """Agents in the order of seats, each with a policy that plays it at some time."""
        self.most_at_once = dict.fromkeys(self._names, 0)
        """Most agents of each policy in one of the first episodes of the plan."""
        self._seats: tuple[str, ...] = ()
        self._scan()

    @property
    def spaces(self) -> dict[str, Spaces]:
        """Observation space and action space of each policy."""
        return {name: self._spaces_of[agent] for name, agent in self._players.items()}

    def seats(self, spec: EpisodeSpec) -> tuple[str, ...]:
        """Return the policy of each seat in an episode.

        Raises:
            ConfigError: An agent has no policy, or one that plays agents with other spaces.
        """
        seats = tuple([self._policy_of(agent, seat, spec) for seat, agent in enumerate(self.agents)])
        if seats != self._seats:  # Most episodes are seated as the one before.
            self._seats = seats
            for agent, name in zip(self.agents, seats, strict=True):
                self._admit(agent, name)
        return seats

    def _scan(self) -> None:
        """Look at the first episodes of the plan: who plays whom, and whether each policy plays at all."""
        count = min(len(self._plan), _SCANNED)
        for turn in range(_ASKED_TWICE):
            self._check_repeats(self._plan[turn % count])
        for index in range(count):
            seats = self.seats(self._plan[index])
            for agent, name in zip(self.agents, seats, strict=True):
                self.owners.setdefault(agent, name)
                self.most_at_once[name] = max(self.most_at_once[name], seats.count(name))
        if idle := [name for name in self._names if name not in self._players]:
            raise ConfigError(
                f"policy.policies has {', '.join(map(repr, idle))}, which plays none of the agents "
                f"{', '.join(map(str, self.agents))} in the first {count} episodes: remove it, or have "
                "policy.policy_mapping_fn name it"
            )

    def _check_repeats(self, spec: EpisodeSpec) -> None:
        """Check that an episode is seated the same way when it is asked about again."""
        for agent, first, again in zip(self.agents, self.seats(spec), self.seats(spec), strict=True):
            if first != again:
                raise ConfigError(
                    f"policy.policy_mapping_fn returned {first!r} for agent {agent!r} of episode {spec.index}, then "
                    f"{again!r}: it is asked wherever the episode runs, so it must depend on agent and spec alone. "
                    "Draw from numpy.random.default_rng(spec.seed)"
                )

    def _admit(self, agent: Any, name: str) -> None:
        """Check that an agent's spaces are those of the policy that plays it."""
        first = self._players.setdefault(name, agent)
        for what, ours, theirs in zip(_SPACES, self._spaces_of[agent], self._spaces_of[first], strict=True):
            if ours != theirs:
                raise ConfigError(
                    f"policy {name!r} plays the agents {first!r} and {agent!r}, whose {what} differ: {theirs} and "
                    f"{ours}. Give them policies of their own, or pad the spaces (SuperSuit's pad_observations_v0 and "
                    "pad_action_space_v0)"
                )

    def _policy_of(self, agent: Any, seat: int, spec: EpisodeSpec) -> str:
        if self._function is not None:
            return self._mapped(agent, spec)
        if spec.seating is not None:
            self._check_seats(spec.seating)
            name: Any = spec.seating[seat]
        else:
            name = self._names[0] if len(self._names) == 1 else str(agent)
        if name not in self._names:
            raise ConfigError(
                f"agent {agent!r} has no policy: policy.policies has {', '.join(self._names)}. Name one {name!r}, "
                "seat policies with evaluation.matchups, or say in policy.policy_mapping_fn which policy plays it"
            )
        return str(name)

    def _check_seats(self, seating: tuple[str, ...]) -> None:
        if len(seating) != len(self.agents):
            raise ConfigError(
                f"evaluation.matchups seats {len(seating)} policies ({', '.join(seating)}), but the environment has "
                f"{len(self.agents)} agents ({', '.join(map(str, self.agents))}): list them in environment.agents in "
                "the order of seats, or say in policy.policy_mapping_fn which policy of spec.seating plays which agent"
            )

    def _mapped(self, agent: Any, spec: EpisodeSpec) -> str:
        try:
            name = self._function(agent, spec)
        except Exception as error:
            raise ConfigError(
                f"policy.policy_mapping_fn raised for agent {agent!r} of episode {spec.index}: {summary_of(error)}"
            ) from error
        if name not in self._names:
            hint = nearest(name, self._names) if isinstance(name, str) else f"known are {', '.join(self._names)}"
            raise ConfigError(
                f"policy.policy_mapping_fn returned {name!r} for agent {agent!r} of episode {spec.index}, which is "
                f"none of policy.policies: {hint}"
            )
        return str(name)

"""Runner of environments with several agents. Slots, leases and faults work as with one agent.

The policy of each agent is fixed before an episode begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, WeightsError, nearest, summary_of
from rl_eval.policies import adapt_policy
from rl_eval.policies.subject import DEFAULT_POLICY, sections_of
from rl_eval.protocols import NoiseSource, Policy
from rl_eval.records.agents import agent_columns
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.lane import Lane
from rl_eval.runners.metrics import scalar_columns
from rl_eval.runners.multi_agent.inference import AgentsInference, PolicyInference
from rl_eval.runners.multi_agent.team import TeamEnv, agents_of, build_team
from rl_eval.runners.vector import VectorEvalRunner
from rl_eval.supervision.caller import survivable
from rl_eval.weights import WeightsSnapshot, module_of, policies_of


@final
class SeveralPolicies:
    """Policies by id."""

    def __init__(self, by_name: Mapping[str, Policy]) -> None:
        self.by_name = by_name

    @cached_property
    def module(self) -> Any:
        """Module that contains the modules of the policies, by id; None if no policy has a module."""
        having = [name for name, policy in self.by_name.items() if module_of(policy) is not None]
        return self.modules(having) if having else None

    def modules(self, names: Iterable[str]) -> Any:
        """Return a module that contains the modules of some policies, by id.

        Raises:
            WeightsError: A policy has no module.
        """
        import torch

        whole = torch.nn.Module()
        for name in names:
            module = module_of(self.by_name[name])
            if module is None:
                kind = type(self.by_name[name]).__name__
                problem = f"policy {name!r} is a {kind}, not an nn.Module, and has no weights to set"
                fix = "Pass an nn.Module, or a Policy with an attribute `module`."
                raise WeightsError(problem, key=f"policy.policies.{name}", value=kind, fix=fix)
            whole._modules[name] = module  # An id may have a dot, or be the name of a method.
        return whole

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Raise an error: each policy acts for its own agents."""
        raise NotImplementedError("several policies do not act together: each policy acts for its own agents")


_SCANNED: Final = 1000
"""Number of episodes that are scanned for the agents of each policy."""
_ASKED_TWICE: Final = 32
"""Number of episodes for which ``policy_mapping_fn`` is called twice, to check that both results are equal."""
_SPACES: Final = ("observation spaces", "action spaces")

Spaces = tuple[gym.Space[Any], gym.Space[Any]]


@final
class PolicyMapping:
    """Policy of every seat. The policies of an episode are fixed before the episode begins.

    Raises:
        ConfigError: ``policy_mapping_fn`` cannot be imported, an agent has no policy, a policy has no agent, or agents
            of one policy have different spaces.
    """

    def __init__(self, settings: EvalSettings, team: TeamEnv) -> None:
        given = settings.policy.policy_mapping_fn
        self._function: Any = import_attribute("policy.policy_mapping_fn", given) if isinstance(given, str) else given
        self._names = tuple(sections_of(settings.policy))
        self._plan = settings.plan()
        self.agents = team.agents
        self._spaces_of = {agent: team.spaces(agent) for agent in self.agents}
        self._players: dict[str, Any] = {}
        """One agent of each policy, by the policy's id. The policy has the spaces of this agent."""
        self.owners: dict[Any, str] = {}
        """Agents in the order of seats, each with the id of a policy that acts for this agent in some episode."""
        self.most_at_once = dict.fromkeys(self._names, 0)
        """Maximum number of agents of each policy in one episode, over the first episodes of the plan."""
        self._seats: tuple[str, ...] = ()
        self._scan()

    @property
    def spaces(self) -> dict[str, Spaces]:
        """Observation space and action space of each policy."""
        return {name: self._spaces_of[agent] for name, agent in self._players.items()}

    def seats(self, spec: EpisodeSpec) -> tuple[str, ...]:
        """Return the policy of each seat in an episode.

        Raises:
            ConfigError: An agent has no policy, or its policy also acts for agents with other spaces.
        """
        seats = tuple([self._policy_of(agent, seat, spec) for seat, agent in enumerate(self.agents)])
        if seats != self._seats:  # Most episodes have the same seats as the previous one.
            self._seats = seats
            for agent, name in zip(self.agents, seats, strict=True):
                self._admit(agent, name)
        return seats

    def _scan(self) -> None:
        """Find the agents of each policy in the first episodes of the plan; raise for a policy without agents."""
        count = min(len(self._plan), _SCANNED)
        for turn in range(_ASKED_TWICE):
            self._check_repeats(self._plan[turn % count])
        for index in range(count):
            seats = self.seats(self._plan[index])
            for agent, name in zip(self.agents, seats, strict=True):
                self.owners.setdefault(agent, name)
                self.most_at_once[name] = max(self.most_at_once[name], seats.count(name))
        if idle := [name for name in self._names if name not in self._players]:
            problem = (
                f"policy.policies has {', '.join(map(repr, idle))}, but none of the agents "
                f"{', '.join(map(str, self.agents))} uses it in the first {count} episodes"
            )
            fix = "Remove this policy, or return its name from policy.policy_mapping_fn."
            raise ConfigError(problem, key="policy.policies", value=", ".join(idle), fix=fix)

    def _check_repeats(self, spec: EpisodeSpec) -> None:
        """Check that ``policy_mapping_fn`` returns the same policies if it is called twice for one episode."""
        for agent, first, again in zip(self.agents, self.seats(spec), self.seats(spec), strict=True):
            if first != again:
                raise ConfigError(
                    f"policy.policy_mapping_fn returned {first!r} for agent {agent!r} of episode {spec.index}, then "
                    f"{again!r}. Each process that runs the episode calls the function, so the result must depend only "
                    "on agent and spec",
                    key="policy.policy_mapping_fn",
                    value=str(again),
                    episode=spec.index,
                    fix="Draw from numpy.random.default_rng(spec.seed).",
                )

    def _admit(self, agent: Any, name: str) -> None:
        """Check that an agent's spaces are those of its policy."""
        first = self._players.setdefault(name, agent)
        for what, ours, theirs in zip(_SPACES, self._spaces_of[agent], self._spaces_of[first], strict=True):
            if ours != theirs:
                raise ConfigError(
                    f"policy {name!r} acts for the agents {first!r} and {agent!r}, whose {what} differ: {theirs} and "
                    f"{ours}",
                    key=f"policy.policies.{name}",
                    fix="Use a separate policy for each agent, or pad the spaces (SuperSuit's pad_observations_v0 and "
                    "pad_action_space_v0).",
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
            problem = f"agent {agent!r} has no policy: policy.policies has {', '.join(self._names)}"
            fix = (
                f"Name a policy {name!r}, seat policies with evaluation.matchups, or return the name of a policy from "
                "policy.policy_mapping_fn."
            )
            raise ConfigError(problem, key="policy.policies", value=str(name), fix=fix)
        return str(name)

    def _check_seats(self, seating: tuple[str, ...]) -> None:
        if len(seating) != len(self.agents):
            problem = (
                f"evaluation.matchups seats {len(seating)} policies ({', '.join(seating)}), but the environment has "
                f"{len(self.agents)} agents ({', '.join(map(str, self.agents))})"
            )
            fix = (
                "List the agents in environment.agents in the order of seats, or return a policy of spec.seating for "
                "each agent from policy.policy_mapping_fn."
            )
            raise ConfigError(problem, key="evaluation.matchups", value=", ".join(seating), fix=fix)

    def _mapped(self, agent: Any, spec: EpisodeSpec) -> str:
        try:
            name = self._function(agent, spec.at_position())
        except survivable() as error:
            problem = (
                f"policy.policy_mapping_fn raised for agent {agent!r} of episode {spec.index}: {summary_of(error)}"
            )
            raise ConfigError(problem, key="policy.policy_mapping_fn", episode=spec.index) from error
        if name not in self._names:
            hint = nearest(name, self._names) if isinstance(name, str) else f"known ids are {', '.join(self._names)}"
            problem = (
                f"policy.policy_mapping_fn returned {name!r}, which is not in policy.policies, for agent {agent!r} of "
                f"episode {spec.index}: {hint}"
            )
            raise ConfigError(problem, key="policy.policy_mapping_fn", value=name, episode=spec.index)
        return str(name)


@final
class MultiAgentEvalRunner(VectorEvalRunner):
    """Runner of k environments of several agents, with one forward pass per policy for its agents in all environments.

    The return of an episode is the sum of the agents' returns; each agent's return is a column of the record. An
    episode ends when all agents are done, and its length is the number of calls of ``step``.
    """

    _inference: AgentsInference
    facts: ClassVar[RunnerFacts] = RunnerFacts(agents=True, conditions=False, sweeps=True)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        super().__init__(settings, runner_index, policy)
        # Only the environment, which the base class has just built, lists the agents.
        pending = self._pending
        pending.info_keys = (*scalar_columns(settings.evaluation), *agent_columns(self._mapping.agents))
        for lane in self.slots:
            lane.num_info_keys = len(pending.info_keys)

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the ``info`` scalars and of the columns of each agent.

        This builds and closes an environment to list its agents, unless ``environment.agents`` is set.

        Raises:
            EnvError: The environment cannot be built here.
        """
        return (*scalar_columns(settings.evaluation), *agent_columns(agents_of(settings)))

    def make_env(self, lane_index: int) -> Any:
        """Build the environment of a lane."""
        return build_team(self.settings, self.runner_index, lane_index)

    def make_policy(self, policy: Any = None) -> Policy:
        """Build every policy.

        Args:
            policy: A policy object, or a mapping of policy objects by id; None for the configured policies.

        Raises:
            ConfigError: An agent has no policy, a policy has no agent, or agents of one policy have different spaces.
        """
        self._sections = sections_of(self.settings.policy)
        self._mapping = PolicyMapping(self.settings, self._team(self.slots[0]))
        self._seated: list[tuple[str, ...]] = [()] * len(self.slots)
        self._numbers = {name: number for number, name in enumerate(sorted(self._sections))}
        live = policy or {} if self.settings.policy.policies else dict.fromkeys(self._sections, policy)
        built = {name: self._build_policy(name, live.get(name)) for name in self._sections}
        return built[DEFAULT_POLICY] if DEFAULT_POLICY in built and len(built) == 1 else SeveralPolicies(built)

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policies by id."""
        return self._policy.by_name if isinstance(self._policy, SeveralPolicies) else {DEFAULT_POLICY: self._policy}

    def make_inference(self) -> AgentsInference:
        """Build the inference of all policies for the agents of all lanes."""
        return AgentsInference(self._build_inference, tuple(self._sections), self._mapping.owners, len(self.slots))

    def weighted_module(self, snapshot: WeightsSnapshot) -> Any:
        """Return the module that receives the weights.

        If there are several policies, it contains the modules of those policies that have weights in ``snapshot``.
        """
        if not isinstance(self._policy, SeveralPolicies):
            return super().weighted_module(snapshot)
        return self._policy.modules(policies_of(snapshot, self._sections))

    # ------------------------------------------------------------------ episodes

    def begin(self, lane: Lane) -> bool:
        """Assign policies to the seats of the next queued attempt, then start the attempt."""
        lease = self.queue[0]
        policies = self._mapping.seats(lease.spec)
        self._inference.seat(lane.index, lease.seed, policies)
        self._seated[lane.index] = policies
        return super().begin(lane)

    def _finish(self, lane: Lane, terminated: bool, truncated: bool) -> None:
        team, numbers = self._team(lane), [self._numbers[name] for name in self._seated[lane.index]]
        lane.episode_return, unread = team.settle(terminated, truncated)
        lane.discounted_return += self._gamma ** (lane.length - 1) * unread  # The rewards belong to the last step.
        lane.info[len(scalar_columns(self.settings.evaluation)) :] = team.columns(numbers)
        super()._finish(lane, terminated, truncated)

    @staticmethod
    def _team(lane: Lane) -> TeamEnv:
        assert isinstance(lane.env, TeamEnv)
        return lane.env

    # ------------------------------------------------------------------ policies

    def _build_policy(self, name: str, live: Any) -> Policy:
        try:
            return adapt_policy(self._sections[name], *self._mapping.spaces[name], live)
        except ConfigError as error:
            problem = f"policy {name!r}: {error.problem}"
            raise ConfigError(problem, key=error.key, value=error.value, fix=error.fix) from error

    def _build_inference(self, name: str) -> PolicyInference:
        policy = self.policies[name]
        rows = len(self.slots) * self._mapping.most_at_once[name]
        return PolicyInference(policy, self._mapping.spaces[name], rows, self._sections[name])

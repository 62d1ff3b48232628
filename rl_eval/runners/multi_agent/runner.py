"""Runner of environments with several agents: slots, leases and faults as for one, and a policy for every agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.policies import adapt_policy
from rl_eval.protocols import Policy
from rl_eval.records.agents import agent_columns
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.environment import ValueReader
from rl_eval.runners.lane import Lane
from rl_eval.runners.multi_agent.inference import AgentsInference, PolicyInference
from rl_eval.runners.multi_agent.mapping import DEFAULT_POLICY, PolicyMapping, SeveralPolicies, sections_of
from rl_eval.runners.multi_agent.team import TeamEnv, agents_of, build_team
from rl_eval.runners.vector import VectorEvalRunner
from rl_eval.weights import WeightsSnapshot, policies_of

__all__ = ["MultiAgentEvalRunner"]


@final
class MultiAgentEvalRunner(VectorEvalRunner):
    """Steps k environments of several agents, with one forward pass per policy over all their agents.

    The return of an episode is the team's, the sum over agents; those of the agents are columns of the record. An
    episode ends when all agents are done, and its length is the number of calls of ``step``.
    """

    several_agents: ClassVar[bool] = True

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        super().__init__(settings, runner_index, policy)
        # Only the environment, which the base has just built, tells which agents there are.
        pending = self._pending
        pending.info_keys = (*settings.evaluation.info_keys, *agent_columns(self._mapping.agents))
        self._values = ValueReader(settings.evaluation.info_keys, pending.note)
        for lane in self._lanes:
            lane.num_info_keys = len(pending.info_keys)

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the ``info`` scalars to keep, and of what is recorded of each agent.

        The environment is built for it and closed, unless ``environment.agents`` is set.

        Raises:
            EnvError: It cannot be built here.
        """
        return (*settings.evaluation.info_keys, *agent_columns(agents_of(settings)))

    def make_env(self, lane_index: int) -> Any:
        """Build the environment of a lane."""
        return build_team(self.settings, self.runner_index, lane_index)

    def make_policy(self, policy: Any = None) -> Policy:
        """Build every policy.

        Args:
            policy: A live policy, or several by id.

        Raises:
            ConfigError: An agent has no policy, a policy no agent, or agents of one policy have different spaces.
        """
        self._sections = sections_of(self.settings.policy)
        self._mapping = PolicyMapping(self.settings, self._team(self._lanes[0]))
        self._seated: list[tuple[str, ...]] = [()] * len(self._lanes)
        self._numbers = {name: number for number, name in enumerate(sorted(self._sections))}
        live = policy or {} if self.settings.policy.policies else dict.fromkeys(self._sections, policy)
        built = {name: self._build_policy(name, live.get(name)) for name in self._sections}
        return built[DEFAULT_POLICY] if DEFAULT_POLICY in built and len(built) == 1 else SeveralPolicies(built)

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policies by id."""
        return self._policy.by_name if isinstance(self._policy, SeveralPolicies) else {DEFAULT_POLICY: self._policy}

    def make_inference(self) -> AgentsInference:
        """Build what applies the policies to the agents of all lanes."""
        return AgentsInference(self._build_inference, tuple(self._sections), self._mapping.owners, len(self._lanes))

    def weighted_module(self, snapshot: WeightsSnapshot) -> Any:
        """Return the module that weights are for; one with the policies as its parts, if there are several."""
        if not isinstance(self._policy, SeveralPolicies):
            return super().weighted_module(snapshot)
        return self._policy.modules(policies_of(snapshot, self._sections))

    # ------------------------------------------------------------------ episodes

    def _begin(self, lane: Lane) -> bool:
        """Seat the policies of the next queued attempt, then start it."""
        lease = self._queue[0]
        policies = self._mapping.seats(EpisodeSpec(lease.index, lease.seed, lease.seating))
        self._inference.seat(lane.index, lease.seed, policies)
        self._seated[lane.index] = policies
        return super()._begin(lane)

    def _finish(self, lane: Lane, terminated: bool, truncated: bool) -> None:
        team, numbers = self._team(lane), [self._numbers[name] for name in self._seated[lane.index]]
        lane.episode_return, unread = team.settle(terminated, truncated)
        lane.discounted_return += lane.discount * unread
        lane.info[len(self.settings.evaluation.info_keys) :] = team.columns(numbers)
        super()._finish(lane, terminated, truncated)

    @staticmethod
    def _team(lane: Lane) -> TeamEnv:
        assert isinstance(lane.env, TeamEnv)
        return lane.env

    # ------------------------------------------------------------------ policies

    def _build_policy(self, name: str, live: Any) -> Policy:
        section = self._sections[name]
        if live is not None:
            section = section.model_copy(update={"policy": live, "policy_kwargs": {}})
        try:
            return adapt_policy(section, *self._mapping.spaces[name])
        except ConfigError as error:
            raise ConfigError(f"policy {name!r}: {error}") from error

    def _build_inference(self, name: str) -> PolicyInference:
        policy = self.policies[name]
        rows = len(self._lanes) * self._mapping.most_at_once[name]
        return PolicyInference(policy, self._mapping.spaces[name], rows, self._sections[name])

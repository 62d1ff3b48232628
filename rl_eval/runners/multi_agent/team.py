"""Multi-agent environments with the interface of a single-agent environment.

PettingZoo's two APIs are recognized by their methods: Parallel, in which all agents act in each step, and AEC, in which
one agent acts at a time. PettingZoo is imported only for an id of PettingZoo's registry. The reward of a step is the
sum of the agents' rewards, and an episode ends when all agents are done. So the runner's base class, which steps an
environment and sums rewards, works for any number of agents. The return, length and ending of each agent are recorded
as well.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from math import isfinite, nan
from typing import Any, Final, NamedTuple, Protocol, final

import gymnasium as gym
import numpy as np
from typing_extensions import override

from rl_eval.adapters import integration_for
from rl_eval.config.settings import EnvironmentSection, EvalSettings, EvaluationSection, copy_containers
from rl_eval.errors import ConfigError, EnvError, UsageError, listed, needs_extra, summary_of
from rl_eval.records.agents import AGENT_COLUMNS
from rl_eval.runners.environment import build_env, episode_hook
from rl_eval.runners.values import scalar_of


class Turn(NamedTuple):
    """Result of a reset or a step, by agent."""

    observations: Mapping[Any, Any]
    """Observations, also of agents that have just ended. Agents that do not act may have no observation."""
    acting: tuple[Any, ...]
    """Agents that must act next, in the environment's order; each has an observation."""
    rewards: Mapping[Any, Any]
    terminated: Mapping[Any, Any]
    truncated: Mapping[Any, Any]
    infos: Mapping[Any, Any]
    over: bool
    """Whether all agents are done."""
    ending: tuple[Any, Any] | None = None
    """Whether the episode was terminated and whether it was truncated; None if the environment reports neither."""
    present: Iterable[Any] = ()
    """Agents that take part in the episode now, whether they act or not, or have ended in this turn."""


class AgentsEnv(Protocol):
    """Environment of several agents. In each turn, some or all agents act."""

    possible_agents: tuple[Any, ...]
    """Every agent that may appear, in the order of seats."""

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the observation space and the action space of an agent."""

    def reset(self, seed: int) -> Turn:
        """Begin an episode."""

    def step(self, actions: Mapping[Any, Any]) -> Turn:
        """Take a step with the actions of the acting agents."""

    def unread_rewards(self) -> Mapping[Any, Any]:
        """Return the rewards that no turn has reported. Called when the episode is cut."""
        return {}

    def close(self) -> None:
        """Free the resources of the environment."""


class _PettingZooAgents(AgentsEnv):
    """Common part of the adapters for PettingZoo's two APIs."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents: tuple[Any, ...] = tuple(getattr(env, "possible_agents", None) or ())

    @override
    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        return self.env.observation_space(agent), self.env.action_space(agent)

    @override
    def close(self) -> None:
        self.env.close()


@final
class ParallelAgents(_PettingZooAgents):
    """Adapter of a ``pettingzoo.ParallelEnv``: all live agents act in each step."""

    @override
    def reset(self, seed: int) -> Turn:
        result = self.env.reset(seed=seed)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise EnvError(_broken("reset", "(observations, infos)", result), key="reset")
        observations, infos = result
        agents = tuple(self.env.agents)
        return Turn(observations, agents, {}, {}, {}, infos, over=not agents, present=agents)

    @override
    def step(self, actions: Mapping[Any, Any]) -> Turn:
        result = self.env.step(actions)
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            due = "(observations, rewards, terminations, truncations, infos)"
            raise EnvError(_broken("step", due, result), key="step")
        observations, rewards, terminated, truncated, infos = result
        alive = tuple(
            [agent for agent in self.env.agents if not (terminated.get(agent, False) or truncated.get(agent, False))]
        )
        ended = [agent for flags in (terminated, truncated) for agent, flag in flags.items() if flag]
        present = (*alive, *ended)
        return Turn(observations, alive, rewards, terminated, truncated, infos, over=not alive, present=present)


@final
class AECAgents(_PettingZooAgents):
    """Adapter of a ``pettingzoo.AECEnv``: agents act one at a time, and an agent gets its reward at its next turn.

    Agents that are done are stepped with None, as in PettingZoo's own loop; such a step is not counted.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._conversion = _conversion_in(env)
        self._read: set[Any] = set()
        """Agents whose reward was read, although a conversion still shows it."""

    @override
    def reset(self, seed: int) -> Turn:
        self.env.reset(seed=seed)
        self._read = set()
        return self._next_turn()

    @override
    def step(self, actions: Mapping[Any, Any]) -> Turn:
        agent, shown = self.env.agent_selection, getattr(self._conversion, "_cumulative_rewards", None)
        self.env.step(actions[agent])
        if self._conversion is not None:  # It replaces all rewards after the last agent's action.
            self._read = {*self._read, agent} if self._conversion._cumulative_rewards is shown else set()  # noqa: SLF001
        return self._next_turn()

    @override
    def unread_rewards(self) -> Mapping[Any, Any]:
        # PettingZoo's wrappers pass this private attribute on, and wrappers of rewards have their own.
        collected = getattr(self.env, "_cumulative_rewards", {})
        read = {self.env.agent_selection, *self._read}
        return {agent: reward for agent, reward in collected.items() if agent not in read}

    def _next_turn(self) -> Turn:
        """Remove agents that are done, until an agent must act or no agent is left."""
        rewards, terminated, truncated, infos = {}, {}, {}, {}
        present = tuple(self.env.agents)
        while self.env.agents:
            agent = self.env.agent_selection
            observation, rewards[agent], terminated[agent], truncated[agent], infos[agent] = self.env.last()
            if not (terminated[agent] or truncated[agent]):
                shown = {agent: observation}, (agent,)
                return Turn(*shown, rewards, terminated, truncated, infos, over=False, present=present)
            self.env.step(None)
            if agent in self.env.agents:
                problem = f"agent {agent!r} has ended and was stepped with None, but it is still among the agents"
                fix = "Remove the agent in step(None), as PettingZoo's _was_dead_step does."
                raise EnvError(problem, key="agents", value=str(agent), fix=fix)
        return Turn({}, (), rewards, terminated, truncated, infos, over=True, present=present)


def _conversion_in(env: Any) -> Any:
    """Return PettingZoo's ``parallel_to_aec`` conversion in an environment; None if there is none.

    Unlike other environments, the conversion does not reset an agent's reward when the agent acts.
    """
    while env is not None and type(env).__name__ != "parallel_to_aec_wrapper":
        env = getattr(env, "env", None)
    return env


def _broken(method: str, due: str, result: Any) -> str:
    shown = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
    return f"{method}() returned {shown}: PettingZoo's contract is {due}, each a dict by agent"


_COMMON: Final = "__common__"
"""Key of infos in RLlib that belong to no agent."""


@final
class TeamEnv:
    """Environment of several agents with the ``reset`` and ``step`` of a single-agent environment.

    Observations and actions are dicts by agent. They contain only the agents that must act. The reward is the sum of
    the agents' rewards.

    Args:
        env: The environment.
        agents: Names of the agents in the order of seats; empty for the environment's possible agents.
        masks: Whether each agent's action mask is in its info, and must be added to its observation.
        evaluation: Section with the scalars to read from ``info`` (a key of the common info, or ``<agent>/<key>``), and
            the keys of success.

    Raises:
        ConfigError: The environment does not list its possible agents, and ``agents`` is empty.
    """

    rewards: Mapping[Any, float]
    """Rewards of the last step, by agent."""
    unread: Mapping[Any, float]
    """Rewards, by agent, that agents would have received in their next turn. Empty unless the episode was cut."""

    def __init__(self, env: AgentsEnv, agents: Sequence[str], *, masks: bool, evaluation: EvaluationSection) -> None:
        self._env = env
        self.agents = _seats(env, agents)
        self._seat = {agent: seat for seat, agent in enumerate(self.agents)}
        self._masks = masks
        names = [str(agent) for agent in self.agents]
        self._wanted = [
            (key, name, key[len(name) + 1 :]) for key in evaluation.info_keys for name in names if _is_of(name, key)
        ]
        self._success_keys = evaluation.success_keys
        self._begin()

    # ------------------------------------------------------------------ spaces

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the observation space and the action space of an agent's policy.

        Raises:
            ConfigError: Masks are configured, but the agent's actions are not discrete.
        """
        observations, actions = self._env.spaces(agent)
        if not self._masks:
            return observations, actions
        if not isinstance(actions, gym.spaces.Discrete):
            problem = (
                f"environment.action_masks is true, but the action space of agent {agent!r} is {actions}: only "
                "Discrete actions have masks"
            )
            fix = "Remove environment.action_masks."
            raise ConfigError(problem, key="environment.action_masks", value=True, fix=fix)
        mask = gym.spaces.Box(0, 1, (int(actions.n),), np.int8)
        return gym.spaces.Dict({"observation": observations, "action_mask": mask}), actions

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Dict of the agents' observation spaces."""
        return gym.spaces.Dict({str(agent): self.spaces(agent)[0] for agent in self.agents})

    @property
    def action_space(self) -> gym.Space[Any]:
        """Dict of the agents' action spaces."""
        return gym.spaces.Dict({str(agent): self.spaces(agent)[1] for agent in self.agents})

    # ------------------------------------------------------------------ episodes

    def reset(self, seed: int) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Start an episode; return the observations of the agents that act first."""
        self._begin()
        turn = self._env.reset(seed)
        if turn.over:
            raise EnvError("the episode ended in reset(): no agent is left to act", key="reset")
        self._note_present(turn.present)
        return self._observations(turn), {}

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], float, bool, bool, dict[str, Any]]:
        """Take a step; return the observations of the agents that act next, the sum of the rewards, flags and info."""
        for agent in actions:
            self._lengths[self._seat[agent]] += 1
        turn = self._env.step(actions)
        self._steps += 1
        self.rewards = _numbers(turn.rewards)
        if self._ended:
            self._refuse_the_gone(turn)
        self._note_present(turn.present)
        reward = self._take_rewards(self.rewards)
        ending = self._take_endings(turn)
        info = self._info(turn.infos) if any(turn.infos.values()) else {}
        if turn.over:
            return {}, reward, *ending, info
        return self._observations(turn), reward, False, False, info

    def settle(self, terminated: bool, truncated: bool) -> tuple[float, float]:
        """End the episode. The ending of the episode applies to agents that have not ended.

        Returns:
            The return of the team, and the part of this return that no step has reported.
        """
        if not (terminated or truncated):
            self.unread = _numbers(self._env.unread_rewards())
        unread = self._take_rewards(self.unread)
        ending = float(terminated), float(truncated or not terminated)
        for seat, agent in enumerate(self.agents):
            if agent not in self._ended:
                self._endings[seat] = ending
        return reduce(operator.add, self._returns, 0.0), unread  # Since Python 3.12, sum() rounds differently.

    def columns(self, policies: Sequence[int]) -> list[float]:
        """Return the values of the columns that :func:`rl_eval.records.agents.agent_columns` names.

        Args:
            policies: For each seat, the number of its policy.
        """
        values: list[float] = []
        for seat, present in enumerate(self._present):
            counted = (self._returns[seat], self._lengths[seat], *self._endings[seat], policies[seat])
            values += map(float, counted) if present else [nan] * len(AGENT_COLUMNS)
        return values

    @property
    def begin_episode(self) -> Any:
        """Method ``begin_episode`` of an environment that is :class:`rl_eval.EpisodeAware`; otherwise None."""
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
        """Step in which each agent ended, for the agents that have ended."""

    def _note_present(self, agents: Iterable[Any]) -> None:
        for agent in agents:
            if (seat := self._seat.get(agent)) is None:
                raise self._stranger(agent)
            self._present[seat] = True

    def _observations(self, turn: Turn) -> dict[Any, Any]:
        """Return the observations of the agents that must act."""
        acting = {}
        for agent in turn.acting:
            seat = self._seat.get(agent)
            if seat is None:
                raise self._stranger(agent)
            if agent in self._ended:
                problem = f"agent {agent!r} must act, but it ended in step {self._ended[agent]}"
                raise EnvError(problem, key="agents", value=str(agent))
            if agent not in turn.observations:
                problem = f"agent {agent!r} must act, but has no observation"
                fix = "Return an observation for every live agent."
                raise EnvError(problem, key="observations", value=str(agent), fix=fix)
            self._present[seat] = True
            acting[agent] = self._masked(turn, agent) if self._masks else turn.observations[agent]
        return acting

    def _masked(self, turn: Turn, agent: Any) -> dict[str, Any]:
        try:
            mask = turn.infos[agent]["action_mask"]
        except (KeyError, TypeError):
            problem = f"environment.action_masks is true, but the info of agent {agent!r} has no action_mask"
            raise EnvError(problem, key="environment.action_masks", value=True) from None
        return {"observation": turn.observations[agent], "action_mask": mask}

    def _take_rewards(self, rewards: Mapping[Any, float]) -> float:
        """Add rewards to the returns of their agents; return their sum."""
        total = 0.0
        for agent, reward in rewards.items():
            seat = self._seat.get(agent)
            if seat is None:
                raise self._stranger(agent)
            self._returns[seat] += reward
            self._present[seat] = self._present[seat] or reward != 0.0
            total += reward
        return total

    def _take_endings(self, turn: Turn) -> tuple[bool, bool]:
        """Record the agents that have ended; return ``terminated`` and ``truncated``, valid if the episode is over."""
        now = [False, False]
        for position, (word, flags) in enumerate((("terminated", turn.terminated), ("truncated", turn.truncated))):
            for agent, value in flags.items():
                if value is not False and _flag(word, agent, value) and self._end(agent, position):
                    now[position] = True
        if turn.ending is not None:
            now = [_flag("terminated", "__all__", turn.ending[0]), _flag("truncated", "__all__", turn.ending[1])]
        if turn.over and not any(now):
            raise EnvError("no agent is left, but the last step terminated or truncated no agent", key="terminated")
        return now[0], now[1]

    def _end(self, agent: Any, position: int) -> bool:
        """Record that an agent ends; return whether it ends in this step."""
        seat = self._seat.get(agent)
        if seat is None:
            raise self._stranger(agent)
        if self._ended.setdefault(agent, self._steps) != self._steps:
            return False  # Some environments repeat the flag in every step until the end of the episode.
        flags = list(self._endings[seat])
        flags[position] = 1.0
        self._endings[seat] = flags[0], flags[1]
        return True

    def _refuse_the_gone(self, turn: Turn) -> None:
        """Raise for observations and rewards of agents that ended in an earlier step."""
        for agent, step in self._ended.items():
            if agent in turn.observations:
                problem = f"step {self._steps} returned an observation of agent {agent!r}, which ended in step {step}"
                raise EnvError(problem, key="observations", value=str(agent))
            if turn.rewards.get(agent, 0.0) != 0.0:
                problem = (
                    f"step {self._steps} returned the reward {turn.rewards[agent]!r} for agent {agent!r}, which "
                    f"ended in step {step}"
                )
                raise EnvError(problem, key="rewards", value=str(agent))

    def _info(self, infos: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the info of the whole episode: success, and the configured scalars."""
        info = dict(infos.get(_COMMON) or {})
        given = {str(agent): part for agent, part in infos.items() if agent != _COMMON and part}
        for key, agent, name in self._wanted:
            if name in given.get(agent, ()):
                info[key] = given[agent][name]
        if self._success(info) is None:
            reported = [value for part in given.values() if (value := self._success(part)) is not None]
            # The reader of values adds a note on an unclear value.
            unclear = [value for value in reported if scalar_of(value) not in (0, 1)]
            if reported:
                info[self._success_keys[0]] = unclear[0] if unclear else all(reported)
        return info

    def _success(self, info: Mapping[str, Any]) -> Any:
        """Return the success that an info reports; None if it reports none."""
        first, second = self._success_keys
        return info.get(first, info.get(second))

    def _stranger(self, agent: Any) -> EnvError:
        return EnvError(
            f"agent {agent!r} appeared, but the environment's possible agents are {listed(self.agents, 8)}",
            key="environment.agents",
            value=str(agent),
            fix="List every agent that may appear in environment.agents.",
        )


def _seats(env: AgentsEnv, names: Sequence[str]) -> tuple[Any, ...]:
    possible = env.possible_agents
    if not names:
        if not possible:
            problem = f"{type(env).__name__} has no possible_agents, so the agents that may appear are not known"
            raise ConfigError(problem, key="environment.agents", fix="List the agents in environment.agents.")
        return possible
    known = {str(agent): agent for agent in possible}
    return tuple(known.get(name, name) for name in names)


def _is_of(agent: str, key: str) -> bool:
    """Whether a key of ``evaluation.info_keys`` belongs to an agent, whose name may contain a slash."""
    return key.startswith(f"{agent}/")


def _numbers(rewards: Mapping[Any, Any]) -> dict[Any, float]:
    """Return rewards as floats.

    Raises:
        EnvError: A reward is not a finite number.
    """
    return {
        agent: reward if type(reward) is float and isfinite(reward) else _number(agent, reward)
        for agent, reward in rewards.items()
    }


def _number(agent: Any, value: Any) -> float:
    """Return a reward as a float."""
    number = scalar_of(value)
    if number is None:
        shown = f"{value!r} of type {type(value).__name__}"
        raise EnvError(f"the reward of agent {agent!r} is {shown}, which is not a number", key="rewards", value=shown)
    if not isfinite(number):
        raise EnvError(
            f"the reward of agent {agent!r} is {number}, which is not a finite number", key="rewards", value=number
        )
    return float(number)


def _flag(word: str, agent: Any, value: Any) -> bool:
    """Return an agent's ``terminated`` or ``truncated`` as a bool."""
    if (number := scalar_of(value)) not in (0, 1):
        text = f"{word} of agent {agent!r} is {value!r}, which is neither true nor false"
        raise EnvError(text, key=word, value=value)
    return bool(number)


_REGISTRIES: Final = ("aec", "parallel")
"""Registries of PettingZoo, as prefixes of ids."""

_MEMBERS: Final = ("reset", "step", "observation_space", "action_space")


def build_team(settings: EvalSettings, runner_index: int, lane_index: int) -> TeamEnv:
    """Build the environment of a lane.

    Raises:
        ConfigError: The name is unknown, or the environment has no known API or does not list its possible agents.
        Exception: The constructor raised it.
    """
    section = settings.environment
    kind, _, name = section.env.partition(":") if isinstance(section.env, str) else ("", "", "")
    if kind in _REGISTRIES:
        built = _make(kind, name, copy_containers(section.env_kwargs))
    else:
        built = build_env(section, runner_index, lane_index, settings.runners.num_runners)
    adapted = _adapted(built, section)
    return TeamEnv(adapted, section.agents, masks=section.action_masks, evaluation=settings.evaluation)


def agents_of(settings: EvalSettings) -> tuple[str, ...]:
    """Return the agents in the order of seats. If they are not configured, build an environment to list them.

    Raises:
        EnvError: The environment cannot be built in this process.
    """
    section = settings.environment
    if section.agents:
        return section.agents
    if not _known or not _same(_known[0][0], section):
        _known[:] = [(section, _ask(settings))]
    return _known[0][1]


_known: list[tuple[EnvironmentSection, tuple[str, ...]]] = []
"""The last section and its agents, because every evaluation of a group needs the agents of the same section."""


def _same(one: EnvironmentSection, other: EnvironmentSection) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # Arrays in the kwargs.
        return False


def _ask(settings: EvalSettings) -> tuple[str, ...]:
    try:
        team = build_team(settings, 0, 0)
    except UsageError:
        raise
    except Exception as error:
        problem = (
            f"to list the agents of {settings.environment.env!r}, the process that starts the evaluation must build "
            f"the environment, and this failed: {summary_of(error)}"
        )
        raise EnvError(problem, key="environment.agents", fix="List the agents in environment.agents.") from error
    with suppress(Exception):  # Nothing depends on an environment that was only built for its agents.
        team.close()
    return tuple(map(str, team.agents))


def _make(kind: str, name: str, kwargs: dict[str, Any]) -> Any:
    """Make an environment from PettingZoo's registry."""
    text = f"environment.env is '{kind}:{name}', which needs PettingZoo"
    with needs_extra("pettingzoo", text, "environment.env", f"{kind}:{name}"):
        import pettingzoo
    try:
        return pettingzoo.make(kind, name, **kwargs)
    except Exception as error:
        if not type(error).__module__.startswith("pettingzoo.env_registry"):
            raise
        text = f"environment.env is '{kind}:{name}': {error}"
        raise ConfigError(text, key="environment.env", value=f"{kind}:{name}") from error


def _adapted(built: Any, section: EnvironmentSection) -> AgentsEnv:
    if (adapt := integration_for(built, "as_agents_env")) is not None and (adapted := adapt(built)) is not None:
        agents: AgentsEnv = adapted
        return agents
    lacking = [name for name in _MEMBERS if not callable(getattr(built, name, None))]
    if lacking or not (hasattr(built, "possible_agents") or hasattr(built, "agents")):
        problem = (
            f"environment.env {section.env!r} built a {type(built).__name__}, which is not an environment of several "
            "agents: it lacks the methods of pettingzoo.ParallelEnv and pettingzoo.AECEnv"
        )
        raise ConfigError(problem, key="environment.env", value=section.env)
    return AECAgents(built) if callable(getattr(built, "agent_iter", None)) else ParallelAgents(built)

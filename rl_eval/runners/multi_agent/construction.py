"""Construction of a multi-agent environment from the config, whatever API it has."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from rl_eval.adapters import integration_for
from rl_eval.config.settings import EnvironmentSection, EvalSettings, copy_containers
from rl_eval.errors import ConfigError, EnvError, UsageError, summary_of
from rl_eval.runners.environment import build_env
from rl_eval.runners.multi_agent.pettingzoo import AECAgents, ParallelAgents
from rl_eval.runners.multi_agent.team import TeamEnv
from rl_eval.runners.multi_agent.turns import AgentsEnv

__all__ = ["agents_of", "build_team"]

_REGISTRIES: Final = ("aec", "parallel")
"""PettingZoo's, as prefixes of ids."""

_MEMBERS: Final = ("reset", "step", "observation_space", "action_space")


def build_team(settings: EvalSettings, runner_index: int, lane_index: int) -> TeamEnv:
    """Build one environment, as the runner steps it.

    Raises:
        ConfigError: It has none of the APIs that are known, or does not say which agents may appear; or its name is
            not known.
        Exception: Whatever its constructor raises.
    """
    section = settings.environment
    kind, _, name = section.env.partition(":") if isinstance(section.env, str) else ("", "", "")
    if kind in _REGISTRIES:
        built = _make(kind, name, copy_containers(section.env_kwargs))
    else:
        built = build_env(section, runner_index, lane_index, settings.runners.num_runners)
    adapted = _adapted(built, section)
    return TeamEnv(adapted, section.agents, masks=section.action_masks, info_keys=settings.evaluation.info_keys)


def agents_of(settings: EvalSettings) -> tuple[str, ...]:
    """Return the agents in the order of seats: those configured, or those of an environment that is built for it.

    Raises:
        EnvError: It cannot be built in this process.
    """
    section = settings.environment
    if section.agents:
        return section.agents
    if not _known or not _same(_known[0][0], section):
        _known[:] = [(section, _ask(settings))]
    return _known[0][1]


_known: list[tuple[EnvironmentSection, tuple[str, ...]]] = []
"""Section that was asked about last, and its agents: every evaluation of a group asks about the same one."""


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
        raise EnvError(
            f"the environment {settings.environment.env!r} cannot be built where the evaluation is started, to see "
            f"which agents it has: {summary_of(error)}. List them in environment.agents"
        ) from error
    with suppress(Exception):  # Nothing depends on an environment that was only asked.
        team.close()
    return tuple(map(str, team.agents))


def _make(kind: str, name: str, kwargs: dict[str, Any]) -> Any:
    """Make an environment of PettingZoo's registry."""
    try:
        import pettingzoo
    except ImportError as error:
        raise ConfigError(
            f"environment.env is '{kind}:{name}', which needs PettingZoo: pip install 'rl-eval[pettingzoo]'"
        ) from error
    try:
        return pettingzoo.make(kind, name, **kwargs)
    except Exception as error:
        if not type(error).__module__.startswith("pettingzoo.env_registry"):
            raise
        raise ConfigError(f"environment.env is '{kind}:{name}': {error}") from error


def _adapted(built: Any, section: EnvironmentSection) -> AgentsEnv:
    if (adapt := integration_for(built, "as_agents_env")) is not None and (adapted := adapt(built)) is not None:
        agents: AgentsEnv = adapted
        return agents
    lacking = [name for name in _MEMBERS if not callable(getattr(built, name, None))]
    if lacking or not (hasattr(built, "possible_agents") or hasattr(built, "agents")):
        raise ConfigError(
            f"environment.env {section.env!r} built a {type(built).__name__}, which is no environment of several "
            "agents: it needs the methods of pettingzoo.ParallelEnv or pettingzoo.AECEnv"
        )
    return AECAgents(built) if callable(getattr(built, "agent_iter", None)) else ParallelAgents(built)

"""CleanRL: agents of its scripts as policies, from an object or from a file that ``--save-model`` wrote."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from gymnasium.vector.utils import batch_space

from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import reading
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource
from rl_eval.weights import read_tensors

_METHODS: Final = ("get_action_and_value", "get_action")


@final
class AgentPolicy:
    """A policy around an agent with ``get_action_and_value(x)``, such as PPO's, or ``get_action(x)``, such as SAC's.

    The first value that the method returns is the action. Draws from torch's distributions use each episode's own
    noise. If ``policy.deterministic`` is true, a draw is the mode of the distribution. A network without these
    methods does not need this class: pass it as the policy if it returns Q values (DQN) or actions (TD3, DDPG).

    Args:
        agent: The agent. It gets observations as float32, as from CleanRL's ``torch.Tensor(obs)``. An observation with
            several parts is a dict or a tuple of such tensors.

    Raises:
        ConfigError: The agent has neither of these methods, or the method needs other arguments in addition to
            observations.
    """

    def __init__(self, agent: torch.nn.Module) -> None:
        self.module = agent.eval()
        self._method = _method_of(agent)

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return the float outputs of the agent that have one row per observation, such as log-probabilities."""
        batch = len(tree.flatten(observations)[0])
        result = self._call(observations, np.ones(batch, bool), None)
        return [
            part.numpy(force=True)
            for part in result
            if isinstance(part, torch.Tensor) and part.is_floating_point() and part.ndim and len(part) == batch
        ]

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[Any], None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self._call(observations, live, noise)[0].numpy(force=True), None

    @torch.no_grad()
    def _call(self, observations: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> tuple[Any, ...]:
        weight = next(self.module.parameters(), None)
        device = None if weight is None else weight.device
        inputs = tree.map_structure(
            lambda part: torch.as_tensor(part, dtype=torch.float32, device=device), observations
        )
        with EpisodeDraws(live, noise):
            result: tuple[Any, ...] = getattr(self.module, self._method)(inputs)
        return result


def load_agent(
    agent: str | type[torch.nn.Module],
    path: str | os.PathLike[str],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    agent_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Load an agent that a script of CleanRL saved with ``--save-model``.

    Use it as a factory; rl_eval passes the spaces::

        config.policy(
            "rl_eval.integrations.cleanrl:load_agent",
            policy_kwargs={"agent": "cleanrl.ppo:Agent", "path": "runs/.../ppo.cleanrl_model"},
        )

    Args:
        agent: Class of the agent in the script, or ``"module:Class"``. It is called with ``envs``, which has
            ``single_observation_space`` and ``single_action_space``.
        path: Model file. It contains the weights of the agent, or a mapping with one entry that fits the agent. If it
            contains a tuple of networks, as for TD3, the first network acts.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        agent_kwargs: Arguments of the class in addition to ``envs``, such as C51's ``n_atoms``.

    Returns:
        An :class:`AgentPolicy`, or the network itself if it returns Q values or actions.

    Raises:
        ConfigError: The file is missing, or its weights do not fit the agent.
    """
    build = import_attribute("policy_kwargs.agent", agent) if isinstance(agent, str) else agent
    single = {"single_observation_space": observation_space, "single_action_space": action_space}
    # Some scripts read the bounds of actions from the space of all environments.
    batched = {"observation_space": batch_space(observation_space, 1), "action_space": batch_space(action_space, 1)}
    envs = SimpleNamespace(**single, **batched, num_envs=1)
    try:
        inspect.signature(build).bind(envs, **(agent_kwargs or {}))
    except TypeError as error:
        problem = f"policy_kwargs.agent: {build.__name__} cannot be called with envs alone: {error}"
        fix = "Pass more arguments in policy_kwargs.agent_kwargs."
        raise ConfigError(problem, key="policy.policy_kwargs.agent", value=build.__name__, fix=fix) from error
    module = build(envs, **(agent_kwargs or {}))
    with reading("path", path, f"weights of {build.__name__}"):
        module.load_state_dict(_weights(Path(path).expanduser(), module.state_dict().keys()))
    return AgentPolicy(module) if any(hasattr(module, name) for name in _METHODS) else module


def _weights(file: Path, names: Collection[str]) -> Any:
    """Return the agent's weights from a model file.

    If the file contains a tuple, return the first item. If it contains a mapping, search for mappings among the
    values. If exactly one of them has exactly the keys ``names``, return this mapping; otherwise, return all content.
    """
    saved = read_tensors(file)
    if isinstance(saved, tuple):
        return saved[0]
    fitting = [part for part in saved.values() if isinstance(part, Mapping) and set(part) == set(names)]
    return fitting[0] if len(fitting) == 1 else saved


def _method_of(agent: torch.nn.Module) -> str:
    """Return the name of the method that chooses actions."""
    for name in _METHODS:
        method = getattr(agent, name, None)
        if method is None:
            continue
        _, *others = inspect.signature(method).parameters.values()
        if needed := [other.name for other in others if other.default is other.empty]:
            problem = (
                f"{type(agent).__name__}.{name}() needs {', '.join(needed)} in addition to the observation, as "
                "recurrent agents do"
            )
            fix = "Wrap the agent in an rl_eval.Policy with initial_state()."
            raise ConfigError(problem, key="agent", value=type(agent).__name__, fix=fix)
        return name
    problem = f"{type(agent).__name__} has neither get_action_and_value() nor get_action()"
    fix = "If the network returns Q values or actions, pass it without AgentPolicy."
    raise ConfigError(problem, key="agent", value=type(agent).__name__, fix=fix)

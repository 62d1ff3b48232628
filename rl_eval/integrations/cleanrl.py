"""CleanRL: agents of its scripts as policies, live or from the files that ``--save-model`` writes."""

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

from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import reading
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource

_METHODS: Final = ("get_action_and_value", "get_action")


@final
class AgentPolicy:
    """A policy around an agent with ``get_action_and_value(x)``, such as PPO's, or ``get_action(x)``, such as SAC's.

    Of what it returns, the first is the action. What the agent draws with torch's distributions comes from each
    episode's own noise; with ``policy.deterministic`` it is the mode of each distribution. Networks without these
    methods, which return Q values (DQN) or actions (TD3, DDPG), are policies as they are.

    Args:
        agent: The agent; observations reach it as float32, as CleanRL's ``torch.Tensor(obs)`` has them, and those of
            several parts as a dict or tuple of such tensors.

    Raises:
        ConfigError: The agent has no such method, or it takes more than observations.
    """

    def __init__(self, agent: torch.nn.Module) -> None:
        self.module = agent.eval()
        self._method = _method_of(agent)

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return log-probabilities, values and whatever else the agent computes in floats."""
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
    """Load what a script of CleanRL saved with ``--save-model``.

    Use it as a factory, which is given the spaces::

        config.policy(
            "rl_eval.integrations.cleanrl:load_agent",
            policy_kwargs={"agent": "cleanrl.ppo:Agent", "path": "runs/.../ppo.cleanrl_model"},
        )

    Args:
        agent: The script's class that acts, or ``"module:Class"``; called with ``envs``, of which it may read
            ``single_observation_space`` and ``single_action_space``.
        path: The model file: the agent's weights, alone or as one entry of a mapping that fits the agent. Of a tuple of
            networks, such as those of TD3, the first is the one that acts.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        agent_kwargs: More arguments of the class, such as C51's ``n_atoms``.

    Returns:
        An :class:`AgentPolicy`, or the network itself if it returns Q values or actions.

    Raises:
        ConfigError: The file is missing, or holds other weights.
    """
    build = import_attribute("policy_kwargs.agent", agent) if isinstance(agent, str) else agent
    envs = SimpleNamespace(single_observation_space=observation_space, single_action_space=action_space, num_envs=1)
    try:
        inspect.signature(build).bind(envs, **(agent_kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"policy_kwargs.agent: {build.__name__} cannot be called with envs alone: {error}; give more arguments in "
            "policy_kwargs.agent_kwargs"
        ) from error
    module = build(envs, **(agent_kwargs or {}))
    with reading("path", path, f"weights of {build.__name__}"):
        module.load_state_dict(_weights(Path(path).expanduser(), module.state_dict().keys()))
    return AgentPolicy(module) if any(hasattr(module, name) for name in _METHODS) else module


def _weights(file: Path, names: Collection[str]) -> Any:
    """Return the weights with these names in a file, or all of it, if it has none or several of them."""
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(saved, tuple):
        return saved[0]
    fitting = [part for part in saved.values() if isinstance(part, Mapping) and set(part) == set(names)]
    return fitting[0] if len(fitting) == 1 else saved


def _method_of(agent: torch.nn.Module) -> str:
    """Return the name of the method that acts."""
    for name in _METHODS:
        method = getattr(agent, name, None)
        if method is None:
            continue
        _, *others = inspect.signature(method).parameters.values()
        if needed := [other.name for other in others if other.default is other.empty]:
            raise ConfigError(
                f"{type(agent).__name__}.{name}() needs {', '.join(needed)} beside the observation, as recurrent "
                "agents do: implement rl_eval.Policy with initial_state() around it"
            )
        return name
    raise ConfigError(
        f"{type(agent).__name__} has neither get_action_and_value() nor get_action(): a network that returns Q values "
        "or actions is a policy as it is, so give it without AgentPolicy"
    )

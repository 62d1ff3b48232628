"""Tianshou: its policies, and the policies of its algorithms. They act as in a collector outside of training."""

from __future__ import annotations

import copy
from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from tianshou.algorithm.algorithm_base import Algorithm, Policy
from tianshou.data import Batch
from tianshou.data.batch import BatchProtocol

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource


def portable(value: Algorithm | Policy) -> Policy:
    """Return a copy of a policy, or of an algorithm's policy, on the CPU."""
    return copy.deepcopy(_policy_of(value)).cpu().eval()


def as_weights(value: Algorithm | Policy) -> dict[str, torch.Tensor]:
    """Return the current tensors of a policy. The keys are the names that the copy from :func:`portable` uses."""
    return dict(_policy_of(value).state_dict())


def as_policy(
    value: Algorithm | Policy, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> TianshouPolicy:
    """Build the policy for an environment with these spaces.

    Raises:
        ConfigError: The policy has another action space than the environment.
    """
    policy = portable(value)
    if policy.action_space != action_space:
        problem = f"the policy has the action space {policy.action_space}, but the environment has {action_space}"
        raise ConfigError(problem, key="policy", value=policy.action_space)
    return TianshouPolicy(policy, section.deterministic)


@final
class TianshouPolicy:
    """A policy of Tianshou behind the interface of :class:`rl_eval.Policy`.

    The policy's ``map_action`` converts the actions. A stochastic policy uses the mode of its distribution if
    ``deterministic`` is true; otherwise, it samples with each episode's own noise. The policy's attribute
    ``deterministic_eval`` is set to ``deterministic``. Policies without this attribute ignore ``deterministic``.

    Args:
        policy: A policy that no other code uses.
        deterministic: Whether to use the mode of the policy's distribution.

    Raises:
        ConfigError: ``deterministic`` is true, but the policy draws quantiles.
    """

    def __init__(self, policy: Policy, deterministic: bool) -> None:
        if deterministic and any(base.__name__ == "IQNPolicy" for base in type(policy).__mro__):
            problem = "IQNPolicy draws quantiles at random, but policy.deterministic is True"
            fix = "Set policy.deterministic to False. Actions then use quantiles from each episode's own noise."
            raise ConfigError(problem, key="policy.deterministic", value=True, fix=fix)
        self.module = policy
        if hasattr(policy, "deterministic_eval"):
            policy.deterministic_eval = deterministic

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return the numbers that determine actions, such as logits."""
        batch = len(tree.flatten(observations)[0])
        logits = self._call(observations, np.ones(batch, bool), None).get("logits")
        parts = logits if isinstance(logits, tuple) else (logits,)
        return [part.numpy(force=True) for part in parts if isinstance(part, torch.Tensor) and len(part) == batch]

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[Any], None]:
        """Choose actions; see :class:`rl_eval.Policy`.

        Raises:
            ConfigError: The policy has a recurrent state.
        """
        result = self._call(observations, live, noise)
        if result.get("state") is not None:
            problem = "the Tianshou policy has a recurrent state, which rl_eval does not support"
            raise ConfigError(problem, key="policy", fix="Wrap the policy in an rl_eval.Policy with initial_state().")
        chosen = result.act
        array = chosen.numpy(force=True) if isinstance(chosen, torch.Tensor) else np.asarray(chosen)
        return np.asarray(self.module.map_action(array)), None

    @torch.no_grad()
    def _call(self, observations: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> BatchProtocol:
        with EpisodeDraws(live, noise):
            return self.module(Batch(obs=observations, info={}))


def _policy_of(value: Algorithm | Policy) -> Policy:
    return value.policy if isinstance(value, Algorithm) else value

"""Policy of a configuration, built in the process of a test, with its spaces and its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym

from rl_eval.config.settings import EvalSettings
from rl_eval.policies import adapt_policy
from rl_eval.protocols import Policy
from rl_eval.runners.environment import construct_env
from rl_eval.weights import WeightsSnapshot, apply_weights, load_weights_file, module_of, snapshot_weights, weights_of

__all__ = ["Subject", "build_subject"]


class Subject(NamedTuple):
    """A policy and the spaces that it was built for."""

    policy: Policy
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]

    def snapshot(self) -> WeightsSnapshot | None:
        """Return the policy's weights, or None if it is no module."""
        return weights_of(self.policy)


def build_subject(settings: EvalSettings) -> Subject:
    """Build the configured policy, as a runner would."""
    env = construct_env(settings.environment, 0, 0, 1)
    spaces = env.observation_space, env.action_space
    env.close()
    policy = adapt_policy(settings.policy, *spaces)
    if settings.policy.weights is not None:
        snapshot = snapshot_weights(load_weights_file(settings.policy.weights, settings.policy.weights_key), 0)
        apply_weights(snapshot, module_of(policy))
    return Subject(policy, *spaces)

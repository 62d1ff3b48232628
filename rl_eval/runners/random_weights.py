"""Random weights: whether a policy's factory makes others each time that it is called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from rl_eval.config.model_files import loads_models
from rl_eval.config.settings import PolicySection
from rl_eval.policies.random_state import other_random_state
from rl_eval.protocols import Policy
from rl_eval.runners.policy_memory import weights_digest
from rl_eval.weights import module_of

__all__ = ["makes_random_weights"]

_LARGE: Final = 10_000_000
"""Parameters of a policy that is not built a second time: that would take its time and memory."""


def makes_random_weights(section: PolicySection, policy: Policy, make: Callable[[], Policy]) -> bool:
    """Build a policy once more, under other random numbers, and compare the weights.

    False without another build where a factory cannot be at fault: the policy is live, or has its weights from a file.
    """
    if not isinstance(section.policy, str) or section.weights is not None or loads_models(section.policy):
        return False
    with suppress(Exception), other_random_state():  # The policy that acts is there already.
        module = module_of(policy)
        if module is not None and sum(parameter.numel() for parameter in module.parameters()) <= _LARGE:
            return weights_digest(make()) != weights_digest(policy)
    return False

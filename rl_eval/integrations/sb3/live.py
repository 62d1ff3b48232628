"""Copies of a model in training that can be sent: its policy, and its weights of the moment.

The copy shares nothing with the model: no tensor, no optimizer, no gradient graph, no environment. It is an ordinary
policy of Stable-Baselines3 with two more parts that travel as its weights do: the normalizers of the training
environment, and, where an algorithm explores by chance, its ``exploration_rate``.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Final

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.sb3.files import trained_normalized
from rl_eval.integrations.sb3.normalizer import (
    ATTRIBUTE,
    LACKS_STATISTICS,
    NOTES,
    normalizers_of,
    refuse_empty,
)

__all__ = ["as_weights", "attach", "for_environment", "portable"]

_logger: Final = logging.getLogger(__name__)

_RATE: Final = "exploration_rate"
_OURS: Final = ("stable_baselines3", "sb3_contrib")


def portable(value: BaseAlgorithm | BasePolicy) -> BasePolicy:
    """Copy the policy of a model, or a policy, so that it can be pickled and trained on without a trace.

    A policy alone does not know its training environment: if that has a ``VecNormalize``, give the model.

    Raises:
        ConfigError: The model predicts in a way of its own, or lacks the ``VecNormalize`` that it was trained with.
    """
    copied = _copied(value)
    if isinstance(value, BasePolicy) or value.get_vec_normalize_env() is not None:
        return copied
    trained = trained_normalized(vars(value))
    if trained:
        raise ConfigError(
            f"the {type(value).__name__} {LACKS_STATISTICS}. Load it with rl_eval.integrations.sb3.load_policy(path, "
            "vecnormalize=FILE), or give it its environment by model.set_env(venv); or give model.policy if it "
            "normalized rewards only"
        )
    if trained is None:
        note = (
            f"the {type(value).__name__} does not show whether it was trained with a VecNormalize, and has none: its "
            "observations are not normalized. If it was, load it with rl_eval.integrations.sb3.load_policy(path, "
            "vecnormalize=FILE); if not, give model.policy"
        )
        _logger.warning(note)
        setattr(copied, NOTES, (note,))
    return copied


def _copied(value: BaseAlgorithm | BasePolicy) -> BasePolicy:
    if isinstance(value, BasePolicy):
        return _detached(value)
    if type(value).predict.__module__.partition(".")[0] not in _OURS:
        raise ConfigError(
            f"{type(value).__name__} has a predict() of its own, which rl_eval cannot batch: implement rl_eval.Policy "
            "around it"
        )
    return attach(_detached(value.policy), value.get_vec_normalize_env(), getattr(value, _RATE, None))


def attach(policy: BasePolicy, wrapper: Any, exploration_rate: float | None) -> BasePolicy:
    """Give a policy the normalizers and the exploration rate that belong to it, and return it."""
    setattr(policy, ATTRIBUTE, normalizers_of(wrapper))
    if exploration_rate is not None:
        # Not persistent: a state dict of the bare policy is complete without it.
        policy.register_buffer(_RATE, torch.tensor(exploration_rate, dtype=torch.float64), persistent=False)
    return policy


def for_environment(value: BaseAlgorithm | BasePolicy, env: Any) -> BaseAlgorithm | BasePolicy:
    """Return a copy of a policy with the statistics of an environment's ``VecNormalize``; itself if that has none."""
    wrapper = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    if wrapper is None:
        return value
    return attach(_copied(value), wrapper, getattr(value, _RATE, None))


def as_weights(value: BaseAlgorithm | BasePolicy) -> dict[str, torch.Tensor]:
    """Return the live tensors of a model by the names that :func:`portable` gives them.

    Raises:
        WeightsError: Its ``VecNormalize`` has not seen an observation.
    """
    policy = value if isinstance(value, BasePolicy) else value.policy
    tensors: dict[str, torch.Tensor] = dict(policy.state_dict())
    if isinstance(value, BasePolicy):
        return tensors
    normalizers = normalizers_of(value.get_vec_normalize_env())
    refuse_empty(normalizers, WeightsError)
    tensors.update(normalizers.state_dict(prefix=f"{ATTRIBUTE}."))
    if (rate := getattr(value, _RATE, None)) is not None:
        tensors[_RATE] = torch.tensor(rate, dtype=torch.float64)
    return tensors


def _detached(policy: BasePolicy) -> BasePolicy:
    """Copy a policy to the CPU, without its optimizers and without what its distributions hold of the last batch.

    That batch is part of a gradient graph, which cannot be copied. Building a new policy instead would draw from
    torch's global generator.
    """
    memo: dict[int, Any] = {}
    for module in policy.modules():
        for held in vars(module).values():
            if isinstance(held, torch.optim.Optimizer):
                memo[id(held)] = None
            elif isinstance(held, Distribution):
                memo[id(held)] = _blank(held)
    return copy.deepcopy(policy, memo).cpu().eval()


def _blank(distribution: Distribution) -> Distribution:
    blank = copy.copy(distribution)
    for name, value in vars(distribution).items():
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, (torch.Tensor, torch.distributions.Distribution)):
            delattr(blank, name)
    return blank

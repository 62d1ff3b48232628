"""Policies of models: copies of the policy of a model in training, and policies of saved models.

A copy has the current weights of the model. It can be pickled, and shares no tensor, optimizer, gradient graph or
environment with the model. It is an ordinary policy of Stable-Baselines3 with two more parts, which are sent with its
weights: the normalizers of the training environment and, if the algorithm has one, its ``exploration_rate``.

From a saved model, only the policy and the statistics are loaded, because the algorithm's replay buffer may be too
large for the memory.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import gymnasium as gym
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.policy_files import reading
from rl_eval.integrations.sb3.files import MASKABLE, PASS, facts_of, normalizer_of, trained_normalized, unknown
from rl_eval.integrations.sb3.observations import (
    ATTRIBUTE,
    LACKS_STATISTICS,
    NOTES,
    normalizers_of,
    refuse_empty,
)
from rl_eval.integrations.sb3.saved_policies import read_policy

_logger: Final = logging.getLogger(__name__)

_RATE: Final = "exploration_rate"
_OURS: Final = ("stable_baselines3", "sb3_contrib")
_LOAD: Final = "rl_eval.integrations.sb3.load_policy(path, vecnormalize=FILE)"


def _trained(value: Any) -> BaseAlgorithm | BasePolicy:
    """Return the model or the policy that a trainer of imitation trains; any other value itself."""
    if isinstance(value, (BaseAlgorithm, BasePolicy)):
        return value
    models = (vars(value).get(name) for name in ("gen_algo", "rl_algo"))
    found: BaseAlgorithm | BasePolicy = next(filter(None, models), None) or value.policy
    return found


def portable(value: Any) -> BasePolicy:
    """Return a copy of a policy, or of a model's policy, that can be pickled and shares nothing with the training.

    ``value`` may also be a trainer of imitation. A policy does not contain the normalizers of its training environment.
    If the training environment has a ``VecNormalize``, pass the model. The copy has a note, unless it is known that
    observations need no statistics.

    Raises:
        ConfigError: The model has its own ``predict``, or does not have the ``VecNormalize`` of its training.
    """
    value = _trained(value)
    copied, alone = _copied(value), isinstance(value, BasePolicy)
    if hasattr(copied, NOTES) if alone else value.get_vec_normalize_env() is not None:
        return copied
    name, trained = type(value).__name__, None if alone else trained_normalized(vars(value))
    if trained:
        problem = f"the {name} {LACKS_STATISTICS}"
        fix = (
            f"Load it with {_LOAD}, or call model.set_env(venv). If the VecNormalize normalized only rewards, pass "
            "model.policy."
        )
        raise ConfigError(problem, key="policy", value=name, fix=fix)
    if trained is None:
        note = (
            f"observations are not normalized: the {name} has no VecNormalize statistics, and does not show whether it "
            f"needs them. If it was trained with a VecNormalize, load it with {_LOAD}"
        )
        _logger.log(logging.INFO if alone else logging.WARNING, note)
        setattr(copied, NOTES, (note,))
    return copied


def _copied(value: BaseAlgorithm | BasePolicy) -> BasePolicy:
    if isinstance(value, BasePolicy):
        return _detached(value)
    if type(value).predict.__module__.partition(".")[0] not in _OURS:
        raise own_predict(value)
    return attach(_detached(value.policy), value.get_vec_normalize_env(), getattr(value, _RATE, None))


def own_predict(value: BaseAlgorithm | BasePolicy) -> ConfigError:
    """Return the error for a model or policy with its own ``predict``."""
    name = type(value).__name__
    problem = f"{name} has its own predict(), which rl_eval cannot batch"
    return ConfigError(problem, key="policy", value=name, fix="Wrap the model in an rl_eval.Policy.")


def attach(
    policy: BasePolicy, wrapper: Any, exploration_rate: float | None, source: str = "the environment", note: str = ""
) -> BasePolicy:
    """Add normalizers of a ``VecNormalize``, an exploration rate, and a note for readers of the results to a policy.

    Args:
        policy: The policy, which is returned.
        wrapper: The ``VecNormalize``; None for no normalizers.
        exploration_rate: Exploration rate of the algorithm; None if it has none.
        source: Origin of the ``VecNormalize``, for the note.
        note: Note if observations are not normalized.
    """
    normalizers = normalizers_of(wrapper)
    setattr(policy, ATTRIBUTE, normalizers)
    note = f"observations are normalized with the VecNormalize statistics of {source}" if normalizers else note
    setattr(policy, NOTES, (note,) if note else ())
    if exploration_rate is not None:
        # Not persistent, so a state dict of the policy alone is complete.
        policy.register_buffer(_RATE, torch.tensor(exploration_rate, dtype=torch.float64), persistent=False)
    return policy


def for_environment(value: BaseAlgorithm | BasePolicy, env: Any) -> BaseAlgorithm | BasePolicy:
    """Return a copy of a policy with the statistics of an environment's ``VecNormalize``.

    If the environment has no ``VecNormalize``, return ``value`` itself.
    """
    value = _trained(value)
    wrapper = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    if wrapper is None:
        return value
    return attach(_copied(value), wrapper, getattr(value, _RATE, None))


def environment_settings(value: BaseAlgorithm | BasePolicy) -> dict[str, Any]:
    """Return the environment settings that a policy needs: action masks for a masked policy."""
    value = _trained(value)
    policy = value if isinstance(value, BasePolicy) else value.policy
    return {"action_masks": True} if type(policy).predict.__module__ == MASKABLE else {}


def as_weights(value: BaseAlgorithm | BasePolicy) -> dict[str, torch.Tensor]:
    """Return the current tensors of a model. The keys are the names that the copy from :func:`portable` uses.

    Raises:
        WeightsError: The model's ``VecNormalize`` has not seen an observation.
    """
    value = _trained(value)
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
    """Return a copy of a policy on the CPU, without its optimizers and without the last batch in its distributions.

    The last batch is part of a gradient graph, which cannot be copied. The policy is copied, because building a new
    policy would draw from torch's global generator.
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


# ---------------------------------------------------------------------- saved models


def load_policy(
    path: str | os.PathLike[str],
    vecnormalize: str | os.PathLike[str] | Literal[False] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    observation_space: gym.Space[Any] | None = None,
    action_space: gym.Space[Any] | None = None,
) -> BasePolicy:
    """Load a policy from the files of ``model.save(path)`` and ``vec_normalize_env.save(vecnormalize)``.

    It also reads the file of ``policy.save(path)``, such as that of a cloned policy of imitation.

    Use it as a factory::

        config.policy("rl_eval.integrations.sb3:load_policy", policy_kwargs={"path": "model.zip"})

    A relative path is relative to the working directory, ``~`` is the home directory, and ``.zip`` can be left out.
    Both files contain pickled objects, which can run code when they are loaded. Load only files that you trust.

    Args:
        path: Zip file of a model, or file of a policy.
        vecnormalize: Pickle of the ``VecNormalize`` of the training. With None, this function searches for the pickle
            next to the model, unless the model shows that it was trained without a ``VecNormalize``. Pass False for a
            model that was trained without a ``VecNormalize``, or with one that normalized only rewards.
        custom_objects: Attributes of the model that replace those in the file, as in SB3's ``load``. Only those of the
            policy matter, such as ``policy_kwargs``. In a config, ``"module:attr"`` stands for an object.
        observation_space: Observation space of the environment, in place of one that cannot be read.
        action_space: Action space of the environment, in place of one that cannot be read.

    Returns:
        The policy on the CPU, with its statistics, for ``evaluate(config, policy)``. Its ``result_notes`` name the
        statistics, or say that observations are not normalized.

    Raises:
        ConfigError: A file is missing, unreadable or of another type. Or the model was trained with a
            ``VecNormalize``, and its statistics are neither passed nor next to the model. Or several files next to the
            model match.
    """
    file = _existing("path", path, ".zip")
    spaces = {"observation_space": observation_space, "action_space": action_space}
    policy, exploration_rate, notes = read_policy(file, custom_objects or {}, spaces)
    note = ""
    if vecnormalize is None:
        vecnormalize, note = _beside(file)
    elif not vecnormalize and trained_normalized(facts_of(file)) is not False:
        note = "observations are not normalized: vecnormalize is False"
    wrapper = _load_statistics(_existing("vecnormalize", vecnormalize, ".pkl")) if vecnormalize else None
    policy = attach(policy, wrapper, exploration_rate, Path(vecnormalize or "").name, note)
    setattr(policy, NOTES, (*getattr(policy, NOTES), *notes))
    refuse_empty(getattr(policy, ATTRIBUTE), ConfigError)
    return policy.eval()


def _beside(file: Path) -> tuple[Path | None, str]:
    """Return the file of the statistics next to a model (or None), and a note on missing statistics."""
    trained, found = normalizer_of(file)
    if trained and found is None:
        problem = f"policy_kwargs.vecnormalize is missing: {str(file)!r} {LACKS_STATISTICS}"
        fix = (
            f"Pass {PASS}, the file that venv.save() wrote. SB3's callbacks and zoo put vecnormalize into the file "
            "name. If only rewards were normalized, pass False."
        )
        raise ConfigError(problem, key="policy.policy_kwargs.vecnormalize", fix=fix)
    return found, unknown(file.name) if trained is None and found is None else ""


def _load_statistics(file: Path) -> VecNormalize:
    with reading("vecnormalize", file, "a VecNormalize"):
        wrapper = pickle.loads(file.read_bytes())
    if not isinstance(wrapper, VecNormalize):
        problem = f"policy_kwargs.vecnormalize: {str(file)!r} contains a {type(wrapper).__name__}, not a VecNormalize"
        raise ConfigError(problem, key="policy.policy_kwargs.vecnormalize", value=str(file))
    return wrapper


def _existing(key: str, path: str | os.PathLike[str], suffix: str) -> Path:
    given = Path(path).expanduser()
    for file in (given, given.with_name(given.name + suffix)):
        if file.is_file():
            return file
    relative = not given.is_absolute()
    problem = f"policy_kwargs.{key}: there is no file {str(given)!r}" + (f" in {Path.cwd()}" if relative else "")
    fix = "If runners have another working directory, pass an absolute path." if relative else ""
    raise ConfigError(problem, key=f"policy.policy_kwargs.{key}", value=str(given), fix=fix)

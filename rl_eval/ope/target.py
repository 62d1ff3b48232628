"""The target policy, whose value is estimated, and its log-probabilities of logged actions."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import UsageError, summary_of
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.ope.data import LoggedEpisodes
from rl_eval.policies.inference.spaces import no_grad
from rl_eval.protocols import ActionLogProb, Policy, Recurrent

_BATCH: Final = 4096
"""Number of steps in one forward pass."""


def target_policy(settings: EvalSettings, episodes: LoggedEpisodes) -> Policy:
    """Build the policy of a configuration in this process, with its weights.

    Args:
        settings: Settings of the evaluation. One environment is built for its spaces.
        episodes: Logged episodes for the estimate.

    Raises:
        ConfigError: Policy or environment cannot be built.
        UsageError: The episodes do not fit this environment, or the actions were changed before they were stored.
    """
    alone = with_values(settings, runners={"num_runners": 0, "num_envs_per_runner": 1})
    with EvalRunnerGroup(alone, threaded=False) as group:
        policy, spaces = group.foreach_runner(lambda runner: (runner.policy, runner.spaces))[0]
    arrays, limit = (episodes.observations, episodes.actions), settings.evaluation.max_episode_steps
    for name, array, space in zip(("observations", "actions"), arrays, spaces, strict=True):
        if math.prod(array.shape[1:]) != math.prod(space.shape or ()):
            problem = f"the logged {name} have shape {array.shape[1:]}, but the environment's space is {space}"
            raise UsageError(problem, key=name, value=array.shape[1:])
    if limit is not None and (longest := int(episodes.lengths.max())) > limit:
        problem = f"a logged episode has {longest} steps, but evaluation.max_episode_steps is {limit}"
        fix = "Pass the limit of the data."
        raise UsageError(problem, key="evaluation.max_episode_steps", value=limit, fix=fix)
    check_unchanged_actions(episodes, spaces[1], settings.policy.actions)
    return policy


def check_unchanged_actions(episodes: LoggedEpisodes, action_space: gym.Space[Any], handling: str) -> None:
    """Reject continuous actions that ``policy.actions`` changed, because their log-probability is unknown.

    Args:
        episodes: Logged episodes, with the actions that the environment received.
        action_space: Action space of the environment.
        handling: Value of ``policy.actions``. It must have been the same for the behaviour policy.

    Raises:
        UsageError: An action was changed, or may have been changed.
    """
    if not isinstance(action_space, gym.spaces.Box) or handling == "none":
        return
    fix = "Record and estimate with policy.actions=none, and let the environment clip the actions."
    if handling == "unsquash":
        problem = "policy.actions is unsquash, so the stored actions differ from the drawn ones"
        raise UsageError(problem, key="policy.actions", value=handling, fix=fix)
    bound = (episodes.actions <= action_space.low) | (episodes.actions >= action_space.high)
    if bound.any():
        row = int(bound.reshape(len(bound), -1).any(1).argmax())
        problem = f"{episodes.place(row)}: the action is at the bound of {action_space}, so it was clipped"
        raise UsageError(problem, key="policy.actions", value=handling, fix=fix)


def with_log_probs(policy: Any, episodes: LoggedEpisodes) -> Any:
    """Return a policy that samples from a copy of an ``nn.Module`` without ``log_prob``.

    Any other policy is returned unchanged.

    The action space is that of the logged actions: Box if they are floats, Discrete from 0 if they are single integers.

    Raises:
        UsageError: Each action consists of several integers, so the action space is unknown.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(policy, torch.nn.Module) or isinstance(policy, ActionLogProb):
        return policy
    from rl_eval.policies.module import ModulePolicy

    shape = episodes.actions.shape[1:]
    if episodes.actions.dtype.kind == "f":
        return ModulePolicy(copy.deepcopy(policy), gym.spaces.Box(-np.inf, np.inf, shape), False)
    if shape:
        problem = f"the logged actions are integers of shape {shape}, so the action space of the module is unknown"
        fix = "Pass rl_eval.policies.module.ModulePolicy(module, action_space, deterministic=False)."
        raise UsageError(problem, key="policy", value=shape, fix=fix)
    copied = copy.deepcopy(policy)
    probed = ModulePolicy(copied, gym.spaces.Discrete(1), False)
    [logits] = _answer(type(policy).__name__, probed.probe_outputs, episodes.observations[:1])
    return ModulePolicy(copied, gym.spaces.Discrete(logits.shape[-1]), False)


def target_log_probs(policy: Any, episodes: LoggedEpisodes) -> npt.NDArray[np.float64]:
    """Return the log-probability of each stored action under a policy, shape (steps,).

    Raises:
        UsageError: The policy has no ``log_prob``, is recurrent, or returns a wrong number of values.
    """
    if not isinstance(policy, ActionLogProb):
        name = type(policy).__name__
        problem = f"the target policy is a {name}, which has no log_prob(observations, actions)"
        fix = "Pass an nn.Module that returns logits or (mean, log_std), or implement rl_eval.protocols.ActionLogProb."
        raise UsageError(problem, key="policy", value=name, fix=fix)
    if isinstance(policy, Recurrent):
        name = type(policy).__name__
        problem = f"the target policy is a {name}, whose recurrent state at a logged step is unknown"
        raise UsageError(problem, key="policy", value=name, fix="Pass a policy that depends only on the observation.")
    name, found = f"log_prob of {type(policy).__name__}", []
    for start in range(0, len(episodes.rewards), _BATCH):
        batch = [array[start : start + _BATCH] for array in (episodes.observations, episodes.actions)]
        log_probs = np.asarray(_answer(name, policy.log_prob, *batch), np.float64)
        if log_probs.shape != (count := len(batch[0]),):
            problem = f"{name} returned shape {log_probs.shape} for {count} actions"
            raise UsageError(problem, key="log_prob", value=log_probs.shape, fix="Return one number for each action.")
        found.append(log_probs)
    return np.concatenate(found)


def _answer(name: str, function: Callable[..., Any], *arrays: npt.NDArray[Any]) -> Any:
    """Call a function with copies of arrays, because a tensor must not share read-only memory."""
    try:
        with no_grad():
            return function(*(array.copy() for array in arrays))
    except UsageError:
        raise
    except Exception as error:
        shapes = " and ".join(str(array.shape[1:]) for array in arrays)
        problem = f"{name} raised for observations (and actions) of shape {shapes}: {summary_of(error)}"
        fix = "Check that they belong to this environment."
        raise UsageError(problem, key="policy", value=shapes, fix=fix) from error

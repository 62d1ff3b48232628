"""Target policy: the one whose value is estimated, and its log-probabilities of actions that another one took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.ope.data import LoggedEpisodes
from rl_eval.protocols import ActionLogProb, Policy, Recurrent
from rl_eval.runners.nested import no_grad

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings

__all__ = ["target_log_probs", "target_policy"]

_BATCH: Final = 4096
"""Steps in one forward pass."""


def target_policy(settings: EvalSettings) -> Policy:
    """Build the policy of a configuration in this process, with its weights.

    Args:
        settings: One environment of it is built for its spaces.

    Raises:
        ConfigError: Policy or environment cannot be built.
    """
    runners = settings.runners.model_copy(update={"num_runners": 0, "num_envs_per_runner": 1})
    with EvalRunnerGroup(settings.model_copy(update={"runners": runners}), threaded=False) as group:
        return group.foreach_runner(lambda runner: runner.policy)[0]


def target_log_probs(policy: Any, episodes: LoggedEpisodes) -> npt.NDArray[np.float64]:
    """Return the log-probability of each stored action under a policy, shape (steps,).

    Raises:
        UsageError: The policy cannot say it, or says it for another number of actions.
    """
    if not isinstance(policy, ActionLogProb):
        raise UsageError(
            f"the target policy is a {type(policy).__name__} and has no log_prob(observations, actions), so its "
            "probability of a logged action is unknown: give an nn.Module that returns logits or (mean, log_std), or "
            "implement rl_eval.protocols.ActionLogProb"
        )
    if isinstance(policy, Recurrent):
        raise UsageError(
            f"the target policy {type(policy).__name__} has a state, and what its state was at a logged step is "
            "unknown: off-policy evaluation needs a policy of the observation alone"
        )
    found = []
    for start in range(0, len(episodes.rewards), _BATCH):
        # Copies, since tensors cannot share memory that must not be written to.
        rows = slice(start, start + _BATCH)
        observations, actions = episodes.observations[rows].copy(), episodes.actions[rows].copy()
        with no_grad():
            log_probs = np.asarray(policy.log_prob(observations, actions), np.float64)
        if log_probs.shape != (len(actions),):
            raise UsageError(
                f"log_prob of {type(policy).__name__} returned shape {log_probs.shape} for {len(actions)} actions: "
                "return one number per row, summed over the dimensions of an action"
            )
        found.append(log_probs)
    return np.concatenate(found)

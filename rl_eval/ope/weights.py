"""Importance weights: products of probability ratios along each episode, and what they say about an estimate.

Weights are kept as logarithms, one per episode and step. After its end an episode keeps the weight it had there: its
weight would otherwise leave sums over all episodes, which then go over those that are still running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.ope.data import LoggedEpisodes

__all__ = ["ImportanceWeights", "effective_sample_size", "importance_weights", "largest_share"]

Matrix = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class ImportanceWeights:
    """Cumulative weights of episodes."""

    logarithms: Matrix
    """Of the products of ratios up to and with each step, shape (episodes, longest)."""

    @property
    def after(self) -> Matrix:
        """The weights up to and with each step, shape (episodes, longest); infinite where they leave float64."""
        with np.errstate(over="ignore"):
            return np.exp(self.logarithms)

    @property
    def before(self) -> Matrix:
        """The weights before each step, shape (episodes, longest); 1 before the first."""
        return np.column_stack([np.ones(len(self.logarithms)), self.after[:, :-1]])


def importance_weights(episodes: LoggedEpisodes, target_log_probs: npt.NDArray[np.float64]) -> ImportanceWeights:
    """Return the weights of episodes under a target policy.

    Args:
        episodes: What was logged.
        target_log_probs: Log-probability of each *stored* action under the target policy, shape (steps,); -inf for an
            action that it never takes.

    Raises:
        UsageError: A log-probability of the target policy is NaN or +inf.
    """
    bad = np.isnan(target_log_probs) | np.isposinf(target_log_probs)
    if bad.any():
        row = int(bad.argmax())
        episode = np.repeat(episodes.ids, episodes.lengths)[row]
        raise UsageError(
            f"episode {episode}: the target policy's log-probability of the action at step "
            f"{episodes.step_numbers()[row]} is {target_log_probs[row]}. Look at what its log_prob returns"
        )
    return ImportanceWeights(episodes.padded(target_log_probs - episodes.log_probs).cumsum(1))


def effective_sample_size(logarithms: Matrix) -> float:
    """Return ``sum(w)**2 / sum(w**2)`` (Kish 1965), the least over columns; 0 where all weights of a column are 0."""
    shares = _shares(logarithms)
    return 0.0 if shares is None else float((1 / (shares**2).sum(0)).min())


def largest_share(logarithms: Matrix) -> float:
    """Return the greatest weight's share of the sum, the greatest over columns; NaN where a column has no weight."""
    shares = _shares(logarithms)
    return math.nan if shares is None else float(shares.max())


def _shares(logarithms: Matrix) -> Matrix | None:
    top = logarithms.max(0)
    if np.isneginf(top).any():
        return None
    scaled = np.exp(logarithms - top)
    return np.asarray(scaled / scaled.sum(0))

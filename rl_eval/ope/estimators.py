"""Importance weights, and estimators of a policy's value. Each estimator is a sum of ratios of means over episodes.

A weight is the product of probability ratios along an episode, stored as a logarithm. After the end of an episode, its
last weight is used at all later steps. Otherwise, the means at these steps would include only the longer episodes.

In the table, ``w`` is the product of ratios up to and including step t, and ``v`` is the product before step t. ``r``
is the reward times ``gamma**t``. ``Q`` and ``V`` are the values of a model with the same discount factor.

==============================  ======================================================================
trajectory importance sampling  ``mean(w_end * sum(r))``
weighted importance sampling    the same, divided by ``mean(w_end)``
per-decision                    ``mean(sum(w * r))`` (Precup, Sutton & Singh 2000)
weighted per-decision           ``sum(mean(w * r) / mean(w))``, means over all episodes at every step,
                                including ended ones (Thomas 2015)
doubly robust                   ``mean(sum(w * (r - Q) + v * V))`` (Jiang & Li 2016)
weighted doubly robust          the same with ``w`` and ``v`` divided by their means at each step
                                (Thomas & Brunskill 2016)
==============================  ======================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.ope.data import LoggedEpisodes

Matrix = npt.NDArray[np.float64]


class ActionValues(NamedTuple):
    """Values of a model at each logged step. They are not discounted to the start of the episode."""

    q: npt.NDArray[np.float64]
    """Value of the stored action under the target policy, shape (steps,)."""
    v: npt.NDArray[np.float64]
    """Mean of the action values under the target policy's own actions, shape (steps,)."""


@final
@dataclass(frozen=True, eq=False)
class RatioSum:
    """Sum of terms. Each term is the ratio of two means over episodes."""

    numerators: Matrix
    """Numerators, shape (episodes, terms)."""
    denominators: Matrix
    """Denominators, shape (episodes, terms), or a single 1 of shape (1, 1)."""

    def value(self) -> float:
        """Return the sum of ``mean(numerators) / mean(denominators)``."""
        return float((self.numerators.mean(0) / self.denominators.mean(0)).sum())

    def influences(self) -> npt.NDArray[np.float64]:
        """Return one number per episode, shape (episodes,): the sum of the value and the episode's influence on it.

        The mean of these numbers is the value. To first order, the standard error of their mean is the standard error
        of the value (infinitesimal jackknife, Efron 1982). If all denominators are 1, the numbers are the
        contributions of the episodes.
        """
        top, bottom = self.numerators.mean(0), self.denominators.mean(0)
        influences = ((self.numerators - top / bottom * self.denominators) / bottom).sum(1)
        return np.asarray(self.value() + influences, np.float64)


@final
@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of the estimators: matrices of shape (episodes, longest)."""

    logarithms: Matrix
    """Logarithms of the weights up to and including each step."""
    rewards: Matrix
    """Discounted rewards; 0 after the end of each episode. The matrices in the next two fields are discounted in the
    same way."""
    q: Matrix
    v: Matrix

    @classmethod
    def of(
        cls,
        episodes: LoggedEpisodes,
        target_log_probs: npt.NDArray[np.float64],
        gamma: float,
        values: ActionValues | None = None,
    ) -> Inputs:
        """Return the inputs for a target policy.

        Args:
            episodes: Logged episodes.
            target_log_probs: Log-probability of each *stored* action under the target policy, shape (steps,); -inf for
                an action that the target policy never takes.
            gamma: Discount factor.
            values: Values of a model; None means 0 for all values.

        Raises:
            UsageError: A log-probability of the target policy is NaN or +inf.
        """
        bad = np.isnan(target_log_probs) | np.isposinf(target_log_probs)
        if bad.any():
            row = int(bad.argmax())
            found = target_log_probs[row]
            problem = f"{episodes.place(row)}: the target policy's log-probability is {found}"
            raise UsageError(problem, key="log_prob", value=float(found), fix="Check its log_prob.")
        logarithms = episodes.padded(target_log_probs - episodes.log_probs).cumsum(1)
        discounts = gamma ** np.arange(logarithms.shape[1])
        zeros = np.zeros(len(episodes.rewards))
        parts = (episodes.rewards, *(values or (zeros, zeros)))
        return cls(logarithms, *(episodes.padded(part) * discounts for part in parts))

    @property
    def after(self) -> Matrix:
        """Weights up to and including each step; infinite if a weight is too large for float64."""
        with np.errstate(over="ignore"):
            return np.exp(self.logarithms)


def effective_sample_size(logarithms: Matrix) -> float:
    """Return the minimum of ``sum(w)**2 / sum(w**2)`` over columns (Kish 1965); 0 if all weights of a column are 0."""
    shares = _shares(logarithms)
    return 0.0 if shares is None else float((1 / (shares**2).sum(0)).min())


def largest_share(logarithms: Matrix) -> float:
    """Return the largest ratio of a weight to the sum of its column; NaN if all weights of a column are 0."""
    shares = _shares(logarithms)
    return math.nan if shares is None else float(shares.max())


def _shares(logarithms: Matrix) -> Matrix | None:
    top = logarithms.max(0)
    if np.isneginf(top).any():
        return None
    scaled = np.exp(logarithms - top)
    return np.asarray(scaled / scaled.sum(0))


MODEL_FREE: Final = ("trajectory_is", "weighted_is", "per_decision_is", "weighted_per_decision_is")
"""Names of the estimators that need only the data."""

WITH_MODEL: Final = ("doubly_robust", "weighted_doubly_robust")
"""Names of the estimators that use the values of a model."""

WHOLE_EPISODES: Final = ("trajectory_is", "weighted_is")
"""Names of the estimators with one weight per episode: the weight at the end of the episode."""


UNWEIGHTED: Final = ("trajectory_is", "per_decision_is", "doubly_robust")
"""Names of the estimators that are not divided by the mean weight."""


def ratio_sums(inputs: Inputs) -> dict[str, RatioSum]:
    """Return the sum of ratios of each estimator, by name."""
    after, rewards = inputs.after, inputs.rewards
    before = np.column_stack([np.ones(len(after)), after[:, :-1]])
    end, one = after[:, -1:], np.ones((1, 1))
    whole, each_step = end * rewards.sum(1, keepdims=True), after * rewards
    residuals, baseline = after * (rewards - inputs.q), before * inputs.v
    return {
        "trajectory_is": RatioSum(whole, one),
        "weighted_is": RatioSum(whole, end),
        "per_decision_is": RatioSum(each_step.sum(1, keepdims=True), one),
        "weighted_per_decision_is": RatioSum(each_step, after),
        "doubly_robust": RatioSum((residuals + baseline).sum(1, keepdims=True), one),
        "weighted_doubly_robust": RatioSum(np.column_stack([residuals, baseline]), np.column_stack([after, before])),
    }

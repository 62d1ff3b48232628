"""Estimators of a policy's value: each is a sum over steps of ratios of means over episodes.

With ``w`` the product of ratios up to and with step t, ``v`` that before it, ``r`` the reward times the discount to the
power of t, and ``Q`` and ``V`` the values of a model, discounted alike:

==============================  ======================================================================
trajectory importance sampling  ``mean(w_end * sum(r))``
weighted importance sampling    the same, divided by ``mean(w_end)``
per-decision                    ``mean(sum(w * r))`` (Precup, Sutton & Singh 2000)
weighted per-decision           ``sum(mean(w * r) / mean(w))``, means over all episodes at every step,
                                also those that are over (Thomas 2015)
doubly robust                   ``mean(sum(w * (r - Q) + v * V))`` (Jiang & Li 2016)
weighted doubly robust          the same with ``w`` and ``v`` divided by their means at each step
                                (Thomas & Brunskill 2016)
==============================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.ope.data import LoggedEpisodes
from rl_eval.ope.weights import ImportanceWeights

__all__ = ["MODEL_FREE", "WITH_MODEL", "ActionValues", "Inputs", "RatioSum", "make_inputs"]

Matrix = npt.NDArray[np.float64]


class ActionValues(NamedTuple):
    """Values of a model, undiscounted to the start of the episode, at each logged step."""

    q: npt.NDArray[np.float64]
    """Value of the stored action under the target policy, shape (steps,)."""
    v: npt.NDArray[np.float64]
    """Mean of the action values under the target policy's own actions, shape (steps,)."""


@final
@dataclass(frozen=True, eq=False)
class RatioSum:
    """A sum of ratios of means over episodes."""

    numerators: Matrix
    """Shape (episodes, terms)."""
    denominators: Matrix
    """Shape (episodes, terms), or (1, 1) of 1 for means that are divided by nothing."""

    def value(self, shares: npt.NDArray[np.float64] | None = None) -> float:
        """Return the sum of ``mean(numerators) / mean(denominators)``.

        Args:
            shares: Weights of the episodes in the means, which sum to 1, shape (episodes,); by default equal ones.
        """
        top, bottom = self._means(shares)
        return float((top / bottom).sum())

    def influences(self) -> npt.NDArray[np.float64]:
        """Return the value plus each episode's influence on it, shape (episodes,).

        Their mean is the value, and their spread is its spread to first order (the infinitesimal jackknife, Efron
        1982). For means that are divided by nothing they are the episodes' own contributions.
        """
        top, bottom = self._means(None)
        return np.asarray(
            self.value() + ((self.numerators - top / bottom * self.denominators) / bottom).sum(1), np.float64
        )

    def _means(self, shares: npt.NDArray[np.float64] | None) -> tuple[Matrix, Matrix]:
        if shares is None:
            return self.numerators.mean(0), self.denominators.mean(0)
        whole = self.denominators if len(self.denominators) > 1 else np.broadcast_to(1.0, self.numerators.shape)
        return shares @ self.numerators, shares @ whole


@final
@dataclass(frozen=True, eq=False)
class Inputs:
    """What estimators compute with: matrices of shape (episodes, longest), 0 after the end of each episode."""

    weights: ImportanceWeights
    rewards: Matrix
    """Discounted, as the next two."""
    q: Matrix
    v: Matrix


def make_inputs(
    episodes: LoggedEpisodes, weights: ImportanceWeights, gamma: float, values: ActionValues | None = None
) -> Inputs:
    """Return matrices of discounted rewards and values; values are 0 without a model."""
    discounts = gamma ** np.arange(weights.logarithms.shape[1])
    zeros = np.zeros(len(episodes.rewards))
    q, v = values if values is not None else (zeros, zeros)
    return Inputs(weights, *(episodes.padded(part) * discounts for part in (episodes.rewards, q, v)))


_ONE: Final = np.ones((1, 1))


def _mean(contributions: npt.NDArray[np.float64]) -> RatioSum:
    return RatioSum(contributions[:, None], _ONE)


def _trajectory(inputs: Inputs) -> RatioSum:
    return _mean(inputs.weights.after[:, -1] * inputs.rewards.sum(1))


def _weighted_trajectory(inputs: Inputs) -> RatioSum:
    return RatioSum(_trajectory(inputs).numerators, inputs.weights.after[:, -1:])


def _per_decision(inputs: Inputs) -> RatioSum:
    return _mean((inputs.weights.after * inputs.rewards).sum(1))


def _weighted_per_decision(inputs: Inputs) -> RatioSum:
    return RatioSum(inputs.weights.after * inputs.rewards, inputs.weights.after)


def _doubly_robust(inputs: Inputs) -> RatioSum:
    weights = inputs.weights
    return _mean((weights.after * (inputs.rewards - inputs.q) + weights.before * inputs.v).sum(1))


def _weighted_doubly_robust(inputs: Inputs) -> RatioSum:
    weights = inputs.weights
    return RatioSum(
        np.column_stack([weights.after * (inputs.rewards - inputs.q), weights.before * inputs.v]),
        np.column_stack([weights.after, weights.before]),
    )


MODEL_FREE: Final[dict[str, Callable[[Inputs], RatioSum]]] = {
    "trajectory_is": _trajectory,
    "weighted_is": _weighted_trajectory,
    "per_decision_is": _per_decision,
    "weighted_per_decision_is": _weighted_per_decision,
}
"""Estimators that need nothing but the data, by the names that they have in results."""

WITH_MODEL: Final[dict[str, Callable[[Inputs], RatioSum]]] = {
    "doubly_robust": _doubly_robust,
    "weighted_doubly_robust": _weighted_doubly_robust,
}
"""Estimators that use the values of a model."""

WHOLE_EPISODES: Final = ("trajectory_is", "weighted_is")
"""Estimators in which an episode has one weight, that of its end."""

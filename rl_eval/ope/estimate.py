"""Estimates of a target policy's value, each with an interval, the state of its weights, and a verdict.

A number is given only where the data identify it. They do not where the target policy's actions are not in them, where
the effective sample size is below 10, or where the mean weight is not 1, so that the weights cannot be those of the
two policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError, nearest
from rl_eval.ope.data import LoggedEpisodes
from rl_eval.ope.estimators import MODEL_FREE, WHOLE_EPISODES, WITH_MODEL, ActionValues, RatioSum, make_inputs
from rl_eval.ope.target import target_log_probs, with_log_probs
from rl_eval.ope.weights import effective_sample_size, importance_weights, largest_share
from rl_eval.protocols import Policy
from rl_eval.records.plain import plain
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import Interval, mean_interval, no_interval

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rl_eval.results.result import EvalResult

__all__ = ["LEAST_SAMPLE_SIZE", "Estimate", "OffPolicyEstimates", "Verdict", "WeightStatistics", "estimate"]

Verdict = Literal["identified", "not identified", "model", "measured"]

LEAST_SAMPLE_SIZE: Final = 10.0
"""Effective sample size below which nothing is estimated."""

_SURE: Final = 0.999
"""Coverage of the interval in which the mean weight must be 1: a refusal is rarely chance."""

_ROUNDING: Final = 1e-3
"""How far that interval may be from 1: stored log-probabilities are float32, and errors add up over an episode."""


@final
@dataclass(frozen=True, slots=True)
class WeightStatistics:
    """What the importance weights of an estimate look like."""

    effective_sample_size: float
    """``sum(w)**2 / sum(w**2)``: so many episodes of the target policy itself would be as good. For estimators with a
    weight at each step it is the least over the steps."""
    largest_share: float
    """Greatest share that one episode has in the sum of the weights, at any step."""
    mean_weight: float
    """Mean of the weights of whole episodes; it estimates 1."""
    mean_weight_interval: Interval
    """99.9 % interval of it."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """One number for the value of a policy, and how far it can be trusted."""

    name: str
    value: float
    """Mean discounted return; NaN if it is not identified."""
    interval: Interval
    verdict: Verdict
    """``identified``, ``not identified``, ``model`` (only as good as the fit, whose error is not in the interval), or
    ``measured`` (a mean of episodes that the policy in question ran itself)."""
    reason: str = ""
    """Why it is not identified."""
    weights: WeightStatistics | None = None
    """None where no weights are used."""


@final
@dataclass(frozen=True, slots=True)
class OffPolicyEstimates:
    """What logged episodes say about another policy's value, by all estimators."""

    estimates: tuple[Estimate, ...]
    gamma: float
    num_episodes: int
    """Episodes in the data."""
    num_steps: int
    longest: int
    """Steps of the longest episode."""

    def __getitem__(self, name: str) -> Estimate:
        named = {one.name: one for one in self.estimates}
        if name not in named:
            raise KeyError(f"no estimate {name!r}: {nearest(name, named)}")
        return named[name]

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    @property
    def identified(self) -> bool:
        """Whether the data identify any estimate."""
        return any(one.verdict == "identified" for one in self.estimates)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; null for what is not identified."""
        return dict(plain(asdict(self)))

    def __str__(self) -> str:
        from rl_eval.ope.table import estimates_text

        return estimates_text(self)

    def __rich__(self) -> RenderableType:
        from rl_eval.ope.table import estimates_table

        return estimates_table(self)


def estimate(
    episodes: LoggedEpisodes,
    policy: Any,
    *,
    gamma: float = 1.0,
    values: ActionValues | Literal["fitted"] | None = "fitted",
    simulation: EvalResult | None = None,
    confidence: float = 0.95,
) -> OffPolicyEstimates:
    """Estimate the mean discounted return of a policy from episodes that another one ran.

    Args:
        episodes: What was logged.
        policy: The target policy: a :class:`~rl_eval.protocols.ActionLogProb`, or an ``nn.Module`` that returns logits
            or ``(mean, log_std)``, from which actions are sampled.
        gamma: Discount of the returns, in [0, 1].
        values: Action values for the doubly robust estimators: given, fitted to the data with
            :func:`~rl_eval.ope.fitted_q.fitted_action_values`, or none, and none of these estimators.
        simulation: An evaluation of the same policy with the same discount, to be shown beside the estimates.
        confidence: Nominal coverage of the intervals.

    Raises:
        UsageError: The policy gives no log-probabilities, or an argument is out of range.
    """
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma is {gamma}: give a discount from 0 to 1")
    policy = with_log_probs(policy, episodes)
    weights = importance_weights(episodes, target_log_probs(policy, episodes))
    rows = [_of_returns("behaviour", make_inputs(episodes, weights, gamma).rewards.sum(1), confidence)]
    if isinstance(values, str):
        values = _fitted(episodes, policy, gamma)
    inputs = make_inputs(episodes, weights, gamma, values)
    whole, each_step = _statistics(weights.logarithms)
    for name, estimator in (MODEL_FREE if values is None else {**MODEL_FREE, **WITH_MODEL}).items():
        statistics = whole if name in WHOLE_EPISODES else each_step
        with np.errstate(all="ignore"):
            rows.append(_identified(name, estimator(inputs), statistics, confidence))
    if values is not None:
        rows.append(_of_returns("fitted_q", inputs.v[:, 0], confidence, "model"))
    if simulation is not None:
        rows.append(_simulated(simulation, gamma, confidence))
    longest = weights.logarithms.shape[1]
    return OffPolicyEstimates(tuple(rows), gamma, len(episodes), len(episodes.rewards), longest)


def _fitted(episodes: LoggedEpisodes, policy: Any, gamma: float) -> ActionValues | None:
    """Fit action values; a single episode has no half to fit to."""
    if len(episodes) < 2:
        return None
    if not isinstance(policy, Policy):
        raise UsageError(
            f"action values are fitted with actions of the target policy, but {type(policy).__name__} has no act: "
            "implement rl_eval.Policy, or leave the fitted values out"
        )
    from rl_eval.ope.fitted_q import fitted_action_values

    return fitted_action_values(episodes, policy, gamma)


def _identified(name: str, ratios: RatioSum, weights: WeightStatistics, confidence: float) -> Estimate:
    """Return an estimate, or why there is none."""
    value, contributions = ratios.value(), ratios.influences()
    if why := _objection(weights, value, contributions):
        return Estimate(name, math.nan, no_interval(confidence, why), "not identified", why, weights)
    return Estimate(name, value, mean_interval(contributions, confidence), "identified", "", weights)


def _statistics(logarithms: npt.NDArray[np.float64]) -> tuple[WeightStatistics, WeightStatistics]:
    """Return the statistics for estimators with one weight per episode, and for those with one at each step."""
    with np.errstate(over="ignore"):
        at_the_end = np.exp(logarithms[:, -1])
    mean, interval = exact_mean(at_the_end), mean_interval(at_the_end, _SURE)
    whole, each_step = (
        WeightStatistics(effective_sample_size(part), largest_share(part), mean, interval)
        for part in (logarithms[:, -1:], logarithms)
    )
    return whole, each_step


def _objection(weights: WeightStatistics, value: float, contributions: npt.NDArray[np.float64]) -> str:
    """Say why the data identify no value; empty if they do."""
    size, mean, interval = weights.effective_sample_size, weights.mean_weight, weights.mean_weight_interval
    if size == 0:
        return "support is missing: from some step on, the target policy never takes the logged actions"
    if size < LEAST_SAMPLE_SIZE:
        return f"the effective sample size is {size:.1f}, below {LEAST_SAMPLE_SIZE:g}"
    if not (math.isfinite(value) and np.isfinite(contributions).all()):
        return "the weights leave the range of floats"
    if interval.exists and interval.high + _ROUNDING < 1:
        return (
            f"the mean weight is {mean:.3g} ({interval.low:.3g} to {interval.high:.3g}), below 1: support is missing, "
            "since the target policy takes actions that are not in the data, or other log-probabilities were stored "
            "than those of the policy that acted"
        )
    if interval.exists and interval.low - _ROUNDING > 1:
        return (
            f"the mean weight is {mean:.3g} ({interval.low:.3g} to {interval.high:.3g}), above 1: other "
            "log-probabilities were stored than those of the policy that acted"
        )
    return ""


def _of_returns(
    name: str, returns: npt.NDArray[np.float64], confidence: float, verdict: Verdict = "measured"
) -> Estimate:
    return Estimate(name, exact_mean(returns), mean_interval(returns, confidence), verdict)


def _simulated(result: EvalResult, gamma: float, confidence: float) -> Estimate:
    used = result.provenance.get("identity", {}).get("gamma", gamma)
    if used != gamma:
        raise UsageError(f"the simulation discounts by {used}, the estimates by {gamma}: evaluate with gamma={gamma}")
    returns = result.counted_rows["discounted_return"]
    interval = mean_interval(returns, confidence, num_missing=result.num_missing)
    return Estimate("simulation", exact_mean(returns), interval, "measured", result.reason)

"""Estimates of a target policy's value, each with an interval, statistics of its weights, and a verdict.

An estimate has a value only if the data identify the value. The data do not identify it in three cases: the actions of
the target policy are not in the data; the effective sample size is below 10; or the mean weight is not 1, which shows
that the log-probabilities are not those of the two policies.

The effective sample size is large if the weights happen to be large, so this condition selects data sets. Estimators
that are not divided by the mean weight are biased in the selected data sets, although their mean over all data sets is
right. So they also need a mean weight that is known well, and close to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError, nearest
from rl_eval.ope.data import LoggedEpisodes
from rl_eval.ope.estimators import (
    MODEL_FREE,
    UNWEIGHTED,
    WHOLE_EPISODES,
    WITH_MODEL,
    ActionValues,
    Inputs,
    RatioSum,
    effective_sample_size,
    largest_share,
    ratio_sums,
)
from rl_eval.ope.target import target_log_probs, with_log_probs
from rl_eval.protocols import Policy
from rl_eval.records.plain import plain
from rl_eval.reports.page import Page, Table
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import (
    Interval,
    mean_interval,
    no_interval,
)
from rl_eval.results.text import decimals, number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rl_eval.results.result import EvalResult


Verdict = Literal["identified", "not identified", "model", "measured"]

LEAST_SAMPLE_SIZE: Final = 10.0
"""Minimum effective sample size for an estimate."""

_SURE: Final = 0.999
"""Coverage of the interval for the mean weight. The interval must contain 1. The coverage is high, so that good data
are rarely rejected by chance."""

_LIKELY: Final = 0.95
"""Coverage of the interval for the mean weight that an estimator without division by the mean weight needs. The
interval must contain 1."""

_NARROW: Final = 0.5
"""Largest width of this interval."""

_ROUNDING: Final = 1e-3
"""Accepted distance of the interval for the mean weight from 1. Log-probabilities are stored as float32, and their
rounding errors add up over an episode."""


@final
@dataclass(frozen=True, slots=True)
class WeightStatistics:
    """Statistics of the importance weights of an estimate."""

    effective_sample_size: float
    """Number of episodes of the target policy itself that would give the same precision: ``sum(w)**2 / sum(w**2)``. For
    an estimator with a weight at each step, the minimum over the steps."""
    largest_share: float
    """Largest fraction of the sum of the weights that one episode has, over all steps."""
    mean_weight: float
    """Mean of the weights of whole episodes. Its expected value is 1."""
    mean_weight_interval: Interval
    """99.9 % interval for the mean weight."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """One estimate of the value of a policy, with its reliability."""

    name: str
    value: float
    """Mean discounted return; NaN if the data do not identify it."""
    interval: Interval
    verdict: Verdict
    """``identified``, ``not identified``, ``model`` (as good as the fitted action values; their error is not in the
    interval), or ``measured`` (a mean over episodes of the policy itself)."""
    reason: str = ""
    """Reason why the data do not identify the value; empty if they identify it."""
    weights: WeightStatistics | None = None
    """Statistics of the weights; None if the estimate uses no weights."""


@final
@dataclass(frozen=True, slots=True)
class OffPolicyEstimates:
    """Off-policy estimates of a policy's value, one estimate per estimator."""

    estimates: tuple[Estimate, ...]
    gamma: float
    num_episodes: int
    """Number of episodes in the data."""
    num_steps: int
    longest: int
    """Number of steps of the longest episode."""

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
        """Return all estimates as plain JSON values. The value of an unidentified estimate is null."""
        return dict(plain(asdict(self)))

    def __str__(self) -> str:
        return str(self._page())

    def __rich__(self) -> RenderableType:
        return self._page()

    def _page(self) -> Page:
        """Return a page with a table of the estimates, and the reasons for missing values below the table."""
        simulated = next((one.value for one in self if one.name == "simulation"), None)
        level = f"{100 * self.estimates[0].interval.confidence:g} % interval"
        gap = () if simulated is None else ("- simulation",)
        headings = ("estimator", "value", level, *gap, "ESS", "largest", "mean weight")
        why: dict[str, list[str]] = {}
        for one in self:
            if one.reason or not one.interval.exists:
                told = "not identified: " if one.verdict == "not identified" else ""
                why.setdefault(told + (one.reason or one.interval.note), []).append(one.name)
        notes = [f"{', '.join(names)} {reason}" for reason, names in why.items()]
        if any(one.verdict == "model" for one in self):
            notes.append("The interval of fitted_q does not include the error of the fit.")
        steps = f"{self.num_steps:,} steps, at most {self.longest:,} each"
        data = f"{self.num_episodes:,} episodes of another policy, {steps}"
        table = Table("", headings, [[*_cells(one, simulated)] for one in self])
        return Page("Value of the target policy", f"from {data}; discount {self.gamma:g}", "", [table], notes)


def estimate(
    episodes: LoggedEpisodes,
    policy: Any,
    *,
    gamma: float = 1.0,
    values: ActionValues | Literal["fitted"] | None = "fitted",
    simulation: EvalResult | None = None,
    confidence: float = 0.95,
) -> OffPolicyEstimates:
    """Estimate the mean discounted return of a policy from episodes of another policy.

    Args:
        episodes: Logged episodes.
        policy: The target policy: a :class:`~rl_eval.protocols.ActionLogProb`, or an ``nn.Module`` that returns logits
            or ``(mean, log_std)``, from which actions are sampled.
        gamma: Discount factor of the returns, in [0, 1].
        values: Action values for the doubly robust estimators. ``fitted`` fits them to the data with
            :func:`~rl_eval.ope.fitted_q.fitted_action_values`; None leaves these estimators out.
        simulation: Result of an evaluation of the same policy with the same discount factor. It is shown beside the
            estimates.
        confidence: Nominal coverage of the intervals.

    Raises:
        UsageError: The policy does not return log-probabilities, or an argument is out of range.
    """
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma is {gamma}", key="gamma", value=gamma, fix="Pass a discount factor from 0 to 1.")
    policy = with_log_probs(policy, episodes)
    log_probs = target_log_probs(policy, episodes)
    if values == "fitted":
        values = _fitted(episodes, policy, gamma)
    inputs = Inputs.of(episodes, log_probs, gamma, values)
    rows = [_measured("behaviour", inputs.rewards.sum(1), confidence)]
    end = inputs.after[:, -1]
    mean = (exact_mean(end), mean_interval(end, _SURE))
    unreliable = "" if (end == end[0]).all() else _unreliable(mean_interval(end, _LIKELY))
    typical = float(np.median(end))
    with np.errstate(all="ignore"):
        sums = ratio_sums(inputs)
        for name in MODEL_FREE if values is None else (*MODEL_FREE, *WITH_MODEL):
            relevant = inputs.logarithms[:, -1:] if name in WHOLE_EPISODES else inputs.logarithms
            statistics = WeightStatistics(effective_sample_size(relevant), largest_share(relevant), *mean)
            doubt = unreliable if name in UNWEIGHTED else ""
            rows.append(_identified(name, sums[name], statistics, typical, confidence, doubt))
    if values is not None:
        rows.append(replace(_measured("fitted_q", inputs.v[:, 0], confidence), verdict="model"))
    if simulation is not None:
        used = simulation.provenance.get("identity", {}).get("gamma", gamma)
        if used != gamma:
            problem = f"the simulation has gamma {used}, and the estimates have gamma {gamma}"
            raise UsageError(problem, key="gamma", value=gamma, fix=f"Pass gamma={used}.")
        returns, missing = simulation.counted_rows["discounted_return"], simulation.num_missing
        rows.append(replace(_measured("simulation", returns, confidence, missing), reason=simulation.reason))
    return OffPolicyEstimates(
        tuple(rows), gamma, len(episodes), num_steps=len(episodes.rewards), longest=inputs.logarithms.shape[1]
    )


def _fitted(episodes: LoggedEpisodes, policy: Any, gamma: float) -> ActionValues | None:
    """Return fitted action values; None for a single episode, because it cannot be split into halves."""
    if len(episodes) < 2:
        return None
    if not isinstance(policy, Policy):
        problem = f"fitted action values need actions of the target policy, but {type(policy).__name__} has no act"
        fix = "Implement rl_eval.Policy, or omit the fitted action values (values=None, --no-fit)."
        raise UsageError(problem, key="policy", fix=fix)
    from rl_eval.ope.fitted_q import fitted_action_values

    return fitted_action_values(episodes, policy, gamma)


def _measured(name: str, returns: npt.NDArray[np.float64], confidence: float, num_missing: int = 0) -> Estimate:
    interval = mean_interval(returns, confidence, num_missing=num_missing)
    return Estimate(name, exact_mean(returns), interval, "measured")


def _identified(
    name: str, ratios: RatioSum, weights: WeightStatistics, typical: float, confidence: float, unreliable: str
) -> Estimate:
    """Return an estimate with a value, or with the reason why it has no value."""
    value, contributions = ratios.value(), ratios.influences()
    finite = bool(math.isfinite(value) and np.isfinite(contributions).all())
    if why := _objection(weights, typical, finite=finite) or unreliable:
        return Estimate(name, math.nan, no_interval(confidence, why), "not identified", why, weights)
    interval = mean_interval(contributions, confidence)
    return Estimate(name, value, interval, "identified", "", weights)


def _unreliable(interval: Interval) -> str:
    """Return the reason why an estimate that is not divided by the mean weight may be biased; empty if there is none.

    Args:
        interval: Interval for the mean weight.
    """
    if not interval.exists:
        return f"needs an interval for the mean weight ({interval.note})"
    ends = f"the {100 * _LIKELY:g} % interval of the mean weight is {_ends(interval, '{:.3g}'.format)}"
    if not interval.low - _ROUNDING <= 1 <= interval.high + _ROUNDING:
        return f"{ends}, without 1"
    if interval.high - interval.low > _NARROW:
        return f"{ends}, wider than {_NARROW:g}: see the estimates that are divided by the mean weight"
    return ""


def _objection(weights: WeightStatistics, typical: float, *, finite: bool) -> str:
    """Return the reason why the data do not identify a value; empty if they identify it.

    Args:
        weights: Statistics of the weights.
        typical: Median of the weights. If nearly all weights are equal, their mean has no interval.
        finite: Whether the value is finite.
    """
    size = weights.effective_sample_size
    if size == 0:
        return "support is missing: from some step on, the target policy never takes the logged actions"
    if size < LEAST_SAMPLE_SIZE:
        return f"the effective sample size is {size:.1f}, below {LEAST_SAMPLE_SIZE:g}"
    if not finite:
        return "the weights are too large or too small for a float"
    return _objection_to_mean(weights, typical)


def _objection_to_mean(weights: WeightStatistics, typical: float) -> str:
    """Return the reason why the mean weight shows that the data do not identify a value; empty if it does not."""
    interval = weights.mean_weight_interval
    mean = f"the mean weight is {weights.mean_weight:.3g} ({_ends(interval, '{:.3g}'.format)})"
    if not interval.exists and abs(typical - 1) > _ROUNDING:
        return (
            f"nearly all weights are {typical:.3g} instead of 1: the stored log-probabilities are not those of the "
            "policy that acted"
        )
    if interval.exists and interval.high + _ROUNDING < 1:
        return (
            f"{mean}, below 1: the target policy takes actions that are not in the data, or "
            "the stored log-probabilities are not those of the policy that acted"
        )
    if interval.exists and interval.low - _ROUNDING > 1:
        return f"{mean}, above 1: the stored log-probabilities are not those of the policy that acted"
    return ""


def _cells(one: Estimate, simulated: float | None) -> Iterator[str]:
    places = decimals((one.interval.high - one.interval.low) / 4, one.value)
    yield f"{one.name} (model)" if one.verdict == "model" else one.name
    yield "none" if math.isnan(one.value) else number(one.value, places)
    yield _ends(one.interval, lambda end: number(end, places))
    if simulated is not None:
        known = one.name != "simulation" and not math.isnan(one.value - simulated)
        yield number(one.value - simulated, places) if known else ""
    if (weights := one.weights) is not None:
        yield number(weights.effective_sample_size, 1)
        yield "n/a" if math.isnan(weights.largest_share) else f"{100 * weights.largest_share:.1f} %"
        yield f"{weights.mean_weight:.3g} ({_ends(weights.mean_weight_interval, '{:.3g}'.format)})"


def _ends(interval: Interval, write: Callable[[float], str]) -> str:
    return f"{write(interval.low)} to {write(interval.high)}" if interval.exists else ""

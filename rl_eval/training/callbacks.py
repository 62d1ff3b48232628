"""Callbacks that detect when a policy is good enough, and when it is the best so far.

A callback is a callable for ``Evaluator(on_result=...)``. A partial or failed result never reaches a threshold and is
never the best, because it covers only the episodes that happened to finish. The same is true for a metric that is NaN.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from rl_eval.errors import UsageError, nearest
from rl_eval.weights import WeightsSnapshot, save_weights_file

if TYPE_CHECKING:
    from rl_eval.results.result import EvalPoint


_logger: Final = logging.getLogger(__name__)
_FORMATS: Final = (".safetensors", ".pt", ".pth")


@final
class StopOnThreshold:
    """Stopping rule: a metric reached a threshold in a number of consecutive evaluations.

    The default metric is the lower end of the confidence interval for the mean return. A lucky evaluation raises this
    lower end less than it raises the mean. If nearly all returns are equal, as in a solved task, this metric has a
    value only with ``evaluation.return_bounds``. Near an upper bound, it needs many episodes: on [0, 500], 72 returns
    of 500 reach 475. Without a value, the threshold is not reached; a warning says so once.

    Args:
        threshold: Lowest value of the metric that is good enough.
        metric: Key of ``EvalResult.metrics``, or key of ``EvalPoint.metrics`` (with the prefix).
        patience: Number of consecutive evaluations that must reach the threshold, at least 1.

    Raises:
        UsageError: ``threshold`` is NaN, or ``patience`` is below 1.

    Example:
        >>> stop = StopOnThreshold(475.0)  # doctest: +SKIP
        >>> evaluator = Evaluator(config, on_result=stop)
        >>> while not stop.reached:
        ...     train()
    """

    def __init__(self, threshold: float, metric: str = "episode_return_ci_low", patience: int = 1) -> None:
        if math.isnan(threshold):
            raise UsageError("threshold is NaN", key="threshold", value=threshold, fix="Pass a number, such as 475.0.")
        if patience < 1:
            raise UsageError(f"patience is {patience}", key="patience", value=patience, fix="Pass 1 or more.")
        self.threshold = threshold
        self.metric = metric
        self.patience = patience
        self.reached = False
        """Whether the threshold was reached in enough consecutive evaluations. Once true, it stays true."""
        self.point: EvalPoint | None = None
        """Point of the evaluation at which ``reached`` became true; None before it, and after
        :meth:`load_state_dict`."""
        self._streak = 0
        self._warned = False

    def __call__(self, point: EvalPoint) -> None:
        """Add an evaluation.

        Raises:
            UsageError: The evaluation does not have the metric.
        """
        value = _value(point, self.metric)
        if value is None and point.result.status == "complete" and not self._warned:
            self._warned = True
            _logger.warning("StopOnThreshold cannot stop, because %s has no value%s", self.metric, self._why(point))
        self._streak = self._streak + 1 if value is not None and value >= self.threshold else 0
        if self._streak >= self.patience and not self.reached:
            self.point, self.reached = point, True

    def _why(self, point: EvalPoint) -> str:
        """Return the reason why a metric of the interval has no value, and a metric that has one; empty for others."""
        if "episode_return_ci" not in self.metric:
            return ""
        return f": {point.result.interval.note}. Or pass metric='episode_return_mean'."

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a training checkpoint; it does not include the point."""
        return {"reached": self.reached, "streak": self._streak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a training checkpoint."""
        self.reached, self._streak, self.point = bool(state["reached"]), int(state["streak"]), None


@final
class NewBest:
    """Callback that acts on every evaluation that is better than all earlier evaluations.

    For each such evaluation, it calls a function, saves the weights, or both.

    The highest of many scores is biased upward, since luck helped to choose it. Evaluate the chosen policy on held-out
    episodes (``first_index``) before you quote a number.

    Args:
        callback: Called with the point, in the evaluator's thread. If it raises, ``on_error`` receives the error, and
            the point does not become the best.
        metric: Key of ``EvalResult.metrics``, or key of ``EvalPoint.metrics`` (with the prefix).
        mode: Whether a higher (``max``) or a lower (``min``) value is better.
        save: File for the weights with which the best point was evaluated: ``.safetensors``, or ``.pt`` if some state
            is not a tensor. The config key ``policy.weights`` accepts this file. The file is replaced atomically,
            before ``callback`` is called.

    Raises:
        UsageError: ``mode`` or the suffix of ``save`` is unknown, or both ``callback`` and ``save`` are missing.

    Example:
        >>> evaluator = Evaluator(config, on_result=NewBest(save="best.safetensors"))  # doctest: +SKIP
    """

    def __init__(
        self,
        callback: Callable[[EvalPoint], object] | None = None,
        metric: str = "episode_return_mean",
        mode: Literal["max", "min"] = "max",
        *,
        save: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise UsageError(f"mode is {mode!r}", key="mode", value=mode, fix='Pass "max" or "min".')
        if callback is None and save is None:
            raise UsageError(
                "NewBest has neither callback nor save", key="callback", fix="Pass a callback, or save=PATH."
            )
        self.save = None if save is None else Path(save).absolute()
        """File for the weights of the best point."""
        if self.save is not None and self.save.suffix not in _FORMATS:
            fix = f"Pass a file name that ends in {' or '.join(_FORMATS)}."
            raise UsageError(f"save is {str(save)!r}", key="save", value=str(save), fix=fix)
        self.callback = callback
        self.metric = metric
        self.mode = mode
        self.best: EvalPoint | None = None
        """Best point so far; None if there is none yet, and after :meth:`load_state_dict`."""
        self.best_value: float | None = None
        """Value of the metric at the best point; None if there is no best point yet."""

    def __call__(self, point: EvalPoint) -> None:
        """Add an evaluation. If its value equals the best value, the evaluation is not better.

        Raises:
            UsageError: The evaluation does not have the metric, or its weights are missing.
            WeightsError: The file format cannot store the weights.
        """
        value = _value(point, self.metric)
        if value is None or not self._better(value):
            return
        if self.save is not None:
            save_weights_file(_weights(point), self.save)
        if self.callback is not None:
            self.callback(point)
        self.best, self.best_value = point, value

    def _better(self, value: float) -> bool:
        if self.best_value is None:
            return True
        return value > self.best_value if self.mode == "max" else value < self.best_value

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a training checkpoint; it does not include the best point."""
        return {"best_value": self.best_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a training checkpoint."""
        value = state["best_value"]
        self.best, self.best_value = None, None if value is None else float(value)


def _weights(point: EvalPoint) -> WeightsSnapshot:
    """Return the weights that were evaluated."""
    found = point.weights
    if found is None or found.digest != point.result.provenance["weights"]["digest"]:
        problem = f"NewBest cannot save the weights of step {point.step}, because the point does not have them"
        fix = (
            "Use a policy with weights, and pass NewBest to an Evaluator as on_result. With a service, send weights "
            "with each request."
        )
        raise UsageError(problem, key="save", fix=fix)
    return found


def _value(point: EvalPoint, metric: str) -> float | None:
    """Return the metric of a point; None if the result is not complete or the metric is NaN."""
    known = {**point.metrics, **point.result.metrics}
    if metric not in known:
        raise UsageError(f"unknown metric {metric!r}: {nearest(metric, known)}", key="metric", value=metric)
    value = float(known[metric])
    return None if point.result.status != "complete" or math.isnan(value) else value

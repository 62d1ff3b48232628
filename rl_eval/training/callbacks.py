"""Callbacks that detect when a policy is good enough, and when it is the best so far.

A callback is a callable for ``Evaluator(on_result=...)``. Only complete results count: a partial or failed one covers
the episodes that happened to finish, and a metric that is NaN is no evidence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from rl_eval.errors import UsageError, nearest
from rl_eval.weights import WeightsSnapshot, save_weights_file

if TYPE_CHECKING:
    from rl_eval.results.result import EvalPoint


_FORMATS: Final = (".safetensors", ".pt", ".pth")


@final
class StopOnThreshold:
    """Stopping rule: a metric has reached a threshold in so many evaluations in a row.

    By default the metric is the lower end of the interval of the mean return, which a lucky evaluation does not lift
    as it lifts the mean.

    Args:
        threshold: What must be reached: at least this much.
        metric: A key of ``EvalResult.metrics``, or of ``EvalPoint.metrics`` with its prefix.
        patience: Evaluations in a row, at least 1.

    Raises:
        UsageError: ``threshold`` is NaN, or ``patience`` below 1.

    Example:
        >>> stop = StopOnThreshold(475.0)  # doctest: +SKIP
        >>> evaluator = Evaluator(config, on_result=stop)
        >>> while not stop.reached:
        ...     train()
    """

    def __init__(self, threshold: float, metric: str = "episode_return_ci_low", patience: int = 1) -> None:
        if math.isnan(threshold):
            raise UsageError("threshold is NaN, which nothing reaches: give a number")
        if patience < 1:
            raise UsageError(f"patience is {patience}: give at least 1")
        self.threshold = threshold
        self.metric = metric
        self.patience = patience
        self.reached = False
        """Whether it was reached; it stays reached."""
        self.point: EvalPoint | None = None
        """The one with which it was."""
        self._streak = 0

    def __call__(self, point: EvalPoint) -> None:
        """Take an evaluation.

        Raises:
            UsageError: It has no such metric.
        """
        value = _value(point, self.metric)
        self._streak = self._streak + 1 if value is not None and value >= self.threshold else 0
        if self._streak >= self.patience and not self.reached:
            self.point, self.reached = point, True

    def state_dict(self) -> dict[str, Any]:
        """Return what a training checkpoint must hold; the point is not in it."""
        return {"reached": self.reached, "streak": self._streak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.reached, self._streak, self.point = bool(state["reached"]), int(state["streak"]), None


@final
class NewBest:
    """Calls back with every evaluation that is better than all before it, and keeps its weights in a file.

    The best of many evaluations is better than its policy: it was chosen for its luck as well. Evaluate the chosen
    policy on held-out episodes (``first_index``) before quoting a number.

    Args:
        callback: Called with the point, in the evaluator's thread; what it raises reaches ``on_error``, and the point
            does not count as the best.
        metric: A key of ``EvalResult.metrics``, or of ``EvalPoint.metrics`` with its prefix.
        mode: Whether more or less is better.
        save: File for the weights of the best point, those that were evaluated, whatever training has made of them
            since: ``.safetensors``, or ``.pt`` for extra state that is no tensor. ``policy.weights`` takes it. It is
            written before the callback is called, and each time whole.

    Raises:
        UsageError: ``mode`` is neither, ``save`` has another ending, or there is neither ``callback`` nor ``save``.

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
            raise UsageError(f'mode is {mode!r}: give "max" or "min"')
        if callback is None and save is None:
            raise UsageError("NewBest has nothing to do: give a callback, or save=PATH")
        self.save = None if save is None else Path(save).absolute()
        """Where the weights of the best go."""
        if self.save is not None and self.save.suffix not in _FORMATS:
            raise UsageError(f"save is {str(save)!r}: give a name that ends in {' or '.join(_FORMATS)}")
        self.callback = callback
        self.metric = metric
        self.mode = mode
        self.best: EvalPoint | None = None
        """The best so far; None before any, and after :meth:`load_state_dict`."""
        self.best_value: float | None = None
        """Its metric."""

    def __call__(self, point: EvalPoint) -> None:
        """Take an evaluation; an equal one is not better.

        Raises:
            UsageError: It has no such metric, or no weights that could be saved.
            WeightsError: The format cannot hold its weights.
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
        """Return what a training checkpoint must hold; the point is not in it."""
        return {"best_value": self.best_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        value = state["best_value"]
        self.best, self.best_value = None, None if value is None else float(value)


def _weights(point: EvalPoint) -> WeightsSnapshot:
    """Return the weights that a point was measured with."""
    found = point.weights
    if found is None or found.digest != point.result.provenance["weights"]["digest"]:
        raise UsageError(
            f"the weights of step {point.step} cannot be saved, as they are not there: NewBest(save=...) needs a "
            "policy with weights, the on_result of an Evaluator, and, for a service, weights with each request"
        )
    return found


def _value(point: EvalPoint, metric: str) -> float | None:
    """Return what a point says about a metric; None if that does not count."""
    known = {**point.metrics, **point.result.metrics}
    if metric not in known:
        raise UsageError(f"no metric is called {metric!r}: {nearest(metric, known)}")
    value = float(known[metric])
    return None if point.result.status != "complete" or math.isnan(value) else value

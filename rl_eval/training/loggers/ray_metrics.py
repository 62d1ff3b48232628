"""Counters and gauges at the Prometheus endpoint of every Ray node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.records.episode import Outcome
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers.base import Logger

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalProgress

__all__ = ["RayMetrics"]

_COUNTERS: Final = {
    "episodes_done": "Episodes that completed.",
    "episodes_failed": "Episodes that ran out of attempts.",
    "episodes_retried": "Episodes that took more than one attempt.",
    "env_steps": "Environment steps, those of wasted attempts included.",
    "faults": "Faults of environments, policies and runners.",
    "runner_restarts": "Runners lost during evaluations; each is replaced while the budget of restarts lasts.",
    "evaluations": "Evaluations that ended.",
}
_GAUGES: Final = {
    "mean_return": "Mean return of the last evaluation that has one.",
    "evaluated_step": "Training step of the last evaluation.",
    "weights_version": "Weights version of the last evaluation.",
    "weights_lag": "Steps that training has gone on since the weights of the last evaluation.",
    "running_episodes_finished": "Finished episodes of the evaluation under way.",
    "runners": "Runners that are up.",
}


@final
class RayMetrics(Logger):
    """Counters and gauges of ``ray.util.metrics``, exported as ``ray_rl_eval_<name>``, counters with ``_total``.

    Ray must be running in this process, as a driver or an actor; a gauge without a value is not exported.

    Args:
        name: Label ``evaluator`` of every series, for several evaluators in one cluster.
    """

    def __init__(self, name: str = "eval") -> None:
        from ray.util.metrics import Counter, Gauge

        self._tags = {"evaluator": name}
        self._counters: dict[str, Any] = {key: Counter(*_described(key, text)) for key, text in _COUNTERS.items()}
        self._gauges: dict[str, Any] = {key: Gauge(*_described(key, text)) for key, text in _GAUGES.items()}
        self._reached: int | None = None
        self._evaluated: int | None = None

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        result = point.result
        self._count(
            episodes_done=int((result.table.rows["outcome"] == Outcome.COMPLETED).sum()),
            episodes_failed=result.num_failed,
            episodes_retried=result.num_retried,
            env_steps=result.timing.env_steps,
            faults=len(result.faults),
            runner_restarts=int(result.provenance.get("runners_lost") or 0),
            evaluations=1,
        )
        self._evaluated = point.step
        self._set(mean_return=result.mean_return, evaluated_step=point.step, weights_version=point.weights_version)
        self.reached(point.step)

    def progress(self, progress: EvalProgress) -> None:
        """See :class:`Logger`."""
        self._set(running_episodes_finished=progress.num_finished, runners=progress.num_runners)

    def reached(self, step: int) -> None:
        """See :class:`Logger`."""
        self._reached = step if self._reached is None else max(self._reached, step)
        if self._evaluated is not None:
            self._set(weights_lag=self._reached - self._evaluated)

    def _count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            if amount > 0:
                self._counters[name].inc(amount, self._tags)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._gauges[name].set(value, self._tags)


def _described(name: str, text: str) -> tuple[str, str, tuple[str]]:
    return f"rl_eval_{name}", text, ("evaluator",)

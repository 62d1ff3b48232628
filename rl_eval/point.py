"""One point of a learning curve: what an evaluation at a training step found."""

from __future__ import annotations

from dataclasses import dataclass

from rl_eval.result import EvalResult

__all__ = ["EvalPoint"]


@dataclass(frozen=True)
class EvalPoint:
    """A finished evaluation, with the training step that it belongs to."""

    step: int
    """Training step given to ``submit``."""
    weights_version: int
    """Version of the weights that were evaluated."""
    result: EvalResult
    metrics: dict[str, float]
    """``"<log_prefix>/<key>"`` for every key of ``result.metrics`` and of what ``metrics_fn`` returned."""

"""One point of a learning curve: what an evaluation at a training step found."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_eval.results.result import EvalResult
from rl_eval.weights import HeldWeights, WeightsSnapshot


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
    held: HeldWeights = field(default_factory=HeldWeights, repr=False, compare=False)
    """Where :attr:`weights` are, until the point is delivered."""

    @property
    def weights(self) -> WeightsSnapshot | None:
        """Weights that were evaluated, for as long as the point is given to callbacks and loggers.

        None for a policy without weights, for a service that was asked without sending any, and afterwards.
        """
        return self.held.snapshot

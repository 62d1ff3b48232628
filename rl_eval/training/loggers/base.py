"""Base class of loggers, and the row that all of them write for a point."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from rl_eval.errors import UsageError
from rl_eval.results.result import EvalPoint

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalProgress
    from rl_eval.recording.video import Video


class Logger(abc.ABC):
    """Receiver of the points of one learning curve, in the order in which they are evaluated.

    Its methods are called by one thread at a time. An error in a logger is reported, and does not end the evaluation or
    the training.
    """

    @abc.abstractmethod
    def log(self, point: EvalPoint) -> None:
        """Write a point. If the format allows this, the point replaces an earlier point of the same step."""

    def log_video(self, video: Video, point: EvalPoint) -> None:  # noqa: B027  # Optional.
        """Write a video of one episode of a point; called after :meth:`log` for this point."""

    def progress(self, progress: EvalProgress) -> None:  # noqa: B027  # Optional.
        """Receive the progress of the running evaluation."""

    def reached(self, step: int) -> None:  # noqa: B027  # Optional.
        """Receive the current training step.

        Results arrive after their step. So a point that is logged before the next call belongs to this step or to an
        earlier step.
        """

    def close(self) -> None:  # noqa: B027  # Optional.
        """Write remaining data, and release files and processes; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def row_of(point: EvalPoint) -> dict[str, Any]:
    """Return a point as one flat row: step, weights version, time, status, fingerprint and metrics.

    The time is the end of the evaluation, or its start if the result was read from an evaluation log.

    Raises:
        UsageError: A metric has the name of another value of the row.
    """
    result = point.result
    row = {
        "step": point.step,
        "weights_version": point.weights_version,
        "time": result.provenance.get("finished_at") or result.provenance.get("started_at"),
        "status": result.status,
        "fingerprint": result.fingerprint,
    }
    if taken := sorted(row.keys() & point.metrics.keys()):
        problem = f"metrics_fn returned {taken[0]!r}, but each row has another value of this name"
        raise UsageError(problem, key=taken[0], fix="Rename the metric, or set log_prefix.")
    return row | dict(point.metrics)


def finite_metrics(point: EvalPoint) -> dict[str, float]:
    """Return the metrics of a point that are finite numbers; other values cannot be plotted."""
    return {name: float(value) for name, value in point.metrics.items() if math.isfinite(value)}


def prefix_of(point: EvalPoint) -> str:
    """Return the prefix of a point's metric names, such as ``"eval/"``; it may be empty."""
    mean = "episode_return_mean"
    return next((name.removesuffix(mean) for name in point.metrics if f"/{name}".endswith(f"/{mean}")), "eval/")

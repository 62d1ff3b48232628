"""What every logger can be told, and what all of them say of a point."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from rl_eval.point import EvalPoint

if TYPE_CHECKING:
    from rl_eval.handle import EvalProgress
    from rl_eval.video import Video

__all__ = ["Logger", "finite_metrics", "prefix_of", "row_of"]


class Logger(abc.ABC):
    """Takes the points of one learning curve, in the order in which they are found.

    Its methods are called by one thread at a time. An error that it raises is reported, and ends neither the
    evaluation nor the training.
    """

    @abc.abstractmethod
    def log(self, point: EvalPoint) -> None:
        """Take a point. One of a step that it has already replaces the earlier one, where the medium can."""

    def log_video(self, video: Video, point: EvalPoint) -> None:  # noqa: B027  # Optional.
        """Take a film of one of the episodes of a point, after the point."""

    def progress(self, progress: EvalProgress) -> None:  # noqa: B027  # Optional.
        """Hear how far an evaluation is."""

    def reached(self, step: int) -> None:  # noqa: B027  # Optional.
        """Hear which step training has reached; a point that comes later is about that step or an earlier one."""

    def close(self) -> None:  # noqa: B027  # Optional.
        """Write what is left, and let go of files and processes; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def row_of(point: EvalPoint) -> dict[str, Any]:
    """Return a point as one flat row: what it is about, how it went, and its metrics."""
    result = point.result
    return {
        "step": point.step,
        "weights_version": point.weights_version,
        "time": result.provenance.get("finished_at"),
        "status": result.status,
        "fingerprint": result.fingerprint,
        **point.metrics,
    }


def finite_metrics(point: EvalPoint) -> dict[str, float]:
    """Return the metrics of a point that are finite numbers: others have no place on an axis."""
    return {name: float(value) for name, value in point.metrics.items() if math.isfinite(value)}


def prefix_of(point: EvalPoint) -> str:
    """Return what stands before the names of the metrics: ``"eval/"``, say, or nothing."""
    mean = "episode_return_mean"
    return next((name.removesuffix(mean) for name in point.metrics if f"/{name}".endswith(f"/{mean}")), "eval/")

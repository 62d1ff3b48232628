"""Logger that prints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.text import Text

from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers.base import Logger, prefix_of

if TYPE_CHECKING:
    from rl_eval.recording.video import Video

__all__ = ["ConsoleLogger"]


@final
class ConsoleLogger(Logger):
    """Printer of one line per point: mean return with its interval, what went wrong, and what ``metrics_fn`` added.

    Args:
        console: Where; by default stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._given = console

    @cached_property
    def _console(self) -> Console:
        # Not before it is used: a console cannot travel to another process, and this logger can.
        return self._given or Console(highlight=False)

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        # Unwrapped, so that a line in a file stays a line.
        self._console.print(_line(point), soft_wrap=True)

    def log_video(self, video: Video, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        where = "" if video.path is None else f": {video.path}"
        unlike = "" if video.identical else f" (differs from the record in {', '.join(video.differences)})"
        self._console.print(Text(f"  video of episode {video.index}{unlike}{where}"), soft_wrap=True)


def _line(point: EvalPoint) -> Text:
    result = point.result
    interval, width = result.interval, f"{result.confidence:.0%}"
    mean = f"return {result.mean_return:.6g} [{interval.low:.6g}, {interval.high:.6g}] {width}"
    head = f"{prefix_of(point).rstrip('/') or 'eval'} step {point.step:,} (weights {point.weights_version})  "
    line = Text.assemble(head, (mean, "bold"), f"  {', '.join(_details(point))}")
    if result.status != "complete":
        line.append(f"  {result.status}: {' '.join(result.reason.split())}", "bold red")
    for note in result.notes:
        line.append(f"  {note}", "yellow")
    return line


def _details(point: EvalPoint) -> Iterator[str]:
    result = point.result
    yield f"{result.aggregates.count:,} episodes"
    if (rate := result.success_rate) is not None:
        yield f"success {rate:.1%}"
    if result.num_failed:
        yield f"{result.num_failed:,} failed"
    if result.faults:
        yield f"{len(result.faults):,} faults"
    yield f"{result.timing.env_steps:,} steps in {result.timing.wall_seconds:.1f} s"
    prefix = prefix_of(point)
    for name, value in point.metrics.items():
        if (key := name.removeprefix(prefix)) not in result.metrics:
            yield f"{key} {value:.6g}"

"""Progress of a command on stderr: live rows on a terminal; otherwise a line at the start and every 30 s.

A separate thread writes the progress, because the main thread is busy with imports, Ray and environments.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from rl_eval.results.text import counted, decimals, environment_name, number

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.execution.handle import EvalProgress


_LIVE_S: Final = 0.2
_LINES_S: Final = 30.0
_LONG_S: Final = 10.0
"""Time without a finished episode after which the line suggests a step limit."""


class Row(NamedTuple):
    """Row of the live display: a bar with a text."""

    done: int
    total: int | None
    """None if the total is unknown."""
    text: str


@final
class Monitor:
    """Display of the progress of a command, until it is closed.

    Args:
        quiet: Show nothing.
        interval_s: Seconds between two lines if stderr is not a terminal.
    """

    def __init__(self, *, quiet: bool, interval_s: float = _LINES_S) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False, quiet=quiet)
        self._live = not quiet and sys.stderr.isatty() and not self._console.is_dumb_terminal
        self._interval_s = _LIVE_S if self._live else interval_s
        self._began = time.monotonic()
        self._phase = "starting"
        self._source: Callable[[], EvalProgress] | None = None
        self._num_runners = 0
        self._whole: Callable[[], Row] | None = None
        self._bar: Progress | None = None
        self._showing = threading.RLock()
        self._closing = threading.Event()
        if not quiet:
            threading.Thread(target=self._run, name="rl_eval progress", daemon=True).start()

    def say(self, phase: str, *, at_once: bool = False) -> None:
        """Set the phase to show; with ``at_once`` also write it as a line if there are no live rows."""
        self._phase, self._source, self._whole = phase, None, None
        if at_once and not self._live:
            self._show()

    def announce(self, line: str) -> None:
        """Write a line immediately, above the live rows."""
        with self._showing:
            self._console.print(line, soft_wrap=True, markup=False)

    def follow(
        self, source: Callable[[], EvalProgress], num_runners: int = 0, whole: Callable[[], Row] | None = None
    ) -> None:
        """Show the progress of an evaluation.

        Args:
            source: Returns the progress of the evaluation.
            num_runners: Configured number of Ray actors.
            whole: Returns a row with the progress of all evaluations, if the command runs several.
        """
        self._source, self._num_runners, self._whole = source, num_runners, whole

    @contextmanager
    def room(self) -> Iterator[None]:
        """Show nothing while the result is printed."""
        with self._showing:
            self._hide()
            yield

    def close(self) -> None:
        """Remove the live rows. Further calls have no effect."""
        with self._showing:
            self._closing.set()
            self._hide()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            with self._showing:
                if not self._closing.is_set():
                    self._show()

    def _show(self) -> None:
        progress = self._source() if self._source else None
        phase = progress.phase if progress else self._phase
        seconds = time.monotonic() - self._began
        line = progress_line(phase, seconds, progress, self._num_runners)
        done, total = (progress.num_finished, progress.num_episodes) if progress else (0, None)
        rows = [self._whole()] if self._whole else []
        rows.append(Row(done, total, line))
        if self._live:
            self._draw(rows)
        else:
            self.announce("; ".join(row.text for row in rows))

    def _draw(self, rows: Sequence[Row]) -> None:
        if self._bar is not None and len(self._bar.task_ids) != len(rows):
            self._hide()
        if self._bar is None:
            self._bar = Progress(
                BarColumn(12),
                TextColumn("{task.description}", markup=False, table_column=Column(ratio=1)),
                console=self._console,
                auto_refresh=False,
                transient=True,
                expand=True,
                redirect_stdout=sys.stdout is sys.stderr,  # True in a command: results have their own stream.
            )
            for _ in rows:
                self._bar.add_task("")
            self._bar.start()
        for task, row in zip(self._bar.task_ids, rows, strict=True):
            self._bar.update(task, total=row.total, completed=row.done, description=row.text)
        self._bar.refresh()

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None  # A restarted bar would erase the lines that it had drawn.


def headline(settings: EvalSettings) -> str:
    """Return a one-line summary of the evaluation that is about to run."""
    from rl_eval.runners import layout_of

    runners, evaluation = settings.runners, settings.evaluation
    lanes = counted(max(1, runners.num_runners) * layout_of(settings).lanes, "environment")
    where = counted(runners.num_runners, "runner") if runners.num_runners else "1 runner in this process"
    return (
        f"{environment_name({'identity': settings.identity()})}: {counted(evaluation.num_episodes, 'episode')}, "
        f"seed {evaluation.seed}, {lanes}, {where}"
    )


def progress_line(phase: str, seconds: float, progress: EvalProgress | None = None, num_runners: int = 0) -> str:
    """Return a line with the phase, the progress of the evaluation and the time since the start of the command.

    Args:
        phase: Current phase, such as ``running``.
        seconds: Time since the start of the command.
        progress: Progress of the evaluation; None before it starts.
        num_runners: Configured number of Ray actors.
    """
    parts = [phase, *(_parts(progress, num_runners) if progress else [])]
    minutes, rest = divmod(round(seconds), 60)
    clock = f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
    return ", ".join([*parts, clock])


def _parts(progress: EvalProgress, num_runners: int) -> Iterator[str]:
    done, left = progress.num_finished, progress.num_episodes - progress.num_finished
    yield f"{done:,} of {progress.num_episodes:,} episodes"
    if progress.unavailable:
        yield progress.unavailable
    elif progress.seconds > _LONG_S and not done:
        yield "no episode has ended yet (evaluation.max_episode_steps limits the length of an episode)"
    if not math.isnan(progress.mean_return):
        spread = 0.0 if math.isnan(progress.half_width) else progress.half_width / 1.96
        places = decimals(spread, progress.mean_return)
        interval = f" ± {number(progress.half_width, places)}" if spread else ""
        yield f"mean return {number(progress.mean_return, places)}{interval} over the first {progress.num_prefix:,}"
    if progress.env_steps and progress.seconds:
        yield f"{number(progress.env_steps / progress.seconds, 0)} steps/s"
    if progress.waiting and not progress.unavailable:
        yield progress.waiting
    if num_runners:
        yield f"{progress.num_runners} of {counted(num_runners, 'runner')}"
    if progress.num_faults:
        yield f"{counted(progress.num_faults, 'fault')}, {progress.num_failed:,} failed"
    here = done - progress.num_earlier
    if here > 0 and left and not progress.unavailable:
        yield f"about {progress.seconds * left / here:,.0f} s left"

"""What is shown while an evaluation runs: a live display on a terminal, a line now and then elsewhere.

Both go to stderr, so that stdout holds the result alone.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, final

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_eval.handle import EvalProgress
from rl_eval.report.table import WIDTH, Line, Page, decimals, number, rich_page

if TYPE_CHECKING:
    from rich.live import Live

    from rl_eval.settings import EvalSettings

__all__ = ["Display", "LineDisplay", "LiveDisplay", "NoDisplay", "make_display", "progress_line"]


class Display(Protocol):
    """Shows progress until it is closed."""

    def update(self, progress: EvalProgress) -> None:
        """Show how far the evaluation is."""

    def say(self, text: str) -> None:
        """Show what is going on besides."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called again."""


def make_display(settings: EvalSettings, *, quiet: bool) -> Display:
    """Choose a display that fits stderr."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        return NoDisplay()
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(settings, console)
    return LineDisplay(settings, console)


@final
class NoDisplay:
    """Shows nothing."""

    def update(self, progress: EvalProgress) -> None:
        """See :class:`Display`."""

    def say(self, text: str) -> None:
        """See :class:`Display`."""

    def close(self) -> None:
        """See :class:`Display`."""


@final
class LineDisplay:
    """Writes a line at once and then every few seconds, for logs.

    Args:
        settings: What is evaluated.
        console: Where to write.
        interval_s: Seconds between two lines.
        clock: Tells the time.
    """

    def __init__(
        self,
        settings: EvalSettings,
        console: Console,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = settings.runners.num_runners
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock() + interval_s
        self.say(headline(settings))

    def update(self, progress: EvalProgress) -> None:
        """See :class:`Display`."""
        if self._clock() >= self._next:
            self._next = self._clock() + self._interval_s
            self.say(progress_line(progress, self._runners))

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """See :class:`Display`."""


@final
class LiveDisplay:
    """Looks like the result that will take its place, with a bar below.

    Args:
        settings: What is evaluated.
        console: Where to draw.
    """

    def __init__(self, settings: EvalSettings, console: Console) -> None:
        from rich.live import Live

        self._settings = settings
        self._said = "starting"
        self._progress = EvalProgress(
            num_episodes=settings.evaluation.num_episodes,
            num_finished=0,
            num_failed=0,
            num_faults=0,
            num_prefix=0,
            mean_return=math.nan,
            half_width=math.nan,
            env_steps=0,
            seconds=0.0,
            num_runners=0,
        )
        self._live: Live = Live(
            self._render(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start(refresh=True)

    def update(self, progress: EvalProgress) -> None:
        """See :class:`Display`."""
        if progress.num_runners and self._said == "starting":
            self._said = "running"
        self._progress = progress
        self._live.update(self._render(), refresh=True)

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        self._said = text
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """See :class:`Display`."""
        self._live.stop()

    def _render(self) -> Group:
        title, subtitle = names(self._settings)
        page = rich_page(Page(title, subtitle, self._said, [progress_lines(self._progress, self._settings)]))
        # The last line stays empty for the ^C that a terminal echoes.
        return Group(page, Text(""), Constrain(_bar(self._progress), WIDTH), Text(""))


# The words


def names(settings: EvalSettings) -> tuple[str, str]:
    """Return the names of environment and policy."""
    identity = settings.identity()
    return str(identity["environment"]["env"]), str(identity["policy"])


def headline(settings: EvalSettings) -> str:
    """Say what is about to run."""
    runners, evaluation = settings.runners, settings.evaluation
    where = f"{_count(runners.num_runners, 'runner')} with " if runners.num_runners else ""
    here = "" if runners.num_runners else " in this process"
    return (
        f"{names(settings)[0]}: {_count(evaluation.num_episodes, 'episode')}, seed {evaluation.seed}, "
        f"{where}{_count(runners.lanes, 'environment')}{' each' if runners.num_runners else here}"
    )


def progress_line(progress: EvalProgress, num_runners: int) -> str:
    """Say everything in one line."""
    parts = [f"{progress.num_finished:,} of {progress.num_episodes:,} episodes"]
    if mean := mean_text(progress):
        parts.append(f"mean return {mean} over the first {progress.num_prefix:,}")
    if progress.num_finished:
        parts.append(f"{number(_rate(progress), 0)} steps/s")
    if num_runners:
        parts.append(f"{progress.num_runners} of {_count(num_runners, 'runner')}")
    parts.append(_count(progress.num_faults, "fault"))
    if progress.num_failed:
        parts.append(f"{progress.num_failed:,} failed")
    return ", ".join([*parts, clock_text(progress.seconds)])


def progress_lines(progress: EvalProgress, settings: EvalSettings) -> list[Line]:
    """Say everything in the lines of a result."""
    mean = mean_text(progress)
    over = f"over the first {_count(progress.num_prefix, 'episode')}" if mean else "not yet known"
    trouble = f"{progress.num_failed:,} failed   {_count(progress.num_faults, 'fault')}"
    runners = settings.runners.num_runners
    where = f"on {progress.num_runners} of {_count(runners, 'runner')}" if runners else "in this process"
    rate = number(_rate(progress), 0) if progress.num_finished else ""
    return [
        Line("mean return", mean, over),
        Line("episodes", f"{progress.num_finished:,}", f"of {progress.num_episodes:,}   {trouble}"),
        Line("speed", rate, f"env steps/s   {where}" if rate else where),
    ]


def mean_text(progress: EvalProgress) -> str:
    """Write mean and half width, as precisely as the half width allows; empty while there is no mean."""
    if math.isnan(progress.mean_return):
        return ""
    spread = 0.0 if math.isnan(progress.half_width) else progress.half_width / 1.96
    places = decimals(spread, progress.mean_return)
    half = f" ± {number(progress.half_width, places)}" if spread else ""
    return number(progress.mean_return, places) + half


def clock_text(seconds: float) -> str:
    """Write seconds as ``0:07``, ``12:03`` or ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(progress: EvalProgress) -> Table:
    """Draw the bar, the time that passed and the time that is left if the rest goes as the part so far."""
    done, total = progress.num_finished, progress.num_episodes
    left = f"about {clock_text(progress.seconds * (total - done) / done)} left" if done else ""
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
    grid.add_column(ratio=1)
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(justify="right", width=len("about 00:00 left"))
    bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="cyan")
    grid.add_row(bar, f"{math.floor(100 * done / total)} %", clock_text(progress.seconds), left)
    return grid


def _rate(progress: EvalProgress) -> float:
    return progress.env_steps / progress.seconds if progress.seconds > 0 else math.nan


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

"""Progress of a command from its first moment on: a live display on a terminal, a line now and then elsewhere.

Both go to stderr, so that stdout holds the result alone. A thread draws them, since the main thread imports, waits
and steps environments meanwhile; the clock runs, and the phase says what is being done.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, final

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_eval.cli.printing import counted
from rl_eval.reports.page import WIDTH, Line, Page, rich_page
from rl_eval.results.text import decimals, environment_name, number, policy_name

if TYPE_CHECKING:
    from rich.live import Live

    from rl_eval.config.settings import EvalSettings
    from rl_eval.execution.handle import EvalProgress

__all__ = ["Display", "LineDisplay", "LiveDisplay", "Monitor", "View", "make_monitor", "progress_line"]

_REFRESH_S: Final = 0.15
_FIRST_LINE_S: Final = 0.3
"""When the first line is written at the latest."""
_STARTING_S: Final = 0.4
"""Between lines before and after the run: torch's import and Ray's start keep their thread waiting for up to 0.7 s."""
_FREQUENT_UNTIL_S: Final = 30.0
"""Until then somebody may be looking on; later lines are for a log, which should not be flooded."""
_FREQUENT_S: Final = 0.9
"""Less than a second, which a busy machine may add to."""
_RARE_S: Final = 5.0
_LONG_S: Final = 10.0
"""So long without the end of an episode, none may ever end."""


@dataclass(frozen=True, slots=True)
class View:
    """State of a command that a display shows."""

    phase: str
    """What is being done."""
    seconds: float
    """Since the command began."""
    settings: EvalSettings | None = None
    """What is evaluated; None until the config is read."""
    progress: EvalProgress | None = None
    """How far the evaluation is; None before there is one."""
    announcement: str = ""
    """What must be shown at once; empty for nothing."""


class Display(Protocol):
    """Shows views until it is closed; called by one thread at a time."""

    def draw(self, view: View) -> None:
        """Show what there is."""

    def make_room(self, view: View) -> None:
        """Leave the terminal to the result; what is drawn from now on stands below it, in one line."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def make_monitor(*, quiet: bool) -> Monitor:
    """Begin to show, in a way that fits stderr."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        return Monitor(None)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        return Monitor(LiveDisplay(console))
    return Monitor(LineDisplay(console))


@final
class Monitor:
    """Draws a display from a thread of its own.

    Args:
        display: What to draw; None draws nothing.
    """

    def __init__(self, display: Display | None) -> None:
        self._display = display
        self._began = time.monotonic()
        self._said = "starting"
        self._announcement = ""
        self._settings: EvalSettings | None = None
        self._source: Callable[[], EvalProgress] | None = None
        self._drawing = threading.Lock()
        self._closing = threading.Event()
        if display is not None:
            threading.Thread(target=self._run, name="rl_eval display", daemon=True).start()

    def say(self, phase: str) -> None:
        """Show what is being done from now on."""
        self._said = phase

    def announce(self, text: str) -> None:
        """Show a text at once and from now on; may be called in a signal handler."""
        self._announcement = text

    def plan(self, settings: EvalSettings) -> None:
        """Show what is evaluated."""
        self._settings = settings

    def follow(self, source: Callable[[], EvalProgress]) -> None:
        """Show progress and phase as a function tells them."""
        self._said, self._source = "", source

    @contextmanager
    def room(self) -> Iterator[None]:
        """Draw nothing meanwhile, and below what was printed afterwards."""
        with self._drawing:
            if self._display is not None and not self._closing.is_set():
                self._display.make_room(self._view())
            yield

    def close(self) -> None:
        """Leave the terminal as it was; may be called again, and by any thread."""
        with self._drawing:
            if self._closing.is_set():
                return
            self._closing.set()
            if self._display is not None:
                if self._announcement:  # It may have come since the last view.
                    self._display.draw(self._view())
                self._display.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._drawing:
                if self._display is not None and not self._closing.is_set():
                    self._display.draw(self._view())
            self._closing.wait(_REFRESH_S)

    def _view(self) -> View:
        progress = None if self._source is None else self._source()
        phase = self._announcement or self._said or (progress.phase if progress else "")
        return View(phase, time.monotonic() - self._began, self._settings, progress, self._announcement)


@final
class LineDisplay:
    """Writes what is evaluated as soon as that is known, a line a second for half a minute, and then every five.

    Before and after the run there are more: imports, and Ray's start and end, keep its thread waiting.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = _FIRST_LINE_S
        self._headed = False
        self._over = False
        self._announced = ""

    def draw(self, view: View) -> None:
        """See :class:`Display`."""
        if view.settings is not None and not self._headed:
            self._headed = True
            self._write(headline(view.settings), view)
        elif view.seconds >= self._next:
            # With tenths, no two lines are equal.
            line = f"{view.phase}, {view.seconds:.1f} s" if self._is_idle(view) else progress_line(view)
            self._write(line, view)
        if view.announcement != self._announced:
            self._announced = view.announcement
            self._write(view.announcement, view)

    def make_room(self, view: View) -> None:
        """See :class:`Display`."""
        self._over = True
        self._next = view.seconds + _STARTING_S - _REFRESH_S

    def close(self) -> None:
        """See :class:`Display`."""

    def _is_idle(self, view: View) -> bool:
        """Whether the run has not begun yet, or is over."""
        return self._over or view.progress is None

    def _write(self, text: str, view: View) -> None:
        interval = _FREQUENT_S if view.seconds < _FREQUENT_UNTIL_S else _RARE_S
        if self._is_idle(view):
            interval = _STARTING_S
        self._next = view.seconds + interval - _REFRESH_S  # A view may come that much later.
        self._console.print(text, soft_wrap=True, markup=False)


@final
class LiveDisplay:
    """Looks like the result that will take its place, with a bar below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = self._new()
        self._over = False

    def draw(self, view: View) -> None:
        """See :class:`Display`."""
        self._live.start()
        self._live.update(
            Text(f"{view.phase}, {clock_text(view.seconds)}") if self._over else _drawing(view), refresh=True
        )

    def make_room(self, view: View) -> None:
        """See :class:`Display`."""
        self._live.stop()
        self._live = self._new()  # The old one would erase again as many lines as it has drawn.
        self._over = True

    def close(self) -> None:
        """See :class:`Display`."""
        self._live.stop()

    def _new(self) -> Live:
        from rich.live import Live

        return Live(
            Text(""),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout is sys.stderr,  # What others print, within a command.
        )


def _drawing(view: View) -> Group:
    title, subtitle = ("rl-eval", "") if view.settings is None else names(view.settings)
    lines = [] if view.settings is None else progress_lines(view.progress or _nothing_yet(view.settings), view.settings)
    page = rich_page(Page(title, subtitle, view.phase, [lines]))
    # The last line stays empty for the ^C that a terminal echoes.
    return Group(page, Text(""), Constrain(_bar(view), WIDTH), Text(""))


def _nothing_yet(settings: EvalSettings) -> EvalProgress:
    from rl_eval.execution.handle import EvalProgress  # It brings NumPy, for which the first view does not wait.

    return EvalProgress(settings.evaluation.num_episodes, 0, 0, 0, 0, math.nan, math.nan, 0, 0.0, 0)


# The words


def names(settings: EvalSettings) -> tuple[str, str]:
    """Return the names of environment and policy."""
    known = {"identity": settings.identity()}
    return environment_name(known), policy_name(known)


def headline(settings: EvalSettings) -> str:
    """Say what is about to run."""
    runners, evaluation = settings.runners, settings.evaluation
    where = f"{counted(runners.num_runners, 'runner')} with " if runners.num_runners else ""
    here = "" if runners.num_runners else " in this process"
    return (
        f"{names(settings)[0]}: {counted(evaluation.num_episodes, 'episode')}, seed {evaluation.seed}, "
        f"{where}{counted(runners.lanes, 'environment')}{' each' if runners.num_runners else here}"
    )


def progress_line(view: View) -> str:
    """Say everything in one line."""
    phase = "" if view.phase == "running" else view.phase
    parts = [] if view.progress is None or view.settings is None else _progress_parts(view.progress, view.settings)
    return ", ".join([*filter(None, [phase, *parts]), clock_text(view.seconds)])


def _progress_parts(progress: EvalProgress, settings: EvalSettings) -> list[str]:
    parts = [f"{progress.num_finished:,} of {progress.num_episodes:,} episodes"]
    parts += filter(None, [_endless(progress)])
    if mean := mean_text(progress):
        parts.append(f"mean return {mean} over the first {progress.num_prefix:,}")
    if progress.env_steps:
        parts.append(f"{number(_rate(progress), 0)} steps/s")
    if runners := settings.runners.num_runners:
        parts.append(f"{progress.num_runners} of {counted(runners, 'runner')}")
    parts.append(counted(progress.num_faults, "fault"))
    if progress.num_failed:
        parts.append(f"{progress.num_failed:,} failed")
    return parts


def progress_lines(progress: EvalProgress, settings: EvalSettings) -> list[Line]:
    """Say everything in the lines of a result."""
    mean = mean_text(progress)
    unknown = _endless(progress) or "not yet known"
    over = f"over the first {counted(progress.num_prefix, 'episode')}" if mean else unknown
    trouble = f"{progress.num_failed:,} failed   {counted(progress.num_faults, 'fault')}"
    runners = settings.runners.num_runners
    where = f"on {progress.num_runners} of {counted(runners, 'runner')}" if runners else "in this process"
    rate = number(_rate(progress), 0) if progress.env_steps else ""
    return [
        Line("mean return", mean, over),
        Line("episodes", f"{progress.num_finished:,}", f"of {progress.num_episodes:,}   {trouble}"),
        Line("speed", rate, f"env steps/s   {where}" if rate else where),
    ]


def _endless(progress: EvalProgress) -> str:
    """Say that episodes may never end, and what limits them; empty as long as nothing speaks for it."""
    endless = progress.seconds > _LONG_S and not progress.num_finished
    return "no episode has ended yet; evaluation.max_episode_steps limits their length" if endless else ""


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


def _bar(view: View) -> Table:
    """Draw the bar, the time that passed and the time that is left if the rest goes as this session's part so far."""
    progress = view.progress
    done, total = (progress.num_finished, progress.num_episodes) if progress else (0, 1)
    left = f"about {clock_text(seconds)} left" if progress and (seconds := _seconds_left(progress)) is not None else ""
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
    grid.add_column(ratio=1)
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(justify="right", width=len("about 00:00 left"))
    bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="cyan")
    grid.add_row(bar, f"{math.floor(100 * done / total)} %", clock_text(view.seconds), left)
    return grid


def _seconds_left(progress: EvalProgress) -> float | None:
    """Extrapolate from what this session has finished; None while that is nothing."""
    done = progress.num_finished - progress.num_earlier
    return progress.seconds * (progress.num_episodes - progress.num_finished) / done if done else None


def _rate(progress: EvalProgress) -> float:
    return progress.env_steps / progress.seconds if progress.seconds > 0 else math.nan

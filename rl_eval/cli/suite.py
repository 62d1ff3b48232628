"""``rl-eval suite``: run the cells of a suite, list them, and report their numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_eval.cli.exits import CODES, ExitCode, explained
from rl_eval.cli.plan import run_pilot, span
from rl_eval.cli.printing import AsJson, Quiet, print_either, print_json, print_line, print_note, print_report
from rl_eval.cli.settings import find_modules_here
from rl_eval.cli.shared import CommandLine, argument, option, shown
from rl_eval.cli.signals import Interruption
from rl_eval.errors import ConfigError, EvalError
from rl_eval.reports.page import Line, Page, Table
from rl_eval.results.text import counted

if TYPE_CHECKING:
    from rl_eval.cli.progress import Monitor
    from rl_eval.execution.handle import EvalHandle, EvalProgress
    from rl_eval.suites.cells import PlannedCell
    from rl_eval.suites.ledger import CellState
    from rl_eval.suites.result import SuiteResult
    from rl_eval.suites.running import SuiteEvents
    from rl_eval.suites.suite import Suite

SuiteFile = Annotated[Path, argument("SUITE", "YAML file of the suite.")]
Out = Annotated[Path | None, option("DIR", "Folder of the suite. [default: suites/NAME]")]

app = CommandLine(
    name="suite",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Evaluate tasks x policies x training seeds x steps from one file.",
)


@app.command("run", epilog=explained(), short_help="Run the cells that have no result yet.")
def run(
    ctx: typer.Context,
    suite: SuiteFile,
    out: Out = None,
    cell: Annotated[
        list[str] | None,
        option("TASK/POLICY/SEED/STEP", "Run and print only these cells; * matches any part. May be repeated."),
    ] = None,
    num_runners: Annotated[
        int | None,
        option("N", "Number of Ray actors; 0 runs in this process, without Ray.", "--num-runners", "--runners", min=0),
    ] = None,
    report: Annotated[
        bool, option(None, "Also write the report of the whole suite, as rl-eval suite report does.", "--report")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run the cells of a suite that have no result yet, and print the table.

    The same command continues an interrupted run. Several processes may run one suite in one folder.
    """
    from rl_eval.cli.progress import Monitor

    with closing(Monitor(quiet=quiet or as_json)) as monitor:
        monitor.say(f"reading {suite.name}")
        opened = _opened(suite)
        events = _display(monitor, ctx.obj)
        ctx.obj.defer()
        result = opened.run(out, cells=cell or (), num_runners=num_runners, events=events)
        monitor.close()
        _print(result, quiet=quiet, as_json=as_json)
        if report and ctx.obj.number is None:
            files = _write(opened.result(out) if cell else result, opened.folder(out))
            print_note(f"wrote {shown(str(files[-1]))}")
        code = _exit_code(result, ctx.obj)
        if ctx.obj.number is not None:
            print_note("interrupted; finished episodes are saved, and the same command continues the run")
        ctx.obj.conclude(code)
    if code:
        raise typer.Exit(code)


@app.command("plan", epilog=explained(), short_help="List the cells, and estimate the time.")
def plan(
    suite: SuiteFile,
    out: Out = None,
    cells: Annotated[
        bool, option(None, "Print one cell per line in the form of --cell, and run nothing.", "--cells")
    ] = False,
    pilot: Annotated[
        int, typer.Option(metavar="N", min=1, help="Episodes of the pilot of each task.", show_default=True)
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Count cells and episodes of a suite, and estimate the time from a short pilot of each task."""
    opened = _opened(suite)
    if cells:
        print_either(as_json, [str(one.cell) for one in opened.cells], "\n".join(str(one.cell) for one in opened.cells))
        return
    rows = list(_planned(opened, opened.result(out).cells, pilot))
    keys = ("task", "cells", "left", "errors", "episodes", "minutes", "problem")
    print_either(as_json, [dict(zip(keys, row, strict=True)) for row in rows], _plan_page(opened, rows))
    if any(problem for *_, problem in rows):
        raise typer.Exit(ExitCode.USAGE)


_Row = tuple[str, int, int, int, int, float | None, str]
"""Row of one task: the name of the task; the number of all cells, of cells to run, and of cells that cannot run; the
number of episodes and the minutes of the cells to run; the first problem."""


def _planned(opened: Suite, states: Sequence[CellState], pilot: int) -> Iterator[_Row]:
    from rl_eval.suites.cells import settings_of_cell

    for task in opened.definition.tasks:
        of_task = [state for state in states if state.planned.cell.task == task]
        left = [state.planned for state in of_task if state.open or state.status == "running"]
        errors = [state.reason for state in of_task if state.status == "error" and not state.open]
        episodes, minutes, problem = 0, None if left else 0.0, "".join(errors[:1])
        try:
            for planned in left[:1]:
                settings = settings_of_cell(opened.definition, planned, {})
                episodes = settings.evaluation.num_episodes * len(left)
                result = run_pilot(settings, min(pilot, settings.evaluation.num_episodes))
                minutes = result.timing.wall_seconds / len(result.plan) * episodes / 60
        except EvalError as error:
            problem = str(error)
        yield task, len(of_task), len(left), len(errors), episodes, minutes, problem


def _plan_page(opened: Suite, rows: Sequence[_Row]) -> Page:
    def shown(row: _Row) -> list[str]:
        task, *counts, minutes, _ = row
        return [task, *(f"{count:,}" for count in counts), span(minutes) if minutes else "-"]

    total = sum(row[5] or 0.0 for row in rows)
    headings = ("task", "cells", "to run", "errors", "episodes", "time")
    table = Table("tasks", headings, [shown(row) for row in rows])
    line = Line("cells", f"{sum(row[1] for row in rows):,}", f"{sum(row[2] for row in rows):,} to run")
    time_line = Line("time", span(total), "in one process, from a pilot of the first cell of each task")
    notes = [f"{task}: {problem}" for task, *_, problem in rows if problem]
    return Page(opened.definition.suite, "", "plan", [[line, time_line], table], notes)


@app.command("report", epilog=explained(), short_help="Write a page, figures and tables.")
def report(
    suite: SuiteFile,
    out: Out = None,
    output: Annotated[
        Path | None, option("FOLDER", "Folder of the report. [default: DIR/report]", "--output", "-o")
    ] = None,
    published: Annotated[
        Path | None,
        option("CSV", "CSV file of published scores (policy,task,seed,score) to show beside the scores of the suite."),
    ] = None,
    videos: Annotated[
        str | None,
        option("SELECTORS", "Record videos of each cell first; rules as for replay --select, such as median,failed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page, figures (PDF), tables (CSV, Markdown, LaTeX) and scores for rliable and marl-eval."""
    opened = _opened(suite)
    folder = opened.folder(out)
    from rl_eval.suites.ledger import SUITE_FILE
    from rl_eval.suites.report import record_cell_videos

    if not (folder / SUITE_FILE).exists():
        fix = "Pass the folder of a suite, or run rl-eval suite run first."
        raise ConfigError(f"{folder} is not the folder of a suite", key="--out", value=str(folder), fix=fix)
    result = opened.result(out, published)

    if videos is not None:
        for cell, found in record_cell_videos(result, folder, videos):
            print_note(f"{cell}: {counted(found, 'video') if isinstance(found, int) else found}")
    files = _write(result, folder, output)
    print_either(as_json, {"files": list(map(str, files))}, "\n".join(map(shown, map(str, files))))


def _write(result: SuiteResult, folder: Path, output: Path | None = None) -> list[Path]:
    """Write the report of a suite, and print a note for each missing part; return the files, with the page last."""
    from rl_eval.suites.report import write_report

    files, notes = write_report(result, output or folder / "report", folder)
    for note in notes:
        print_note(note)
    return files


def _opened(path: Path) -> Suite:
    find_modules_here()  # The suite may name a catalogue in one of these modules.
    from rl_eval.suites.suite import Suite

    return Suite.from_yaml(path)


def _display(monitor: Monitor, interruption: Interruption) -> SuiteEvents:
    """Return event handlers that show the progress of the suite and of the current cell."""
    from rl_eval.cli.progress import Row
    from rl_eval.suites.running import SuiteEvents

    ended: Counter[str] = Counter()
    began, ran, total = time.monotonic(), 0, 0

    def whole() -> Row:
        done = sum(ended.values())
        parts = [f"{done} of {total} cells"]
        if bad := done - ended["complete"]:
            parts.append(f"{bad} not complete")
        if ran and done < total:
            parts.append(f"about {span((time.monotonic() - began) / ran * (total - done) / 60)} left")
        return Row(done, total, ", ".join(parts))

    class Shown(SuiteEvents):
        def on_begin(self, count: int) -> None:
            nonlocal total
            total = count

        def on_start(self, planned: PlannedCell, handle: EvalHandle) -> None:
            nonlocal ran
            ran += 1
            monitor.follow(_with_phase(handle.progress, str(planned.cell)), whole=whole)
            interruption.defer(handle.flush, cancel=handle.cancel)

        def on_end(self, state: CellState) -> None:
            ended[state.status] += 1
            why = f": {state.reason}" if state.reason else ""
            score = "" if state.score is None else f", mean score {state.score.mean:.6g}"
            monitor.announce(f"{state.planned.cell} is {state.status}{score}{why} ({whole().text})")

        def stopping(self) -> bool:
            return interruption.number is not None

    return Shown()


def _with_phase(progress: Callable[[], EvalProgress], phase: str) -> Callable[[], EvalProgress]:
    return lambda: replace(progress(), phase=phase)


def _print(result: SuiteResult, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    elif quiet:
        done = sum(state.status == "complete" for state in result.cells)
        print_line(f"{done} of {counted(len(result.cells), 'cell')} complete")
        for state in result.cells:
            if state.reason:
                print_note(f"{state.planned.cell} is {state.status}: {state.reason}")
    else:
        print_report(result)


def _exit_code(result: SuiteResult, interruption: Interruption) -> int:
    if interruption.number is not None:
        return 128 + interruption.number
    return CODES[result.status]

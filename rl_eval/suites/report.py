"""Report of a suite: one page, figures, and the tables in files for papers and other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rl_eval.atomic_write import write_bytes
from rl_eval.errors import ConfigError, UsageError, summary_of
from rl_eval.recording.video import record_videos
from rl_eval.recording.video_selection import VideoSettings, captions, video_folder, videos_of
from rl_eval.reports.charts import Plot, Row, estimates, lines
from rl_eval.reports.html import is_report, render_template
from rl_eval.reports.page import Table as PageTable
from rl_eval.results.loading import load
from rl_eval.suites.exports import marl_eval_json, rliable_json, scores_csv
from rl_eval.suites.figures import interval_figure, line_figure, pages
from rl_eval.suites.result import TITLES, SuiteResult
from rl_eval.suites.tables import Table, csv_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE: Final = "report.html"
_GENERATOR: Final = '<meta name="generator" content="rl-eval suite report">'
_LINES: Final = {"profiles": "fraction of scores above", "curves": "IQM"}
"""Tables that are drawn as lines, with the label of the vertical axis. Other tables are drawn as intervals."""
_AXES: Final = {"aggregates": "score", "improvement": "probability of a higher score"}
"""Labels of the horizontal axes of tables whose numbers are no means."""
_TABLES: Final = ("tables.csv", "tables.md", "tables.tex")
_FILES: Final = (*_TABLES, "figures.pdf", "scores.csv", "rliable.json", "marl_eval.json", PAGE)
"""Names of all files that a report can have."""


def write_report(result: SuiteResult, folder: Path, cells: Path) -> tuple[list[Path], list[str]]:
    """Write the page, the tables as CSV, Markdown and LaTeX, the figures as PDF, and files of scores.

    Equal results give equal files.

    Args:
        result: The result.
        folder: Folder of the report; it is created. The files of an older report are replaced or removed.
        cells: Folder of the suite. The page has links to the videos in this folder.

    Returns:
        Paths of the written files, and notes on missing parts.

    Raises:
        ConfigError: The folder contains no report, but a file whose name the report needs.
    """
    _check_folder(folder)
    notes = list[str]()
    files: list[tuple[str, bytes]] = list(_texts(result, notes))
    try:
        if drawn := [_figure(name, table) for name, table in _tables(result).items()]:
            files.append(("figures.pdf", pages(drawn)))
    except ConfigError as error:
        notes.append(str(error))
    files.append((PAGE, _page(result, folder, cells).encode()))
    # The page is written first, so that the folder is that of a report, even if the program is killed.
    for name, content in (files[-1], *files[:-1]):
        write_bytes(folder / name, content)
    for name in {*_FILES} - {name for name, _ in files}:
        (folder / name).unlink(missing_ok=True)
    return [folder / name for name, _ in files], list(dict.fromkeys(notes))


def _check_folder(folder: Path) -> None:
    page = folder / PAGE
    if page.is_file() and is_report(page, _GENERATOR):
        return
    if found := [name for name in _FILES if (folder / name).exists()]:
        problem = f"{folder / found[0]} exists, and the folder has no report of a suite"
        raise ConfigError(problem, key="--output", value=str(folder), fix="Pass another folder (--output), or move it.")


def record_cell_videos(result: SuiteResult, cells: Path, select: str) -> Iterator[tuple[str, int | str]]:
    """Record videos of some episodes of each cell with a result, into the subfolder ``videos`` of the cell's folder.

    Args:
        result: The result. The code that its cells name is trusted.
        cells: Folder of the suite.
        select: Selection of episodes, such as ``failed,worst:1``; see ``rl-eval replay --select``.

    Yields:
        Name of the cell, with the number of its videos or the reason why there are no videos.

    Raises:
        ConfigError: A selector is unknown, or the encoder is not installed.
    """
    VideoSettings(select)  # A wrong selector is an error of the caller, not of a cell.
    for state in result.cells:
        if state.score is not None:
            place = cells / state.planned.cell.folder
            try:
                videos = record_videos(load(place), select, video_folder(place), trust=True)
                yield str(state.planned.cell), len(videos)
            except Exception as error:  # A user's environment that cannot render must not end the report.
                yield str(state.planned.cell), summary_of(error)


def _tables(result: SuiteResult) -> dict[str, Table]:
    return {name: table for name, table in result.tables.items() if isinstance(table, Table)}


def _figure(name: str, table: Table) -> Figure:
    if name in _LINES:
        return line_figure(table, _LINES[name])
    if name == "tasks":
        return interval_figure(table.transposed())  # Tasks have different scales.
    return interval_figure(table, reference=0.5 if name == "improvement" else None)


def _texts(result: SuiteResult, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    tables = _tables(result)
    if tables:
        readable = {name: table for name, table in tables.items() if name != "profiles"}  # Too many columns.
        markdown = "\n".join(f"## {TITLES[name]}\n\n{table.markdown()}" for name, table in readable.items())
        latex = "\n".join(table.latex() for table in readable.values())
        yield from zip(_TABLES, map(str.encode, (csv_of(tables), markdown, latex)), strict=True)
    suite = result.definition
    unit, kinds = suite.aggregate.unit, {name: task.score for name, task in suite.tasks.items()}
    if not result.has_scores:
        return
    yield "scores.csv", scores_csv(result.scores).encode()
    if result.published is None and unit is not None:
        makers: dict[str, Callable[[], str]] = {
            "rliable.json": lambda: rliable_json(result.normalized_scores, unit),
            "marl_eval.json": lambda: marl_eval_json(result.scores_by_step, suite.suite, kinds),
        }
        yield from _of_all_runs(makers, notes)


def _of_all_runs(makers: Mapping[str, Callable[[], str]], notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files that need all runs. If a file cannot be made, add a note."""
    for name, make in makers.items():
        try:
            yield name, make().encode()
        except UsageError as error:  # noqa: PERF203  # Two files.
            notes.append(f"{name} is not written: {error}")


def _page(result: SuiteResult, folder: Path, cells: Path) -> str:
    meanings = [(TITLES[name], table.details) for name, table in _tables(result).items() if table.details]
    terms = PageTable("Definitions and intervals", ("table", "meaning"), meanings, folded=True)
    content, title = result.page, result.definition.suite
    shown: dict[str, Any] = {"charts": list(_charts(result)), "films": list(_films(result, folder, cells))}
    shown["content"] = replace(content, sections=[*content.sections, terms])
    return render_template("suite.html.j2", generator=_GENERATOR, title=title, **shown)


def _charts(result: SuiteResult) -> Iterator[tuple[str, list[Plot]]]:
    """Yield the heading and the charts of each table: first, a chart of each task."""
    for name, table in sorted(_tables(result).items(), key=lambda one: one[0] != "tasks"):
        found = [_lines(name, table)] if name in _LINES else _panels(result, name, table)
        yield TITLES[name], [*filter(None, found)]


def _lines(name: str, table: Table) -> Plot | None:
    series: dict[str, list[tuple[float, Row]]] = {}
    for policy, at in table.cells:
        series.setdefault(policy, []).append((float(at), _row(table, policy, at)))
    return lines(TITLES[name], table.columns_are, _LINES[name], series)


def _panels(result: SuiteResult, name: str, table: Table) -> Iterator[Plot | None]:
    """Yield a chart for each task, aggregate or baseline, with a dot and an interval for each policy."""
    suite, panels = result.definition, table if name == "tasks" else table.transposed()
    for panel in panels.rows:
        rows = [_row(panels, panel, policy) for row, policy in panels.cells if row == panel]
        score = suite.tasks[panel].score if panel in suite.tasks else "score"
        within = (0.5,) if name == "improvement" else suite.bounds.get(panel, ()) if name == "tasks" else ()
        yield estimates(panel, _AXES.get(name, f"mean {score}"), rows, within=within)


def _row(table: Table, row: str, column: str | float) -> Row:
    one = table.cells[row, column]
    return Row(str(column), one.value, one.interval.low, one.interval.high, table.text(row, column), one.both)


def _films(result: SuiteResult, folder: Path, cells: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each cell that has videos, with their links and captions: the worst, median and best episode first."""
    for state in result.cells:
        place = cells / state.planned.cell.folder
        if state.score is not None and video_folder(place).is_dir():
            found = load(place)
            files, named = videos_of(found, place), captions(found)
            shown = [index for index in dict.fromkeys([*named, *files]) if index in files]
            links = [quote(os.path.relpath(files[index].resolve(), folder.resolve())) for index in shown]
            yield str(state.planned.cell), [*zip(links, (named.get(i, f"episode {i}") for i in shown), strict=True)]

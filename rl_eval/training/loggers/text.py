"""Loggers that write text: lines on a console, or a file with one line per step.

A resumed training continues its file. Each point rewrites the whole file atomically, so a kill or a full disk leaves
the old file. An existing file is continued only if it begins with the names in :data:`_MARK`. Any other file is
rejected and does not change.
"""

from __future__ import annotations

import abc
import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from rl_eval.atomic_write import sweep, write_text
from rl_eval.errors import UsageError
from rl_eval.records.plain import plain
from rl_eval.results.csv_text import read_csv, write_csv
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers.base import Logger, prefix_of, row_of

if TYPE_CHECKING:
    from rl_eval.recording.video import Video


Row = Mapping[str, Any]

_MARK: Final = ["step", "weights_version", "time", "status", "fingerprint"]
"""First names of every row of :func:`row_of`. A file that begins with them is a file of these loggers."""


class _StepFile(Logger):
    """Text file with at most one row per step.

    Args:
        path: Path of the file. An existing file is continued; it does not change before the first point.

    Raises:
        UsageError: The file exists, and a logger of this class did not write it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._read()

    @override
    def log(self, point: EvalPoint) -> None:
        """Write the row of a point; it replaces the row of the same step.

        Raises:
            UsageError: The file is no longer a file of this logger.
            OSError: The point cannot be written; the file has not changed.
        """
        sweep(self.path.parent)
        names, rows = self._read()
        rows[point.step] = row_of(point)
        try:
            write_text(self.path.resolve(), self._format(names, [*rows.values()]))
        except OSError as error:
            reason = f"{error.strerror}: step {point.step} was not written"
            raise OSError(error.errno, reason, os.fspath(self.path)) from error

    @abc.abstractmethod
    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        """Return the names that a file begins with, and its rows.

        Raises:
            ValueError: A line cannot be read.
        """

    @abc.abstractmethod
    def _format(self, names: list[Any], rows: list[Row]) -> str:
        """Return the text of a file with these rows; ``names`` are the names with which the old file begins."""

    def _read(self) -> tuple[list[Any], dict[int, Row]]:
        """Return the names that the file begins with, and its rows by step."""
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return [], {}
        try:
            names, rows = self._parse(content.decode())
            _check_mark(names)
            return names, {int(row["step"]): row for row in rows}
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            problem = f"{self.path} exists and is not a file of this logger ({type(error).__name__}: {error})"
            fix = "The file was not changed. Pass another path, or move the file."
            raise UsageError(problem, key="path", value=str(self.path), fix=fix) from error


@final
class JSONLinesLogger(_StepFile):
    """File with one JSON object per step. NaN is written as ``null``, and infinity as the string ``"inf"``.

    Args:
        path: Path of the file. An existing file is continued; it does not change before the first point.

    Raises:
        UsageError: The file exists, and a logger of this class did not write it.
    """

    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        rows = [json.loads(line) for line in text.split("\n") if line]
        return list(rows[0]) if rows else [], rows

    def _format(self, names: list[Any], rows: list[Row]) -> str:
        return "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows)


@final
class CSVLogger(_StepFile):
    """CSV file with a header and one line per step. NaN is written as an empty cell, and infinity as ``inf``.

    A metric that is not in the file yet gets a new column at the right, with empty cells in the existing lines. If a
    point lacks a metric of the file, the cell is empty.

    Args:
        path: Path of the file. An existing file is continued; it does not change before the first point.

    Raises:
        UsageError: The file exists, and a logger of this class did not write it.
    """

    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        names, *rows = read_csv(text)
        return names, [dict(zip(names, row, strict=True)) for row in rows if row]

    def _format(self, names: list[Any], rows: list[Row]) -> str:
        columns = list(dict.fromkeys([*names, *(name for row in rows for name in row)]))
        return write_csv([columns, *([_cell(row.get(name)) for name in columns] for row in rows)])


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _check_mark(names: list[Any]) -> None:
    if names[: len(_MARK)] != _MARK:
        begin = ", ".join(map(str, names[:3])) or "a blank line"
        raise ValueError(f"the file begins with {begin}, not with {', '.join(_MARK)}")


@final
class ConsoleLogger(Logger):
    """Logger that prints one line per evaluation: mean return with interval, problems, and values of ``metrics_fn``.

    Args:
        console: Console for the lines; by default stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._given = console

    @cached_property
    def _console(self) -> Console:
        # Built at the first use: a console cannot be pickled, but this logger can.
        return self._given or Console(highlight=False, emoji=False)

    @override
    def log(self, point: EvalPoint) -> None:
        # Do not wrap: if stdout is a file, each evaluation is one line in it.
        self._console.print(_line(point), soft_wrap=True)

    @override
    def log_video(self, video: Video, point: EvalPoint) -> None:
        where = "" if video.path is None else f": {video.path}"
        unlike = "" if video.identical else f" (differs from the record in {', '.join(video.differences)})"
        self._console.print(Text(f"  video of episode {video.index}{unlike}{where}"), soft_wrap=True)


def _line(point: EvalPoint) -> Text:
    result = point.result
    interval, width = result.interval, f"{result.confidence:.0%}"
    mean = f"return {result.aggregates.mean:.6g} ({interval.low:.6g} to {interval.high:.6g}) {width}"
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

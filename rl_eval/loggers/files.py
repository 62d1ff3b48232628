"""Files with one line per step, that a kill leaves readable and a resumed training continues.

A point is appended in one write; where the disk is full, what was written of it is taken away at once. A last line that
was cut short, by a kill in the middle of it, is taken away when the file is opened again. Only what appending cannot express rewrites the file, under another name first: a step that is there
already is replaced where it stands, and a CSV file gets the columns that it lacks.
"""

from __future__ import annotations

import abc
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from rl_eval.errors import UsageError
from rl_eval.loggers.base import Logger, row_of
from rl_eval.point import EvalPoint
from rl_eval.report.files import plain, write_text

__all__ = ["CSVLogger", "JSONLinesLogger"]

Row = Mapping[str, Any]


class _StepFile(Logger):
    """A text file of rows, at most one per step.

    Args:
        path: The file; it is continued if it is there.

    Raises:
        UsageError: It is there and something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._steps = {_step(row) for row in self._read()}

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`.

        Raises:
            OSError: The point cannot be written; the file is as it was.
        """
        row = row_of(point)
        try:
            if point.step in self._steps or not self._fits(row):
                self._rewrite(point.step, row)
            else:
                self._append(self._line(row))
        except OSError as error:
            reason = f"{error.strerror}: step {point.step} was not written"
            raise OSError(error.errno, reason, os.fspath(self.path)) from error
        self._steps.add(point.step)

    @abc.abstractmethod
    def _parse(self, text: str) -> list[Row]:
        """Read whole lines; raise ``ValueError`` or ``KeyError`` for what this logger has not written."""

    @abc.abstractmethod
    def _format(self, rows: list[Row]) -> str:
        """Return the text of a whole file."""

    @abc.abstractmethod
    def _line(self, row: Row) -> str:
        """Return the text of one row."""

    @abc.abstractmethod
    def _fits(self, row: Row) -> bool:
        """Whether a row can be appended."""

    def _read(self) -> list[Row]:
        """Read the file, and take a torn last line away."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = self._checked(whole)
        except _UNREADABLE as error:
            # The last line may be torn and have an end nevertheless: that of something that was appended to it.
            whole = whole[: whole.rfind(b"\n", 0, -1) + 1]
            with suppress(*_UNREADABLE):
                rows = self._checked(whole)
            if not rows:
                raise UsageError(
                    f"{self.path} is there already, and no file of this logger ({type(error).__name__}: {error}): give "
                    "another path, or remove it"
                ) from error
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return rows

    def _checked(self, content: bytes) -> list[Row]:
        rows = self._parse(content.decode())
        _ = [_step(row) for row in rows]
        return rows

    def _rewrite(self, step: int, row: Row) -> None:
        rows = {_step(other): other for other in self._read()}
        text = self._format([*(rows | {step: row}).values()])
        write_text(self.path, text)
        self._parse(text)

    def _append(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            size, rest = os.fstat(file.fileno()).st_size, memoryview(line.encode())
            try:
                # A disk that becomes full takes a part and says nothing: it is the next write that says why.
                while rest:
                    if not (count := file.write(rest)):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    rest = rest[count:]
            except OSError:
                file.truncate(size)
                raise


@final
class JSONLinesLogger(_StepFile):
    """Writes one JSON object per step; NaN is null, and infinity the text ``inf``.

    Args:
        path: The file; it is continued if it is there.

    Raises:
        UsageError: It is there and something else.
    """

    def _parse(self, text: str) -> list[Row]:
        return [json.loads(line) for line in text.splitlines()]

    def _format(self, rows: list[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps(plain(row), allow_nan=False) + "\n"

    def _fits(self, row: Row) -> bool:
        return True


@final
class CSVLogger(_StepFile):
    """Writes one line per step under a header; NaN is an empty cell, and infinity ``inf``.

    A metric that comes up later gets a column at the right, which is empty in earlier lines; one that is missing
    leaves its cell empty.

    Args:
        path: The file; it is continued if it is there.

    Raises:
        UsageError: It is there and something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._columns: list[str] = []
        super().__init__(path)

    def _parse(self, text: str) -> list[Row]:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows: list[Row] = list(reader)
        self._columns = list(reader.fieldnames or ())
        if self._columns and "step" not in self._columns:
            raise ValueError("the header has no column 'step'")
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a line has not as many cells as the header")
        return rows

    def _format(self, rows: list[Row]) -> str:
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        return _csv_line(self._columns) + "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return _csv_line(_cell(row.get(name)) for name in self._columns)

    def _fits(self, row: Row) -> bool:
        return row.keys() <= set(self._columns)


def _csv_line(cells: Iterable[Any]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _step(row: Row) -> int:
    return int(row["step"])

"""Files with one line per step, that a kill leaves readable and a resumed training continues.

A point is appended in one write; where the disk is full, what was written of it is taken away at once. A last line that
was cut short, by a kill in the middle of it, is taken away when the file is opened again. Only what appending cannot
express rewrites the file, under another name first: a step that is there already is replaced where it stands, and a CSV
file gets the columns that it lacks.
"""

from __future__ import annotations

import abc
import csv
import errno
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Final, final

from rl_eval.atomic_write import write_text
from rl_eval.errors import UsageError
from rl_eval.loggers.base import Logger, row_of
from rl_eval.point import EvalPoint
from rl_eval.report.files import plain

__all__ = ["CSVLogger", "JSONLinesLogger"]

Row = Mapping[str, Any]

_UNREADABLE: Final = (ValueError, KeyError, TypeError, csv.Error)


class _StepFile(Logger):
    """A text file of rows, at most one per step.

    Args:
        path: The file; it is continued if it is there.

    Raises:
        UsageError: It is there and something else.
    """

    _start: ClassVar[bytes]
    """What every file of this logger begins with."""

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
        """Read whole lines; raise one of ``_UNREADABLE`` for what this logger has not written."""

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
        rows, size = self._whole_rows(content)
        if size < len(content):
            os.truncate(self.path, size)
        return rows

    def _whole_rows(self, content: bytes) -> tuple[list[Row], int]:
        """Return the rows before a torn last line, and how many bytes they take."""
        size = content.rfind(b"\n") + 1
        try:
            if not size and content[: len(self._start)] != self._start[: len(content)]:
                raise ValueError(f"it does not begin with {self._start.decode()}")
            return self._checked(content[:size]), size
        except _UNREADABLE as error:
            # A torn line may have an end nevertheless: that of something that was appended to it.
            size = content.rfind(b"\n", 0, max(size - 1, 0)) + 1
            with suppress(*_UNREADABLE):
                if rows := self._checked(content[:size]):
                    return rows, size
            raise UsageError(
                f"{self.path} is there already, and no file of this logger ({type(error).__name__}: {error}): give "
                "another path, or remove it"
            ) from error

    def _checked(self, content: bytes) -> list[Row]:
        rows = self._parse(content.decode())
        _ = [_step(row) for row in rows]
        return rows

    def _rewrite(self, step: int, row: Row) -> None:
        rows = {_step(other): other for other in self._read()}
        text = self._format([*(rows | {step: row}).values()])
        write_text(self.path, text)
        self._parse(text)  # A CSV file has these columns from now on, and not before.

    def _append(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                _write_all(file, line.encode())
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

    _start = b'{"step": '

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

    _start = b"step,"

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
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        return _csv_line(columns) + "".join(_cells(row, columns) for row in rows)

    def _line(self, row: Row) -> str:
        return _cells(row, self._columns)

    def _fits(self, row: Row) -> bool:
        return row.keys() <= set(self._columns)


def _write_all(file: FileIO, content: bytes) -> None:
    """Write everything: a disk that becomes full takes a part and says nothing, and it is the next write that fails."""
    rest = memoryview(content)
    while rest:
        count = file.write(rest)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[count:]


def _csv_line(cells: Iterable[Any]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cells(row: Row, columns: Iterable[str]) -> str:
    return _csv_line(_cell(row.get(name)) for name in columns)


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _step(row: Row) -> int:
    return int(row["step"])

"""Files with one line per step, that a kill leaves readable and a resumed training continues.

Only a file that begins with the names that every point begins with is continued; any other is refused and stays as it
is. A point is appended in one write; where the disk is full, what was written of it is taken away at once. What
appending cannot express writes the whole file anew, atomically: the first point, a step that is there already, a column
that is missing, and an end that a kill has cut short, which is mended with the first point of the next logger.
"""

from __future__ import annotations

import abc
import csv
import errno
import io
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import sweep, write_text
from rl_eval.errors import UsageError
from rl_eval.loggers.base import Logger, row_of
from rl_eval.plain import plain
from rl_eval.point import EvalPoint

__all__ = ["CSVLogger", "JSONLinesLogger"]

Row = Mapping[str, Any]

_MARK: Final = ["step", "weights_version", "time", "status", "fingerprint"]
"""First names of every row of :func:`row_of`; a file that begins with them is ours."""

_logger = logging.getLogger(__name__)


class _StepFile(Logger):
    """A text file of rows, at most one per step.

    Args:
        path: The file; it is continued if it is there, and not changed before the first point.

    Raises:
        UsageError: It is there and something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._steps: set[int] = set()
        self._ready = False
        """Whether the file is there and ends with a whole line."""
        self._read()

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`.

        Raises:
            UsageError: The file has become something else.
            OSError: The point cannot be written; the file is as it was.
        """
        row = row_of(point)
        try:
            if self._can_append(row):
                self._append(self._line(row))
            else:
                self._rewrite(row)
        except OSError as error:
            reason = f"{error.strerror}: step {point.step} was not written"
            raise OSError(error.errno, reason, os.fspath(self.path)) from error
        self._steps.add(point.step)

    @abc.abstractmethod
    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        """Return the names that a file begins with, and its rows.

        Raises:
            ValueError: A line cannot be read.
        """

    @abc.abstractmethod
    def _format(self, rows: list[Row]) -> str:
        """Return the text of a whole file."""

    @abc.abstractmethod
    def _line(self, row: Row) -> str:
        """Return the text of one row."""

    @abc.abstractmethod
    def _fits(self, row: Row) -> bool:
        """Whether a row has a place for all its values."""

    def _read(self) -> tuple[dict[int, Row], bool]:
        """Return the rows by step, and whether there are any and the file ends with them.

        Raises:
            UsageError: It is something else.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return {}, False
        try:
            names, rows, whole = self._parse_all_but_torn(content)
            _check_mark(names)
            return {_step(row): row for row in rows}, whole
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path} is there already, and no file of this logger ({type(error).__name__}: {error}): it was "
                "left as it is; give another path, or move it away"
            ) from error

    def _parse_all_but_torn(self, content: bytes) -> tuple[list[Any], list[Row], bool]:
        """Parse a file, without its last line if that one has no end and cannot be parsed."""
        whole = content.endswith(b"\n")
        try:
            return *self._parse(content.decode()), whole
        except ValueError:
            rest = content[: content.rfind(b"\n") + 1]
            if whole or not rest:
                raise
            return *self._parse(rest.decode()), False

    def _can_append(self, row: Row) -> bool:
        if not self._ready:
            sweep(self.path.parent)
            rows, self._ready = self._read()
            self._steps = set(rows)
            if rows and not self._ready:
                _logger.warning("%s: its last line was cut short, or its last value may be: it is mended", self.path)
        return self._ready and row["step"] not in self._steps and self._fits(row)

    def _rewrite(self, row: Row) -> None:
        rows, _ = self._read()
        text = self._format([*(rows | {row["step"]: row}).values()])
        write_text(self.path, text)
        self._parse(text)  # A CSV file has these columns from now on, and not before.
        self._ready = True

    def _append(self, line: str) -> None:
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
        path: The file; it is continued if it is there, and not changed before the first point.

    Raises:
        UsageError: It is there and something else.
    """

    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        rows = [json.loads(line) for line in text.split("\n") if line]
        return list(rows[0]) if rows else [], rows

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
        path: The file; it is continued if it is there, and not changed before the first point.

    Raises:
        UsageError: It is there and something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._columns: list[str] = []
        super().__init__(path)

    def _parse(self, text: str) -> tuple[list[Any], list[Row]]:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            rows: list[Row] = list(reader)
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a line has not as many cells as the header")
        self._columns = list(reader.fieldnames or ())
        return self._columns, rows

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


def _check_mark(names: list[Any]) -> None:
    if names[: len(_MARK)] != _MARK:
        begin = ", ".join(map(str, names[:3])) or "a blank line"
        raise ValueError(f"it begins with {begin}, not with {', '.join(_MARK)}")


def _step(row: Row) -> int:
    return int(row["step"])

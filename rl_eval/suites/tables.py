"""Tables of numbers with intervals, as CSV with all digits, as Markdown, and as LaTeX with booktabs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from rl_eval.reports.page import Table as PageTable
from rl_eval.reports.page import one_line
from rl_eval.results.csv_text import write_csv
from rl_eval.results.stats.interval import Interval
from rl_eval.results.text import decimals, number

_LATEX: Final = re.compile(r"[\\~^&%$#_{}<>|]|(?<=-)-|(?<=['`!?,])['`,]|^[\[*]")
"""Special characters of LaTeX, second characters of ligatures, and first characters of an option of a row."""
_NAMES: Final = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
_ESCAPES: Final = {c: f"\\{c}" for c in "&%$#_{}"} | {c: rf"\text{name}{{}}" for c, name in _NAMES.items()}
_MINUS: Final = re.compile(r"(?<![\w.-])-(?=\d)")
NUMBERS: Final = ("value", "low", "high", "confidence", "method", "note", "both")
"""Headings of the numbers of a cell in CSV."""
_MARKUP: Final = re.compile(r"[\\`*<\[~$|]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""Characters that are markup in Markdown; an underscore inside a word is not."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval, as in ``value, interval = estimate``."""

    value: float
    """The number; NaN if it cannot be computed. In this case, the note of the interval has the reason."""
    interval: Interval
    both: tuple[float, ...] = ()
    """Number of each training seed, in ascending order of the seeds, if there are exactly two; otherwise empty."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.value, self.interval))


@final
@dataclass(frozen=True, eq=False)
class Table:
    """Estimates by row and column. A cell may be absent."""

    caption: str
    """Description of the numbers, in at most 25 words."""
    rows_are: str
    """Heading of the rows, such as ``"policy"``."""
    columns_are: str
    """Meaning of the columns, such as ``"aggregate"``, ``"step"`` or ``"threshold"``."""
    cells: Mapping[tuple[str, str | float], Estimate]
    own_notes: tuple[str, ...] = ()
    """Notes about the whole table."""
    details: str = ""
    """Definitions of the numbers and methods of the intervals, in sentences."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows, in the order of the cells."""
        return tuple(dict.fromkeys(row for row, _ in self.cells))

    @property
    def columns(self) -> tuple[str | float, ...]:
        """Names of the columns, in the order of the cells. Steps and thresholds are numbers."""
        return tuple(dict.fromkeys(column for _, column in self.cells))

    @property
    def interval_notes(self) -> tuple[str, ...]:
        """Notes of the intervals, in the order of the cells, without duplicates."""
        return tuple(dict.fromkeys(cell.interval.note for cell in self.cells.values() if cell.interval.note))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the table and of its intervals."""
        return (*self.own_notes, *self.interval_notes)

    def transposed(self) -> Table:
        """Return the table with its columns as rows."""
        cells: dict[tuple[str, str | float], Estimate] = {
            (str(column), row): cell for (row, column), cell in self.cells.items()
        }
        return replace(self, rows_are=self.columns_are, columns_are=self.rows_are, cells=cells)

    def page_table(self, title: str) -> PageTable:
        """Return the table for a page."""
        heading, *rows = self._grid(str)
        return PageTable(title, heading, rows, self.caption)

    def csv(self) -> str:
        """Return CSV with one line per cell, with all digits. Without an interval, ``low`` and ``high`` are empty."""
        return write_csv([(self.rows_are, self.columns_are, *NUMBERS), *self.lines()])

    def markdown(self) -> str:
        """Return a Markdown table, with caption and notes below it."""
        lines = [f"| {' | '.join(cells)} |" for cells in self._grid(_markdown)]
        lines.insert(1, f"|---|{'---:|' * len(self.columns)}")
        notes = (f"\n- {_markdown(note)}" for note in filter(None, (self.details, *self.notes)))
        return "\n".join([*lines, "", _markdown(self.caption), *notes, ""])

    def latex(self) -> str:
        r"""Return a LaTeX table with a caption. The document needs ``\usepackage{booktabs}``."""
        heading, *body = (f"{' & '.join(_with_minus(cells))} \\\\" for cells in self._grid(_latex))
        notes = " ".join(filter(None, (self.details, f"Notes: {'; '.join(self.notes)}." if self.notes else "")))
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.caption)}}}",
                rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
                *(r"\toprule", heading, r"\midrule", *body, r"\bottomrule"),
                r"\end{tabular}",
                rf"\par\smallskip\footnotesize {_latex(notes)}",
                r"\end{table}",
                "",
            ]
        )

    def lines(self) -> Iterator[tuple[Any, ...]]:
        """Yield a line for each cell: its row, its column, and the values of :data:`NUMBERS`."""
        for (row, column), one in self.cells.items():
            low_high = (one.interval.low, one.interval.high) if one.interval.exists else ("", "")
            note = "; ".join(filter(None, (*self.own_notes, one.interval.note)))
            both = " ".join(map(str, one.both))
            yield row, column, one.value, *low_high, one.interval.confidence, one.interval.method, note, both

    def _grid(self, escaped: Callable[[str], str]) -> list[list[str]]:
        heading = [escaped(str(name)) for name in (self.rows_are, *self.columns)]
        return [heading, *([escaped(row), *(self.text(row, column) for column in self.columns)] for row in self.rows)]

    def text(self, row: str, column: str | float) -> str:
        """Return a cell as text: the number with its interval, or with the numbers of both training seeds."""
        if (row, column) not in self.cells:
            return "-"
        one = self.cells[row, column]
        spread = abs(one.both[1] - one.both[0]) / 2 if one.both else (one.interval.high - one.interval.low) / 4
        places = decimals(spread, one.value)
        text = number(one.value, places)
        if one.interval.exists:
            return f"{text} ({number(one.interval.low, places)} to {number(one.interval.high, places)})"
        return f"{text} ({' and '.join(number(each, places) for each in one.both) or 'no interval'})"


def csv_of(tables: Mapping[str, Table]) -> str:
    """Return the cells of several named tables as one CSV, like :meth:`Table.csv`."""
    lines = ((name, *line) for name, table in tables.items() for line in table.lines())
    return write_csv([("table", "row", "column", *NUMBERS), *lines])


def _with_minus(cells: Sequence[str]) -> list[str]:
    """Return a row of a LaTeX table, with minus signs in its numbers."""
    return [cells[0], *(_MINUS.sub("$-$", cell) for cell in cells[1:])]


def _latex(text: str) -> str:
    return _LATEX.sub(lambda found: _ESCAPES.get(found[0], f"{{}}{found[0]}"), one_line(text))


def _markdown(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", one_line(text))

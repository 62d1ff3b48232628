"""CSV text whose cells stay text in a spreadsheet, and its inverse.

A spreadsheet evaluates a text that begins like a formula. In a file, such a text begins with an apostrophe, which
:func:`read_csv` removes. Numbers do not change, even if they are text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Any, Final

_NUMBERS: Final = r"(?:[+-]?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan)(?: |\Z))+\Z"
_FORMULA: Final = re.compile(rf"(?!{_NUMBERS})(?:'*[\t\r\n]|[\s']*[=+\-@＝＋－＠])", re.IGNORECASE)  # noqa: RUF001
"""Begin of a text that a spreadsheet evaluates. Some accept wide signs."""


def write_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV text with LF line ends."""
    lines: list[str] = []
    file: Any = type("Lines", (), {"write": staticmethod(lines.append)})
    csv.writer(file).writerows([csv_cell(value) for value in row] for row in rows)
    # With the line end CR LF, the writer also puts quotes around a text that contains CR.
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def read_csv(text: str) -> list[list[str]]:
    """Return the rows of CSV text, without the apostrophes that :func:`write_csv` added.

    Raises:
        csv.Error: The text is not CSV.
    """
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    return [[one[1:] if one[:1] == "'" and _FORMULA.match(one[1:]) else one for one in row] for row in rows]


def csv_cell(value: Any) -> Any:
    """Return a value as it is in a file: a text that begins like a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value

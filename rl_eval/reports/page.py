"""Page as data, with renderers for a terminal, for plain text and for a notebook.

Text from files is shown on one line and without unprintable characters. Otherwise, a line break in a name could imitate
a line of the page, and a terminal would execute control characters. A lone surrogate, which JSON may contain, could
not be encoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from rl_eval.errors.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

    from rl_eval.reports.charts import Plot


WIDTH: Final = 80
_LABEL: Final = 13
_GAP: Final = 3
_COLOURS: Final = {"complete": "green", "partial": "yellow", "failed": "red"}
_BYTES: Final = 0xDC00
"""First of the surrogates with which Python represents the bytes of a file name that are not UTF-8."""


class Line(NamedTuple):
    """One labelled line. Further lines of the same topic have an empty label."""

    label: str
    strong: str
    """Main number or word of the line, in bold."""
    rest: str = ""


@dataclass(frozen=True)
class Table:
    """Table of text. The first column contains the names of the rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False
    """Whether a browser shows the table only after a click on its title."""
    num_hidden: int | None = None
    """Number of last columns that a browser hides until they are chosen. If set, a browser can sort and filter rows."""


@dataclass(frozen=True)
class Page:
    """Content of a page. It can be rendered as plain text, by :mod:`rich`, and in a notebook."""

    title: str
    subtitle: str
    state: str
    """Status at the right edge: ``complete``, ``partial``, ``failed``, or empty."""
    sections: Sequence[Sequence[Line] | Table | Plot]
    """Parts of the page, in order. Only browsers show plots."""
    notes: Sequence[str] = field(default_factory=list)
    verdict: str = ""
    failure: str = ""
    """Reason why the numbers are missing or not reliable. It is shown first."""

    def __str__(self) -> str:
        from rich.console import Console, Group

        console = Console(
            file=io.StringIO(), width=1_000, color_system=None, highlight=False, emoji=False, legacy_windows=False
        )
        with console.capture() as captured:
            console.print(Group(*_parts(self, "-")))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich__(self) -> RenderableType:
        """Return the page in colour. Except for tables, it has at most 80 columns."""
        from rich.console import Group

        return Group(*_parts(self, "─"))

    def _repr_html_(self) -> str:
        """Return one HTML table for a notebook. All text is escaped."""
        rows: list[Sequence[str]] = []
        for section in (self.head, *self.sections, self.tail):
            if isinstance(section, Table):
                rows += [(section.title,), section.headings, *section.rows]
            elif isinstance(section, Sequence):
                rows += section
        caption = "   ".join(map(_escaped, filter(None, (self.title, self.subtitle, self.state))))
        return f"<table><caption {_LEFT}><b>{caption}</b></caption>{''.join(map(_html_row, rows))}</table>"

    @property
    def head(self) -> list[Line]:
        """Line with the failure; empty if there is none."""
        return [Line("failed", "", self.failure)] if self.failure else []

    @property
    def tail(self) -> list[Line]:
        """Lines with the verdict and the notes."""
        verdict = [Line("verdict", "", self.verdict)] if self.verdict else []
        return verdict + [Line("note", "", note) for note in self.notes]


def one_line(text: str) -> str:
    """Return a text on one line.

    Unprintable characters are removed or become spaces, and undecodable bytes of file names become escapes.
    """
    return text if text.isprintable() else "".join(map(_printed, printable(text)))


def _printed(char: str) -> str:
    r"""Return a character or its replacement.

    A byte becomes an escape such as ``\xff``, so that file names stay distinct.
    """
    if char.isprintable():
        return char
    byte = ord(char) - _BYTES
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else " "


def lines(text: str) -> str:
    """Return a text with several lines, such as a traceback, without unprintable characters."""
    return "\n".join(one_line(line.expandtabs()).rstrip() for line in text.splitlines())


def _parts(page: Page, rule: str) -> Iterator[RenderableType]:
    from rich.constrain import Constrain
    from rich.rule import Rule

    title, state = _text(page.title, "bold"), _text(page.state, _COLOURS.get(page.state, ""))
    yield title.append(" " * max(1, WIDTH - len(title) - len(state))).append(state)
    if page.subtitle:
        yield Constrain(_text(page.subtitle), WIDTH)
    yield from (_hanging(line, "bold red") for line in page.head)
    yield Constrain(Rule(style="dim", characters=rule), WIDTH)
    shown = [section for section in page.sections if section and isinstance(section, (Table, Sequence))]
    grouped = [line for section in shown if not isinstance(section, Table) for line in section]
    label = max([_LABEL, *(len(line.label) + 1 for line in grouped)])
    strong = max([len(line.strong) for line in grouped], default=0) + _GAP
    for place, section in enumerate(shown):
        if place:
            yield ""
        if isinstance(section, Table):
            yield from _table(section)
            continue
        grid = _grid(label, strong)
        for line in section:
            grid.add_row(_text(line.label, "dim"), _text(line.strong, "bold"), _text(line.rest))
        yield Constrain(grid, WIDTH)
    if page.tail:
        yield Constrain(Rule(style="dim", characters=rule), WIDTH)
    yield from (_hanging(line, "bold" if line.label == "verdict" else "yellow") for line in page.tail)


def _table(table: Table) -> Iterator[RenderableType]:
    from rich.table import Table as Grid

    laid_out = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for place, heading in enumerate(table.headings):
        # On a narrow terminal, numbers wrap before the names of the rows are cut.
        laid_out.add_column(_text(heading), justify="right" if place else "left", no_wrap=not place, overflow="fold")
    for row in table.rows:
        laid_out.add_row(*("\n".join(map(one_line, cell.split("\n"))) for cell in row))
    yield from (_text(table.title, "dim"), laid_out)
    if table.caption:
        yield _text(table.caption, "dim")


def _hanging(line: Line, style: str) -> RenderableType:
    """Return a labelled sentence with a hanging indent."""
    from rich.constrain import Constrain

    row = _grid(_LABEL)
    row.add_row(_text(line.label, style), _text(line.rest))
    return Constrain(row, WIDTH)


def _grid(*widths: int) -> Grid:
    """Return an empty grid with columns of the given widths, and a last column with the remaining width."""
    from rich.table import Table as Grid

    grid = Grid.grid()
    for width in widths:
        grid.add_column(width=width)
    grid.add_column(overflow="fold")
    return grid


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(one_line(text), style)


_LEFT: Final = 'style="text-align: left; white-space: pre-wrap"'
"""Style of a table cell in a notebook. The notebook's own style aligns text to the right and collapses spaces."""


def _html_row(row: Sequence[str]) -> str:
    first, *cells = map(_escaped, row)
    if isinstance(row, Line):
        cells[0] = f"<b>{cells[0]}</b>"
    return f"<tr><th {_LEFT}>{first}</th>{''.join(f'<td {_LEFT}>{cell}</td>' for cell in cells)}</tr>"


def _escaped(text: str) -> str:
    return escape(one_line(text))

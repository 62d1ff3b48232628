"""Pages of the docs whose benchmark tables are made from the committed results.

A page has a table between ``<!-- benchmark: NAME -->`` and ``<!-- end of benchmark -->``, with the machine and the
versions, or with ``<!-- benchmark: NAME, short -->`` the name of the file that has them. A single number within a
sentence is between ``<!-- figure: NAME -->`` and ``<!-- end of figure -->``. What belongs to a benchmark without
committed results stays as it is written.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from benchmarks import provenance, table
from benchmarks.runner import Row
from benchmarks.scenarios import REPO

__all__ = ["COMMAND", "FIGURES", "RESULTS", "generated", "markdown", "named", "pages", "read", "write"]

COMMAND: Final = "python -m benchmarks tables"
RESULTS: Final = REPO / "benchmarks" / "results"
FIGURES: Final[Mapping[str, Callable[[Sequence[Row]], str]]] = {
    "throughput": table.best_share,
    "faults": table.share_of_same,
    "levels": table.most_wrong,
    "seeds": table.coverage_of_aggregates,
    "ope": table.coverage_of_estimates,
}

_BLOCK: Final = re.compile(
    r"^(<!-- benchmark: (\w+)(, short)? -->\n)(.*?)^(<!-- end of benchmark -->)$", re.DOTALL | re.MULTILINE
)
_FIGURE: Final = re.compile(r"(<!-- figure: (\w+) -->)([^<\n]*)(<!-- end of figure -->)")
_MARKUP: Final = re.compile(r"[\\`*{}\[\]|]|(?<![^\W_])_|_(?![^\W_])")
_RULES: Final[Mapping[str, str]] = {"right": "---:"}


def pages() -> list[Path]:
    """Files with tables or numbers of benchmarks."""
    found = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
    return [path for path in found if named(path.read_text())]


def named(text: str) -> set[str]:
    """Benchmarks that a page names."""
    return {match[2] for pattern in (_BLOCK, _FIGURE) for match in pattern.finditer(text)}


def write() -> list[Path]:
    """Make all tables and numbers again, and return the pages that changed."""
    changed = []
    for path in pages():
        text = path.read_text()
        if (made := generated(text)) != text:
            path.write_text(made)
            changed.append(path)
    return changed


def generated(text: str, results: Path = RESULTS) -> str:
    """Return a page with its tables and numbers as the results have them now.

    Args:
        text: The page.
        results: Folder with ``NAME.json`` files.

    Raises:
        ValueError: The page names a benchmark that does not exist.
    """

    def block(match: re.Match[str]) -> str:
        found = read(match[2], table.TABLES, results)
        return match[0] if found is None else f"{match[1]}\n{_body(found, short=bool(match[3]))}\n{match[5]}"

    def figure(match: re.Match[str]) -> str:
        found = read(match[2], FIGURES, results)
        return match[0] if found is None else f"{match[1]}{FIGURES[match[2]](found['rows'])}{match[4]}"

    return _FIGURE.sub(figure, _BLOCK.sub(block, text))


def read(name: str, known: Mapping[str, Any], results: Path = RESULTS) -> dict[str, Any] | None:
    """Return the results of a benchmark, None if there are none."""
    if name not in known:
        raise ValueError(f"a page names the benchmark {name!r}; known are {', '.join(known)}")
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _body(found: dict[str, Any], *, short: bool) -> str:
    name = found["settings"]["name"]
    text = "\n".join(map(markdown, table.TABLES[name](found["rows"])))
    source = f"Machine and versions: `benchmarks/results/{name}.json`." if short else provenance.line(found)
    return f"{text}\n{source}\n"


def markdown(shown: Table) -> str:
    """Return a table as Markdown, with its title above and its caption below."""
    rows = [list(map(_cell, row)) for row in zip(*(column.cells for column in shown.columns), strict=True)]
    head = [[_cell(column.header) for column in shown.columns]]
    head += [[_RULES.get(column.justify, "---") for column in shown.columns]]
    lines = [f"**{_cell(shown.title)}**", "", *(f"| {' | '.join(row)} |" for row in head + rows), ""]
    return "\n".join([*lines, *([f"{_cell(shown.caption)}.", ""] if shown.caption else [])])


def _cell(markup: Any) -> str:
    """Text of a cell of rich's table, bold where anything in it is."""
    text = Text.from_markup(str(markup))
    plain = _MARKUP.sub(r"\\\g<0>", html.escape(" ".join(text.plain.split()), quote=False))
    return f"**{plain}**" if text.spans else plain

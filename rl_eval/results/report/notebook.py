"""Page of a result as a small HTML table, for notebooks. Whatever it quotes is escaped."""

from __future__ import annotations

from html import escape

from rl_eval.results.report.printable import one_line
from rl_eval.results.report.table import Line, Page

__all__ = ["html_page"]


def html_page(page: Page) -> str:
    """Render a page as one HTML table."""
    rows = [f"<caption>{_text(' '.join(filter(None, (page.title, page.subtitle, page.state))))}</caption>"]
    if page.failure:
        rows.append(_row(Line("failed", "", page.failure)))
    rows += [_row(line) for section in page.sections for line in section]
    rows += [_row(Line("verdict", "", page.verdict))] if page.verdict else []
    rows += [_row(Line("note", "", note)) for note in page.notes]
    return f"<table>{''.join(rows)}</table>"


def _row(line: Line) -> str:
    return f"<tr><th>{_text(line.label)}</th><td><b>{_text(line.strong)}</b></td><td>{_text(line.rest)}</td></tr>"


def _text(text: str) -> str:
    return escape(one_line(text))

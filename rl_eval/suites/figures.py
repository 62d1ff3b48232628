"""Figures of tables with intervals, as SVG and PNG. This module needs ``pip install 'rl-eval[plot]'``."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from rl_eval.errors import needs_extra
from rl_eval.suites.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: Final = {"svg.hashsalt": "rl_eval", "svg.fonttype": "none"}
"""Settings for reproducible files, and for SVG files in which text is stored as text, not as shapes."""


def interval_figure(table: Table, reference: float | None = None) -> Figure:
    """Draw estimates as marks with intervals: one panel for each column, one bar for each row.

    Args:
        table: Table of the estimates.
        reference: Value to mark in each panel; None for no mark.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    num_rows, num_columns = len(table.rows), len(table.columns)
    figure = _figure(2.6 * num_columns + 1.2, 0.35 * num_rows + 1.1)
    panels = figure.subplots(1, num_columns, sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, table.columns, strict=True):
        axes.use_sticky_edges = False  # Bars keep a margin.
        for place, row in enumerate(table.rows):
            if (row, column) not in table.cells:
                continue
            one = table.cells[row, column]
            value, interval = one.value, one.interval
            axes.barh(place, interval.high - interval.low, 0.5, interval.low, color=f"C{place % 10}", alpha=0.4)
            axes.plot(one.both, [place] * len(one.both), ".", color=f"C{place % 10}")
            axes.plot([value, value], [place - 0.3, place + 0.3], color=f"C{place % 10}")
        if reference is not None:
            axes.axvline(reference, color="gray", linestyle=":")
        axes.set_title(_shown(str(column)))
        axes.locator_params(axis="x", nbins=4)  # More tick labels could overlap.
        axes.grid(axis="x", alpha=0.25)
    panels[0].set(yticks=range(num_rows), yticklabels=map(_shown, table.rows), ylim=(num_rows - 0.5, -0.5))
    return figure


def line_figure(table: Table, ylabel: str) -> Figure:
    """Draw each row as a line over the columns, with its intervals as a band: learning curves or profiles.

    Args:
        table: Table whose columns are numbers.
        ylabel: Label of the vertical axis.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    for row in table.rows:
        _draw_line(axes, table, row)
    axes.set(xlabel=table.columns_are, ylabel=ylabel)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    return figure


def picture(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Return the bytes of a figure's file. Equal figures give equal bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def pages(figures: Iterable[Figure]) -> bytes:
    """Return a PDF file with one figure on each page. Equal figures give equal bytes."""
    from matplotlib.backends.backend_pdf import PdfPages

    content = io.BytesIO()
    with PdfPages(content, metadata={"CreationDate": None}) as file:
        for figure in figures:
            file.savefig(figure)
    return content.getvalue()


def _draw_line(axes: Axes, table: Table, row: str) -> None:
    points = [(column, *table.cells[row, column]) for column in table.columns if (row, column) in table.cells]
    places = np.array([place for place, _, _ in points], np.float64)
    marker, values = "o" if len(points) < 30 else "", [value for _, value, _ in points]
    [line] = axes.plot(places, values, label=_shown(row), marker=marker)
    ends = np.array([(interval.low, interval.high) for _, _, interval in points])
    axes.fill_between(places, ends[:, 0], ends[:, 1], color=line.get_color(), alpha=0.2, linewidth=0)


def _shown(name: str) -> str:
    """Return a name in matplotlib's notation: dollars are no formula, and a leading underscore hides no label."""
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def _figure(width: float, height: float) -> Figure:
    with needs_extra("plot", "figures need matplotlib, which is not installed", "figures"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=150, layout="constrained")

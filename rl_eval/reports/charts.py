"""Charts of a report, as shapes with coordinates. The template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.aggregate import histogram_edges
from rl_eval.results.text import counted

Values: TypeAlias = npt.NDArray[np.float64]

WIDTH: Final = 540.0
HEIGHT: Final = 250.0
"""Height of a drawing without rows, in pixels."""
_LEFT: Final = 60.0
_RIGHT: Final = 20.0
_TOP: Final = 10.0
_BOTTOM: Final = 48.0
_ROW: Final = 46.0
"""Height of a row, with the text above its mark."""
_BARS: Final = 38.0
"""Height of the bars in a row."""
_ABOVE: Final = 32.0
"""Height above the bars of a histogram, for its mean."""
_MOST_NAME: Final = 26
"""Maximum number of characters of a row's name, so that the name fits beside its numbers on a phone."""

_STEPS: Final = (1, 2, 2.5, 5, 10)
_MARGIN: Final = 0.04
"""Margin of an axis, as a fraction of the range of values."""
_WIDEST: Final = 1e300
"""Maximum magnitude of drawn values. Differences between larger values may overflow."""
_MARKED: Final = 30
"""Number of points from which on a line has no marks."""
_COLOURS: Final = 7
"""Number of different colours of lines."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Linear axis that maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    label: str
    low: float
    high: float
    start: float
    end: float
    whole: bool = False
    """Whether only whole numbers are meaningful."""

    def place(self, values: npt.ArrayLike) -> Values:
        """Return the positions of values in pixels, clipped to the ends."""
        share = (np.clip(np.asarray(values, np.float64), self.low, self.high) - self.low) / (self.high - self.low)
        return np.asarray(self.start + share * (self.end - self.start))

    @property
    def hint(self) -> str:
        """Sentence for an axis that does not contain 0; otherwise an empty text."""
        return "" if self.low <= 0 <= self.high else "The axis does not contain 0."

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Four to eight round numbers, with their positions in pixels.

        If only whole numbers are meaningful, there may be fewer.
        """
        width = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(width))
        step = next(step * power for step in _STEPS if step * power >= width * (1 - 1e-9))
        step = max(1.0, math.ceil(step)) if self.whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(float(self.place(n * step)), f"{n * step + 0.0:,.10g}") for n in range(first, last + 1)]


def axis_over(label: str, values: Iterable[float], start: float, end: float, *, whole: bool = False) -> Axis | None:
    """Return an axis for values, with a margin on both sides; None if no value can be drawn.

    Args:
        label: Meaning of the values.
        values: The values. NaN, infinities and extremely large numbers are omitted.
        start: Position of the lower end, in pixels.
        end: Position of the upper end, in pixels.
        whole: Whether only whole numbers are meaningful.
    """
    drawn = [value for value in map(float, values) if abs(value) <= _WIDEST]
    if not drawn:
        return None
    low, high = min(drawn), max(drawn)
    size = max(abs(low), abs(high))
    tiny = max(1e-7 * size, 1e-300)  # Keeps the tick labels distinct, and their distances above 0.
    room = (high - low) * _MARGIN if high - low > tiny else size / 100 if size > 1e-290 else 1.0
    return Axis(label, low - room, high + room, start, end, whole)


class Shape(NamedTuple):
    """Element of a drawing."""

    tag: Literal["path", "rect", "circle"]
    css: str
    """CSS class, which sets the colour."""
    at: dict[str, str]
    """Attributes of the SVG element: its position and, if a click filters the episodes, its range of returns."""
    title: str = ""
    """Text of the tooltip."""


@dataclass(frozen=True)
class Plot:
    """Drawing with its axes."""

    title: str
    x: Axis
    y: Axis
    shapes: list[Shape]
    key: list[tuple[str, str]] = field(default_factory=list)
    """Legend: pairs of CSS class and meaning."""
    caption: str = ""
    height: float = HEIGHT
    rows: Sequence[tuple[float, str, str]] = ()
    """Rows instead of a vertical axis: the position of each, its name at the left, and its numbers at the right."""


class Row(NamedTuple):
    """Row of a chart: a number with its interval."""

    name: str
    value: float
    low: float
    """Lower end of the interval; NaN if there is no interval."""
    high: float
    text: str
    """The number and its interval as text."""
    parts: Sequence[float] = ()
    """Numbers of which the value is the mean, such as those of two training seeds."""


def estimates(
    title: str, label: str, rows: Sequence[Row], *, within: Sequence[float] = (), samples: Sequence[Values] = ()
) -> Plot | None:
    """Return a chart with a dot and an interval in each row, or None if no value can be drawn.

    Args:
        title: Title of the chart.
        label: Meaning of the values, for the axis.
        rows: The numbers, from top to bottom.
        within: Values that the axis contains, such as the bounds of a score. A single one is marked in all rows.
        samples: Values of each row, which are drawn as a histogram.
    """
    drawn = [_drawable(values) for values in samples]
    edges = histogram_edges(np.concatenate(drawn)) if sum(map(len, drawn)) else np.zeros(0)
    shown = (end for row in rows for end in (row.value, row.low, row.high, *row.parts))
    x = axis_over(label, [*within, *edges, *shown], _RIGHT, WIDTH - _RIGHT)
    if x is None:
        return None
    step = _ROW + _BARS if samples else _ROW
    height = _TOP + step * len(rows) + _BOTTOM
    y, names = Axis("", 0.0, 1.0, height - _BOTTOM, _TOP), []
    shapes: list[Shape] = []
    for place, row in enumerate(rows):
        base, top, end = (_TOP + step * place + distance for distance in (step - 13, 21, step - 3))
        grid = "".join(f"M{_px(at)} {top}V{end}" for at, _ in x.ticks)  # It crosses no text.
        shapes.append(Shape("path", "grid", {"d": f"{grid}M{x.start} {end}H{x.end}"}))
        if len(within) == 1:
            shapes.append(_path("equal", x.place([*within] * 2), [top, end]))
        shapes += _bars(x, drawn[place], edges, base - 9, _BARS) if len(edges) else []
        shapes += _estimate(x, row, base)
        name = row.name if len(row.name) <= _MOST_NAME else f"…{row.name[1 - _MOST_NAME :]}"
        names.append((_TOP + step * place + 14, name, row.text))
    caption = "Bars show numbers of episodes. Each result has its own vertical scale." if samples else x.hint
    return Plot(title, x, y, shapes, caption=caption, height=height, rows=names)


def _estimate(x: Axis, row: Row, height: float) -> Iterator[Shape]:
    if math.isfinite(row.low + row.high):
        low, high = x.place([row.low, row.high])
        ends, up = [low, low, low, high, high, high], np.array([-5, 5, 0, 0, -5, 5]) + height
        yield _path("whisker", ends, up, row.text)
    for css, values, radius in (("part", row.parts, 3), (f"point{_open(row)}", [row.value], 5)):
        for value in filter(math.isfinite, values):
            at = {"cx": _px(float(x.place(value))), "cy": _px(height), "r": f"{radius}"}
            yield Shape("circle", css, at, f"{row.name}: {value:,.6g}")


def _open(row: Row) -> str:
    """Return the CSS class of a hollow dot, for a number without an interval; otherwise an empty text."""
    return "" if math.isfinite(row.low + row.high) else " open"


def histogram(values: Values, label: str, mean: Row, *, marks: Sequence[tuple[str, str, float]] = ()) -> Plot | None:
    """Return a histogram with the mean and its interval above the bars, or None if no value can be drawn.

    Args:
        values: The values, shape (n,).
        label: Meaning of the values, for the axis.
        mean: Mean of the values. Its name is the title of the chart.
        marks: Vertical lines, each with a CSS class, a meaning and a value.
    """
    drawn = _drawable(values)
    if not len(drawn):
        return None
    edges = histogram_edges(drawn)
    x = axis_over(label, [*edges, mean.low, mean.high], _LEFT, WIDTH - _RIGHT)
    assert x is not None
    y = Axis("episodes", 0.0, np.histogram(drawn, edges)[0].max(), HEIGHT - _BOTTOM, _TOP + _ABOVE, whole=True)
    shapes = [*_bars(x, drawn, edges, y.start, y.start - y.end)]
    for css, _, value in marks:
        shapes.append(_path(css, x.place([value] * 2), [y.start, y.end], f"{value:,.6g}"))
    shapes += _estimate(x, mean, _TOP + 10)
    lost = len(values) - len(drawn)
    caption = f"Not drawn, because too large or not finite: {counted(lost, 'value')}." if lost else ""
    mark = ("point open", "mean, without interval") if _open(mean) else ("whisker", "mean and interval")
    key = [("bar", "episodes"), mark, *((css, meaning) for css, meaning, _ in marks)]
    return Plot(mean.name, x, y, shapes, key=key, caption=caption)


def _drawable(values: Values) -> Values:
    return values[np.abs(values) <= _WIDEST]


def _bars(x: Axis, values: Values, edges: Values, floor: float, height: float) -> Iterator[Shape]:
    """Yield the bars of a histogram that stands on ``floor``. The highest bar has the given height."""
    counts, _ = np.histogram(values, edges)
    for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True):
        if count:
            left, right = x.place([low, high])
            tall, gap = height * count / counts.max(), right - left > 4
            at = {"x": left, "y": floor - tall, "width": max(right - left - gap, 0.5), "height": tall}
            chosen = {name: _px(value) for name, value in at.items()} | {"data-low": f"{low}", "data-high": f"{high}"}
            yield Shape("rect", "bar", chosen, f"{low:,.6g} to {high:,.6g}: {counted(count, 'episode')}")


def lines(title: str, label: str, of: str, series: Mapping[str, Sequence[tuple[float, Row]]]) -> Plot | None:
    """Return a chart with a line and a band of intervals for each series, or None if no value can be drawn.

    Args:
        title: Title of the chart.
        label: Meaning of the positions, for the horizontal axis.
        of: Meaning of the values, for the vertical axis.
        series: Points of each line, by name: positions in ascending order, each with its number. NaN is omitted.
    """
    every = [point for points in series.values() for point in points]
    whole = all(float(at).is_integer() for at, _ in every)
    x = axis_over(label, [at for at, _ in every], _LEFT, WIDTH - _RIGHT, whole=whole)
    y = axis_over(of, [*np.ravel([row[1:4] for _, row in every])], HEIGHT - _BOTTOM, _TOP)
    if x is None or y is None:
        return None
    bands, marks, key = list[Shape](), list[Shape](), list[tuple[str, str]]()
    for place, (name, points) in enumerate(series.items()):
        css = f"colour{place % _COLOURS}"
        known = [(float(x.place(at)), row) for at, row in points if not math.isnan(row.value)]
        if ends := [(at, row.low, row.high) for at, row in known if math.isfinite(row.low + row.high)]:
            across, low, high = zip(*ends, strict=True)
            bands.append(_path(f"band {css}", [*across, *across[::-1]], y.place([*low, *high[::-1]]), name))
        if known:
            marks.append(_path(f"line {css}", [at for at, _ in known], y.place([row.value for _, row in known]), name))
            key.append((f"line {css}", name))
        for at, row in known if len(known) < _MARKED else ():
            circle = {"cx": _px(at), "cy": _px(float(y.place(row.value))), "r": "4"}
            text = f"{name}: {row.text or f'{row.value:,.6g}'}"
            marks.append(Shape("circle", f"dot{_open(row)} {css}", circle, text))
    key += [("band", "interval")] * bool(bands)
    key += [("dot open", "no interval")] * any(shape.css.startswith("dot open") for shape in marks)
    return Plot(title, x, y, bands + marks, key=key, caption=y.hint)


def _path(css: str, across: Iterable[float], up: Iterable[float], title: str = "") -> Shape:
    points = "L".join(f"{_px(x)} {_px(y)}" for x, y in zip(across, up, strict=True))
    return Shape("path", css, {"d": f"M{points}"}, title)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

"""Charts of a report as shapes with their places; the template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from rl_eval.results.page.axes import Axis, axis_over
from rl_eval.results.report.table import number
from rl_eval.results.stats.histogram import histogram_edges

__all__ = ["Bar", "Plot", "Shape", "curve", "forest", "histogram", "running_mean", "scatter", "time_bars"]

WIDTH: Final = 540.0
HEIGHT: Final = 250.0
_LEFT: Final = 60.0
_RIGHT: Final = 20.0
_TOP: Final = 10.0
_BOTTOM: Final = 44.0
_SQUARE: Final = 420.0

_POINTS: Final = 300
"""Episodes at which a running mean is drawn."""
_MOST_DOTS: Final = 1_500
"""Dots of a scatter plot; beyond, cells are drawn by how many lie in them."""
_CELLS: Final = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """One element of a drawing."""

    tag: Literal["path", "rect", "circle"]
    css: str
    """Class that gives it its colour."""
    at: dict[str, str]
    """Attributes that give it its place."""
    title: str = ""
    """Shown when it is pointed at."""
    value: tuple[float, float] | None = None
    """Range of returns that it stands for, if episodes can be chosen by it."""


@dataclass(frozen=True)
class Plot:
    """A drawing with its axes."""

    title: str
    """Description for those who cannot see it."""
    x: Axis
    y: Axis
    shapes: list[Shape]
    width: float = WIDTH
    height: float = HEIGHT
    key: list[tuple[str, str]] = field(default_factory=list)
    """Classes that are drawn, with what they are."""
    names: list[tuple[float, str]] = field(default_factory=list)
    """Texts along the y axis in place of numbers: pixels and text."""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """Part of a bar that shows shares of a whole."""

    name: str
    start: float
    """Share of the whole before it."""
    share: float


def histogram(
    values: npt.NDArray[np.float64], label: str, *, lines: Sequence[tuple[str, str, float]] = ()
) -> Plot | None:
    """Draw how often values occur; None if there is nothing to draw.

    Args:
        values: Shape (n,).
        label: What they are, for the axis.
        lines: Upright lines: class, meaning, place.
    """
    x = axis_over(label, values, _LEFT, WIDTH - _RIGHT, margin=0.02)
    if x is None:
        return None
    drawn = values[(values >= x.low) & (values <= x.high)]
    edges = histogram_edges(drawn)
    counts, _ = np.histogram(drawn, edges)
    x = Axis(label, min(x.low, float(edges[0])), max(x.high, float(edges[-1])), x.start, x.end)
    y = Axis("episodes", 0.0, float(counts.max()) * 1.05, HEIGHT - _BOTTOM, _TOP, whole=True)
    places = number_places(float(edges[1] - edges[0]))
    shapes = [_bar(x, y, edges[i], edges[i + 1], int(count), places) for i, count in enumerate(counts) if count]
    shapes += [
        _upright(x, css, f"{meaning} {number(at, places)}", at) for css, meaning, at in lines if math.isfinite(at)
    ]
    left_out = f"{len(values) - len(drawn):,} that cannot be drawn are left out." if len(drawn) < len(values) else ""
    key = list(
        dict.fromkeys([("bar", "episodes"), *((css, meaning) for css, meaning, at in lines if math.isfinite(at))])
    )
    return Plot(f"Histogram of {len(drawn):,} values of {label}", x, y, shapes, key=key, caption=left_out)


def running_mean(places: npt.NDArray[np.int64], values: npt.NDArray[np.float64], confidence: float) -> Plot | None:
    """Draw the mean of the first n episodes of a plan, for every n, with Student t limits; None without three values.

    Args:
        places: Indices of the episodes, in order, shape (n,).
        values: Their returns.
        confidence: Nominal coverage of the band at each place by itself.
    """
    if len(values) < 3 or not np.isfinite(values).all() or np.abs(values).max() > 1e150:
        return None
    mean, half = _prefixes(values, confidence)
    shown = np.unique(np.linspace(1, len(values) - 1, min(_POINTS, len(values) - 1)).astype(int))
    settled = shown[shown >= min(len(values) // 10, shown[-1])]
    ends = [mean[settled] - half[settled], mean[settled] + half[settled], mean[shown]]
    x = axis_over("episode index", places, _LEFT, WIDTH - _RIGHT, margin=0.0, whole=True)
    y = axis_over("mean return so far", np.concatenate(ends), HEIGHT - _BOTTOM, _TOP)
    if x is None or y is None:
        return None
    across, low, high = x.place(places[shown]), mean[shown] - half[shown], mean[shown] + half[shown]
    shapes = [_band(across, y.place(low), y.place(high)), _line(across, y.place(mean[shown]))]
    level = f"{100 * confidence:g} %"
    return Plot(
        f"Running mean of {len(values):,} returns by episode index",
        x,
        y,
        shapes,
        key=[("line", "mean of the episodes up to this index"), ("band", f"{level} band (Student t)")],
        caption="In the order of the plan, whatever finished first. The band holds at each place by itself.",
    )


def scatter(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], names: tuple[str, str]) -> Plot | None:
    """Draw pairs of returns, one of either side; None if there is nothing to draw."""
    both = np.concatenate([a, b])
    x = axis_over(names[0], both, _LEFT, _SQUARE - _RIGHT)
    y = axis_over(names[1], both, _SQUARE - _BOTTOM, _TOP)
    if x is None or y is None:
        return None
    known = (a >= x.low) & (a <= x.high) & (b >= y.low) & (b <= y.high)
    equal = Shape("path", "equal", {"d": _path([x.start, x.end], [y.start, y.end])})
    across, up = x.place(a[known]), y.place(b[known])
    shapes = _dots(across, up) if len(across) <= _MOST_DOTS else _cells(x, y, across, up)
    what = "an episode" if len(across) <= _MOST_DOTS else "episodes; the darker, the more"
    key = [("dot", what), ("equal", "equal returns")]
    title = f"Returns of {len(across):,} pairs of episodes: {names[1]} against {names[0]}"
    return Plot(title, x, y, [equal, *shapes], _SQUARE, _SQUARE, key=key)


def curve(
    steps: Sequence[float], means: Sequence[float], ends: Sequence[tuple[float, float]], label: str
) -> Plot | None:
    """Draw mean returns with their intervals over training steps; None if there is nothing to draw.

    Args:
        steps: In ascending order.
        means: One for each step; NaN is left out.
        ends: Low and high end of each interval; NaN without one.
        label: What a step is.
    """
    x = axis_over(label, steps, _LEFT, WIDTH - _RIGHT, whole=True)
    y = axis_over("mean return", [*means, *(end for pair in ends for end in pair)], HEIGHT - _BOTTOM, _TOP)
    if x is None or y is None:
        return None
    drawn = [
        (x.at(step), y.at(mean), pair)
        for step, mean, pair in zip(steps, means, ends, strict=True)
        if not math.isnan(mean)
    ]
    whiskers = [
        Shape("path", "whisker", {"d": _path([at, at], [y.at(pair[0]), y.at(pair[1])])})
        for at, _, pair in drawn
        if not math.isnan(pair[0])
    ]
    line = _line([at for at, _, _ in drawn], [up for _, up, _ in drawn])
    dots = [
        _dot(at, up, number(mean, 2))
        for (at, up, _), mean in zip(drawn, (m for m in means if not math.isnan(m)), strict=True)
    ]
    return Plot("Mean return over checkpoints", x, y, [line, *whiskers, *dots], key=[("line", "mean return")])


def forest(names: Sequence[str], means: Sequence[float], ends: Sequence[tuple[float, float]]) -> Plot | None:
    """Draw mean returns with their intervals below one another; None if there is nothing to draw."""
    left, row = 180.0, 26.0
    height = _TOP + row * len(names) + _BOTTOM
    x = axis_over("mean return", [*means, *(end for pair in ends for end in pair)], left, WIDTH - _RIGHT)
    if x is None:
        return None
    y = Axis("", 0.0, float(len(names)), _TOP, height - _BOTTOM)
    shapes = []
    for place, (mean, (low, high)) in enumerate(zip(means, ends, strict=True)):
        up = y.at(place + 0.5)
        if not math.isnan(low):
            shapes.append(Shape("path", "whisker", {"d": _path([x.at(low), x.at(high)], [up, up])}))
        if not math.isnan(mean):
            shapes.append(_dot(x.at(mean), up, number(mean, 2)))
    labels = [(y.at(place + 0.5), _short(name)) for place, name in enumerate(names)]
    return Plot("Mean returns with their intervals", x, y, shapes, height=height, names=labels)


def time_bars(shares: dict[str, float]) -> list[Bar]:
    """Return the parts of a bar that shows shares, one after the other."""
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    return [Bar(name, start, share) for (name, share), start in zip(shares.items(), ends[:-1], strict=True)]


def number_places(width: float) -> int:
    """Return how many decimals tell values apart that lie this far from each other."""
    return max(0, 1 - math.floor(math.log10(width))) if 0 < width < 10 else 0


# Parts


def _prefixes(
    values: npt.NDArray[np.float64], confidence: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and half the width of the band of the first 1, 2, ... values; the first half width is infinite."""
    from scipy.special import stdtrit

    count = np.arange(1, len(values) + 1)
    centre = values.mean()
    sums, squares = np.cumsum(values - centre), np.cumsum((values - centre) ** 2)
    with np.errstate(all="ignore"):
        variance = np.maximum(squares - sums**2 / count, 0) / (count - 1)
        half = stdtrit(count - 1, (1 + confidence) / 2) * np.sqrt(variance / count)
    return centre + sums / count, np.where(count > 1, half, np.inf)


def _bar(x: Axis, y: Axis, low: float, high: float, count: int, places: int) -> Shape:
    left, right, top = x.at(low), x.at(high), y.at(count)
    gap = 1.0 if right - left > 4 else 0.0
    at = {"x": left, "y": top, "width": max(right - left - gap, 0.5), "height": y.start - top}
    title = f"{number(float(low), places)} to {number(float(high), places)}: {count:,} episodes"
    return Shape("rect", "bar", {name: _px(value) for name, value in at.items()}, title, (float(low), float(high)))


def _upright(x: Axis, css: str, title: str, value: float) -> Shape:
    at = x.at(value)
    return Shape("path", css, {"d": _path([at, at], [_TOP, HEIGHT - _BOTTOM])}, title)


def _band(across: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> Shape:
    return Shape("path", "band", {"d": _path([*across, *across[::-1]], [*low, *high[::-1]]) + "Z"})


def _line(across: Iterable[float], up: Iterable[float]) -> Shape:
    return Shape("path", "line", {"d": _path(across, up)})


def _dot(across: float, up: float, title: str) -> Shape:
    return Shape("circle", "point", {"cx": _px(across), "cy": _px(up), "r": "4"}, title)


def _dots(across: npt.NDArray[np.float64], up: npt.NDArray[np.float64]) -> list[Shape]:
    return [Shape("circle", "dot", {"cx": _px(x), "cy": _px(y), "r": "2.5"}) for x, y in zip(across, up, strict=True)]


def _cells(x: Axis, y: Axis, across: npt.NDArray[np.float64], up: npt.NDArray[np.float64]) -> list[Shape]:
    ends = ((x.start, x.end), (y.end, y.start))
    counts, lefts, tops = np.histogram2d(across, up, bins=_CELLS, range=ends)
    width, height, most = _px(lefts[1] - lefts[0]), _px(tops[1] - tops[0]), counts.max()
    return [
        Shape("path", f"dot shade{math.ceil(5 * math.sqrt(counts[i, j] / most))}",
              {"d": f"M{_px(lefts[i])} {_px(tops[j])}h{width}v{height}h-{width}z"},
              f"{int(counts[i, j]):,} episodes")
        for i, j in np.argwhere(counts > 0)
    ]  # fmt: skip


def _path(across: Iterable[float], up: Iterable[float]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in zip(across, up, strict=True))


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:10]}…{name[-11:]}"

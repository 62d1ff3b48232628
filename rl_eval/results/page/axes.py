"""Axes of charts: places of values on the page, and round numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Tick", "axis_over"]

_STEPS: Final = (1, 2, 2.5, 5, 10)
_WIDEST: Final = 1e300
"""Greatest magnitude that is drawn: differences of greater ones may leave the range of floats."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A round number on an axis."""

    at: float
    """Place on the page, in pixels."""
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis: values from ``low`` to ``high`` lie at pixels from ``start`` to ``end``."""

    label: str
    low: float
    high: float
    start: float
    end: float
    whole: bool = False
    """Whether only whole numbers mean something."""

    def place(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return where values lie, in pixels; those outside lie at the ends."""
        share = (np.clip(np.asarray(values, np.float64), self.low, self.high) - self.low) / (self.high - self.low)
        return np.asarray(self.start + share * (self.end - self.start))

    def at(self, value: float) -> float:
        """Return where one value lies."""
        return float(self.place(value))

    @property
    def ticks(self) -> list[Tick]:
        """Four to eight round numbers, fewer where they are whole."""
        step = _round_step((self.high - self.low) / 5)
        step = max(1.0, math.ceil(step)) if self.whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        places = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}"[2] == "5" and step < 10 else 0)
        return [Tick(self.at(n * step), _text(n * step, step, places)) for n in range(first, last + 1)]


def axis_over(
    label: str, values: Iterable[float], start: float, end: float, *, margin: float = 0.04, whole: bool = False
) -> Axis | None:
    """Return an axis that shows values, with a margin on either side; None if none of them can be drawn.

    Args:
        label: What the values are.
        values: NaN, infinities and what is near the end of the floats are left out.
        start: Pixels of the lower end.
        end: Pixels of the upper end.
        margin: As a share of their range.
        whole: Whether only whole numbers mean something.
    """
    drawn = [value for value in map(float, values) if abs(value) <= _WIDEST]
    if not drawn:
        return None
    low, high = min(drawn), max(drawn)
    size = max(abs(low), abs(high))
    if low == high:  # So much around it that the numbers on the axis differ.
        room = size / 100 or 1.0
    else:
        room = max((high - low) * margin, 1e-9 * size if high - low < 1e-9 * size else 0.0)
    return Axis(label, low - room, high + room, start, end, whole)


def _round_step(width: float) -> float:
    """Return the least of 1, 2, 2.5, 5, 10, ... times a power of ten that is at least a width."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in _STEPS if step * power >= width * (1 - 1e-9))


def _text(value: float, step: float, places: int) -> str:
    if abs(value) >= 1e6 or step < 1e-6:
        return f"{value:.6g}"
    return f"{0.0 if value == 0 else value:,.{min(places, 8)}f}"

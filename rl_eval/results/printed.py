"""Printing of numbers as a page: the renderer stands in a room above, and is looked up when something is printed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Printed"]

_RENDERER: Final = "rl_eval.reports.pages"
"""Module with ``text``, ``rich`` and ``notebook``, each a function of what is printed."""


class Printed:
    """Base of values that print as a page: in text, for :mod:`rich` in colour, and in a notebook as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(_renderer().text(self))

    def __rich__(self) -> RenderableType:
        found: RenderableType = _renderer().rich(self)
        return found

    def _repr_html_(self) -> str:
        return str(_renderer().notebook(self))


def _renderer() -> Any:
    return importlib.import_module(_RENDERER)

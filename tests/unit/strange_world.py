"""Files of strangers for the tests: strange values in every place of a description, and what is read of the result."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from rl_eval.errors import ComparisonError, EvalError
from rl_eval.reports.html import Source, render
from rl_eval.results.comparison import compare
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult

STRANGE: Final = [None, "<b>", -5, 10**30, 10**400, 0.5, math.nan, math.inf, True, [], [["a"]], {"a": 1}]
STRANGE += ["\ud800x", "a\nb\x1b[2J"]


def ones(observations: Any) -> Any:
    """Return a policy's actions: 1 for each observation."""
    return np.ones(len(observations), np.int64)


def places(data: Any, deepest: int = 3) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested data, as far as it is followed."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (key,)
        if deepest > 1:
            yield from ((key, *more) for more in places(value, deepest - 1))


def changed(data: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the data with another value in one place; without it, if the value is an ellipsis."""
    other = copy.deepcopy(data)
    within = other
    for key in place[:-1]:
        within = within[key]
    if value is ...:
        del within[place[-1]]
    else:
        within[place[-1]] = value
    return other


def changes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data with something strange in one place, or without it, for each place; deep in it with one each."""
    for number, place in enumerate(places(data)):
        for strange in [*STRANGE, ...] if len(place) < 3 else [STRANGE[number % len(STRANGE)]]:
            yield changed(data, place, strange)


def show(result: EvalResult) -> None:
    """Show a result in every way: as text, as JSON, as a page, and compared with itself."""
    json.dumps(result.to_dict(), allow_nan=False)
    assert str(result).encode()
    assert "<b>" not in render([Source("x", result)])
    with suppress(ComparisonError):
        comparison = compare(result, result)
        json.dumps(comparison.to_dict(), allow_nan=False)
        assert str(comparison).encode()


def is_shown_or_refused(folder: Path) -> bool:
    """Load a result and show it; return whether that was possible, and raise what is no sentence."""
    with suppress(EvalError):
        show(load(folder))
        return True
    return False

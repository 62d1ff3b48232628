"""Trace of an episode: digests of its observations and actions, its rewards and its ending, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import tree
import xxhash

from rl_eval.errors import EvalError

__all__ = ["TRACE", "Divergence", "TraceRecorder", "first_divergence"]

TRACE: Final = np.dtype(
    [("action", "<u8"), ("reward", "<f8"), ("terminated", "?"), ("truncated", "?"), ("observation", "<u8")]
)
"""One step of an episode, its columns in the order in which they come about. Row 0 is the reset."""

_LONGEST: Final = 100_000
"""Rows of a trace; steps after them are not traced."""


class Divergence(NamedTuple):
    """Place where two traces of one episode part."""

    step: int
    """Number of the step, from 1; 0 is the reset."""
    what: str
    """Column of :data:`TRACE`, or ``length``."""


@final
class TraceRecorder:
    """Wrapper of an environment's ``reset`` and ``step`` that keeps a trace.

    Args:
        reset: The environment's.
        step: The environment's.
        content: Returns what the policy is given of an observation.
    """

    def __init__(self, reset: Callable[..., Any], step: Callable[[Any], Any], content: Callable[[Any], bytes]) -> None:
        self._reset = reset
        self._step = step
        self._content = content
        self._rows: list[tuple[int, float, float, float, int]] = []

    def reset(self, **kwargs: Any) -> Any:
        """Reset, and begin the trace."""
        result = self._reset(**kwargs)
        self._rows = []
        if type(result) is tuple and result:
            self._rows = [(0, 0.0, False, False, self._observed(result[0]))]
        return result

    def step(self, action: Any) -> Any:
        """Step, and add a row."""
        chosen = _digest(action) if len(self._rows) < _LONGEST else 0  # The environment may change it in place.
        result = self._step(action)
        # Whether a result keeps the contract is for the runner to say.
        if len(self._rows) < _LONGEST and type(result) is tuple and len(result) == 5:
            observation, reward, terminated, truncated, _ = result
            self._rows.append(
                (chosen, _number(reward), _number(terminated), _number(truncated), self._observed(observation))
            )
        return result

    def _observed(self, observation: Any) -> int:
        try:
            return xxhash.xxh3_64_intdigest(self._content(observation))
        except EvalError:
            return 0  # What is wrong with it is for the runner to say.

    @property
    def trace(self) -> npt.NDArray[np.void]:
        """Array of :data:`TRACE`, shape (steps + 1,)."""
        return np.array(self._rows, TRACE)


def first_divergence(one: npt.NDArray[np.void], other: npt.NDArray[np.void]) -> Divergence | None:
    """Return where two traces part, None if they are equal bit by bit."""
    common = min(len(one), len(other))
    different = np.stack([_bits(one[name][:common]) != _bits(other[name][:common]) for name in TRACE.names or ()])
    if different.any():
        step = int(np.argmax(different.any(axis=0)))
        return Divergence(step, (TRACE.names or ())[int(np.argmax(different[:, step]))])
    return None if len(one) == len(other) else Divergence(common, "length")


def _bits(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(column).view("u8") if column.dtype.itemsize == 8 else column


def _number(value: Any) -> float:
    """Return a number whatever form it has; NaN for what is none."""
    if type(value) is float or type(value) is bool:
        return value
    try:
        return float(np.asarray(value, np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError, RuntimeError):
        return float("nan")


def _digest(value: Any) -> int:
    """Hash an action."""
    digest = xxhash.xxh3_64()
    for leaf in tree.flatten(value):
        array = np.asarray(leaf)
        digest.update(repr(leaf).encode() if array.dtype.kind == "O" else array.tobytes())
    return digest.intdigest()

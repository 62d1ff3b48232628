"""The arrays of SB3's ``evaluations.npz``: the numbers of every evaluation of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np

from rl_eval.atomic_write import write_atomically
from rl_eval.results.result import EvalResult

__all__ = ["EvaluationArrays"]


@final
class EvaluationArrays:
    """Returns, lengths and successes of all evaluations, and the file of them.

    The file is written anew after each of the first hundred evaluations, and later when there are one in a hundred more
    than it has, so that all writing together stays in proportion to their number.

    Args:
        file: Where they are written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._steps: list[int] = []
        self._columns: dict[str, list[Any]] = {"results": [], "ep_lengths": [], "successes": []}
        self._all_succeed_or_not = True
        """Whether every evaluation has said which episodes succeeded."""
        self._num_written = 0

    def add(self, step: int, result: EvalResult) -> None:
        """Take the numbers of an evaluation, and write the file if that is due."""
        self._steps.append(step)
        self._columns["results"].append(_column(result, "episode_return"))
        self._columns["ep_lengths"].append(_column(result, "length"))
        self._columns["successes"].append(_column(result, "success_at_end") > 0)
        self._all_succeed_or_not &= result.success_rate is not None
        if 100 * len(self._steps) >= 101 * self._num_written:
            self.write()

    def write(self) -> None:
        """Write what is not in the file yet; a reader sees the old file or the new one."""
        if len(self._steps) == self._num_written:
            return
        arrays: dict[str, Any] = {"timesteps": self._steps, **self._columns}
        if not self._all_succeed_or_not:
            del arrays["successes"]

        def write(temporary: Path) -> None:
            with temporary.open("wb") as stream:  # To a path, numpy would add a suffix.
                np.savez(stream, **arrays)

        write_atomically(self._file, write)
        self._num_written = len(self._steps)


def _column(result: EvalResult, name: str) -> Any:
    """Return one number per planned episode, NaN where it did not complete."""
    column = result.table.rows[name].astype(np.float64)
    column[~result.table.completed] = np.nan
    return column

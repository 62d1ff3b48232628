"""Exported models whose batch has a fixed size: each row is computed alone."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from rl_eval.policies.inference.spaces import take_rows


def row_by_row(run: Callable[[Any], Any], inputs: Any, size: int, live: npt.NDArray[np.bool_]) -> Any:
    """Run a model for each live row alone, in a batch of copies of the row.

    Args:
        run: The model. It maps nested arrays or tensors of shape (size, ...) to nested arrays of shape (size, ...).
        inputs: Nested arrays or tensors of shape (rows, ...).
        size: Size of the model's batch.
        live: Mask of the rows to compute, shape (rows,). The results of the other rows are arbitrary.

    Returns:
        Nested arrays of shape (rows, ...).
    """
    wanted = np.flatnonzero(live).tolist() or [0]
    done = {row: tree.map_structure(itemgetter(0), run(take_rows(inputs, np.full(size, row)))) for row in wanted}
    rows = [done.get(row, done[wanted[0]]) for row in range(len(live))]
    return tree.map_structure(lambda *parts: np.stack(parts), *rows)


def note_on(dimension: str, size: int, export: str) -> str:
    """Return the note for readers of a result whose policy is such a model.

    Args:
        dimension: Dimension of the batch, such as ``dimension 0 of the input 'obs'``.
        size: Its size.
        export: Argument of the export that makes the batch free.
    """
    return (
        f"{dimension} has the fixed size {size}, so every row is computed alone, which is exact but slow. To compute "
        f"rows together, export the model with {export}"
    )

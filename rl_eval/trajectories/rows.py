"""Columns of a recorder: arrays that grow row by row, and images that are compressed as they come in."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.trajectories.trajectory import CompressedArray, Leaf

__all__ = ["CompressedRows", "Rows", "rows_of"]

Array = npt.NDArray[Any]

_FIRST_ROWS: Final = 256
"""Steps that there is room for at first."""
_BLOCK: Final = 32
"""Images that are compressed together."""


class Rows:
    """Rows of one array, which doubles when it is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.array = np.empty((0, *shape), dtype)

    def write(self, row: int, value: Any) -> None:
        """Write one row."""
        if row >= len(self.array):
            more = np.empty((max(_FIRST_ROWS, len(self.array)), *self.array.shape[1:]), self.array.dtype)
            self.array = np.concatenate([self.array, more])
        self.array[row] = value

    def taken(self, rows: int) -> Array:
        """Return a copy of the first rows."""
        return self.array[:rows].copy()


class CompressedRows:
    """Rows of images, compressed in blocks as soon as a block is full."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._block = np.empty((_BLOCK, *shape), dtype)
        self._blocks: list[bytes] = []

    def write(self, row: int, value: Any) -> None:
        """Write the next row; row 0 begins anew."""
        place = row % _BLOCK
        if row == 0:
            self._blocks = []
        elif place == 0:
            self._blocks.append(_compressed(self._block))
        self._block[place] = value

    def taken(self, rows: int) -> CompressedArray:
        """Return all rows."""
        last = self._block[: (rows - 1) % _BLOCK + 1]
        return CompressedArray(
            str(self._block.dtype), (rows, *self._block.shape[1:]), (*self._blocks, _compressed(last))
        )


def _compressed(rows: Array) -> bytes:
    return zlib.compress(rows.tobytes(), 1)


def rows_of(leaf: Leaf, *, compress_images: bool) -> Rows | CompressedRows:
    """Return an empty column for a leaf."""
    return (CompressedRows if compress_images and leaf.is_image else Rows)(leaf.shape, leaf.dtype)

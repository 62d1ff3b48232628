"""Functions for arrays of NumPy, torch and JAX on any device, without an import of torch or JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def kind_of(array: Any) -> str:
    """Return the kind of an array's dtype, as NumPy names it; ``masked`` for a masked array."""
    if isinstance(array, np.ndarray):
        return "masked" if isinstance(array, np.ma.MaskedArray) else str(array.dtype.kind)
    name = str(array.dtype).removeprefix("torch.")
    return "f" if "float" in name else name[0]


def numpy_of(array: Any) -> npt.NDArray[Any]:
    """Return an array as a NumPy array, copied from the device if it is not in host memory."""
    if type(array) is np.ndarray:
        return array
    return np.asanyarray(array.detach().cpu() if hasattr(array, "detach") else array)


def numpy_of_all(arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """Return arrays of equal shape as NumPy arrays. Tensors become float64, so that one transfer copies all of them."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and all(isinstance(array, torch.Tensor) for array in arrays):
        return list(numpy_of(torch.stack([array.double() for array in arrays])))
    if jax is not None and all(isinstance(array, jax.Array) for array in arrays):
        arrays = jax.device_get(arrays)
    return [numpy_of(array) for array in arrays]


def like(array: Any, other: Any) -> Any:
    """Return an array, converted to the library, dtype and device of another array."""
    if hasattr(other, "new_tensor"):
        return array.to(other) if hasattr(array, "new_tensor") else other.new_tensor(numpy_of(array))
    same = type(array) is type(other) and array.dtype == other.dtype
    return array if same else numpy_of(array).astype(other.dtype)


def with_rows(array: Any, rows: Any, values: Any) -> Any:
    """Return a copy of an array, on the same device, with new values in some rows."""
    if hasattr(array, "at"):  # JAX arrays never change.
        return array.at[rows].set(values)
    changed = array.clone() if hasattr(array, "clone") else array.copy()
    changed[rows] = values
    return changed

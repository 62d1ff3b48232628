"""Nested batches of arrays or tensors, handled by row: observations, recurrent state, actions."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import tree

__all__ = ["assign_rows", "copy_batch", "inference_mode", "take_rows"]


def assign_rows(target: Any, rows: slice, values: Any) -> None:
    """Write rows of one array or tensor."""
    target[rows] = values


def take_rows(nested: Any, rows: Any) -> Any:
    """Return some rows of every leaf: views for a slice, copies for indices."""
    return tree.map_structure(lambda leaf: leaf[rows], nested)


def copy_batch(nested: Any) -> Any:
    """Copy every leaf; None stays None."""
    if nested is None:
        return None
    with inference_mode():
        return tree.map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else np.array(leaf), nested)


def inference_mode() -> contextlib.AbstractContextManager[Any]:
    """Enter the inference mode of torch where torch is in use; a policy without torch does not make us import it."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch is not None else contextlib.nullcontext()

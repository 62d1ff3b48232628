"""Nested batches of arrays or tensors, handled by row: observations, recurrent state, actions."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import tree

__all__ = ["assign_rows", "copy_batch", "no_grad", "take_rows"]


def assign_rows(target: Any, rows: Any, values: Any) -> None:
    """Write rows of one array or tensor."""
    target[rows] = values


def take_rows(nested: Any, rows: Any) -> Any:
    """Return some rows of every leaf: views for a slice, copies for indices."""
    return tree.map_structure(lambda leaf: leaf[rows], nested)


def copy_batch(nested: Any) -> Any:
    """Copy every leaf; None stays None."""
    if nested is None:
        return None
    with no_grad():
        return tree.map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else np.array(leaf), nested)


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Switch gradients off where torch is in use; a policy without torch does not make us import it."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()

"""Attributes of a saved model of Stable-Baselines3, and whether they show training with a ``VecNormalize``.

Nothing that the file names is imported or run: arrays are the only objects that are read.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["facts_of", "trained_normalized"]

_SPACE: Final = "observation_space"
_LAST: Final = "_last_obs"
_ORIGINAL: Final = "_last_original_obs"
_REPLAY_BUFFER: Final = "buffer_size"
"""Setting of the algorithms that have one."""
_ARRAYS: Final = ("_frombuffer", "_reconstruct", "dtype", "ndarray", "scalar")
"""Names in NumPy of which a pickled array consists."""
_ROUNDING: Final = 1e-4


def trained_normalized(facts: Mapping[str, Any]) -> bool | None:
    """Return whether a model was trained on observations that a ``VecNormalize`` normalized.

    ``learn`` keeps two observations. ``_last_obs`` is the policy's input: float32 if it was normalized. The other,
    ``_last_original_obs``, is the one before normalization. Algorithms with a replay buffer have it without a
    ``VecNormalize`` too, from the step before.

    Args:
        facts: Attributes of a model, live (``vars(model)``) or as :func:`facts_of` reads them.

    Returns:
        None if the attributes do not show it.
    """
    if facts.get("_vec_normalize_env") is not None:
        return True
    last, original = facts.get(_LAST, {}), facts.get(_ORIGINAL, {})
    if original is None or (facts.get("env") is not None and last is not None):
        return False
    shown = _shown_by(_parts(last), _parts(original), _parts(facts.get(_SPACE)))
    if shown is None and _ORIGINAL in facts and _REPLAY_BUFFER not in facts:
        return True
    return shown


def facts_of(model: Path) -> Mapping[str, Any]:
    """Return the attributes of a saved model; none if the file cannot be read.

    Pickled attributes are the JSON that SB3 wrote beside them, but for spaces and observations.
    """
    try:
        with zipfile.ZipFile(model) as archive:
            facts = json.loads(archive.read("data"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}  # Loading it reports the error.
    if not isinstance(facts, dict):
        return {}
    return {**facts, **{name: _read(facts[name]) for name in (_SPACE, _LAST, _ORIGINAL) if name in facts}}


def _shown_by(last: Mapping[Any, Any], original: Mapping[Any, Any], space: Mapping[Any, Any]) -> bool | None:
    """Return the verdict of two observations, given by key: one normalized key is enough, and False needs all."""
    verdicts = {_of_one(last[key], original.get(key), space.get(key)) for key in last}
    return True if True in verdicts else None if None in verdicts or not verdicts else False


def _of_one(last: Any, original: Any, space: Any) -> bool | None:
    if not isinstance(last, np.ndarray):
        return None
    # A VecFrameStack around the VecNormalize changes the shape, and gives its frames the dtype of the space.
    if not isinstance(original, np.ndarray) or last.shape != original.shape:
        return True if _outside(last, space) else None
    # An environment that exceeds its own bounds shows nothing by that.
    if _outside(last, space) and not _outside(original, space):
        return True
    if last.dtype != original.dtype:
        return True if last.dtype == np.float32 else None
    return False if last.dtype != np.float32 or np.array_equal(last, original) else None


def _outside(observations: npt.NDArray[Any], space: Any) -> bool:
    """Return whether observations are outside of the bounds of a space, if it has any, by more than rounding."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if not isinstance(low, np.ndarray) or not isinstance(high, np.ndarray) or observations.shape[1:] != low.shape:
        return False
    below = observations < low - _ROUNDING * (1 + abs(low))
    return bool(np.any(below | (observations > high + _ROUNDING * (1 + abs(high)))))


def _parts(value: Any) -> dict[Any, Any]:
    """Return an observation or a space by key; the key of one that is not a Dict is None."""
    value = getattr(value, "spaces", value)
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {None: value}


def _read(value: Any) -> Any:
    """Return a pickled attribute, or an empty mapping if it cannot be read."""
    if value is None:
        return None
    try:
        return _Arrays(io.BytesIO(base64.b64decode(value[":serialized:"]))).load()
    except Exception:
        return {}


class _Inert:
    """Stand-in for an object of any class but an array: it has the attributes, and no behaviour."""


class _Arrays(pickle.Unpickler):
    """Unpickler that builds arrays, and stand-ins for all other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a part of NumPy's arrays by its name, or a stand-in."""
        if module.partition(".")[0] == "numpy" and name in _ARRAYS:
            return super().find_class(module, name)
        return {"bytearray": bytearray, "OrderedDict": dict}.get(name, _Inert)

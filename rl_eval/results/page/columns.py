"""Columns of the episodes of a report: compressed numbers in text, which the page unpacks when it is opened.

Each column is a little-endian array of the smallest type that shows the same seven digits, its bytes sorted by their
place in the number, which compresses better, then zlib and base64.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import Outcome
from rl_eval.results.report.metrics import episode_seconds
from rl_eval.results.story import story

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult

__all__ = ["MOST_ROWS", "data_of_all", "episode_data", "pack", "shown_rows"]

MOST_ROWS: Final = 200_000
"""Episodes of one result in the table; the others are in the numbers alone."""

_MOST_TEXT: Final = 1_700_000
"""Characters of the packed columns of one result: info scalars beyond it are left out."""
_MOST_FAULTS: Final = 20_000
_MOST_TRACEBACKS: Final = 2_000_000
"""Characters of tracebacks of one result, each different one counted once."""
_UNSIGNED: Final = ("<u1", "<u2", "<u4")
_DIGITS: Final = 1e-7
"""Relative error that does not show."""


def data_of_all(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """Return :func:`episode_data` of each result, without columns that equal the first result's, as seeds do."""
    first, *others = map(episode_data, results)
    for other in others:
        columns = other["columns"].items()
        other["columns"] = {name: packed for name, packed in columns if packed != first["columns"][name]}
    return [first, *others]


def episode_data(result: EvalResult) -> dict[str, Any]:
    """Return the finished episodes of a result, with their faults, as JSON values.

    Returns:
        ``columns``: packed columns by name; ``infos``: those of info scalars, as pairs of name and column; ``faults``:
        packed text of a JSON object; ``omitted``: episodes that are not there.
    """
    positions = shown_rows(result)
    rows = result.table.rows[positions]
    columns = {
        "index": rows["index"],
        "seed": rows["seed"],
        "return": rows["episode_return"],
        "length": rows["length"],
        "end": _ends(rows),
        "success": rows["success_at_end"].astype(np.int16) + 1,
        "attempts": rows["attempts"],
        "runner": rows["runner"].astype(np.int64) + 1,
        "seconds": _three_digits(episode_seconds(rows)),
        "counted": result.counted[positions].astype(np.uint8),
    }
    packed = {name: pack(values) for name, values in columns.items()}
    infos = _info_columns(result, positions, _MOST_TEXT - sum(len(text) for _, _, text in packed.values()))
    return {
        "columns": packed,
        "infos": infos,
        "infos_omitted": len(result.table.info_keys) - len(infos),
        "faults": _pack_text(_fault_data(result)),
        "omitted": int(result.table.filled.sum()) - len(rows),
    }


def _info_columns(result: EvalResult, positions: npt.NDArray[np.intp], left: int) -> list[list[Any]]:
    """Return the first info scalars, as pairs of name and packed column, in at most ``left`` characters."""
    found: list[list[Any]] = []
    for name, values in zip(result.table.info_keys, result.table.infos.T, strict=True):
        packed = pack(values[positions])
        left -= len(packed[2])
        if left < 0:
            break
        found.append([name, packed])
    return found


def shown_rows(result: EvalResult) -> npt.NDArray[np.intp]:
    """Return the indices of the episodes that the table has: the first of those that finished."""
    return np.flatnonzero(result.table.filled)[:MOST_ROWS]


def pack(values: npt.NDArray[Any]) -> list[Any]:
    """Return an array of numbers as ``[type, count, text]``."""
    small = _narrow(values)
    planes = small.view(np.uint8).reshape(len(small), small.itemsize).T
    text = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    return [small.dtype.str[1:], len(small), text]


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.kind in "biu":
        least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        fits = (kind for kind in _UNSIGNED if least >= 0 and most <= np.iinfo(kind).max)
        return np.ascontiguousarray(values, next(fits, "<f8"))
    wide = np.ascontiguousarray(values, "<f8")
    with np.errstate(over="ignore", under="ignore"):
        small = wide.astype("<f4")
        known = np.isfinite(wide)
        shows = bool((np.abs(small[known] - wide[known]) <= _DIGITS * np.abs(wide[known])).all())
    return small if shows else wide


def _ends(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """Return how episodes ended: 0 terminated, 1 cut by the environment, 2 by ``max_episode_steps``, 3 failed."""
    ends = np.where(rows["terminated"], 0, np.maximum(rows["truncated_by"], 1))
    return np.where(rows["outcome"] == Outcome.FAILED, 3, ends).astype(np.uint8)


def _three_digits(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Round to three decimal digits, then to the eleven binary ones that tell them apart: noise does not compress."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (np.floor(np.log10(np.abs(seconds))) - 2)
        mantissas, exponents = np.frexp(np.round(seconds / scale) * scale)
    rounded = np.ldexp(np.round(mantissas * 2**11) / 2**11, exponents)
    return np.where(np.isfinite(rounded), rounded, seconds)


def _fault_data(result: EvalResult) -> dict[str, Any]:
    """Return faults as rows, told as in a story, and each different traceback once; a row without one has place -1."""
    texts: dict[str, int] = {}
    left, rows = _MOST_TRACEBACKS, []
    events = (event for index in sorted(result.table.faults) for event in story(result, index))
    told = ((event.fault, event.text) for event in events if event.fault is not None)
    for fault, text in islice(told, _MOST_FAULTS):
        if fault.traceback not in texts and len(fault.traceback) <= left:
            left -= len(fault.traceback)
            texts[fault.traceback] = len(texts)
        rows.append([fault.index, fault.attempt, fault.runner, text, texts.get(fault.traceback, -1)])
    return {"rows": rows, "tracebacks": list(texts), "omitted": max(0, len(result.faults) - _MOST_FAULTS)}


def _pack_text(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    return base64.b64encode(zlib.compress(text, 9)).decode()

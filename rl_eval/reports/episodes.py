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
from rl_eval.results.metrics import episode_seconds
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
    rows, infos = result.table.rows[positions], []
    ends = np.where(rows["terminated"], 0, np.maximum(rows["truncated_by"], 1))
    mantissas, exponents = np.frexp(episode_seconds(rows))  # Noise beyond a few digits does not compress.
    columns = {
        "index": rows["index"],
        "seed": rows["seed"],
        "return": rows["episode_return"],
        "length": rows["length"],
        "end": np.where(rows["outcome"] == Outcome.FAILED, 3, ends),
        "success": rows["success_at_end"].astype(np.int16) + 1,
        "attempts": rows["attempts"],
        "runner": rows["runner"].astype(np.int64) + 1,
        "seconds": np.ldexp(np.round(mantissas * 2**13) / 2**13, exponents),
        "counted": result.counted[positions],
    }
    packed = {name: pack(values) for name, values in columns.items()}
    left = _MOST_TEXT - sum(len(text) for _, _, text in packed.values())
    for name, values in zip(result.table.info_keys, result.table.infos.T, strict=True):
        column = pack(values[positions])
        left -= len(column[2])
        if left < 0:
            break
        infos.append([name, column])
    return {
        "columns": packed,
        "infos": infos,
        "infos_omitted": len(result.table.info_keys) - len(infos),
        "faults": _compressed(json.dumps(_fault_data(result), separators=(",", ":"), allow_nan=False).encode("ascii")),
        "omitted": int(result.table.filled.sum()) - len(rows),
    }


def shown_rows(result: EvalResult) -> npt.NDArray[np.intp]:
    """Return the indices of the episodes that the table has: the first of those that finished."""
    return np.flatnonzero(result.table.filled)[:MOST_ROWS]


def pack(values: npt.NDArray[Any]) -> list[Any]:
    """Return an array of numbers as ``[type, count, text]``."""
    small = _narrow(values)
    planes = small.view(np.uint8).reshape(len(small), small.itemsize).T
    return [small.dtype.str[1:], len(small), _compressed(planes.tobytes())]


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
    return {"rows": rows, "tracebacks": list(texts)}


def _compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()

"""Decides how episodes and faults look as columns of an Arrow table, and reads them back bit by bit.

Outside of this package an outcome is a word and "not reported" is null; inside both are small codes. This
is the one place that knows both. Whatever is written to Parquet, the result's file or a segment of the
evaluation log, has these columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.episode import ROW, Fault, Outcome, Truncation

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["episode_columns", "fault_columns", "read_episodes", "read_faults"]

_OUTCOMES: Final = {outcome.name.lower(): int(outcome) for outcome in Outcome}
_TRUNCATIONS: Final = {None if cut is Truncation.NONE else cut.name.lower(): int(cut) for cut in Truncation}
_SUCCESS: Final = {None: -1, False: 0, True: 1}
_CODES: Final[dict[str, dict[Any, int]]] = {
    "outcome": _OUTCOMES,
    "truncated_by": _TRUNCATIONS,
    "success_once": _SUCCESS,
    "success_at_end": _SUCCESS,
}
"""Columns whose codes are written as text or booleans: written value to code, the codes without a gap."""

_INFO: Final = "info_"


def episode_columns(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], info_keys: Sequence[str]
) -> dict[str, pa.Array]:
    """Return the columns of finished episodes by name.

    Args:
        rows: Array of :data:`~rl_eval.episode.ROW`, shape (n,).
        infos: Their info scalars, shape (n, len(info_keys)).
        info_keys: Names of the info scalars; they become columns ``info_<key>``.
    """
    import pyarrow as pa

    columns = {name: _decode(name, rows[name]) for name in ROW.names or ()}
    return columns | {_INFO + key: pa.array(infos[:, number]) for number, key in enumerate(info_keys)}


def read_episodes(table: pa.Table) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64], tuple[str, ...]]:
    """Return rows, info scalars and info keys: the inverse of :func:`episode_columns`.

    Raises:
        KeyError: A column is missing.
        ValueError: A column holds a value that no code stands for.
    """
    keys = tuple(name.removeprefix(_INFO) for name in table.column_names if name.startswith(_INFO))
    rows = np.zeros(len(table), ROW)
    infos = np.empty((len(table), len(keys)))
    for name in ROW.names or ():
        rows[name] = _encode(name, table.column(name))
    for number, key in enumerate(keys):
        infos[:, number] = table.column(_INFO + key).to_numpy()
    return rows, infos, keys


def fault_columns(faults: Sequence[Fault]) -> dict[str, pa.Array]:
    """Return the columns of faults by name: the fields of :class:`~rl_eval.episode.Fault`."""
    import pyarrow as pa

    kinds = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return {
        field.name: pa.array(
            [_storable(getattr(fault, field.name)) for fault in faults], kinds.get(str(field.type), pa.string())
        )
        for field in fields(Fault)
    }


def read_faults(table: pa.Table) -> tuple[Fault, ...]:
    """Return faults: the inverse of :func:`fault_columns`."""
    return tuple(Fault(**fault) for fault in table.to_pylist())


def _storable(value: Any) -> Any:
    # An exception's text may hold surrogates (a file name that is not UTF-8), which no file format takes.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _decode(name: str, codes: npt.NDArray[Any]) -> pa.Array:
    """Return a column as it is written: codes become text or booleans, null for "none"."""
    import pyarrow as pa

    if name not in _CODES:
        return pa.array(np.ascontiguousarray(codes))
    values = list(_CODES[name])
    positions = codes.astype(np.int64) - _CODES[name][values[0]]
    return pa.array(values, _kind(name)).take(pa.array(positions))


def _encode(name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a written column as codes: the inverse of :func:`_decode`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in _CODES:
        return np.asarray(column.to_numpy())
    written = pa.array(list(_CODES[name]), _kind(name))
    positions = pc.index_in(column.cast(_kind(name)), value_set=written)
    if positions.null_count:
        raise ValueError(f"column {name} holds a value other than {', '.join(map(str, _CODES[name]))}")
    codes: npt.NDArray[Any] = np.array(list(_CODES[name].values()), ROW[name])[positions.to_numpy()]
    return codes


def _kind(name: str) -> pa.DataType:
    import pyarrow as pa

    return pa.bool_() if _CODES[name] is _SUCCESS else pa.string()

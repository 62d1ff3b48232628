"""Columns of an Arrow table for episodes and faults, which read back bit by bit.

In files an outcome is a word and "not reported" is null; in rows both are small codes, as
:class:`~rl_eval.records.episode.Column` says. Whatever is written to Parquet, the result's file or a segment of the
evaluation log, has these columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import COLUMNS, ROW, Fault
from rl_eval.records.foreign import typed

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["episode_columns", "fault_columns", "read_episodes", "read_faults"]

_INFO: Final = "info_"


def episode_columns(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], info_keys: Sequence[str]
) -> dict[str, pa.Array]:
    """Return the columns of finished episodes by name.

    Args:
        rows: Array of :data:`~rl_eval.records.episode.ROW`, shape (n,).
        infos: Their info scalars, shape (n, len(info_keys)).
        info_keys: Names of the info scalars; they become columns ``info_<key>``.
    """
    import pyarrow as pa

    columns = {name: _decode(name, rows[name]) for name in COLUMNS}
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
    for name in COLUMNS:
        rows[name] = _encode(name, table.column(name))
    for number, key in enumerate(keys):
        infos[:, number] = table.column(_INFO + key).to_numpy()
    return rows, infos, keys


def fault_columns(faults: Sequence[Fault]) -> dict[str, pa.Array]:
    """Return the columns of faults by name: the fields of :class:`~rl_eval.records.episode.Fault`."""
    import pyarrow as pa

    kinds = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return {
        field.name: pa.array(
            [_storable(getattr(fault, field.name)) for fault in faults], kinds.get(str(field.type), pa.string())
        )
        for field in fields(Fault)
    }


def read_faults(table: pa.Table) -> tuple[Fault, ...]:
    """Return faults: the inverse of :func:`fault_columns`.

    Raises:
        ValueError: A column is missing, or holds what no fault has.
    """
    return tuple(typed(list[Fault], table.to_pylist()))


def _storable(value: Any) -> Any:
    # An exception's text may hold surrogates (a file name that is not UTF-8), which no file format takes.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _decode(name: str, stored: npt.NDArray[Any]) -> pa.Array:
    """Return a column as it is written: codes become text or booleans, null for "none"."""
    import pyarrow as pa

    codes = COLUMNS[name].codes
    if codes is None:
        return pa.array(np.ascontiguousarray(stored))
    return _written(codes).take(pa.array(stored.astype(np.int64) - min(codes.values())))


def _encode(name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a written column as codes: the inverse of :func:`_decode`."""
    import pyarrow.compute as pc

    codes = COLUMNS[name].codes
    if codes is None:
        return np.asarray(column.to_numpy())
    written = _written(codes)
    positions = pc.index_in(column.cast(written.type), value_set=written)
    if positions.null_count:
        raise ValueError(f"column {name} holds a value other than {', '.join(map(str, codes))}")
    stored: npt.NDArray[Any] = np.array(list(codes.values()), ROW[name])[positions.to_numpy()]
    return stored


def _written(codes: Mapping[Any, int]) -> pa.Array:
    """Return the values that codes stand for, in the order of the codes: text or booleans."""
    import pyarrow as pa

    return pa.array(list(codes), pa.bool_() if True in codes else pa.string())

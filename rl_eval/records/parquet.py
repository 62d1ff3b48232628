"""Records and faults as columns of Parquet files."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.bounded_read import BoundedFile
from rl_eval.records.episode import COLUMNS, ROW, Fault
from rl_eval.records.plain import typed

if TYPE_CHECKING:
    import pyarrow as pa


_ROW_BYTES: Final = 3
"""Minimum number of bytes per row of a valid file. rl_eval writes at least 4.7 bytes per row, for a million failed
episodes with shared seeds."""
_UNPACKED: Final = 64
"""Maximum compression ratio of columns without dictionaries. Snappy, which rl_eval uses, reaches 21."""
_VALUES: Final = (20_000_000, 10)
"""Two limits of the number of values in all columns together: a number, and a number per byte of the file. The higher
limit applies, because a column that repeats one value needs almost no bytes."""
_FOOTER: Final = 300_000
"""Maximum number of bytes of the metadata of a small file. In memory, they can take 250 times as much."""
_PART: Final = 2**26
"""Number of bytes of a column in one row group that are read of any file. rl_eval writes a million rows per group."""
_END: Final = 8
"""Number of bytes at the end of a file: four of the length of the metadata, and four that every file has."""
_TEXT: Final = "BYTE_ARRAY"
_BYTES: Final = "FIXED_LEN_BYTE_ARRAY"


@final
class ParquetColumns:
    """Columns of a Parquet file: numbers, truth values and text.

    Args:
        source: The open file.
        size: Size of the file, in bytes.
        texts: Names of columns of text. Each distinct text is read only once, because a long text may be in every row.

    Raises:
        OSError, pyarrow.ArrowException: The file is not a Parquet file.
    """

    def __init__(self, source: Any, size: int, texts: Collection[str] = ()) -> None:
        import pyarrow.parquet as pq

        source.seek(-_END, os.SEEK_END)
        if (footer := int.from_bytes(source.read(4), "little")) > max(_FOOTER, size * 9 // 10):
            raise OSError(errno.EFBIG, f"its footer has {footer:,} bytes, of {size:,}")
        metadata = pq.read_metadata(source)
        self._size = size
        # A nested column has a longer path than its name, so it is not found by its name.
        columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
        self._kinds = {column.path: column.physical_type for column in columns}
        self._texts = [name for name in texts if self._kinds.get(name) == _TEXT]
        self._file = pq.ParquetFile(source, metadata=metadata, read_dictionary=self._texts)
        self.num_rows: int = metadata.num_rows
        self.names: list[str] = self._file.schema_arrow.names
        self.metadata: dict[bytes, bytes] = metadata.metadata or {}

    def read(self, names: Sequence[str], *, use_threads: bool = True) -> pa.Table:
        """Read some columns.

        Raises:
            ValueError: A column is missing or has another type, or the file claims more rows than possible.
            OSError, pyarrow.ArrowException: A column is damaged.
        """
        self._check_kinds(names)
        self._check_size(len(names), _ROW_BYTES)
        return self._file.read(columns=list(names), use_threads=use_threads)

    def _check_kinds(self, names: Sequence[str]) -> None:
        if len({*self.names}) < len(self.names):
            raise ValueError("two of its columns have the same name")
        for name in names:
            kind = self._kinds.get(name)
            if kind is None:
                raise ValueError(f"the file has no column {name} of single values")
            if kind == _BYTES or (kind == _TEXT and name not in self._texts):
                stored = self._file.schema_arrow.field(name).type
                raise ValueError(f"its column {name} has the unexpected type {stored}")

    def read_all(self) -> pa.Table:
        """Read all columns, of any type, as :meth:`read` does."""
        self._check_size(len(self.names), 0)
        return self._file.read()

    def _check_size(self, num_columns: int, row_bytes: int) -> None:
        metadata = self._file.metadata
        # Do not check the columns of a group: pyarrow terminates the process when it reads damaged columns.
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if sum(group.num_rows for group in groups) != self.num_rows:
            raise ValueError(f"its row groups do not add up to the {self.num_rows:,} rows that it claims")
        values, per_byte = _VALUES
        if (
            self.num_rows * row_bytes > self._size
            or self.num_rows * num_columns > max(values, per_byte * self._size)
            or sum(group.total_byte_size for group in groups) > self._size * _UNPACKED
        ):
            raise ValueError(f"the file claims {self.num_rows:,} rows, which its {self._size:,} bytes cannot contain")


@contextmanager
def parquet_columns(path: Path, texts: Collection[str] = ()) -> Iterator[ParquetColumns]:
    """Open a Parquet file.

    Raises:
        OSError, pyarrow.ArrowException: The file is not a Parquet file.
    """
    with BoundedFile(path) as file:  # pyarrow accepts only UTF-8 paths, so Python opens every file.
        file.limit = max(_PART, file.stored)
        yield ParquetColumns(file, file.stored, texts)


TEXTS: Final = (
    *(name for name, column in COLUMNS.items() if column.codes and True not in column.codes),
    *(field.name for field in fields(Fault) if field.type not in ("int", "float", "bool")),
)
"""Names of the columns of text."""

_INFO: Final = "info_"
_BLOCK: Final = 10_000
"""Number of faults to build at a time, because the mappings from which they are built take several times as much
memory."""
_LONGEST: Final = 200
"""Maximum number of characters of an error's text, because the text contains the value."""


def episode_columns(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], info_keys: Sequence[str]
) -> dict[str, pa.Array]:
    """Return the columns of finished episodes by name.

    Args:
        rows: Array of :data:`~rl_eval.records.episode.ROW`, shape (n,).
        infos: Info scalars of the rows, shape (n, len(info_keys)).
        info_keys: Names of the info scalars; they become columns ``info_<key>``.
    """
    import pyarrow as pa

    columns = {name: _decode(name, rows[name]) for name in COLUMNS}
    return columns | {_INFO + key: pa.array(infos[:, number]) for number, key in enumerate(info_keys)}


def episode_names(names: Sequence[str]) -> list[str]:
    """Return the names of the columns to read for :func:`read_episodes`.

    These are all columns of a row, even if the file lacks some, and the info columns of the file.

    Args:
        names: Names of the columns of the file.
    """
    return [*COLUMNS, *(name for name in names if name.startswith(_INFO))]


def read_episodes(table: pa.Table) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64], tuple[str, ...]]:
    """Return the rows, the info scalars and the info keys of a table: the inverse of :func:`episode_columns`.

    Raises:
        KeyError: A column is missing.
        ValueError: A column contains a value without a code, or of another type; the message names the column.
    """
    keys = tuple(name.removeprefix(_INFO) for name in table.column_names if name.startswith(_INFO))
    rows = np.zeros(len(table), ROW)
    infos = np.empty((len(table), len(keys)))
    for name in COLUMNS:
        rows[name] = _encode(name, table.column(name))
    for number, key in enumerate(keys):
        infos[:, number] = _numbers(_INFO + key, table.column(_INFO + key), infos.dtype)
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


def fault_names(names: Sequence[str]) -> list[str]:
    """Return the names of the columns to read for :func:`read_faults`.

    These are all required fields, even if the file lacks some, and the optional fields of the file.

    Args:
        names: Names of the columns of the file.
    """
    return [field.name for field in fields(Fault) if field.name in names or field.default is MISSING]


def read_faults(table: pa.Table) -> tuple[Fault, ...]:
    """Return the faults of a table: the inverse of :func:`fault_columns`.

    Raises:
        ValueError: A column is missing, or contains an invalid value.
    """
    names, faults = table.column_names, []
    rows = zip(*(_values(table.column(name)) for name in names), strict=True)
    while block := [dict(zip(names, row, strict=True)) for row in islice(rows, _BLOCK)]:
        faults += typed(list[Fault], block)
    return tuple(faults)


def _storable(value: Any) -> Any:
    # An exception's text may contain surrogates (a file name that is not UTF-8), which no file format accepts.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _decode(name: str, stored: npt.NDArray[Any]) -> pa.Array:
    """Return a column in the form of the file: codes become text or booleans, and the code of None becomes null."""
    import pyarrow as pa

    codes = COLUMNS[name].codes
    if codes is None:
        return pa.array(np.ascontiguousarray(stored))
    return _written(codes).take(pa.array(stored.astype(np.int64) - min(codes.values())))


def _encode(name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column of a file as codes: the inverse of :func:`_decode`."""
    codes = COLUMNS[name].codes
    if codes is None:
        return _numbers(name, column, ROW[name])
    written = _written(codes)
    with _named(name, column, written.type):
        positions = _positions(column, written)
    if positions.null_count:
        raise ValueError(f"column {name} contains a value other than {', '.join(map(str, codes))}")
    stored: npt.NDArray[Any] = np.array(list(codes.values()), ROW[name])[positions.to_numpy()]
    return stored


def _positions(column: pa.ChunkedArray, written: pa.Array) -> pa.ChunkedArray:
    """Return the position of each value in the list of valid values; null for an invalid value.

    For dictionary-encoded text, each distinct value is looked up only once.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return pc.index_in(column.cast(written.type), value_set=written)
    words, places = _words(column)
    return pc.index_in(words.cast(written.type), value_set=written).take(places)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as a list. If the column is dictionary-encoded, equal texts are the same object."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    words, places = _words(column)
    texts = words.to_pylist()
    return [texts[place] for place in places.to_pylist()]


def _words(column: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    """Return the distinct values of a dictionary-encoded column, and for each row the position of its value among them.

    The last distinct value is null.
    """
    import pyarrow as pa

    codes = column.unify_dictionaries().combine_chunks()
    words = pa.concat_arrays([codes.dictionary, pa.nulls(1, codes.dictionary.type)])
    return words, codes.indices.cast(pa.int64()).fill_null(len(words) - 1)


def _numbers(name: str, column: pa.ChunkedArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a column of numbers or booleans as an array; null in a float column becomes NaN."""
    import pyarrow as pa

    kind = pa.from_numpy_dtype(dtype)
    with _named(name, column, kind):
        cast = column.cast(kind)
    if cast.null_count and dtype.kind != "f":
        raise ValueError(f"column {name} lacks {cast.null_count:,} of its {len(cast):,} values")
    return np.asarray(cast.to_numpy())


@contextmanager
def _named(name: str, column: pa.ChunkedArray, kind: pa.DataType) -> Iterator[None]:
    """Convert an error of Arrow about the values of a column into an error that names the column."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        reason = str(error)[:_LONGEST]
        raise ValueError(f"column {name} of type {column.type} cannot be converted to {kind}: {reason}") from error


def _written(codes: Mapping[Any, int]) -> pa.Array:
    """Return the values of a column (text or booleans), in the order of their codes."""
    import pyarrow as pa

    return pa.array(list(codes), pa.bool_() if True in codes else pa.string())

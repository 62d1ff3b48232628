"""Parquet files that somebody else may have written: how much they hold is known before it is read.

A few kilobytes can stand for any number of rows, and for one long text in each of them. Rows of this package compress
little, as no seed and no time is like another, so a file that says more than its bytes can hold is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetColumns"]

_ROW_BYTES: Final = 3
"""Fewest bytes for each row. The least that we write are 4.7, for a million failed episodes that share their seeds."""
_UNPACKED: Final = 64
"""Most bytes that one byte stands for, before dictionaries are used: Snappy, which we write, reaches 21."""
_VALUES: Final = (20_000_000, 10)
"""Most values in all columns: so many, or so many for each byte. A column that repeats one value needs no bytes."""
_TEXT: Final = "BYTE_ARRAY"
_BYTES: Final = "FIXED_LEN_BYTE_ARRAY"


@final
class ParquetColumns:
    """Columns of a Parquet file: numbers, truth values and text.

    Args:
        source: The file, as pyarrow takes it.
        size: Its bytes.
        texts: Columns of text, which are read as codes of their different values: one may stand in every row.

    Raises:
        OSError, pyarrow.ArrowException: It is no Parquet file.
    """

    def __init__(self, source: Any, size: int, texts: Collection[str]) -> None:
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(source)
        self._size = size
        # What is in a nested column has a longer path than its name, so it is not found under it.
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
            ValueError: One is missing or of another kind, or the file says more than its bytes can hold.
            OSError, pyarrow.ArrowException: They are damaged.
        """
        self._check_kinds(names)
        self._check_size(len(names))
        return self._file.read(columns=list(names), use_threads=use_threads)

    def _check_kinds(self, names: Sequence[str]) -> None:
        if len({*self.names}) < len(self.names):
            raise ValueError("two of its columns have one name")
        for name in names:
            kind = self._kinds.get(name)
            if kind is None:
                raise ValueError(f"it has no column {name} of single values")
            if kind == _BYTES or (kind == _TEXT and name not in self._texts):
                raise ValueError(
                    f"its column {name} holds {self._file.schema_arrow.field(name).type}, which none of ours does"
                )

    def _check_size(self, num_columns: int) -> None:
        metadata = self._file.metadata
        # Not of its columns: what is wrong with those ends the process where pyarrow looks at them.
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if sum(group.num_rows for group in groups) != self.num_rows:
            raise ValueError(f"its parts do not have the {self.num_rows:,} rows that it says")
        values, per_byte = _VALUES
        if (
            self.num_rows * _ROW_BYTES > self._size
            or self.num_rows * num_columns > max(values, per_byte * self._size)
            or sum(group.total_byte_size for group in groups) > self._size * _UNPACKED
        ):
            raise ValueError(f"it says that it has {self.num_rows:,} rows, which its {self._size:,} bytes cannot hold")

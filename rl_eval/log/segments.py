"""Segments: Parquet files with the rows of a log.

A name is ``<epoch>-<number>-<kind>-<hash>.parquet``: the session, the place in the session, the kind of rows, and the
hash of the bytes. The hash shows a damaged segment. Numbers start at 1 and have no gaps, so they show a missing
segment.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rl_eval.errors import LogError
from rl_eval.log.manifest import FORMAT
from rl_eval.records.episode import ROW, Batch, Fault, Pardon, RuleEnd
from rl_eval.records.parquet import (
    TEXTS,
    ParquetColumns,
    episode_columns,
    episode_names,
    fault_columns,
    fault_names,
    read_episodes,
    read_faults,
)
from rl_eval.records.plain import damage, parse_json, typed

if TYPE_CHECKING:
    import pyarrow as pa


Kind = Literal["episodes", "faults"]

_METADATA: Final = b"rl_eval"
_MOST_FAULTS: Final = 1_000_000
"""Maximum number of faults to read from a segment. One flush has far fewer faults. In memory, a fault takes several
hundred bytes."""
_NAME: Final = re.compile(r"(\d{6,})-(\d{8,})-(episodes|faults)-([0-9a-f]{32})\.parquet")


class SegmentName(NamedTuple):
    """Name of a segment; names sort in the order of writing."""

    epoch: int
    number: int
    kind: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> SegmentName | None:
        """Parse a file name; return None if it is not the name of a segment."""
        match = _NAME.fullmatch(text)
        return match and cls(int(match[1]), int(match[2]), match[3], match[4])

    def __str__(self) -> str:
        return f"{self.epoch:06d}-{self.number:08d}-{self.kind}-{self.digest}.parquet"


@dataclass(frozen=True)
class Header:
    """Metadata of a segment: facts about the flush that wrote the segment."""

    session: str
    """Unique string of the session. It differs even if two sessions claimed the same epoch at the same time."""
    numerics: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    """Steps and seconds since the previous flush, by name."""
    notes: list[str] = field(default_factory=list)
    """Notes of the result since the previous flush."""
    determinism: dict[str, Any] = field(default_factory=dict)
    """Finding of the determinism check; empty if the check has not ended."""
    num_runners: int | None = None
    """Largest number of runner processes at one time so far; None if unknown."""
    ended_by: RuleEnd | None = None
    """End of the evaluation by a rule."""
    pardons: list[Pardon] = field(default_factory=list)
    """Pardons since the previous flush, of faults in this or earlier segments."""


@dataclass(frozen=True)
class Segment:
    """Contents of a segment."""

    header: Header
    rows: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ROW))
    infos: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    faults: tuple[Fault, ...] = ()


def encode(batches: Sequence[Batch], info_keys: Sequence[str], session: str) -> list[tuple[Kind, bytes]]:
    """Return the segments of one flush, as pairs of kind and bytes, in the order of writing.

    Faults come before their episodes.
    """
    faults = [fault for batch in batches for fault in batch.faults]
    rows = np.concatenate([batch.rows for batch in batches])
    infos = np.concatenate([batch.infos for batch in batches])
    numerics = next((batch.numerics for batch in reversed(batches) if batch.numerics), {})
    notes = list(dict.fromkeys(note for batch in batches for note in batch.notes))
    last = batches[-1]
    totals = sum_totals(batch.totals for batch in batches)
    ended_by = next((batch.ended_by for batch in reversed(batches) if batch.ended_by), None)
    pardons = [pardon for batch in batches for pardon in batch.pardons]
    header = Header(session, numerics, totals, notes, last.determinism, last.num_runners, ended_by, pardons)
    files: list[tuple[Kind, bytes]] = [("episodes", _encode(episode_columns(rows, infos, info_keys), header))]
    if faults:
        files.insert(0, ("faults", _encode(fault_columns(faults), Header(session))))
    return files


def name_of(data: bytes, epoch: int, number: int, kind: Kind) -> SegmentName:
    """Return the name of a segment whose file contains ``data``."""
    return SegmentName(epoch, number, kind, xxhash.xxh3_128_hexdigest(data))


def decode(name: SegmentName, data: bytes) -> Segment:
    """Read the bytes of a segment.

    Raises:
        ValueError: The bytes are damaged.
        LogError: Another version of this package wrote the segment.
    """
    import pyarrow as pa

    if xxhash.xxh3_128_hexdigest(data) != name.digest:
        raise ValueError("the hash of its bytes differs from the hash in its name")
    try:
        return _segment(name, ParquetColumns(pa.BufferReader(data), len(data), TEXTS))
    except (OSError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise ValueError(damage(error)) from error


def _segment(name: SegmentName, columns: ParquetColumns) -> Segment:
    described = parse_json(columns.metadata[_METADATA])
    if described["format"] != FORMAT:
        problem = f"segment {name} does not have format {FORMAT}, the only format that this version of rl_eval reads"
        raise LogError(problem, key="format", value=described["format"])
    header = typed(Header, described)
    if name.kind == "faults":
        if columns.num_rows > _MOST_FAULTS:
            raise ValueError(f"it has {columns.num_rows:,} faults, but the limit is {_MOST_FAULTS:,}")
        return Segment(header, faults=read_faults(columns.read(fault_names(columns.names), use_threads=False)))
    rows, infos, _ = read_episodes(columns.read(episode_names(columns.names), use_threads=False))
    return Segment(header, rows, infos)


def sum_totals(totals: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up totals, by name."""
    summed: dict[str, float] = defaultdict(float)
    for total in totals:
        for name, value in total.items():
            summed[name] += value
    return dict(summed)


def _encode(columns: Mapping[str, pa.Array], header: Header) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = {"format": FORMAT} | asdict(header)
    table = pa.table(dict(columns), metadata={_METADATA: json.dumps(described, default=str)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())

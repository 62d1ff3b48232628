"""Reader of an evaluation log: the rows of all undamaged segments, in the order of writing, each index once.

A row is a function of its index. Two sessions can write the row of the same index, for example because the first
session seemed dead. Then the reader uses the row that was written first, and compares the second row with the first.

A row without an outcome sets the earlier rows of its index aside: they stay in the log, but do not count.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, LogError
from rl_eval.log.manifest import (
    MANIFEST_FILE,
    RESTORE,
    Amendment,
    Manifest,
    Retry,
    counts,
    is_manifest,
    read_changes,
    retried_since,
)
from rl_eval.log.ownership import Claim, read_claims
from rl_eval.log.segments import Segment, SegmentName, decode, sum_totals
from rl_eval.log.storage import Storage, log_error, open_storage
from rl_eval.records.episode import ROW, Fault, Outcome, Pardon, RuleEnd, outcomes_of

_SEGMENTS: Final = "segments"
_DAMAGED: Final = "damaged"
_NUMBERED: Final = re.compile(r"\d{6,}-\d{8,}-")
_MOST_MISSING: Final = 100_000
"""Maximum number of missing segments to list, because a claim that another program wrote may contain any number."""
_READERS: Final = 8
"""Number of segments to read at once, because each read takes a round trip on an object store."""


@dataclass(frozen=True)
class LogContents:
    """Contents of an evaluation log."""

    manifest: Manifest
    rows: npt.NDArray[np.void]
    """Array of :data:`~rl_eval.records.episode.ROW`, shape (n,), in order of writing, each index once."""
    infos: npt.NDArray[np.float64]
    """Info scalars of the rows, shape (n, len(manifest.info_keys))."""
    faults: tuple[Fault, ...]
    """Faults in order of writing. A charged fault of an attempt that ran again after a restart appears only once."""
    pardons: tuple[Pardon, ...]
    """Pardons of charged faults."""
    numerics: dict[str, Any]
    """Numerics key of the first session that recorded a key."""
    totals: dict[str, float]
    """Sums of steps and seconds over all sessions, by name. Only committed work counts."""
    notes: tuple[str, ...]
    """Notes of the result in order of writing, without duplicates."""
    determinism: dict[str, Any]
    """Finding of the last determinism check; empty if no check has ended."""
    ended_by: RuleEnd | None
    """End of the evaluation by a rule; None if the last session ended without, or records were set aside since."""
    mismatches: tuple[int, ...]
    """Indices that were written twice with different outcomes: the evaluation is not deterministic."""
    amendments: tuple[Amendment, ...]
    """Accepted code changes, in order. There is a note about each change."""
    damaged: tuple[str, ...]
    """Names of segments that were set aside: in the result of ``EvaluationLog.begin`` by this call, in the result of
    :func:`read_log` at any time. The rows contain an episode of such a segment only if the episode ran again."""
    num_runners: int | None
    """Largest number of runner processes at one time in any session; None if unknown."""
    retried: tuple[int, ...] = ()
    """Indices of episodes whose failed records a retry set aside."""
    set_aside: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ROW))
    """Rows from :func:`~rl_eval.records.episode.set_aside_rows`, for episodes whose policy may have been another one.
    Such an episode has a row in ``rows`` only if it ran again."""


@dataclass(frozen=True)
class Scan:
    """All segments of a log: intact, damaged, missing, and set aside."""

    segments: list[tuple[SegmentName, Segment]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """Description of the damage, by file name."""
    missing: list[str] = field(default_factory=list)
    """Prefixes of the names of missing segments."""
    set_aside: list[str] = field(default_factory=list)


def read_log(folder: str | os.PathLike[str]) -> LogContents:
    """Read an evaluation log, even while a driver writes it.

    Raises:
        LogError: The log does not exist, is damaged or cannot be read. For damage, the message names the file and the
            next step.
        ConfigError: The folder or URI cannot be opened.
    """
    storage = open_storage(folder)
    try:
        manifest = read_manifest(storage)
        amendments, retries = read_changes(storage)
        found = scan(storage)
        if found.damaged or found.missing:
            found = scan(storage)  # While a driver writes, a listing may show its last segment but not the one before.
    except OSError as error:
        raise log_error(storage, f"cannot be read: {error}") from error
    if manifest is None:
        problem = f"{storage.label} has no {MANIFEST_FILE}, so it is not an evaluation log"
        raise LogError(problem, key=MANIFEST_FILE, value=storage.label)
    for name, reason in found.damaged.items():
        raise _damaged(storage, name, reason)
    for name in found.missing:
        raise _damaged(storage, f"{name}-...parquet", "the file was written, but is missing")
    return fold(manifest, found, storage.label, amendments, retries)


def read_manifest(storage: Storage) -> Manifest | None:
    """Return the manifest of a log; None if there is no segment and the manifest is missing or damaged.

    Raises:
        LogError: The manifest has another format, or it is missing or damaged although there are segments.
        OSError: The folder cannot be read.
    """
    try:
        return Manifest.from_json(storage.read(MANIFEST_FILE), storage.label)
    except FileNotFoundError:
        problem = "is missing"
    except (ValueError, TypeError, KeyError) as error:
        problem = f"is damaged ({error})"
    count = len(storage.names(_SEGMENTS))
    if count == 0:
        return None
    problem = (
        f"{storage.label}/{MANIFEST_FILE} {problem}; without this file, the {count} segments of the log cannot be read"
    )
    raise LogError(problem, key=MANIFEST_FILE, value=storage.label, fix=RESTORE)


def check_ours(storage: Storage) -> None:
    """Check that a folder without segments has no manifest of another program, because a new log would replace it.

    A manifest of ours that is damaged, for example by a power cut, may be replaced.

    Raises:
        ConfigError: The manifest in the folder is from another program.
        OSError: The folder cannot be read.
    """
    with suppress(FileNotFoundError):
        data = storage.read(MANIFEST_FILE)
        if not is_manifest(data) and not storage.names(_SEGMENTS):
            problem = f"output {storage.label} contains the {MANIFEST_FILE} of another program"
            fix = "Pass another folder, or remove this file."
            raise ConfigError(problem, key="output", value=storage.label, fix=fix)


def scan(storage: Storage) -> Scan:
    """Read all segments.

    Raises:
        LogError: A segment has another format.
        OSError: The folder cannot be read.
    """
    claims = read_claims(storage)  # First: a live driver's count may lag behind its segments, but never exceeds them.
    names = [name for text in storage.names(_SEGMENTS) if (name := SegmentName.parse(text))]
    found = Scan(set_aside=[name for name in storage.names(_DAMAGED) if _NUMBERED.match(name)])
    with ThreadPoolExecutor(_READERS, thread_name_prefix="rl_eval-log-read") as pool:
        decoded = pool.map(lambda name: _read(storage, name), names)
        for name, segment in zip(names, decoded, strict=True):
            if isinstance(segment, Segment):
                found.segments.append((name, segment))
            else:
                found.damaged[str(name)] = segment
    found.segments.sort(key=lambda pair: pair[0])
    found.missing.extend(_missing([*map(str, names), *found.set_aside], claims))
    return found


def set_aside(storage: Storage, found: Scan) -> tuple[str, ...]:
    """Move damaged segments to the folder ``damaged``, and create a mark there for each missing segment.

    Then the log can be read again. Return the names of the moved segments and of the marks.
    """
    for name in found.damaged:
        storage.move(f"{_SEGMENTS}/{name}", f"{_DAMAGED}/{name}")
    notes = [f"{name}-missing" for name in found.missing]
    for note in notes:
        storage.write(f"{_DAMAGED}/{note}", b"This segment was written, but was missing when the log was read.\n")
    return (*found.damaged, *notes)


def fold(
    manifest: Manifest,
    found: Scan,
    label: str,
    amendments: Sequence[Amendment] = (),
    retries: Sequence[Retry] = (),
) -> LogContents:
    """Combine the segments of a log.

    Raises:
        LogError: A segment belongs to another log: an index is not in the plan, or the number of info keys differs.
    """
    width = len(manifest.info_keys)
    for name, segment in found.segments:
        if not _belongs(segment, manifest.num_episodes, width):
            problem = f"{label}/{_SEGMENTS}/{name} belongs to another log"
            raise LogError(problem, key=str(name), value=label, fix="Remove this file from the folder.")
    retried = retried_since(retries)
    rows = np.concatenate([np.zeros(0, ROW), *(segment.rows for _, segment in found.segments)])
    infos = np.concatenate(
        [np.zeros((0, width)), *(segment.infos for _, segment in found.segments if len(segment.rows))]
    )
    if retried:
        counted = np.concatenate([counts(segment.rows, name.epoch, retried) for name, segment in found.segments])
        rows, infos = rows[counted], infos[counted]
    rows, infos, withdrawn = _counted(rows, infos, manifest.num_episodes)
    _, first, place = np.unique(rows["index"], return_index=True, return_inverse=True)
    mismatches: tuple[int, ...] = ()
    if len(first) < len(rows):
        mismatches = _mismatches(rows, infos, manifest.info_keys, first[place])
        kept = np.sort(first)
        rows, infos = rows[kept], infos[kept]
    headers = [segment.header for _, segment in found.segments]
    written = (note for header in headers for note in header.notes)
    runners = [header.num_runners for header in headers if header.num_runners is not None]
    return LogContents(
        manifest=manifest,
        rows=rows,
        infos=infos,
        faults=tuple(_once(fault for _, segment in found.segments for fault in segment.faults)),
        pardons=tuple(pardon for header in headers for pardon in header.pardons),
        numerics=next((header.numerics for header in headers if header.numerics), {}),
        totals=sum_totals(header.totals for header in headers),
        notes=tuple(dict.fromkeys([*map(str, amendments), *map(str, retries), *written])),
        amendments=tuple(amendments),
        determinism=next((header.determinism for header in reversed(headers) if header.determinism), {}),
        ended_by=_end_by_rule(found, retried, rows),
        mismatches=mismatches,
        damaged=tuple(found.set_aside),
        num_runners=max(runners, default=None),
        retried=tuple(sorted(retried)),
        set_aside=withdrawn,
    )


def _end_by_rule(found: Scan, retried: Mapping[int, int], rows: npt.NDArray[np.void]) -> RuleEnd | None:
    """Return the end by a rule; None if the last session ended without.

    An end does not count if records were set aside since, because no rule has seen the new records, or if an episode
    before it has no record.
    """
    aside = (name.epoch + 1 for name, segment in found.segments if (segment.rows["outcome"] == Outcome.MISSING).any())
    since = max([*retried.values(), *aside], default=0)
    headers = (segment.header for name, segment in reversed(found.segments) if name.epoch >= since)
    end = next((header.ended_by for header in headers if header.ended_by or header.determinism), None)
    return None if end is None or np.count_nonzero(rows["index"] < end.after) < end.after else end


def _counted(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], num_episodes: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64], npt.NDArray[np.void]]:
    """Return the rows and infos without those that a later row sets aside, and the rows that set others aside."""
    aside = np.flatnonzero(rows["outcome"] == Outcome.MISSING)
    if not len(aside):
        return rows, infos, rows[aside]
    last = np.full(num_episodes, -1)
    last[rows["index"][aside]] = aside
    kept = np.arange(len(rows)) > last[rows["index"]]
    return rows[kept], infos[kept], rows[aside]


def _belongs(segment: Segment, num_episodes: int, num_info_keys: int) -> bool:
    indices = segment.rows["index"]
    if not len(indices):
        return True
    return bool(0 <= indices.min() <= indices.max() < num_episodes) and segment.infos.shape[1] == num_info_keys


def _read(storage: Storage, name: SegmentName) -> Segment | str:
    """Return a segment, or a description of its damage."""
    try:
        return decode(name, storage.read(f"{_SEGMENTS}/{name}"))
    except FileNotFoundError:
        return "the file was removed while the log was read"
    except ValueError as error:
        return str(error)


def _missing(names: Sequence[str], claims: Sequence[Claim]) -> list[str]:
    """Return the prefixes of the names of missing segments.

    The segments of a session have the numbers from 1 to the highest number in a file name or in the session's claim.
    """
    numbers: dict[int, set[int]] = defaultdict(set)
    for name in names:
        epoch, number = name.split("-")[:2]
        numbers[int(epoch)].add(int(number))
    last = {epoch: max(there) for epoch, there in numbers.items()}
    for claim in claims:
        last[claim.epoch] = max(last.get(claim.epoch, 0), claim.segments)
    gone = (
        f"{epoch:06d}-{number:08d}"
        for epoch in sorted(last)
        for number in range(1, last[epoch] + 1)
        if number not in numbers[epoch]
    )
    return list(islice(gone, _MOST_MISSING))


def _damaged(storage: Storage, name: str, reason: str) -> LogError:
    label = storage.label
    fix = f"To set the segment aside and run its episodes again, continue with output={label!r} (--output)."
    return LogError(f"{label}/{_SEGMENTS}/{name} is damaged: {reason}", key=name, value=label, fix=fix)


def _once(faults: Iterable[Fault]) -> Iterable[Fault]:
    charged = set()
    for fault in faults:
        ended = fault.index, fault.attempt
        if not fault.charged:
            yield fault  # The attempt ran again with the same number, so an equal fault may be a new one.
        elif ended not in charged:
            charged.add(ended)
            yield fault


def _mismatches(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], keys: Sequence[str], first: npt.NDArray[np.intp]
) -> tuple[int, ...]:
    """Return the indices of rows whose outcome differs from that of the first row with the same index.

    ``first`` contains, for each row, the position of the first row with its index.
    """
    again = np.flatnonzero(first != np.arange(len(rows)))
    ours, theirs = (outcomes_of(rows[places], infos[places], keys) for places in (first[again], again))
    different = {int(a["index"]) for a, b in zip(ours, theirs, strict=True) if a.tobytes() != b.tobytes()}
    return tuple(sorted(different))

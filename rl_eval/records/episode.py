"""Values of an episode before, during and after its run: specs, leases, faults, records.

A *spec* is one line of the plan. A *lease* is the permission to run it once. A *record* is the
outcome. Records cross processes in batches, as rows of one structured array (:data:`ROW`), and are stored in this form.
A row has less than 100 bytes, so a million finished episodes take less than 100 MB. The objects that a user reads
(:class:`EpisodeRecord`) are built on access.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from rl_eval.errors import message_of
from rl_eval.errors.redaction import redact_text, redacted_traceback
from rl_eval.records.agents import agent_columns, agents_in

TRACEBACK_CAP: Final = 8_000
"""Maximum number of characters of a traceback in a fault. Its end is kept, since it shows the cause."""

MESSAGE_CAP: Final = 2_000
"""Maximum number of characters of a message in a fault."""


class Outcome(IntEnum):
    """End of an episode. ``MISSING`` marks a row that was never filled."""

    MISSING = 0
    COMPLETED = 1
    FAILED = 2


class Truncation(IntEnum):
    """Limit that cut the episode short. If both limits apply at one step, it is the environment's."""

    NONE = 0
    ENVIRONMENT = 1
    MAX_EPISODE_STEPS = 2


class Condition(NamedTuple):
    """Row of ``evaluation.conditions``."""

    id: str
    values: Mapping[str, Any]
    """Other columns by name, as plain JSON."""


class EpisodeSpec(NamedTuple):
    """One line of a plan."""

    index: int  # type: ignore[assignment]  # The field's name hides tuple.index, which is not used.
    seed: int
    seating: tuple[str, ...] | None = None
    """Policy of each seat, in the order of the environment's possible agents; None without seats."""
    condition: Condition | None = None
    """Initial condition; None without ``evaluation.conditions``."""

    @property
    def reset_arguments(self) -> dict[str, Any]:
        """Keywords of ``env.reset``: the seed, and the values of the condition as ``options``."""
        if self.condition is None:
            return {"seed": self.seed}
        return {"seed": self.seed, "options": copy.deepcopy({**self.condition.values})}

    def lease(self, attempt: int, runner: int = 0) -> Lease:
        """Return a lease for one attempt of the episode."""
        return Lease(self.index, self.seed, attempt, runner, seating=self.seating, condition=self.condition)


class Lease(NamedTuple):
    """Permission for one runner to run one episode, from its given attempt on.

    ``attempt`` is the number of the attempt, from 1; earlier attempts are used up. ``runner`` is the incarnation number
    of the runner with the lease; a replacement of the runner has another number. ``fresh`` requests a new environment,
    and ``traced`` a trace in the report. ``seating`` and ``condition`` are those of the episode's spec. ``alone``
    requests a simulator without other slots, so that no other episode can cause a fault. ``block`` has the seeds of the
    consecutive episodes that run together, including this one. It is empty for an episode that runs separately.
    """

    index: int  # type: ignore[assignment]
    seed: int
    attempt: int
    runner: int
    fresh: bool = False
    traced: bool = False
    seating: tuple[str, ...] | None = None
    block: tuple[int, ...] = ()
    alone: bool = False
    condition: Condition | None = None

    @property
    def spec(self) -> EpisodeSpec:
        """Line of the plan for the episode."""
        return EpisodeSpec(self.index, self.seed, self.seating, self.condition)

    @property
    def condition_id(self) -> str | None:
        """Id of the condition; None without conditions."""
        return None if self.condition is None else self.condition.id


Phase = Literal["construct", "reset", "step", "act", "close", "run"]
FaultCause = Literal["env", "policy", "timeout", "runner"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure of one attempt, with its episode, its place and the original error."""

    index: int
    """Index of the episode."""
    seed: int
    """Seed of the reset of the episode."""
    attempt: int
    """Attempt that this fault ended, from 1."""
    cause: FaultCause
    """Part that failed."""
    phase: Phase
    """Call during which it failed."""
    step: int
    """Environment steps that the attempt had completed."""
    error_type: str
    """Class name of the original exception."""
    message: str
    """Text of the original exception; if it has none, the line that raised it."""
    traceback: str
    """End of the original traceback."""
    runner: int
    """Index of the runner."""
    node: str
    """Host name of the runner."""
    seconds: float
    """Wall-clock age of the attempt."""
    charged: bool = True
    """Whether it used up the attempt. The loss of a runner uses up an attempt of an episode only on evidence. In a
    report, False means *suspected*: several episodes shared the call that failed, and one of them caused the fault."""

    @staticmethod
    def describe(error: BaseException) -> tuple[str, str, str]:
        """Return class name, message and capped traceback text of an exception, without secrets."""
        # Before they are cut, which could leave half a secret.
        message = redact_text(message_of(error))[:MESSAGE_CAP]
        return type(error).__name__, message, redacted_traceback(error)[-TRACEBACK_CAP:]

    def __str__(self) -> str:
        return (
            f"episode {self.index} (seed {self.seed}), attempt {self.attempt}, runner {self.runner}: "
            f"{self.cause} failed in {self.phase} after {self.step} steps: {self.error_type}: {self.message}"
        )


_TRUNCATIONS: Final = {None if cut is Truncation.NONE else cut.name.lower(): int(cut) for cut in Truncation}
_OUTCOMES: Final = {outcome.name.lower(): int(outcome) for outcome in Outcome}
_SUCCESS: Final = {None: -1, False: 0, True: 1}


@dataclass(frozen=True)
class Column:
    """Storage of one field of a record: in a row, in a file, and in the row of an episode that failed."""

    dtype: str
    """Type of the field in :data:`ROW`."""
    outcome: bool = False
    """Whether the field is part of the fingerprint, so that it must not depend on runners and environments."""
    failed: float = 0
    """Value of the field in the row of an episode that failed."""
    codes: Mapping[Any, int] | None = None
    """Code in a row for each value, without gaps; None if the row contains the value itself."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """Record of one episode of the plan; each field declares a column of the record table."""

    index: Annotated[int, Column("<i8", outcome=True)]
    """Position in the plan, from 0."""
    seed: Annotated[int, Column("<i8", outcome=True)]
    """The int passed to ``env.reset(seed=...)``; with it, a plain loop repeats the episode."""
    episode_return: Annotated[float, Column("<f8", outcome=True, failed=math.nan)]
    """Undiscounted sum of ``float(reward)`` in step order, in float64; NaN when failed."""
    discounted_return: Annotated[float, Column("<f8", failed=math.nan)]
    """Sum of ``gamma**t * reward_t``; NaN when failed."""
    length: Annotated[int, Column("<i8", outcome=True)]
    """Environment steps; 0 when failed."""
    terminated: Annotated[bool, Column("?", outcome=True)]
    """Whether the environment reached a terminal state."""
    truncated: Annotated[bool, Column("?", outcome=True)]
    """Whether the episode was cut short."""
    truncated_by: Annotated[Literal["environment", "max_episode_steps"] | None, Column("u1", codes=_TRUNCATIONS)]
    """Limit that cut it short; None if it was not cut short."""
    success_once: Annotated[bool | None, Column("i1", outcome=True, failed=-1, codes=_SUCCESS)]
    """Whether ``info["is_success"]`` (or ``info["success"]``) was true at any step; None if never reported."""
    success_at_end: Annotated[bool | None, Column("i1", outcome=True, failed=-1, codes=_SUCCESS)]
    """Success at the last step that reported it; None if never reported."""
    outcome: Annotated[Literal["completed", "failed"], Column("u1", failed=Outcome.FAILED, codes=_OUTCOMES)]
    """``completed`` if an attempt completed, ``failed`` if all attempts were used up."""
    attempts: Annotated[int, Column("<u2")]
    """Number of attempts, including the last one."""
    runner: Annotated[int, Column("<i4", failed=-1)]
    """Index of the runner that finished it; -1 if it failed (its faults have the indices of their runners)."""
    weights_version: Annotated[int, Column("<i8")]
    """Version of the weights that it ran with."""
    reset_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time inside ``env.reset``."""
    step_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time inside ``env.step``."""
    inference_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time in the policy while the episode ran, shared with the other episodes of the batch."""
    faults: tuple[Fault, ...]
    """Faults that ended its earlier attempts; also the fault of the last attempt if the episode failed."""
    info: dict[str, float]
    """Last value of each requested ``info`` scalar; NaN if it was never reported."""
    condition: str | None = None
    """Id of the row of ``evaluation.conditions`` that the plan assigns to it; None without conditions."""


COLUMNS: Final[Mapping[str, Column]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(EpisodeRecord, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""Columns of a row by name, as :class:`EpisodeRecord` declares them."""

ROW: Final = np.dtype([(name, column.dtype) for name, column in COLUMNS.items()])
"""One episode as a fixed-width row."""

_MEANINGS: Final = {
    name: {code: value for value, code in column.codes.items()}
    for name, column in COLUMNS.items()
    if column.codes is not None
}
_OUTCOME_COLUMNS: Final = tuple(name for name, column in COLUMNS.items() if column.outcome)


def _row_type() -> Any:
    defaults = [column.failed for column in COLUMNS.values()]
    return namedtuple("Row", COLUMNS, defaults=defaults)  # noqa: PYI024 - The table has the types.


Row: Final = _row_type()
"""One episode as a tuple of its columns, by name; a missing column has the value of a failed episode."""


PROGRESS: Final = np.dtype([("index", np.int64), ("attempt", np.int64), ("step", np.int64)])
"""Progress of one live attempt: its episode, its number from 1, and the steps that it has completed."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of one call of ``EvalRunner.run``."""

    rows: npt.NDArray[np.void]
    """Finished episodes: array of :data:`ROW`, shape (finished,)."""
    infos: npt.NDArray[np.float64]
    """Requested info scalars, shape (finished, len(info_keys))."""
    faults: tuple[Fault, ...]
    """Every fault since the last report; a fault of a call for several episodes is not charged."""
    progress: npt.NDArray[np.void]
    """Live attempts: array of :data:`PROGRESS`, shape (live,)."""
    returned: tuple[int, ...]
    """Indices returned to the group on request, because their episodes had not started."""
    env_steps: int
    """Environment steps executed, including those of failed attempts."""
    reset_seconds: float
    step_seconds: float
    inference_seconds: float
    weights_version: int
    numerics: dict[str, Any] = field(default_factory=dict)
    """The runner's numerics key; empty before its first episode."""
    traces: Mapping[int, npt.NDArray[np.void]] = field(default_factory=dict)
    """Traces of completed episodes whose leases asked for one, by index: arrays of
    :data:`rl_eval.records.determinism.TRACE`."""
    construct_seconds: float = math.inf
    """Shortest construction of an environment so far."""
    notes: tuple[str, ...] = ()
    """Notes for a reader of the result; notes that differ only in their place become one."""
    artifacts: tuple[tuple[str, Mapping[int, Any]], ...] = ()
    """Artifacts that observers returned for the finished episodes: names of observers, each with artifacts by index.
    A name may appear more than once."""
    built_weights: str = ""
    """Digest of the weights with which the policy was built; empty if weights were sent, or if the policy has none."""


@dataclass(frozen=True)
class Batch:
    """Rows, faults and totals that are committed together. The arrays must no longer change."""

    rows: npt.NDArray[np.void]
    """Array of :data:`ROW`, shape (n,)."""
    infos: npt.NDArray[np.float64]
    """Info scalars of the rows, shape (n, k)."""
    faults: tuple[Fault, ...] = ()
    totals: dict[str, float] = field(default_factory=dict)
    """Steps and seconds spent since the previous batch, by name."""
    numerics: dict[str, Any] = field(default_factory=dict)
    """Numerics key; empty while unknown."""
    notes: tuple[str, ...] = ()
    """Notes of the result that are not in earlier batches."""
    determinism: dict[str, Any] = field(default_factory=dict)
    """Finding of the determinism check, in the last batch of an evaluation."""
    num_runners: int = 0
    """Highest number of runner processes at one time so far; 0 in the caller's process."""


_FIRST_SEEN: Final = "; first seen in "


def first_seen(text: str, index: int, step: int, shown: str) -> str:
    """Return a note on a finding that may concern many episodes, with its first place.

    Args:
        text: The finding, in the same words for every place.
        index: Index of the episode.
        step: Step of the episode; 0 is the reset.
        shown: Value at this place.
    """
    return f"{text}{_FIRST_SEEN}episode {index} at step {step}: {shown}"


def without_place(note: str) -> str:
    """Return a note without the place added by :func:`first_seen`, to compare notes on the same finding."""
    return note.partition(_FIRST_SEEN)[0]


class EpisodeTable:
    """Rows of a plan in index order, filled as episodes finish, each at most once."""

    def __init__(self, num_episodes: int, info_keys: Sequence[str] = ()) -> None:
        self.rows: npt.NDArray[np.void] = np.zeros(num_episodes, ROW)
        """Array of :data:`ROW`, shape (num_episodes,); unfilled rows have outcome ``MISSING``."""
        self.info_keys = tuple(info_keys)
        self.infos: npt.NDArray[np.float64] = np.full((num_episodes, len(self.info_keys)), np.nan)
        self.faults: dict[int, list[Fault]] = {}
        self.conditions: Sequence[str] = ()
        """Id of the condition of each episode; empty without conditions. A result sets them from its plan."""
        self._charged: dict[Fault, int] = {}
        """Position of each charged fault in the list of its episode. A file from another program may have any number of
        faults."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def filled(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows that contain a record, shape (num_episodes,)."""
        return np.asarray(self.rows["outcome"] != Outcome.MISSING)

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose episode completed, shape (num_episodes,)."""
        return np.asarray(self.rows["outcome"] == Outcome.COMPLETED)

    def fill(
        self,
        rows: npt.NDArray[np.void],
        infos: npt.NDArray[np.float64] | None = None,
        faults: Iterable[Fault] = (),
    ) -> None:
        """Write finished rows at their indices, and attach faults to their episodes.

        Args:
            rows: Array of :data:`ROW`, shape (n,).
            infos: Info scalars of the rows, shape (n, len(info_keys)).
            faults: Faults, also of episodes that have no row yet.
        """
        positions = rows["index"]
        self.rows[positions] = rows
        if self.info_keys and infos is not None:
            self.infos[positions] = infos
        for fault in faults:
            self.add_fault(fault)

    def copy(self) -> EpisodeTable:
        """Return a table that does not change when this one is filled."""
        copied = EpisodeTable(len(self), self.info_keys)
        copied.rows, copied.infos = self.rows.copy(), self.infos.copy()
        copied.faults = {index: list(faults) for index, faults in self.faults.items()}
        copied._charged = dict(self._charged)
        return copied

    def add_fault(self, fault: Fault) -> None:
        """Add a fault to its episode. If it is no longer charged, it replaces its charged form."""
        faults = self.faults.setdefault(fault.index, [])
        place = None if fault.charged else self._charged.pop(replace(fault, charged=True), None)
        if place is not None:
            faults[place] = fault
            return
        if fault.charged:
            self._charged.setdefault(fault, len(faults))
        faults.append(fault)

    def outcomes(self, chosen: slice | npt.NDArray[Any]) -> npt.NDArray[np.void]:
        """Return :func:`outcomes_of` chosen rows."""
        return outcomes_of(self.rows[chosen], self.infos[chosen], self.info_keys)

    def mismatches(self, rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64]) -> list[int]:
        """Return the indices of rows whose outcome differs from the recorded one."""
        recorded, offered = self.outcomes(rows["index"]), outcomes_of(rows, infos, self.info_keys)
        return [
            int(index)
            for index, ours, theirs in zip(rows["index"], recorded, offered, strict=True)
            if ours.tobytes() != theirs.tobytes()
        ]

    def prefix(self) -> int:
        """Length of the leading run of filled rows, over which results of an early stop are computed."""
        filled = self.filled
        return len(filled) if filled.all() else int(np.argmin(filled))

    def fingerprint(self) -> str:
        """SHA-256 of the outcomes of the filled rows, in index order.

        Per row: index, seed, return, length, terminated, truncated, success once, success at end, as little-endian
        fixed-width fields; for several agents also the columns of each. Attempts, faults, timings, other info and
        runners are not included.
        """
        return hashlib.sha256(self.outcomes(self.filled).tobytes()).hexdigest()

    def digest(self) -> str:
        """SHA-256 of all columns of the filled rows and of their info scalars, by name; all NaNs are equal."""
        filled = self.filled
        rows, infos = self.rows[filled], self.infos[filled]
        columns = {name: rows[name] for name in COLUMNS}
        columns |= {f"info {key}": values for key, values in zip(self.info_keys, infos.T, strict=True)}
        found = hashlib.sha256(json.dumps([*columns]).encode())
        for column in columns.values():
            # A Parquet file keeps only one of the NaNs of a column, which may have different bits.
            known = (
                np.where(np.isnan(column), column.dtype.type(np.nan), column) if column.dtype.kind == "f" else column
            )
            found.update(np.ascontiguousarray(known).tobytes())
        return found.hexdigest()

    def record(self, index: int) -> EpisodeRecord:
        """Build the record of one filled row.

        Raises:
            IndexError: The index is outside the plan, or its episode has not finished.
        """
        row = self.rows[index]
        if row["outcome"] == Outcome.MISSING:
            raise IndexError(f"episode {index} has no record: it did not finish")
        info = dict(zip(self.info_keys, self.infos[index].tolist(), strict=True))
        condition = self.conditions[int(row["index"])] if self.conditions else None
        return record_of(row.item(), info, self.faults.get(int(row["index"]), ()), condition)

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return (self.record(int(index)) for index in np.flatnonzero(self.filled))


def record_of(
    row: tuple[Any, ...], info: dict[str, float], faults: Sequence[Fault] = (), condition: str | None = None
) -> EpisodeRecord:
    """Build the record of a row; the values may be those of :data:`ROW`, or not yet rounded to its dtypes."""
    values = dict(zip(COLUMNS, row, strict=True))
    for name, meanings in _MEANINGS.items():
        values[name] = meanings[int(values[name])]
    return EpisodeRecord(**values, faults=tuple(faults), info=info, condition=condition)


def outcomes_of(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], info_keys: Sequence[str]
) -> npt.NDArray[np.void]:
    """Return the outcome columns of rows and of their agents, packed.

    They must not depend on the number of runners and environments.

    Args:
        rows: Array of :data:`ROW`, shape (n,).
        infos: Info scalars of the rows, shape (n, len(info_keys)).
        info_keys: Names of these, those of agents among them.
    """
    agents = agent_columns(agents_in(info_keys))
    packed = np.empty(len(rows), [(name, ROW[name]) for name in _OUTCOME_COLUMNS] + [(name, "<f8") for name in agents])
    for name in _OUTCOME_COLUMNS:
        packed[name] = rows[name]
    place_of = {name: place for place, name in enumerate(info_keys)}
    for name in agents:
        column = infos[:, place_of[name]]
        packed[name] = np.where(np.isnan(column), np.nan, column)  # All NaNs get the same bits.
    return packed


def different_columns(recorded: npt.NDArray[np.void], again: npt.NDArray[np.void]) -> list[str]:
    """Return the names of the columns in which two rows differ, as :func:`outcomes_of` returns them, shape (1,)."""
    return [name for name in recorded.dtype.names or () if recorded[name].tobytes() != again[name].tobytes()]


def failed_row(index: int, seed: int, attempts: int, weights_version: int) -> npt.NDArray[np.void]:
    """Return the row, shape (1,), of a failed episode that its runner could not report because it died."""
    return np.array([Row(index=index, seed=seed, attempts=attempts, weights_version=weights_version)], ROW)


def charged_attempts(table: EpisodeTable) -> dict[int, int]:
    """Return the number of attempts that unfinished episodes have used up, by index."""
    return {
        index: max(charged)
        for index, faults in table.faults.items()
        if (charged := [fault.attempt for fault in faults if fault.charged]) and not table.filled[index]
    }

"""Values of an episode before, during and after its run: specs, leases, faults, records.

A *spec* is one line of the plan. A *lease* is the permission to run the episode once. A *record* is the outcome of the
episode. Records cross processes in batches, as rows of one structured array (:data:`ROW`), and are stored in this form.
A row has less than 100 bytes, so a million finished episodes take less than 100 MB. The objects that a user reads
(:class:`EpisodeRecord`) are built on access.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from rl_eval.errors import message_of, traceback_of
from rl_eval.errors.other_names import KnowsNames
from rl_eval.records.agents import agent_columns, agents_in

TRACEBACK_CAP: Final = 8_000
"""Maximum number of characters of a traceback in a fault. The end of the traceback is kept, because it shows the
cause."""

MESSAGE_CAP: Final = 2_000
"""Maximum number of characters of a message in a fault."""


class Outcome(IntEnum):
    """End of an episode. ``MISSING`` marks a row that was never filled."""

    MISSING = 0
    COMPLETED = 1
    FAILED = 2


class Truncation(IntEnum):
    """Limit that cut the episode short. If both limits apply at the same step, ``ENVIRONMENT`` is recorded."""

    NONE = 0
    ENVIRONMENT = 1
    MAX_EPISODE_STEPS = 2


class Condition(NamedTuple):
    """Row of ``evaluation.conditions``."""

    id: str
    values: Mapping[str, Any]
    """Values of the row without its id, by name, as plain JSON."""


class EpisodeSpec(NamedTuple):
    """One line of a plan."""

    index: int  # type: ignore[assignment]  # The field's name hides tuple.index, which is not used.
    seed: int
    seating: tuple[str, ...] | None = None
    """Policy of each seat, in the order of the environment's possible agents; None without seats."""
    condition: Condition | None = None
    """Initial condition; None without ``evaluation.conditions``."""
    first_index: int = 0
    """First index of the plan. With ``index``, it determines the seed."""

    @property
    def position(self) -> int:
        """Index of the episode in the plan that has the same root seed and starts at index 0.

        Equal episodes have equal positions.
        """
        return self.first_index + self.index

    def at_position(self) -> EpisodeSpec:
        """Return the spec to pass to user code, with the position as its index.

        Then an episode is the same in every plan that contains it, even if the environment depends on the index.
        """
        return self._replace(index=self.position, first_index=0) if self.first_index else self

    @property
    def reset_arguments(self) -> dict[str, Any]:
        """Keywords of ``env.reset``: the seed, and the values of the condition as ``options``."""
        if self.condition is None:
            return {"seed": self.seed}
        return {"seed": self.seed, "options": copy.deepcopy({**self.condition.values})}

    @property
    def condition_id(self) -> str | None:
        """Id of the condition; None without conditions."""
        return None if self.condition is None else self.condition.id


class How(NamedTuple):
    """Way in which a runner runs an episode."""

    fresh: bool = False
    """Whether the episode runs in a new environment."""
    alone: bool = False
    """Whether the episode runs in a new simulator of its own, so that no other episode can cause a fault."""
    traced: bool = False
    """Whether the report contains a trace of the episode."""
    again: bool = False
    """Whether the episode runs to be compared, and so without observers."""
    block: tuple[EpisodeSpec, ...] = ()
    """Consecutive episodes that run together, including this one; empty for an episode that runs separately."""
    steps: int = 0
    """Number of steps after which a block that runs again ends; 0 to run the whole block."""


class Lease(NamedTuple):
    """Permission for one runner to run one attempt of one episode."""

    spec: EpisodeSpec
    """The episode; the first one of a block."""
    attempt: int
    """Number of the attempt, from 1; earlier attempts are used up."""
    runner: int = 0
    """Number of the runner with the lease; a runner that replaces it has another number."""
    how: How = How()

    @property
    def index(self) -> int:  # type: ignore[override]  # Without it, the name would mean tuple.index.
        """Index of the episode."""
        return self.spec.index

    @property
    def seed(self) -> int:
        """Seed of the episode."""
        return self.spec.seed

    def with_how(self, **how: Any) -> Lease:
        """Return a lease for the same attempt with other values of :attr:`how`."""
        return self._replace(how=self.how._replace(**how))


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
    """Number of the attempt that this fault ended, from 1."""
    cause: FaultCause
    """Part that failed, such as the environment or the policy."""
    phase: Phase
    """Call during which it failed."""
    step: int
    """Number of environment steps that the attempt had completed."""
    error_type: str
    """Class name of the original exception."""
    message: str
    """Text of the original exception. If it has no text, the source line that raised it."""
    traceback: str
    """End of the original traceback."""
    runner: int
    """Index of the runner."""
    node: str
    """Host name of the runner."""
    seconds: float
    """Wall-clock age of the attempt, in seconds."""
    charged: bool = True
    """Whether the fault used up the attempt. The loss of a runner uses up an attempt of an episode only if there is
    evidence against this episode. In a report, False means *suspected*: several episodes shared the call that failed,
    and one of them caused the fault."""
    pardon: str = ""
    """Reason why the fault is no longer charged; empty without a :class:`Pardon`."""

    @staticmethod
    def describe(error: BaseException) -> tuple[str, str, str]:
        """Return the class name, the message and the traceback of an exception, shortened and without secrets."""
        return type(error).__name__, message_of(error)[:MESSAGE_CAP], traceback_of(error)[-TRACEBACK_CAP:]

    def __str__(self) -> str:
        return (
            f"episode {self.index} (seed {self.seed}), attempt {self.attempt}, runner {self.runner}: "
            f"{self.cause} failed in {self.phase} after {self.step} steps: {self.error_type}: {self.message}"
        )


@dataclass(frozen=True, slots=True)
class Pardon:
    """Cancellation of the charged fault of an attempt. The attempt is not used up, but its number is not used again."""

    index: int
    attempt: int
    reason: str


_TRUNCATIONS: Final = {None if cut is Truncation.NONE else cut.name.lower(): int(cut) for cut in Truncation}
_OUTCOMES: Final = {outcome.name.lower(): int(outcome) for outcome in Outcome}
_SUCCESS: Final = {None: -1, False: 0, True: 1}


@dataclass(frozen=True)
class Column:
    """Storage of one field of a record: its dtype and codes, and its value in the row of a failed episode."""

    dtype: str
    """Type of the field in :data:`ROW`."""
    outcome: bool = False
    """Whether the field is part of the fingerprint, so that it must not depend on runners and environments."""
    failed: float = 0
    """Value of the field in the row of an episode that failed."""
    codes: Mapping[Any, int] | None = None
    """Code that a row contains for each value: numbers without gaps. None if the row contains the value itself."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord(KnowsNames):
    """Record of one episode of the plan; each field declares a column of the record table."""

    index: Annotated[int, Column("<i8", outcome=True)]
    """Position in the plan, from 0."""
    seed: Annotated[int, Column("<i8", outcome=True)]
    """Seed of the episode, passed to ``env.reset(seed=...)``. A plain loop with this seed repeats the episode."""
    episode_return: Annotated[float, Column("<f8", outcome=True, failed=math.nan)]
    """Undiscounted sum of ``float(reward)`` in step order, in float64; NaN if the episode failed."""
    discounted_return: Annotated[float, Column("<f8", failed=math.nan)]
    """Sum of ``gamma**t * reward_t``; NaN if the episode failed."""
    length: Annotated[int, Column("<i8", outcome=True)]
    """Number of environment steps; 0 if the episode failed."""
    terminated: Annotated[bool, Column("?", outcome=True)]
    """Whether the environment reached a terminal state."""
    truncated: Annotated[bool, Column("?", outcome=True)]
    """Whether the episode was cut short."""
    truncated_by: Annotated[Literal["environment", "max_episode_steps"] | None, Column("u1", codes=_TRUNCATIONS)]
    """Limit that cut the episode short; None if there was none."""
    success_once: Annotated[bool | None, Column("i1", outcome=True, failed=-1, codes=_SUCCESS)]
    """Whether ``info["is_success"]`` (or ``info["success"]``) was true at any step; None if no step reported it."""
    success_at_end: Annotated[bool | None, Column("i1", outcome=True, failed=-1, codes=_SUCCESS)]
    """Success at the last step that reported it; None if no step reported it."""
    outcome: Annotated[Literal["completed", "failed"], Column("u1", failed=Outcome.FAILED, codes=_OUTCOMES)]
    """``completed`` if an attempt completed, ``failed`` if all attempts were used up."""
    attempts: Annotated[int, Column("<u2")]
    """Number of attempts, including the last one."""
    runner: Annotated[int, Column("<i4", failed=-1)]
    """Index of the runner that completed the episode; -1 if the episode failed. Faults have the indices of their
    runners."""
    weights_version: Annotated[int, Column("<i8")]
    """Version of the weights with which the episode ran."""
    reset_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time inside ``env.reset``."""
    step_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time inside ``env.step``."""
    inference_seconds: Annotated[float, Column("<f4")]
    """Wall-clock time in the policy while the episode ran, shared with the other episodes of the batch. If answers come
    later, the time for which the episode waited for them."""
    faults: tuple[Fault, ...]
    """Faults that ended earlier attempts. If the episode failed, also the fault of the last attempt."""
    info: dict[str, float]
    """Last reported value of each requested ``info`` scalar; NaN if no step reported it."""
    condition: str | None = None
    """Id of the row of ``evaluation.conditions`` that the plan assigns to the episode; None without conditions."""


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
"""One episode as a named tuple of its columns. A missing column has the value of a failed episode."""


PROGRESS: Final = np.dtype([("index", np.int64), ("attempt", np.int64), ("step", np.int64)])
"""Progress of one live attempt: index of the episode, number of the attempt (from 1), and number of completed steps."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of one call of ``EvalRunner.run``."""

    rows: npt.NDArray[np.void]
    """Finished episodes: array of :data:`ROW`, shape (finished,)."""
    infos: npt.NDArray[np.float64]
    """Requested info scalars, shape (finished, len(info_keys))."""
    faults: tuple[Fault, ...]
    """Faults since the last report. A fault in a call for several episodes is not charged."""
    progress: npt.NDArray[np.void]
    """Live attempts: array of :data:`PROGRESS`, shape (live,)."""
    returned: tuple[int, ...]
    """Indices of leases returned to the group: on request if their episodes had not started, and all after an abort."""
    env_steps: int
    """Number of environment steps since the last report, including those of failed attempts."""
    reset_seconds: float
    step_seconds: float
    inference_seconds: float
    weights_version: int
    numerics: dict[str, Any] = field(default_factory=dict)
    """The runner's numerics key; empty before its first episode."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data of aspects of the evaluation, by aspect, from the functions in ``RunnerCore.extra``."""
    notes: tuple[str, ...] = ()
    """Notes for a reader of the result. Notes that differ only in their place become one note."""
    artifacts: tuple[tuple[str, Mapping[int, Any]], ...] = ()
    """Artifacts that observers returned for the finished episodes: pairs of the observer's name and its artifacts by
    index. A name may appear more than once."""
    answer_seconds: float = 0.0
    """Seconds for which rows waited for late answers, if each environment has a process of its own."""
    probes: int = 0
    """Number of times that the runner has probed its policy again."""
    generators: tuple[str, ...] = ()
    """Changes of global random generators by an environment so far, such as ``reset() changes numpy's global
    generator``."""


@dataclass(frozen=True)
class RuleEnd:
    """End of an evaluation by a rule."""

    after: int
    """Number of episodes that count: the first of the plan."""
    rule: str
    """Name of the rule in ``evaluation.rules``."""
    reason: str

    def __str__(self) -> str:
        return f"a rule ended the evaluation after {self.after:,} episodes: {self.reason} ({self.rule})"


@dataclass(frozen=True)
class Batch:
    """Rows, faults and totals that are committed to the log together. The arrays must no longer change."""

    rows: npt.NDArray[np.void]
    """Array of :data:`ROW`, shape (n,)."""
    infos: npt.NDArray[np.float64]
    """Info scalars of the rows, shape (n, k)."""
    faults: tuple[Fault, ...] = ()
    totals: dict[str, float] = field(default_factory=dict)
    """Numbers of steps and seconds since the previous batch, by name."""
    numerics: dict[str, Any] = field(default_factory=dict)
    """Numerics key; empty while it is unknown."""
    notes: tuple[str, ...] = ()
    """Notes of the result that are not in earlier batches."""
    determinism: dict[str, Any] = field(default_factory=dict)
    """Finding of the determinism check, in the last batch of an evaluation."""
    num_runners: int = 0
    """Largest number of runner processes at one time so far; 0 if the runners are in the caller's process."""
    ended_by: RuleEnd | None = None
    """End of the evaluation by a rule."""
    pardons: tuple[Pardon, ...] = ()
    """Pardons of faults in earlier batches, or in this batch."""


_FIRST_SEEN: Final = "; first seen in "


def first_seen(text: str, index: int, step: int, shown: str) -> str:
    """Return a note on a finding that may concern many episodes, with the first place where it was found.

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
    """Rows of the episodes of a plan, in index order. Each row is filled once, when its episode finishes."""

    def __init__(self, num_episodes: int, info_keys: Sequence[str] = ()) -> None:
        self.rows: npt.NDArray[np.void] = np.zeros(num_episodes, ROW)
        """Array of :data:`ROW`, shape (num_episodes,); unfilled rows have outcome ``MISSING``."""
        self.info_keys = tuple(info_keys)
        self.infos: npt.NDArray[np.float64] = np.full((num_episodes, len(self.info_keys)), np.nan)
        self.faults: dict[int, list[Fault]] = {}
        self.conditions: Sequence[str] = ()
        """Id of the condition of each episode; empty without conditions. A result sets the ids from its plan."""

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

    @property
    def set_aside(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose record was set aside, shape (num_episodes,)."""
        return ~self.filled & (self.rows["attempts"] > 0)

    def fill(
        self,
        rows: npt.NDArray[np.void],
        infos: npt.NDArray[np.float64] | None = None,
        faults: Iterable[Fault] = (),
        pardons: Iterable[Pardon] = (),
    ) -> None:
        """Write finished rows at their indices, and attach faults to their episodes.

        Args:
            rows: Array of :data:`ROW`, shape (n,).
            infos: Info scalars of the rows, shape (n, len(info_keys)).
            faults: Faults, also of episodes that have no row yet.
            pardons: Pardons of these or earlier faults.
        """
        positions = rows["index"]
        self.rows[positions] = rows
        if self.info_keys and infos is not None:
            self.infos[positions] = infos
        for fault in faults:
            self.add_fault(fault)
        reasons = {(one.index, one.attempt): one.reason for one in pardons}
        for index in {index for index, _ in reasons} & self.faults.keys():
            self.faults[index] = [
                replace(fault, charged=False, pardon=reasons[index, fault.attempt])
                if fault.charged and (index, fault.attempt) in reasons
                else fault
                for fault in self.faults[index]
            ]

    def copy(self) -> EpisodeTable:
        """Return a copy of the table, which does not change when the original is filled."""
        return self.head(len(self))

    def head(self, count: int) -> EpisodeTable:
        """Return a copy with the records and faults of the first ``count`` episodes only."""
        copied = EpisodeTable(len(self), self.info_keys)
        copied.rows[:count], copied.infos[:count] = self.rows[:count], self.infos[:count]
        copied.faults = {index: list(faults) for index, faults in self.faults.items() if index < count}
        return copied

    def add_fault(self, fault: Fault) -> None:
        """Add a fault to its episode."""
        self.faults.setdefault(fault.index, []).append(fault)

    def outcomes(self, chosen: slice | npt.NDArray[Any]) -> npt.NDArray[np.void]:
        """Return :func:`outcomes_of` of the chosen rows."""
        return outcomes_of(self.rows[chosen], self.infos[chosen], self.info_keys)

    def mismatches(self, rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64]) -> list[int]:
        """Return the indices of rows whose outcome differs from the recorded outcome."""
        recorded, offered = self.outcomes(rows["index"]), outcomes_of(rows, infos, self.info_keys)
        return [
            int(index)
            for index, ours, theirs in zip(rows["index"], recorded, offered, strict=True)
            if ours.tobytes() != theirs.tobytes()
        ]

    def prefix(self) -> int:
        """Number of filled rows before the first row that is not filled.

        After an early stop, results are computed over these rows.
        """
        filled = self.filled
        return len(filled) if filled.all() else int(np.argmin(filled))

    def fingerprint(self) -> str:
        """SHA-256 of the outcomes of the filled rows, in index order.

        Per row: index, seed, return, length, terminated, truncated, success once, success at end, as little-endian
        fixed-width fields; with several agents, also the columns of each agent. Attempts, faults, timings, other infos
        and runners are not included.
        """
        return hashlib.sha256(self.outcomes(self.filled).tobytes()).hexdigest()

    def digest(self) -> str:
        """SHA-256 of the names of all columns and info scalars, and of their values in the filled rows.

        All NaNs are treated as equal.
        """
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
    """Build the record of a row. The values of the row may have higher precision than the dtypes of :data:`ROW`."""
    values = dict(zip(COLUMNS, row, strict=True))
    for name, meanings in _MEANINGS.items():
        values[name] = meanings[int(values[name])]
    return EpisodeRecord(**values, faults=tuple(faults), info=info, condition=condition)


def outcomes_of(
    rows: npt.NDArray[np.void], infos: npt.NDArray[np.float64], info_keys: Sequence[str]
) -> npt.NDArray[np.void]:
    """Return the outcome columns of rows and of their agents, as a packed structured array.

    These columns must not depend on the number of runners and environments.

    Args:
        rows: Array of :data:`ROW`, shape (n,).
        infos: Info scalars of the rows, shape (n, len(info_keys)).
        info_keys: Names of the info scalars, including the columns of agents.
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
    """Return the names of the columns in which two rows differ.

    Each row is an array of :func:`outcomes_of`, shape (1,).
    """
    return [name for name in recorded.dtype.names or () if recorded[name].tobytes() != again[name].tobytes()]


def failed_row(index: int, seed: int, attempts: int, weights_version: int) -> npt.NDArray[np.void]:
    """Return the row, shape (1,), of a failed episode. The schedule gave the episode up, so no runner reported it."""
    return np.array([Row(index=index, seed=seed, attempts=attempts, weights_version=weights_version)], ROW)


def set_aside_rows(indices: Sequence[int], seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Return rows, shape (n,), that set earlier records of these episodes aside: the records no longer count.

    Args:
        indices: Indices of the episodes.
        seeds: Seeds of the plan, by index.
    """
    rows = [Row(index=index, seed=seeds[index], attempts=1, outcome=Outcome.MISSING) for index in indices]
    return np.array(rows, ROW)


def used_attempts(table: EpisodeTable) -> tuple[dict[int, int], dict[int, int]]:
    """Return the highest number of a charged or pardoned attempt of each episode, and the number of its pardons."""
    counted = [fault for faults in table.faults.values() for fault in faults if fault.charged or fault.pardon]
    attempts: dict[int, int] = {}
    for fault in counted:
        attempts[fault.index] = max(fault.attempt, attempts.get(fault.index, 0))
    return attempts, dict(Counter(fault.index for fault in counted if fault.pardon))

"""Folder of a suite: one subfolder for each cell, with its definition, its evaluation log and its score.

Cells share only the file ``suite.json``, so any number of processes may work on one folder. The process that owns the
evaluation log of a cell runs this cell. The score of a cell is computed from its log, and can be computed again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np

from rl_eval.atomic_write import write_text
from rl_eval.config.policy_sources import digest_of
from rl_eval.errors import ConfigError, EvalError, LogError, summary_of
from rl_eval.log.manifest import MANIFEST_FILE
from rl_eval.log.ownership import writer_of
from rl_eval.log.storage import open_storage
from rl_eval.records.plain import differences, parse_json, typed
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from rl_eval.suites.cells import Cell, EvaluatedSteps, PlannedCell, definition_of
from rl_eval.suites.definition import ScoreKind, SuiteDefinition

CellStatus = Literal["complete", "partial", "failed", "error", "running", "missing"]
"""Status of a cell: the status of its result, or a reason why it has no result. ``error`` means that the cell
cannot be evaluated as it is defined now, or that the last attempt failed. ``running`` means that a process evaluates
the cell. ``missing`` means that the cell has no result yet."""
SUITE_FILE: Final = "suite.json"
CELL_FILE: Final = "cell.json"
SCORE_FILE: Final = "score.json"
ERROR_FILE: Final = "error.json"
FORMAT: Final = 1
_SERVED: Final = ("server/weights", "server/outputs")
_COLUMNS: Final[Mapping[ScoreKind, str]] = {
    "return": "episode_return",
    "success_once": "success_once",
    "success_at_end": "success_at_end",
}


@dataclass(frozen=True)
class Score:
    """Scores of the episodes of one cell."""

    kind: ScoreKind
    """Number that is the score of an episode: its return, or one of its success flags."""
    status: Literal["complete", "partial", "failed"]
    """Status of the result; ``failed`` if an episode did not report its success, and success is the score."""
    reason: str
    """Reason why the result is not complete; empty if it is complete."""
    fingerprint: str
    """Fingerprint of the records."""
    guarantee: str
    """Guarantee of the result."""
    episodes: int
    """Number of episodes in the plan."""
    values: tuple[float, ...]
    """Score of each completed episode, in the order of the plan."""
    seconds: float
    """Duration of the evaluation, in seconds."""
    code: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the code files of the environment and the policy, by module."""
    served: dict[str, str] = field(default_factory=dict)
    """Digests of the weights and of some outputs of the policy that ``rl-eval serve`` has served, by name."""

    @property
    def mean(self) -> float:
        """Mean of the values; NaN if there are no values."""
        return math.fsum(self.values) / len(self.values) if self.values else math.nan

    @classmethod
    def of(cls, result: EvalResult, kind: ScoreKind) -> Score:
        """Return the scores of a result's episodes."""
        rows = result.counted_rows[_COLUMNS[kind]]
        status, reason, values = result.status, result.reason, np.asarray(rows, np.float64)
        if kind != "return" and (rows < 0).any():
            missing = int((rows < 0).sum())
            status = "failed"
            reason = f"the score is the success flag, but {missing} of {len(rows)} episodes did not report it"
            values = values[:0]
        return cls(
            kind,
            status,
            reason,
            result.fingerprint,
            result.guarantee,
            len(result.plan),
            tuple(values.tolist()),
            result.timing.wall_seconds,
            {name: file["sha256"] for name, file in result.provenance.get("code", {}).get("files", {}).items()},
            {name: digest for name, digest in result.provenance.get("numerics", {}).items() if name in _SERVED},
        )


@dataclass(frozen=True)
class CellState:
    """A cell, with its status and score in the folder."""

    planned: PlannedCell
    status: CellStatus
    reason: str = ""
    """Reason why the result is not complete, or why the last attempt has no result; otherwise empty."""
    score: Score | None = None
    open: bool = False
    """Whether the next run of the suite evaluates this cell."""


@final
class Ledger:
    """Folder with the results of a suite.

    Args:
        folder: The folder. It may not exist yet.
        suite: The suite.

    Raises:
        ConfigError: The folder belongs to another suite, or to another version of the suite.
        LogError: The file ``suite.json`` cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], suite: SuiteDefinition) -> None:
        self.folder = Path(folder).absolute()
        self._suite = suite
        self._storage = open_storage(self.folder)
        self._described_suite = {"format": FORMAT, "suite": suite.suite, "version": suite.version}
        theirs = self._read(SUITE_FILE)
        if theirs is not None:
            _check_same(theirs, self._described_suite, self.folder)

    def begin(self) -> None:
        """Create the folder and its file ``suite.json``, unless they exist.

        Raises:
            ConfigError: The folder cannot be written, or another process has just started another suite in it.
        """
        described = _text(self._described_suite).encode()
        try:
            if self._storage.create(SUITE_FILE, described):
                return
            if described.startswith(self._storage.read(SUITE_FILE)):  # A process died while it wrote the file.
                self._storage.write(SUITE_FILE, described)
            elif (theirs := self._read(SUITE_FILE)) is None:
                problem = f"{self.folder / SUITE_FILE} belongs to another program"
                raise ConfigError(problem, key="--out", value=str(self.folder), fix="Pass another folder (--out).")
            else:
                _check_same(theirs, self._described_suite, self.folder)
        except OSError as error:
            problem = f"the folder {self.folder} (--out) cannot be written: {error.strerror or error}"
            raise ConfigError(problem, key="--out", value=str(self.folder)) from error

    def evaluated(self) -> EvaluatedSteps:
        """Return the checkpoints of the cells that have a score and a training step."""
        found: dict[str, dict[int, str]] = {}
        for digest in self._storage.names("cells"):
            if not (self.folder / "cells" / digest / SCORE_FILE).exists():
                continue
            match self._read(f"cells/{digest}/{CELL_FILE}"):
                case {"cell": str(cell), "definition": {"policy": {"checkpoint": str(checkpoint)}}}:
                    run, _, step = cell.rpartition("/")
                    if step.isdecimal():
                        found.setdefault(run, {})[int(step)] = checkpoint
        return found

    def folder_of(self, planned: PlannedCell) -> Path:
        """Return the folder of a cell's evaluation log."""
        return self.folder / planned.cell.folder

    def claim(self, planned: PlannedCell) -> None:
        """Write the definition of a cell whose log this process owns. If a definition exists, check that it is equal.

        Raises:
            ConfigError: The cell was evaluated with another definition, or another checkpoint.
        """
        if difference := self._difference(planned):
            problem = f"{planned.cell} was evaluated with another definition: {difference}"
            fix = f"Undo the change, use another name, or remove {self.folder_of(planned)} to evaluate the cell again."
            raise ConfigError(problem, key=str(planned.cell), fix=fix)
        if self._claimed(planned) is None:
            write_text(self.folder_of(planned) / CELL_FILE, _text(self._described(planned)))
        (self.folder_of(planned) / ERROR_FILE).unlink(missing_ok=True)

    def state(self, planned: PlannedCell, *, watch: bool = False) -> CellState:
        """Return the state of a cell.

        Args:
            planned: The cell.
            watch: Whether to wait for heartbeats of a process on another machine that runs the cell. If not, such a
                process is treated as alive.
        """
        if difference := self._difference(planned):
            why = f"it was evaluated with another definition: {difference}; to evaluate it again, remove "
            return CellState(planned, "error", f"{why}{self.folder_of(planned)}")
        try:
            score = self._score(planned)
        except EvalError as error:
            return CellState(planned, "error", summary_of(error))
        if score is not None:
            return CellState(planned, score.status, score.reason, score)
        return self._state_without_score(planned, watch)

    def _state_without_score(self, planned: PlannedCell, watch: bool) -> CellState:
        if planned.problem:
            return CellState(planned, "error", planned.problem)
        if writer_of(open_storage(self.folder_of(planned)), watch=watch) is not None:
            return CellState(planned, "running")
        if (failed := self._read(f"{planned.cell.folder}/{ERROR_FILE}")) is not None:
            return CellState(planned, "error", str(failed.get("reason")), open=True)
        return CellState(planned, "missing", open=True)

    def _score(self, planned: PlannedCell) -> Score | None:
        """Return the score of a cell; None if it has no score.

        Use the stored score if its result was complete and its kind is that of the task's score. Otherwise, compute the
        score from the log, which may have changed.
        """
        copy = self._read(f"{planned.cell.folder}/{SCORE_FILE}")
        kind = self._suite.tasks[planned.cell.task].score
        if copy is None:
            return None
        with suppress(ValueError):
            found = typed(Score, copy)
            if found.kind == kind and found.status == "complete":
                return found
        result = load(self.folder_of(planned))
        if result.stopped_early:
            return None
        score = Score.of(result, kind)
        if score.status == "complete":
            with suppress(OSError):  # A reader may have no permission to write.
                self._write(planned, score)
        return score

    def record(self, planned: PlannedCell, result: EvalResult) -> CellState:
        """Write the score of a result, and return the new state of the cell.

        If another policy was served for another task, do not write the score.
        """
        score = Score.of(result, self._suite.tasks[planned.cell.task].score)
        if score.served and (other := self._other_server(planned.cell, score.served)):
            problem = f"the server has another policy than for {other}"
            return self.fail(planned, f"{problem}; start that policy again, and remove {self.folder_of(planned)}")
        self._write(planned, score)
        return CellState(planned, score.status, score.reason, score)

    def fail(self, planned: PlannedCell, reason: str) -> CellState:
        """Write the reason why a cell has no result yet, and return the new state of the cell."""
        write_text(self.folder_of(planned) / ERROR_FILE, _text({"cell": str(planned.cell), "reason": reason}))
        return CellState(planned, "error", reason, open=True)

    def _other_server(self, cell: Cell, served: Mapping[str, str]) -> str:
        """Return a cell of the same training run, but another task, with another served policy; empty without one."""
        if "{task}" in str(self._suite.policies[cell.policy].section):
            return ""  # Each task has its own policy.
        for task in self._suite.tasks:
            other = replace(cell, task=task)
            score = self._read(f"{other.folder}/{SCORE_FILE}") or {}
            if (score.get("served") or served) != served:
                return str(other)
        return ""

    def _write(self, planned: PlannedCell, score: Score) -> None:
        write_text(self.folder_of(planned) / SCORE_FILE, _text(asdict(score)))

    def _claimed(self, planned: PlannedCell) -> dict[str, Any] | None:
        """Return the content of the existing ``cell.json``; None if the cell has no log.

        A cell that failed before its evaluation started has no log.
        """
        has_log = (self.folder_of(planned) / MANIFEST_FILE).exists()
        return self._read(f"{planned.cell.folder}/{CELL_FILE}") if has_log else None

    def _difference(self, planned: PlannedCell) -> str:
        """Return the differences between the folder's and the suite's definition of a cell; empty if they are equal."""
        there = self._claimed(planned)
        if there is None:
            return ""
        found = list(differences(there, self._described(planned, there.get("checkpoint"))))
        if any(one.key.startswith("checkpoint.") for one in found):
            return f"the file {planned.checkpoint} has changed"
        return "; ".join(f"{one.key.removeprefix('definition.')} was {one.a!r} and is {one.b!r}" for one in found)

    def _described(self, planned: PlannedCell, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of ``cell.json``.

        Args:
            planned: The cell.
            known: Description of the checkpoint in the existing ``cell.json``. A checkpoint is hashed again only if its
                size or modification time has changed.
        """
        path, checkpoint = planned.checkpoint, known
        if path is not None and path.exists():
            seen = {"size": path.stat().st_size, "modified": path.stat().st_mtime_ns}
            if known is None or any(known.get(key) != value for key, value in seen.items()):
                digest = digest_of(path)
                if known is None or known.get("digest") != digest:
                    checkpoint = {**seen, "digest": digest}
        return {"cell": str(planned.cell), "definition": definition_of(self._suite, planned), "checkpoint": checkpoint}

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file; None if the file does not exist, or is not a JSON object.

        Raises:
            LogError: The file exists, but cannot be read.
        """
        try:
            found = parse_json(self._storage.read(name))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise LogError(f"{self.folder / name} cannot be read: {error}", key=str(self.folder / name)) from error
        return found if isinstance(found, dict) else None


def _check_same(theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: Path) -> None:
    for key, value in ours.items():
        if theirs.get(key) != value:
            problem = f"{folder} has the {key} {theirs.get(key)!r}, not {value!r}"
            raise ConfigError(problem, key="--out", value=str(folder), fix="Pass another folder (--out).")


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"

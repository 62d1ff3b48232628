"""Front of a suite: its file, its cells, its run, and its results."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from rl_eval.records.plain import plain
from rl_eval.reports.page import Line, Page, Table
from rl_eval.suites.cells import Cell, PlannedCell, chosen, matrix
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.ledger import CellState, Ledger
from rl_eval.suites.running import SuiteEvents, SuiteRun


@final
@dataclass(frozen=True)
class SuiteResult:
    """States and scores of the cells of a suite."""

    definition: SuiteDefinition
    cells: tuple[CellState, ...]
    skipped: tuple[tuple[Cell, str], ...]
    """Skipped cells, with the reason."""

    @property
    def complete(self) -> bool:
        """Whether every cell is complete."""
        return all(state.status == "complete" for state in self.cells)

    @property
    def page(self) -> Page:
        """The table of all cells."""
        rows = [_row(state) for state in self.cells]
        done = sum(state.status == "complete" for state in self.cells)
        line = Line("cells", f"{done:,}", f"of {len(rows):,} complete")
        headings = ("cell", "status", "episodes", "mean score")
        notes = [f"{cell} is skipped: {why}" for cell, why in self.skipped]
        notes += [f"{state.planned.cell}: {state.reason}" for state in self.cells if state.reason]
        return Page(self.definition.suite, "", "", [[line], Table("cells", headings, rows)], notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the cells as plain JSON values."""
        return {
            "suite": self.definition.suite,
            "version": self.definition.version,
            "cells": [_described(state) for state in self.cells],
            "skipped": [{"cell": str(cell), "why": why} for cell, why in self.skipped],
        }


@final
class Suite:
    """Tasks x policies x training seeds x steps.

    Args:
        definition: The content of the suite's file.

    Example:
        >>> Suite.from_yaml("suite.yaml").run(out="results")  # doctest: +SKIP
    """

    def __init__(self, definition: SuiteDefinition) -> None:
        self.definition = definition

    @classmethod
    def from_yaml(cls, path: str | Path) -> Suite:
        """Read a suite from a file; relative paths in it begin at its folder.

        Raises:
            ConfigError: The file cannot be read, or a key or value in it is wrong; the message has line and column.
        """
        return cls(SuiteDefinition.from_yaml(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], folder: str | Path = ".") -> Suite:
        """Build a suite from nested values, as in the file; relative paths begin at ``folder``.

        Raises:
            ConfigError: A key or value is wrong.
        """
        return cls(SuiteDefinition.from_dict(values, folder))

    @cached_property
    def cells(self) -> tuple[PlannedCell, ...]:
        """Cells, without the skipped ones, with the checkpoints that were on disk at the first access."""
        return self._matrix.cells

    @cached_property
    def _matrix(self) -> Any:
        return matrix(self.definition)

    def run(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        cells: Sequence[str] = (),
        num_runners: int | None = None,
        events: SuiteEvents | None = None,
    ) -> SuiteResult:
        """Run the cells that have no result yet, and return the results of all cells.

        The same call continues an interrupted run. Several processes may run one suite in one folder.

        Args:
            out: Folder of the suite; by default ``suites/NAME``.
            cells: Cells to run, such as ``hopper/ppo/0/1000`` or ``hopper/*``; by default all.
            num_runners: Replaces ``runners.num_runners``.
            events: Receives what happens.

        Raises:
            ConfigError: No cell matches, or the folder belongs to another suite.
            ClusterDied: The Ray cluster died; the same call continues.
        """
        ledger = Ledger(self.folder(out), self.definition)
        wanted = chosen(self.cells, cells) if cells else self.cells
        runners = {} if num_runners is None else {"num_runners": num_runners}
        SuiteRun(self.definition, ledger, wanted, runners, events or SuiteEvents()).run()
        return self._result(ledger)

    def result(self, out: str | os.PathLike[str] | None = None) -> SuiteResult:
        """Return the results in a folder without running anything.

        Raises:
            ConfigError: The folder belongs to another suite.
        """
        return self._result(Ledger(self.folder(out), self.definition))

    def folder(self, out: str | os.PathLike[str] | None) -> Path:
        """Return the folder of the suite, by default ``suites/NAME``."""
        return Path("suites", self.definition.suite) if out is None else Path(out)

    def _result(self, ledger: Ledger) -> SuiteResult:
        return SuiteResult(self.definition, tuple(map(ledger.state, self.cells)), self._matrix.skipped)


def _row(state: CellState) -> tuple[str, str, str, str]:
    if state.score is None:
        return str(state.planned.cell), state.status, "", ""
    count, planned = len(state.score.values), state.score.episodes
    episodes = f"{count:,}" if count == planned else f"{count:,} of {planned:,}"
    return str(state.planned.cell), state.status, episodes, f"{state.score.mean:.6g}"


def _described(state: CellState) -> dict[str, Any]:
    cell, score = state.planned.cell, state.score
    mean = math.nan if score is None else score.mean
    numbers = {"mean": mean, "count": len(score.values) if score else 0, "fingerprint": score and score.fingerprint}
    names = {"task": cell.task, "policy": cell.policy, "seed": cell.seed, "step": cell.step}
    described: dict[str, Any] = plain({**names, "status": state.status, "reason": state.reason, **numbers})
    return described

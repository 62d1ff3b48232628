"""Suites for users: the file, the cells, the run and the results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from rl_eval.suites.cells import PlannedCell, chosen, matrix
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.exports import read_scores
from rl_eval.suites.ledger import Ledger
from rl_eval.suites.result import SuiteResult
from rl_eval.suites.running import SuiteEvents, SuiteRun


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
        """Read a suite from a file. Relative paths in the file begin at the file's folder.

        Raises:
            ConfigError: The file cannot be read, or a key or value in it is wrong; the message names the line and the
                column.
        """
        return cls(SuiteDefinition.from_yaml(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], folder: str | Path = ".") -> Suite:
        """Create a suite from nested values, as in the file. Relative paths begin at ``folder``.

        Raises:
            ConfigError: A key or value is wrong.
        """
        return cls(SuiteDefinition.from_dict(values, folder))

    @cached_property
    def cells(self) -> tuple[PlannedCell, ...]:
        """Cells that are not skipped, with the checkpoints that were on disk at the first access."""
        return matrix(self.definition, {}).cells

    def run(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        cells: Sequence[str] = (),
        num_runners: int | None = None,
        events: SuiteEvents | None = None,
    ) -> SuiteResult:
        """Run the chosen cells that have no result yet, and return the results of all chosen cells.

        The same call continues an interrupted run. Several processes may run one suite in one folder.

        Args:
            out: Folder of the suite; by default ``suites/NAME``.
            cells: Names or patterns of the cells to run, such as ``hopper/ppo/0/1000`` or ``hopper/*``; by default, all
                cells.
            num_runners: Value that replaces ``runners.num_runners`` of the suite.
            events: Object that receives the events of the run.

        Raises:
            ConfigError: No cell matches a pattern, every cell is skipped, or the folder belongs to another suite.
            ClusterDied: The Ray cluster died. Call this method again to continue.
        """
        ledger = Ledger(self.folder(out), self.definition)
        planned = matrix(self.definition, ledger.evaluated())
        wanted = chosen(planned.cells, cells) if cells else planned.cells
        runners = {} if num_runners is None else {"num_runners": num_runners}
        SuiteRun(self.definition, ledger, wanted, runners, events or SuiteEvents()).run()
        return SuiteResult(self.definition, tuple(map(ledger.state, wanted)), () if cells else planned.skipped)

    def result(
        self, out: str | os.PathLike[str] | None = None, published: str | os.PathLike[str] | None = None
    ) -> SuiteResult:
        """Return the results in a folder without running anything.

        Args:
            out: Folder of the suite; by default ``suites/NAME``.
            published: CSV file of published scores; see :func:`~rl_eval.suites.exports.read_scores`.

        Raises:
            ConfigError: The folder belongs to another suite, every cell is skipped, or the CSV file cannot be read.
            UsageError: The CSV file has no scores, or a score is NaN or infinite.
        """
        ledger = Ledger(self.folder(out), self.definition)
        planned = matrix(self.definition, ledger.evaluated())
        found = SuiteResult(self.definition, tuple(map(ledger.state, planned.cells)), planned.skipped)
        return found if published is None else replace(found, published=read_scores(published))

    def folder(self, out: str | os.PathLike[str] | None) -> Path:
        """Return the folder of the suite, by default ``suites/NAME``."""
        return Path("suites", self.definition.suite) if out is None else Path(out)

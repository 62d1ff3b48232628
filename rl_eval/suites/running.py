"""Run of a suite: the cells that have no result run one after the other.

Consecutive cells use the same runner processes if their settings allow it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ClusterDied, LogFenced, LogOwned, summary_of
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle, result_unless
from rl_eval.runners.runner_processes import shares_processes
from rl_eval.suites.cells import PlannedCell, settings_of_cell
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.ledger import CellState, Ledger

_POLL_S: Final = 0.2
_OTHERS_S: Final = 2.0
"""Seconds between two checks of the cells that other processes run."""


class SuiteEvents:
    """Base class for objects that show a run of a suite, with one method per event."""

    def on_begin(self, count: int) -> None:
        """Handle the start of the run; ``count`` is the number of cells that have no result yet."""

    def on_start(self, planned: PlannedCell, handle: EvalHandle) -> None:
        """Handle the start of a cell's evaluation."""

    def on_end(self, state: CellState) -> None:
        """Handle the end of a cell. The cell may have run in another process."""

    def stopping(self) -> bool:
        """Whether the run must cancel its current cell and return."""
        return False


@final
class SuiteRun:
    """Run of a suite by one process.

    Args:
        suite: The suite.
        ledger: Folder of the suite.
        cells: The cells to run.
        runners: Config values of the section ``runners``, which override the values in the suite.
        events: Object that receives the events of the run.
    """

    def __init__(
        self,
        suite: SuiteDefinition,
        ledger: Ledger,
        cells: Sequence[PlannedCell],
        runners: Mapping[str, Any],
        events: SuiteEvents,
    ) -> None:
        self._suite, self._ledger, self._runners, self._events = suite, ledger, runners, events
        self._cells = cells
        self._group: EvalRunnerGroup | None = None
        self._home = Path.cwd()

    def run(self) -> None:
        """Run the cells without a result, and wait for the cells that other processes run.

        A cell that fails does not end the run.

        Raises:
            ClusterDied: The Ray cluster died. Call this method again to continue.
        """
        self._ledger.begin()
        left = [one for one in self._cells if self._ledger.state(one).score is None]
        self._events.on_begin(len(left))
        watch = False
        try:
            while left and not self._events.stopping():
                before, left = len(left), [one for one in left if not self._attempt(one, watch)]
                watch = len(left) == before  # Other processes run these cells, and their machines may be dead.
                if watch:
                    self._wait()
        finally:
            self._stop_group()

    def _attempt(self, planned: PlannedCell, watch: bool) -> bool:
        """Run a cell, if no other process runs it now. Return whether the cell has ended."""
        if self._events.stopping():
            return False
        state = self._ledger.state(planned, watch=watch)
        if state.open:
            try:
                state = self._evaluate(planned)
            except (LogOwned, LogFenced):
                return False
            except ClusterDied:
                raise
            except Exception as error:  # An error of a user's code must not stop the other cells.
                self._stop_group()
                state = self._ledger.fail(planned, summary_of(error))
        if state.status in ("missing", "running"):
            return False
        self._events.on_end(state)
        return True

    def _evaluate(self, planned: PlannedCell) -> CellState:
        settings = settings_of_cell(self._suite, planned, self._runners)
        handle = self._group_for(settings).submit(
            output=self._ledger.folder_of(planned), on_submitted=partial(self._on_submitted, planned)
        )
        result = result_unless(handle, self._events.stopping, _POLL_S)
        if not result.stopped_early:
            return self._ledger.record(planned, result)
        if self._events.stopping():
            return CellState(planned, "missing", result.reason)
        return self._ledger.fail(planned, result.reason)

    def _on_submitted(self, planned: PlannedCell, handle: EvalHandle) -> None:
        self._ledger.claim(planned)
        self._events.on_start(planned, handle)

    def _group_for(self, settings: EvalSettings) -> EvalRunnerGroup:
        """Return a group of runners for a cell: the group of the previous cell, if its processes are suitable."""
        if self._group is not None and shares_processes(self._group.settings, settings):
            self._group.reconfigure(settings)
            return self._group
        self._stop_group()
        self._group = EvalRunnerGroup(settings, threaded=settings.runners.num_runners > 0)
        return self._group

    def _stop_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.stop()
            os.chdir(self._home)  # An environment may have changed the folder; paths are relative to it.

    def _wait(self) -> None:
        end = time.monotonic() + _OTHERS_S
        while time.monotonic() < end and not self._events.stopping():
            time.sleep(_POLL_S)

"""Result of a suite: the states of its cells, its tables, and its page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, final

import numpy as np

from rl_eval.errors import UsageError
from rl_eval.records.plain import plain
from rl_eval.reports.page import Line, Page
from rl_eval.reports.page import Table as PageTable
from rl_eval.reports.pages import page_of
from rl_eval.results.result import Status
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.text import Printed, merged_notes, of_planned, rounded, several
from rl_eval.suites.aggregates import aggregate_scores, learning_curves, performance_profiles, task_means
from rl_eval.suites.cells import Cell
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.improvement import probabilities_of_improvement
from rl_eval.suites.ledger import CellState
from rl_eval.suites.normalization import normalized
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Table
from rl_eval.suites.units import MANY, Unit

_MANY: Final = 100
_THRESHOLDS: Final = 41
"""Number of thresholds of a performance profile."""
TITLES: Final = {
    "aggregates": "Aggregates over tasks and training seeds",
    "improvement": "Probability of improvement",
    "tasks": "Mean score of each task",
    "profiles": "Performance profiles",
    "curves": "Learning curves",
}
"""Titles of the tables, by their names."""
_UNSCALED: Final = ("improvement", "tasks")
"""Names of the tables that do not use normalized scores."""
_SCALED: Final = "Scores are normalized: low is 0, and high is 1."


@final
@dataclass(frozen=True, eq=False)
class SuiteResult(Printed):
    """States and scores of the cells of a suite."""

    definition: SuiteDefinition
    cells: tuple[CellState, ...]
    skipped: tuple[tuple[Cell, str], ...]
    """Skipped cells, with the reason."""
    published: Scores | None = None
    """Published scores that are shown beside the scores of the suite."""

    @property
    def complete(self) -> bool:
        """Whether every cell is complete."""
        return all(state.status == "complete" for state in self.cells)

    @property
    def status(self) -> Status:
        """Status: ``complete`` if every cell is complete, ``failed`` if no cell has a result, otherwise ``partial``."""
        if self.complete:
            return "complete"
        return "partial" if any(state.score is not None for state in self.cells) else "failed"

    @cached_property
    def scores_by_step(self) -> dict[int, Scores]:
        """Scores of all cells with a result, by training step. Cells without a step are at step 0."""
        return self._scores_by_step(self.cells)

    @property
    def has_scores(self) -> bool:
        """Whether at least one training run has a score at its last step."""
        return any(_has_score(states[-1]) for states in self._runs.values())

    @cached_property
    def scores(self) -> Scores:
        """Scores of the last step of each run, and published scores. A run whose last step has no score is left out.

        Raises:
            UsageError: No run has a score at its last step. Or the published scores belong to other tasks, or contain
                a policy of the suite.
        """
        ours = self._scores(states[-1] for states in self._runs.values())
        return ours if self.published is None else ours.with_baselines(self.published)

    @cached_property
    def normalized_scores(self) -> Scores:
        """:attr:`scores`, normalized by the scales of the tasks; not normalized if a task has no scale."""
        scales = self.definition.scales
        return self.scores if scales is None else normalized(self.scores, scales)

    @cached_property
    def tables(self) -> dict[str, Table | UsageError]:
        """Tables of scores and aggregates, by their names in :data:`TITLES`.

        If a table cannot be computed, the mapping has the error instead. Tables that need a missing setting are absent.
        """
        makers, lacking, notes = self._makers(), sum(state.status != "complete" for state in self.cells), list[str]()
        if lacking:
            notes.append(f"cells without a complete result: {lacking:,} of {len(self.cells):,}")
        if self.published is not None and self.definition.aggregate.unit == "episode":
            notes.append("published scores are means of runs, so their aggregates differ from aggregates of episodes")
        notes_of = {"curves": notes}
        return {
            name: _made(makers[name], notes_of.get(name, [*notes, *self._ends]), scaled=name not in _UNSCALED)
            for name in TITLES
            if name in makers
        }

    @cached_property
    def _runs(self) -> dict[Run, list[CellState]]:
        """States of the cells of each run, in ascending order of their steps."""
        found: dict[Run, list[CellState]] = {}
        for state in self.cells:
            found.setdefault(_run(state.planned.cell), []).append(state)
        return {run: sorted(states, key=lambda state: state.planned.cell.step or 0) for run, states in found.items()}

    @cached_property
    def _ends(self) -> list[str]:
        """Notes on runs without a score at their last step, and on policies with runs that end at different steps."""
        lasts = {run: states[-1] for run, states in self._runs.items()}
        earlier = {run for run, states in self._runs.items() if any(map(_has_score, states[:-1]))}
        notes = [
            f"{last.planned.cell} has no score, so its run is left out"
            for run, last in lasts.items()
            if run in earlier and not _has_score(last)
        ]
        steps: dict[tuple[str, str], set[int]] = {}
        for run, last in lasts.items():
            if last.planned.cell.step is not None:
                steps.setdefault(("training seeds", f"{run.task}/{run.policy}"), set()).add(last.planned.cell.step)
                steps.setdefault(("tasks", run.policy), set()).add(last.planned.cell.step)
        return notes + [
            f"the {parts} of {name} are compared at different steps: {', '.join(map(str, sorted(found)))}"
            for (parts, name), found in steps.items()
            if len(found) > 1
        ]

    def _scores(self, cells: Iterable[CellState]) -> Scores:
        found = ((_run(state.planned.cell), state.score) for state in cells)
        runs = {run: np.array(score.values) for run, score in found if score is not None and score.values}
        return Scores(runs, self.definition.bounds)

    def _scores_by_step(self, cells: Iterable[CellState]) -> dict[int, Scores]:
        found: dict[int, list[CellState]] = {}
        for state in cells:
            found.setdefault(state.planned.cell.step or 0, []).append(state)
        return {step: self._scores(states) for step, states in sorted(found.items()) if any(map(_has_score, states))}

    def _makers(self) -> dict[str, Callable[[], Table]]:
        aggregate = self.definition.aggregate
        unit, scales = aggregate.unit, self.definition.scales
        if unit is None:
            return {}
        makers: dict[str, Callable[[], Table]] = {"tasks": lambda: task_means(self.scores, unit)}
        if len(self.definition.policies) > 1 or self.published is not None:
            makers["improvement"] = lambda: self._against_baseline(probabilities_of_improvement(self.scores, unit))
        if scales is None:
            return makers

        makers["aggregates"] = lambda: aggregate_scores(self.normalized_scores, unit, aggregate.metrics)
        makers["profiles"] = lambda: _profiles(self.normalized_scores, unit)
        with_steps = [state for state in self.cells if state.planned.cell.step is not None]
        if any(map(_has_score, with_steps)) and max(map(len, self._runs.values())) > 1:

            def curves() -> Table:
                by_step = self._scores_by_step(with_steps)
                return learning_curves({step: normalized(scores, scales) for step, scores in by_step.items()}, unit)

            makers["curves"] = curves
        return makers

    def _against_baseline(self, table: Table) -> Table:
        """Return the columns of a table that compare with the baseline; without a baseline, return the whole table."""
        compare, cells = self.definition.compare, table.cells
        if compare is not None:
            cells = {pair: cell for pair, cell in cells.items() if pair[1] == compare.baseline}
        levels = {frozenset(pair): one.interval.confidence for pair, one in cells.items() if one.interval.exists}
        notes = [several(len(levels), "comparisons", min(levels.values()))] if len(levels) > 1 else []
        return replace(table, cells=cells, own_notes=(*table.own_notes, *notes))

    @property
    def page(self) -> Page:
        """Page with the tables and all cells."""
        return self._page(self.cells)

    @property
    def short_page(self) -> Page:
        """Page for a terminal. If there are more than 100 cells, it lists only the cells that are not complete."""
        incomplete = [state for state in self.cells if state.status != "complete"]
        return self.page if len(self.cells) <= _MANY else self._page(incomplete)

    def _page(self, listed: Iterable[CellState]) -> Page:
        done = sum(state.status == "complete" for state in self.cells)
        lines = [Line("cells", f"{done:,}", f"of {len(self.cells):,} complete")]
        sizes = {*Counter((run.task, run.policy) for run in self._runs).values()}
        if self.definition.aggregate.unit == "run" and 0 < max(sizes, default=0) < MANY:
            few = "so few that intervals may exceed the range of scores, unless return_bounds is set"
            note = "too few for intervals, which need 3" if max(sizes) == 2 else few
            lines.append(Line("training seeds", " to ".join(map(str, sorted({min(sizes), max(sizes)}))), note))
        shown = {name: table for name, table in self.tables.items() if isinstance(table, Table)}
        tables = [table.page_table(TITLES[name]) for name, table in shown.items() if name not in ("profiles", "curves")]
        cells = PageTable("Cells", _HEADINGS, [_row(state) for state in listed], folded=True)
        errors = ((TITLES[name], str(error)) for name, error in self.tables.items() if isinstance(error, UsageError))
        reasons = ((str(one.planned.cell), one.reason) for one in self.cells if one.reason)
        limits = (
            (
                TITLES[name] + f" ({row}, {column})" * (name == "tasks"),
                "no interval: " * (not found.exists) + found.note,
            )
            for name, table in shown.items()
            for (row, column), (_, found) in table.cells.items()
            if found.note
        )
        notes = [*merged_notes(errors), *merged_notes(reasons)]
        notes += merged_notes((f"{cell} is skipped", why) for cell, why in self.skipped)
        notes += dict.fromkeys([*self._ends, *(note for table in shown.values() for note in table.own_notes)])
        notes += [*merged_notes(limits), *self._code_changes(), *self._missing_settings()]
        name, version = self.definition.suite, f"version {self.definition.version}"
        return Page(name, version, self.status, [lines, *tables, cells], notes)

    def _code_changes(self) -> Iterator[str]:
        """Yield a note on each module that changed between two cells."""
        first: dict[str, tuple[str, Cell]] = {}
        changed = dict[str, tuple[Cell, Cell]]()
        for cell, score in ((one.planned.cell, one.score) for one in self.cells if one.score is not None):
            for module, digest in score.code.items():
                known, other = first.setdefault(module, (digest, cell))
                if known != digest:
                    changed.setdefault(module, (other, cell))
        for module, (one, other) in changed.items():
            yield f"{one} and {other} were evaluated with different code of {module}"

    def _missing_settings(self) -> list[str]:
        if self.definition.aggregate.unit is None:
            return ["for intervals and aggregates, set aggregate.unit to run or to episode"]
        if self.definition.scales is None:
            return ["for aggregates over tasks, set low and high of every task"]
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return the status, the cells and the tables as plain JSON values."""
        described: dict[str, Any] = plain(
            {
                "suite": self.definition.suite,
                "version": self.definition.version,
                "status": self.status,
                "cells": [_described(state) for state in self.cells],
                "skipped": [{"cell": str(cell), "why": why} for cell, why in self.skipped],
                "tables": {name: _numbers(table) for name, table in self.tables.items()},
            }
        )
        return described


_HEADINGS: Final = ("cell", "status", "episodes", "mean score", "guarantee")


def _has_score(state: CellState) -> bool:
    return state.score is not None and bool(state.score.values)


def _made(make: Callable[[], Table], notes: Sequence[str], *, scaled: bool) -> Table | UsageError:
    try:
        table = make()
    except UsageError as error:
        return error
    if not table.cells:
        return UsageError(
            "the table is empty: too few cells have a result",
            key="cells",
            fix="Finish the suite, or choose more cells.",
        )
    return replace(
        table, own_notes=(*notes, *table.own_notes), caption=f"{table.caption} {_SCALED}" if scaled else table.caption
    )


def _profiles(scores: Scores, unit: Unit) -> Table:
    means = [exact_mean(values) for values in scores.runs.values()]
    thresholds = np.linspace(min(0.0, *means), max(1.0, *means), _THRESHOLDS).tolist()
    return performance_profiles(scores, unit, thresholds)


def _run(cell: Cell) -> Run:
    return Run(cell.policy, cell.task, cell.seed or 0)


def _row(state: CellState) -> tuple[str, ...]:
    name, score = str(state.planned.cell), state.score
    if score is None:
        return name, state.status, "", "", ""
    return name, state.status, of_planned(len(score.values), score.episodes), rounded(score.mean), score.guarantee


def _described(state: CellState) -> dict[str, Any]:
    cell, score = state.planned.cell, state.score
    names = {"task": cell.task, "policy": cell.policy, "seed": cell.seed, "step": cell.step}
    numbers = {
        "mean": math.nan if score is None else score.mean,
        "count": len(score.values) if score else 0,
        "fingerprint": score and score.fingerprint,
        "guarantee": score and score.guarantee,
    }
    return {**names, "folder": cell.folder, "status": state.status, "reason": state.reason, **numbers}


def _numbers(table: Table | UsageError) -> Mapping[str, Any]:
    if isinstance(table, UsageError):
        return {"problem": str(table)}
    cells = [
        {table.rows_are: row, table.columns_are: column, "value": one.value, "low": one.interval.low}
        | {"high": one.interval.high, "note": one.interval.note, "both": one.both}
        for (row, column), one in table.cells.items()
    ]
    return {"caption": table.caption, "cells": cells}


@page_of.register
def _(shown: SuiteResult) -> Page:
    return shown.short_page

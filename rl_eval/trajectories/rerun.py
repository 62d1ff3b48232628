"""Episodes of a finished evaluation, run once more for their trajectories, and proved to be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from rl_eval.errors import ConfigError, EvalError, UsageError
from rl_eval.records.episode import Lease, Outcome, RunReport, different_columns, outcomes_of
from rl_eval.records.plain import plain
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner, Runner
from rl_eval.trajectories.trajectory import Trajectory

__all__ = ["rerun", "selected"]

_NAME: Final = "trajectory"
_BUDGET_S: Final = 1.0


def selected(result: EvalResult, indices: Sequence[int] | None) -> list[int]:
    """Return the episodes to run again: those that are named, or all that completed.

    Raises:
        UsageError: One that is named did not complete, or none did.
    """
    completed = result.table.rows["outcome"] == Outcome.COMPLETED
    if indices is None:
        if not completed.any():
            raise UsageError("no episode of the result completed: there are no trajectories to export")
        return [int(index) for index in completed.nonzero()[0]]
    for index in indices:
        if not 0 <= index < len(completed):
            raise UsageError(f"there is no episode {index}: the plan has {len(completed)}, from 0 on")
        if not completed[index]:
            raise UsageError(f"episode {index} did not complete, so it has no trajectory: choose others")
    return list(dict.fromkeys(indices))


def rerun(
    result: EvalResult, runner: Runner, indices: Sequence[int], recorder: Callable[[Any], Any]
) -> Iterator[list[Trajectory]]:
    """Run episodes again with a rebuilt runner, some at once; return their trajectories in order.

    Raises:
        ConfigError: The runner has no observers.
        EvalError: An episode did not come out as it was recorded.
    """
    if not isinstance(runner, EvalRunner):
        raise ConfigError(f"episodes of {type(runner).__name__} leave no trajectories, as it is no rl_eval.EvalRunner")
    runner.observe({_NAME: recorder})
    waiting = iter(indices)
    while wave := list(islice(waiting, 2 * runner.settings.runners.lanes)):
        found = _run_wave(result, runner, wave)
        yield [found[index] for index in wave]


def _run_wave(result: EvalResult, runner: Runner, wave: Sequence[int]) -> dict[int, Trajectory]:
    rows = result.table.rows
    leases = [Lease(index, int(rows[index]["seed"]), int(rows[index]["attempts"]), 0) for index in wave]
    found: dict[int, Trajectory] = {}
    while len(found) < len(wave):
        report = runner.run(leases, _BUDGET_S)
        leases = []
        if report.faults:
            raise EvalError(
                f"an episode did not complete again, although it is recorded as completed: {report.faults[0]}"
            )
        for row in report.rows:
            found[int(row["index"])] = _proved(result, report, int(row["index"]))
    return found


def _proved(result: EvalResult, report: RunReport, index: int) -> Trajectory:
    """Return the trajectory of an episode that came out as it was recorded."""
    mine, keys = report.rows["index"] == index, result.table.info_keys
    recorded, again = (
        result.table.outcomes(slice(index, index + 1)),
        outcomes_of(report.rows[mine], report.infos[mine], keys),
    )
    if different := different_columns(recorded, again):
        shown = ", ".join(f"{name} was {recorded[name][0]!r} and is {again[name][0]!r}" for name in different)
        raise EvalError(
            f"episode {index} did not come out as it was recorded: {shown}{_other_numerics(result, report)}"
        )
    artifact = next((kept[index] for name, kept in report.artifacts if name == _NAME and index in kept), None)
    if artifact is None:
        raise EvalError(f"episode {index} left no trajectory: {'; '.join(report.notes)}")
    kept: Trajectory = replace(artifact, weights_version=int(result.table.rows["weights_version"][index]))
    return kept


def _other_numerics(result: EvalResult, report: RunReport) -> str:
    ours, theirs = plain(report.numerics), result.provenance["numerics"]
    different = [
        f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}" for key in theirs if theirs[key] != ours.get(key)
    ]
    return f"; this process computes floats in another way than the run: {', '.join(different)}" if different else ""

"""Result of one evaluation: its numbers, and which of its episodes each number goes over.

The rule: a run that went through its plan reports over the episodes that completed; a run that was
stopped early reports over those of the leading stretch of the plan in which every episode finished,
because which episodes finish first depends on their length. Failed episodes are never dropped in
silence: they are counted, and they widen the interval or, without known return bounds, remove it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, final, get_args, overload

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rl_eval.atomic_write import sweep, write_text
from rl_eval.errors import LogError, UsageError, nearest
from rl_eval.records.agents import agent_rows
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeRecord, EpisodeTable, Fault, Outcome
from rl_eval.records.foreign import damage, typed
from rl_eval.records.plain import plain
from rl_eval.results.agents import policy_names, policy_versions
from rl_eval.results.report.files import (
    EPISODES_FILE,
    RESULT_FILE,
    check_fingerprint,
    check_format,
    check_ours,
    describe,
    episode_frame,
    json_text,
    read_folder,
    write_episodes,
)
from rl_eval.results.report.metrics import flat_metrics, notes, success_counts
from rl_eval.results.stats.aggregate import Aggregates, aggregate, exact_mean
from rl_eval.results.stats.interval import (
    Interval,
    check_confidence,
    no_interval,
    return_interval,
    success_interval,
)
from rl_eval.scheduling.plan import EpisodePlan

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

__all__ = ["EpisodeSequence", "EvalResult", "Status", "Timing", "decide_status"]

Status = Literal["complete", "partial", "failed"]

_UNCHECKED: Final = Determinism(remark="no episode was run again")


def decide_status(table: EpisodeTable, limit: float | None, reason: str) -> tuple[Status, str]:
    """Decide between complete, partial and failed, and say why.

    Args:
        table: Every record.
        limit: ``fault_tolerance.max_failed_episodes``.
        reason: Why episodes did not finish, if some did not.
    """
    failed = int((table.rows["outcome"] == Outcome.FAILED).sum())
    missing = int((~table.filled).sum())
    if missing:
        reason = f"{missing} of {len(table)} episodes did not finish: {reason}"
        return ("partial" if table.completed.any() else "failed"), reason
    if not failed:
        return "complete", ""
    first = int(np.argmax(table.rows["outcome"] == Outcome.FAILED))
    told = table.faults.get(first)
    reason = f"{failed} of {len(table)} episodes failed; first: {told[-1] if told else f'episode {first}'}"
    allowed = len(table) if limit is None else limit * len(table) if limit < 1 else limit
    return ("failed" if failed > allowed or failed == len(table) else "partial"), reason


@dataclass(frozen=True, slots=True)
class Timing:
    """Time that the parts of one evaluation took."""

    wall_seconds: float
    """From the first lease to the last record, on the driver's clock."""
    env_steps: Annotated[int, Field(ge=0, lt=2**63)]
    """Environment steps executed, those of wasted attempts included."""
    reset_seconds: float
    """Inside ``env.reset``, summed over runners; so are the next two."""
    step_seconds: float
    inference_seconds: float
    num_runners: Annotated[int, Field(ge=0, lt=2**31)]
    """Runner processes; 0 when the caller's process ran the episodes."""

    @classmethod
    def of_totals(cls, totals: Mapping[str, float], num_runners: int) -> Timing:
        """Build it from sums by field name; what is missing is 0."""
        return cls(
            wall_seconds=totals.get("wall_seconds", 0.0),
            env_steps=int(totals.get("env_steps", 0)),
            reset_seconds=totals.get("reset_seconds", 0.0),
            step_seconds=totals.get("step_seconds", 0.0),
            inference_seconds=totals.get("inference_seconds", 0.0),
            num_runners=num_runners,
        )

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the runners' time by activity; they sum to 1, or are empty without time."""
        spent = {"step": self.step_seconds, "inference": self.inference_seconds, "reset": self.reset_seconds}
        total = max(self.wall_seconds * max(1, self.num_runners), sum(spent.values()))
        if not total > 0:
            return {}
        return {**{name: value / total for name, value in spent.items()}, "other": 1 - sum(spent.values()) / total}


@dataclass(frozen=True)
class _Described:
    """Arguments of a result that its description holds as they are."""

    status: Status
    reason: str
    timing: Timing
    provenance: dict[str, Any]
    confidence: float
    audit_mismatches: tuple[int, ...]
    return_bounds: tuple[float, float] | None
    determinism: Determinism


class EpisodeSequence(Sequence[EpisodeRecord]):
    """The finished episodes of a table in index order; records are built when they are looked at."""

    def __init__(self, table: EpisodeTable, positions: npt.NDArray[np.intp]) -> None:
        self._table = table
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, key: int) -> EpisodeRecord: ...
    @overload
    def __getitem__(self, key: slice) -> EpisodeSequence: ...
    def __getitem__(self, key: int | slice) -> EpisodeRecord | EpisodeSequence:
        if isinstance(key, slice):
            return EpisodeSequence(self._table, self._positions[key])
        return self._table.record(int(self._positions[key]))

    def __repr__(self) -> str:
        return f"<{len(self)} episodes>"


@final
class EvalResult:
    """The outcome of one evaluation. Do not change its table afterwards: numbers are computed once.

    Args:
        table: Every record and fault.
        plan: The episodes that were asked for.
        status: ``complete`` when every episode completed, ``partial`` when some failed or never
            finished, ``failed`` when the evaluation itself broke down.
        reason: Why the status is not ``complete``.
        timing: Where the time went.
        provenance: What was evaluated, how and where. ``identity`` in it holds what the outcomes
            depend on. Kept as plain JSON values, so that a reloaded result equals a live one.
        confidence: Nominal coverage of every interval.
        audit_mismatches: Indices of episodes that ran twice with different outcomes.
        return_bounds: Least and greatest possible return, if known.
        determinism: What came of running a few episodes again.
        artifacts: What observers returned for episodes of this session, by index and observer; not saved.

    Raises:
        UsageError: The arguments contradict each other.
    """

    def __init__(
        self,
        *,
        table: EpisodeTable,
        plan: EpisodePlan,
        status: Status,
        reason: str,
        timing: Timing,
        provenance: Mapping[str, Any],
        confidence: float = 0.95,
        audit_mismatches: tuple[int, ...] = (),
        return_bounds: tuple[float, float] | None = None,
        determinism: Determinism = _UNCHECKED,
        artifacts: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        check_confidence(confidence)
        if status not in get_args(Status):
            raise UsageError(f"status is {status!r}: {nearest(str(status), get_args(Status))}")
        self.table = table
        self.plan = plan
        self.status: Status = status
        self.reason = reason
        self.timing = timing
        self.provenance: dict[str, Any] = plain(provenance)
        self.confidence = confidence
        self.audit_mismatches = tuple(audit_mismatches)
        self.return_bounds = return_bounds
        self.determinism = determinism
        self.artifacts: Mapping[int, Mapping[str, Any]] = artifacts or {}
        self._check_rows()
        self._check_bounds()

    def _check_rows(self) -> None:
        if len(self.table) != len(self.plan):
            raise UsageError(f"the table has {len(self.table)} rows for a plan of {len(self.plan)} episodes")
        rows, positions = self.table.rows[self.table.filled], np.flatnonzero(self.table.filled)
        strangers = positions[(rows["index"] != positions) | (rows["seed"] != self.plan.seeds[positions])]
        if strangers.size:
            raise UsageError(f"the record of episode {strangers[0]} has another index or seed than {self.plan!r}")
        if self.status == "complete" and self.stopped_early:
            raise UsageError(f"{len(self.plan) - len(rows)} episodes have no record: the status cannot be 'complete'")
        versions = np.unique(self.counted_rows["weights_version"])
        if len(versions) > 1:
            raise UsageError(f"records of weights versions {versions.tolist()} cannot be one result")

    def _check_bounds(self) -> None:
        if self.return_bounds is None:
            return
        low, high = self.return_bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UsageError(f"return_bounds is ({low}, {high}): give two finite numbers, the lower one first")

    # Which episodes count

    @property
    def stopped_early(self) -> bool:
        """Whether some episodes of the plan have no record."""
        return not bool(self.table.filled.all())

    @cached_property
    def scope(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows that the numbers are about, shape (num_episodes,).

        All rows, or the leading stretch of finished ones when the run was stopped early.
        """
        return np.arange(len(self.table)) < self.table.prefix()

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows that the numbers are computed from: completed and in scope."""
        return self.scope & self.table.completed

    @cached_property
    def counted_rows(self) -> npt.NDArray[np.void]:
        """The rows that the numbers are computed from, array of ``ROW``."""
        return np.asarray(self.table.rows[self.counted])

    @property
    def episodes(self) -> EpisodeSequence:
        """Every finished episode, failed ones included, in index order."""
        return EpisodeSequence(self.table, np.flatnonzero(self.table.filled))

    @cached_property
    def agents(self) -> npt.NDArray[np.void]:
        """One row per completed episode and agent that appeared in it; empty where episodes have a single agent.

        A structured array with the fields ``index``, ``seat``, ``agent``, ``policy``, ``weights_version``
        (of that policy), ``return``, ``length`` (actions of the agent), ``terminated``, ``truncated`` and ``outcome``:
        1 for a win, 0 for a draw, -1 for a loss, as the returns of the episode say.
        """
        table, names = self.table, policy_names(self.provenance)
        rows, infos = table.rows["index"][table.completed], table.infos[table.completed]
        return agent_rows(rows, infos, table.info_keys, names, policy_versions(self.provenance))

    # Numbers

    @cached_property
    def aggregates(self) -> Aggregates:
        """Numbers that describe the returns of the counted episodes."""
        return aggregate(self.counted_rows["episode_return"])

    @property
    def mean_return(self) -> float:
        """Mean return of the counted episodes; NaN when there are none."""
        return self.aggregates.mean

    @cached_property
    def interval(self) -> Interval:
        """Interval for the mean return."""
        returns, missing = self.counted_rows["episode_return"], self.num_missing
        if missing and self.num_outside_bounds:
            return no_interval(self.confidence, "a return lies outside return_bounds")
        return return_interval(returns, self.confidence, num_missing=missing, bounds=self.return_bounds)

    @cached_property
    def mean_return_bounds(self) -> tuple[float, float] | None:
        """Mean return if the failed episodes in scope were all worst and all best; None if unknown."""
        if not self.num_missing:
            return self.mean_return, self.mean_return
        if self.return_bounds is None or self.num_outside_bounds or not self.counted.any():
            return None
        worst, best = (
            exact_mean(np.append(self.counted_rows["episode_return"], [bound] * self.num_missing))
            for bound in self.return_bounds
        )
        return worst, best

    @property
    def success_rate(self) -> float | None:
        """Share of counted episodes that were successful at their end; None when none reports it."""
        successes, reporting = success_counts(self.counted_rows["success_at_end"])
        return successes / len(self.counted_rows) if reporting else None

    @cached_property
    def success_interval(self) -> Interval | None:
        """Interval for the success rate; failed and non-reporting episodes count as unknown."""
        successes, reporting = success_counts(self.counted_rows["success_at_end"])
        if not reporting:
            return None
        unknown = int(self.scope.sum()) - reporting
        return success_interval(successes, reporting, self.confidence, num_unknown=unknown)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Every number as one flat mapping. All keys are always there; NaN where undefined."""
        return flat_metrics(self)

    @property
    def num_missing(self) -> int:
        """Episodes in scope that have no return because they failed."""
        return int(self.scope.sum() - self.counted.sum())

    @property
    def num_outside_bounds(self) -> int:
        """Counted returns that contradict ``return_bounds``."""
        if self.return_bounds is None:
            return 0
        returns = self.counted_rows["episode_return"]
        return int(((returns < self.return_bounds[0]) | (returns > self.return_bounds[1])).sum())

    # What went wrong

    @property
    def num_failed(self) -> int:
        """Episodes that ran out of attempts, whether or not they are in scope."""
        return int((self.table.rows["outcome"] == Outcome.FAILED).sum())

    @property
    def num_retried(self) -> int:
        """Episodes that took more than one attempt, failed ones included."""
        return int((self.table.rows["attempts"][self.table.filled] > 1).sum())

    @property
    def faults(self) -> list[Fault]:
        """All faults, in the order of their episodes, and of an episode in the order in which it had them."""
        return [fault for index in sorted(self.table.faults) for fault in self.table.faults[index]]

    @property
    def fault_counts(self) -> dict[str, int]:
        """Number of faults by type of error, the most frequent first."""
        return dict(Counter(fault.error_type for fault in self.faults).most_common())

    @property
    def notes(self) -> list[str]:
        """Notes that a reader needs before using the numbers; empty for an ordinary result."""
        return notes(self)

    # Identity

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the outcomes: equal for equal records, whatever ran them."""
        return self.table.fingerprint()

    @property
    def plan_fingerprint(self) -> str:
        """SHA-256 of the plan: only results of equal plans can be compared."""
        return self.plan.fingerprint

    # Ways out and back in

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the records as plain JSON values; NaN becomes None, infinity ``"inf"``."""
        return describe(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return :meth:`to_dict` as JSON text, and write it to ``path`` if one is given."""
        text = json_text(self.to_dict())
        if path is not None:
            write_text(path, text)
        return text

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write one row per finished episode."""
        write_episodes(path, self.table)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per finished episode as a pandas frame.

        Raises:
            UsageError: pandas is not installed.
        """
        return episode_frame(self.table)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``episodes.parquet`` and then ``result.json``, each whole or not at all; a former result is replaced.

        Raises:
            UsageError: A file of that name is no result, or the folder has the log of an evaluation with another plan.
        """
        check_ours(Path(folder))
        self._check_log(Path(folder))
        sweep(folder)
        self.to_parquet(Path(folder, EPISODES_FILE))
        self.to_json(Path(folder, RESULT_FILE))

    def _check_log(self, folder: Path) -> None:
        from rl_eval.log.contents import read_manifest
        from rl_eval.log.storage import LocalStorage

        with suppress(LogError):
            manifest = read_manifest(LocalStorage(folder))
            if manifest is not None and manifest.plan_fingerprint != self.plan_fingerprint:
                raise UsageError(f"{folder} has the log of an evaluation of other episodes: choose another folder")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvalResult:
        """Read what :meth:`save` wrote, compute every number anew and check the fingerprint.

        Args:
            path: The folder, or the ``result.json`` in it.

        Raises:
            UsageError: A file is missing or damaged, or the records are not those that were saved.
        """
        data, table = read_folder(path)
        try:
            return cls.from_dict(data, table)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], table: EpisodeTable) -> EvalResult:
        """Rebuild a result from :meth:`to_dict` and its records.

        Raises:
            UsageError: A field is missing, or the records are not those that were described.
        """
        check_format(data)
        try:
            plan = EpisodePlan.from_dict(data["plan"])
            check_fingerprint("plan", data["plan"]["fingerprint"], plan.fingerprint)
            check_fingerprint("table of records", data["fingerprint"], table.fingerprint())
            if "records_digest" in data:  # Older files have none.
                check_fingerprint("content of all columns", data["records_digest"], table.digest())
            return cls(table=table, plan=plan, **vars(typed(_Described, data)))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the result is damaged: {damage(error)}") from error

    def __repr__(self) -> str:
        return (
            f"EvalResult(status={self.status!r}, mean_return={self.mean_return:.6g}, "
            f"num_episodes={self.aggregates.count}, fingerprint={self.fingerprint[:16]!r})"
        )

    def __str__(self) -> str:
        from rl_eval.results.report.table import result_page, text_page

        return text_page(result_page(self))

    def __rich__(self) -> RenderableType:
        from rl_eval.results.report.table import result_page, rich_page

        return rich_page(result_page(self))

    def _repr_html_(self) -> str:
        from rl_eval.results.report.notebook import html_page
        from rl_eval.results.report.table import result_page

        return html_page(result_page(self))

"""Result of one evaluation: episodes, status, provenance, and saving and loading.

The class :class:`rl_eval.results.metrics.Numbers` computes the numbers of a result.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.atomic_write import sweep, write_text
from rl_eval.errors import LogError, UsageError, check_known
from rl_eval.errors.redaction import redact
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeRecord, EpisodeTable, Fault, Outcome, RuleEnd
from rl_eval.records.guarantee import Guarantee, guarantee_of
from rl_eval.records.plain import damage, plain, typed
from rl_eval.results.files import (
    EPISODES_FILE,
    FORMAT,
    RESULT_FILE,
    check_fingerprint,
    check_format,
    check_ours,
    episode_frame,
    fault_values,
    json_text,
    read_folder,
    write_episodes,
)
from rl_eval.results.metrics import Numbers, Timing
from rl_eval.results.observations import Groups
from rl_eval.results.stats.rows import Rows, Target
from rl_eval.results.text import Printed, all_numbers
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import HeldWeights, WeightsSnapshot

if TYPE_CHECKING:
    import pandas as pd

    from rl_eval.results.conditions import ConditionNumbers

Status = Literal["complete", "partial", "failed"]

_UNCHECKED: Final = Determinism(remark="no episode was run again")


def decide_status(
    table: EpisodeTable, limit: float | None, reason: str, ended_by: RuleEnd | None
) -> tuple[Status, str]:
    """Return the status, and the reason if it is not ``complete``.

    Args:
        table: The records of the evaluation.
        limit: Value of ``fault_tolerance.max_failed_episodes``.
        reason: Reason why some episodes did not finish; empty if all finished.
        ended_by: End of the evaluation by a rule, behind which no episode counts.
    """
    outcome = table.rows["outcome"][: ended_by and ended_by.after]
    size, failed = len(outcome), int((outcome == Outcome.FAILED).sum())
    missing = int((outcome == Outcome.MISSING).sum())
    if missing:
        lack = "do not count" if table.set_aside.any() else "did not finish"
        reason = f"{missing} of {size} episodes {lack}: {reason}"
        return ("partial" if table.completed.any() or table.set_aside.any() else "failed"), reason
    if not failed:
        return "complete", ""
    first = int(np.argmax(outcome == Outcome.FAILED))
    told = table.faults.get(first)
    reason = f"{failed} of {size} episodes failed; first: {told[-1] if told else f'episode {first}'}"
    allowed = size if limit is None else limit * size if limit < 1 else limit
    return ("failed" if failed > allowed or failed == size else "partial"), reason


@dataclass(frozen=True)
class _Described:
    """Arguments of a result that are stored unchanged in its description."""

    status: Status
    reason: str
    timing: Timing
    provenance: dict[str, Any]
    confidence: float
    audit_mismatches: tuple[int, ...]
    return_bounds: tuple[float, float] | None
    determinism: Determinism
    condition_target: Target = "rows"
    ended_by: RuleEnd | None = None


class EpisodeSequence(Sequence[EpisodeRecord]):
    """The finished episodes of a table, in index order. A record is built when it is accessed."""

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
class EvalResult(Numbers, Printed):
    """The outcome of one evaluation. Its table must not change afterwards, because numbers are computed only once.

    Args:
        table: The records and faults of the evaluation.
        plan: The planned episodes.
        status: ``complete`` if every episode completed, ``partial`` if some episodes failed or did not finish,
            ``failed`` if no episode completed, or if all episodes finished and more of them failed than
            ``max_failed_episodes`` allows.
        reason: Reason why the status is not ``complete``.
        timing: Seconds by activity, and numbers of steps and runners.
        provenance: Description of the evaluation. Its ``identity`` has the settings on which the outcomes depend. The
            description is stored as plain JSON values, so that a loaded result equals the original result.
        confidence: Nominal coverage of every interval.
        audit_mismatches: Indices of episodes that ran twice with different outcomes.
        return_bounds: Lowest and highest possible return, if known.
        determinism: Outcome of the determinism check.
        condition_target: Target of intervals over conditions: ``rows`` or ``population``.
        artifacts: Artifacts that observers returned for episodes of this session, by index and observer; not saved.
        ended_by: End of the evaluation by a rule. The episodes behind it do not count: they are not in the result.

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
        condition_target: Target = "rows",
        artifacts: Mapping[int, Mapping[str, Any]] | None = None,
        ended_by: RuleEnd | None = None,
    ) -> None:
        check_known("status", status, get_args(Status), UsageError)
        check_known("condition_target", condition_target, get_args(Target), UsageError)
        if ended_by is not None:
            table = table.head(ended_by.after)
            audit_mismatches = tuple(index for index in audit_mismatches if index < ended_by.after)
            artifacts = {index: one for index, one in (artifacts or {}).items() if index < ended_by.after}
        super().__init__(
            table, timing, plain(provenance), confidence, return_bounds, tuple(audit_mismatches), determinism, ended_by
        )
        self.plan = plan
        self.condition_target: Target = condition_target
        self.status: Status = status
        self.reason = reason
        self.artifacts: Mapping[int, Mapping[str, Any]] = artifacts or {}
        self._has_warned = False
        table.conditions = plan.condition_ids
        self._check_rows()
        self._check_bounds()

    def _check_rows(self) -> None:
        if len(self.table) != len(self.plan):
            problem = f"the table has {len(self.table)} rows for a plan of {len(self.plan)} episodes"
            raise UsageError(problem, key="table", value=len(self.table))
        rows, positions = self.table.rows[self.table.filled], np.flatnonzero(self.table.filled)
        mismatched = positions[(rows["index"] != positions) | (rows["seed"] != self.plan.seeds[positions])]
        if mismatched.size:
            index = int(mismatched[0])
            problem = f"the record of episode {index} has another index or seed than {self.plan!r}"
            raise UsageError(problem, key="records", episode=index)
        if self.status == "complete" and self.stopped_early:
            problem = f"{len(self.plan) - len(rows)} episodes have no record, but the status is 'complete'"
            raise UsageError(problem, key="status", value=self.status)
        versions = np.unique(self.counted_rows["weights_version"])
        if len(versions) > 1:
            problem = f"one result cannot have records of the weights versions {versions.tolist()}"
            raise UsageError(problem, key="weights_version", value=versions.tolist())

    def _check_bounds(self) -> None:
        if self.return_bounds is None:
            return
        low, high = self.return_bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            fix = "Pass two finite numbers, with the lower number first."
            raise UsageError(f"return_bounds is ({low}, {high})", key="return_bounds", value=(low, high), fix=fix)

    @property
    def episodes(self) -> EpisodeSequence:
        """Records of the finished episodes, including failed episodes, in index order."""
        return EpisodeSequence(self.table, np.flatnonzero(self.table.filled))

    @property
    def returns(self) -> npt.NDArray[np.float64]:
        """Returns of the completed episodes in plan order, shape (n,)."""
        return np.asarray(self.table.rows["episode_return"][self.table.completed])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the completed episodes in plan order, in steps, shape (n,)."""
        return np.asarray(self.table.rows["length"][self.table.completed], np.int64)

    @property
    def std(self) -> float:
        """Standard deviation of the returns of the counted episodes, with the divisor n - 1; NaN if there are none."""
        return self.aggregates.std

    @property
    @override
    def mean_return(self) -> float:
        """Mean return of the counted episodes. If there are none, it is NaN, and the first access warns."""
        mean = self.aggregates.mean
        if math.isnan(mean) and not self._has_warned:
            self._has_warned = True
            why = self.reason or "no episode has a return"
            warnings.warn(f"mean_return is NaN: the evaluation is {self.status}: {why}", RuntimeWarning, stacklevel=2)
        return mean

    @property
    def faults(self) -> list[Fault]:
        """All faults, in the order of the episodes. The faults of one episode are in the order of time."""
        return [fault for index in sorted(self.table.faults) for fault in self.table.faults[index]]

    @property
    def fault_counts(self) -> dict[str, int]:
        """Number of faults by type of error, the most frequent first."""
        return dict(Counter(fault.error_type for fault in self.faults).most_common())

    @cached_property
    def by_condition(self) -> dict[str, list[ConditionNumbers]]:
        """Numbers of each condition (under ``id``), and of each value of an axis (under the name of the axis).

        Empty without ``evaluation.conditions``.
        """
        if self.plan.conditions is None:
            return {}
        from rl_eval.results.conditions import by_condition

        return by_condition(self, self.plan)

    # Identity

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the outcomes. It is equal for equal records, whatever runners made them."""
        return self.table.fingerprint()

    @property
    @override
    def seed_groups(self) -> Groups:
        return self.plan.seed_groups

    @cached_property
    @override
    def condition_rows(self) -> Rows | None:
        """Row of initial conditions of each episode, and the target of intervals; None without conditions."""
        if self.plan.conditions is None:
            return None
        place_of = {name: place for place, name in enumerate(self.plan.conditions.rows)}
        return Rows(np.array([place_of[name] for name in self.plan.condition_ids]), self.condition_target)

    @property
    def plan_fingerprint(self) -> str:
        """SHA-256 of the plan. Only results of equal plans can be compared."""
        return self.plan.fingerprint

    @property
    def guarantee(self) -> Guarantee:
        """Changes of an execution that do not change the records: ``exact``, ``conditions`` or ``layout``."""
        numerics = self.provenance.get("numerics")
        return guarantee_of(numerics if isinstance(numerics, Mapping) else {})

    # Saving and loading

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the records as plain JSON values.

        NaN becomes None, and infinity becomes ``"inf"``.
        """
        success = self.success_interval
        described = {
            "format": FORMAT,
            "status": self.status,
            "reason": self.reason,
            "fingerprint": self.fingerprint,
            "records_digest": self.table.digest(),
            "plan": {**self.plan.to_dict(), "fingerprint": self.plan_fingerprint},
            "guarantee": self.guarantee,
            "notes": self.notes,
            "metrics": self.metrics,
            "confidence": self.confidence,
            "interval": self.interval.to_dict(),
            "success_interval": success.to_dict() if success else None,
            "return_bounds": self.return_bounds,
            "mean_return_bounds": self.mean_return_bounds,
            "audit_mismatches": self.audit_mismatches,
            "determinism": self.determinism.to_dict() | {"summary": str(self.determinism)},
            "ended_by": self.ended_by and asdict(self.ended_by),
            "timing": asdict(self.timing),
            "provenance": self.provenance | {key: redact(self.provenance.get(key)) for key in ("config", "identity")},
            "fault_counts": self.fault_counts,
        }
        if self.by_condition:
            parts = self.by_condition.items()
            described["condition_target"] = self.condition_target
            described["by_condition"] = {column: [asdict(one) for one in found] for column, found in parts}
        faults = [fault_values(fault) for fault in self.faults]
        return {key: plain(value) for key, value in described.items()} | {"faults": faults}

    @property
    def details(self) -> str:
        """All numbers as text, as ``rl-eval run -v`` prints them. ``str(result)`` is shorter."""
        return all_numbers(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return :meth:`to_dict` as JSON text. If ``path`` is passed, also write the text to this file."""
        text = json_text(self.to_dict())
        if path is not None:
            write_text(path, text)
        return text

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with one row per finished episode."""
        write_episodes(path, self.table)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per finished episode as a pandas frame.

        Raises:
            UsageError: pandas is not installed.
        """
        return episode_frame(self.table)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``episodes.parquet`` and then ``result.json``, each atomically. An earlier result is replaced.

        Raises:
            UsageError: One of the files exists and is not part of a result, or the folder has the log of another run.
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
            if manifest is not None and not manifest.is_of(self.plan_fingerprint, self.provenance):
                problem = f"{folder} contains the log of another evaluation"
                raise UsageError(problem, key=str(folder), fix="Choose another folder.")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvalResult:
        """Read the files that :meth:`save` wrote, compute every number again, and check the fingerprint.

        Args:
            path: The folder, or the ``result.json`` in it.

        Raises:
            UsageError: A file is missing or damaged, or the records differ from the saved records.
        """
        data, table = read_folder(path)
        try:
            return cls.from_dict(data, table)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}", key=os.fspath(path), episode=error.episode) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], table: EpisodeTable) -> EvalResult:
        """Rebuild a result from :meth:`to_dict` and its records.

        Raises:
            UsageError: A field is missing, or the records differ from those that the dict describes.
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
            raise UsageError(f"the result is damaged: {damage(error)}", key="result") from error

    def __repr__(self) -> str:
        return (
            f"EvalResult(status={self.status!r}, mean_return={self.mean_return:.6g}, "
            f"num_episodes={self.aggregates.count}, fingerprint={self.fingerprint[:16]!r})"
        )


@dataclass(frozen=True)
class EvalPoint:
    """A finished evaluation, with the training step to which it belongs."""

    step: int
    """Training step passed to ``submit``."""
    weights_version: int
    """Version of the weights that were evaluated."""
    result: EvalResult
    metrics: dict[str, float]
    """Metrics by name: every metric of ``result.metrics`` and of ``metrics_fn``, as ``"<log_prefix>/<key>"``."""
    held: HeldWeights = field(default_factory=HeldWeights, repr=False, compare=False)
    """Storage of :attr:`weights` until the point is delivered."""

    @property
    def weights(self) -> WeightsSnapshot | None:
        """Evaluated weights, while callbacks and loggers handle the point.

        None after that time, for a policy without weights, and if a request to a service passed no weights.
        """
        return self.held.snapshot

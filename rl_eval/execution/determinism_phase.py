"""Last phase of an evaluation, the determinism check: which episodes run again, and for how long.

They are chosen before any episode runs, from the second half of the plan, where most environments have served other
episodes before, and are traced while they run for the first time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, Literal, final

import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EvalSettings
from rl_eval.execution.determinism_check import DeterminismCheck, Origin
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeTable, Lease, RunReport

__all__ = ["DeterminismPhase", "affordable", "candidates"]

Share = float | Literal["auto"]

_TRACED: Final = 5
"""Episodes that are traced at most."""

_EPISODES: Final = 4
"""Episodes that ``auto`` runs again."""
_FREE_SECONDS: Final = 2.0
_FREE_SHARE: Final = 0.02
"""``auto`` may take the longer of these two: seconds, and share of the run's."""
_PATIENCE: Final = 20.0
"""Longest check, as a multiple of what the same episodes took the first time."""
_LEAST_PATIENCE_S: Final = 60.0


@final
class DeterminismPhase:
    """Last phase of an evaluation: it chooses episodes before any runs, and has them run again when all are done.

    Args:
        num_episodes: Episodes of the plan.
        settings: What is evaluated.
    """

    def __init__(self, num_episodes: int, settings: EvalSettings) -> None:
        self._settings = settings
        self._share: Share = settings.evaluation.determinism_check
        self._chosen = candidates(num_episodes, self._share, settings.evaluation.seed)
        self._traced = frozenset(self._chosen[:_TRACED])
        self._traces: dict[int, npt.NDArray[np.void]] = {}
        self._construct_seconds = math.inf
        self._former: npt.NDArray[np.bool_] = np.zeros(num_episodes, bool)
        self._unchecked = "the evaluation was not finished"
        self._check: DeterminismCheck | None = None
        self._patience_s = self._ends = math.inf

    # ------------------------------------------------------------------ while episodes run for the first time

    def begin(self, filled: npt.NDArray[np.bool_]) -> None:
        """Note which episodes a former process finished, shape (num_episodes,)."""
        self._former = filled

    def mark(self, leases: Sequence[Lease]) -> list[Lease]:
        """Ask for the traces of the first few candidates."""
        return [lease._replace(traced=True) if lease.index in self._traced else lease for lease in leases]

    def recorded(self, report: RunReport, counted: npt.NDArray[np.void]) -> None:
        """Take the traces of the rows that count."""
        self._construct_seconds = min(self._construct_seconds, report.construct_seconds)
        if report.traces:
            indices = set(counted["index"].tolist())
            self._traces |= {index: trace for index, trace in report.traces.items() if index in indices}

    # ------------------------------------------------------------------ while some run again

    @property
    def running(self) -> bool:
        """Whether the phase has begun."""
        return self._check is not None

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self._check is None or self._check.done

    def start(self, table: EpisodeTable, run_seconds: float, runners: int, now: float) -> None:
        """Decide what runs again.

        Args:
            table: The records.
            run_seconds: Wall-clock time of the evaluation so far.
            runners: Runners that share the work.
            now: The time.
        """
        build_seconds, reused = self._build_seconds, self._settings.environment.env_reuse == "lane"
        chosen, self._unchecked = self._affordable(table, run_seconds, build_seconds, runners)
        dear = ""
        if not chosen and reused and build_seconds:
            chosen, _ = self._affordable(table, run_seconds, 0.0, runners)
            dear = f"in used environments, since a new one takes {build_seconds:.1f} s"
        if chosen:
            origins = {index: self._origin(table, index) for index in chosen}
            self._check = DeterminismCheck(origins, reused, self._settings.runners.num_runners, dear)
            once = float(_seconds(table)[chosen].sum()) + len(chosen) * build_seconds
            self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * once)
            self._ends = now + self._patience_s

    def expired(self, now: float, runners: int) -> bool:
        """Whether it has taken too long; time without any runner that is up does not count."""
        if not runners:
            self._ends = now + self._patience_s
        return self.running and now > self._ends

    def holds(self, runner: int) -> bool:
        """Whether a runner (its incarnation) has anything to do."""
        return self._check is not None and self._check.holds(runner)

    def take(self, runner: int, position: int, positions: Collection[int]) -> tuple[Lease, ...]:
        """Give a runner as many episodes as it has lanes free; see :meth:`DeterminismCheck.take`."""
        assert self._check is not None
        return self._check.take(runner, position, self._settings.runners.lanes, positions)

    def reported(self, runner: int, position: int, report: RunReport) -> None:
        """Take what a runner finished."""
        assert self._check is not None
        self._check.reported(runner, position, report)

    def lost(self, runner: int) -> None:
        """A runner is gone."""
        assert self._check is not None
        self._check.lost(runner)

    def stop(self, why: str) -> None:
        """End the phase; what has not run again says nothing."""
        if self._check is not None:
            self._check.stop(why)

    @property
    def finding(self) -> Determinism:
        """What has been found."""
        return Determinism(remark=self._unchecked) if self._check is None else self._check.result

    # ------------------------------------------------------------------ inside

    @property
    def _build_seconds(self) -> float:
        return self._construct_seconds if math.isfinite(self._construct_seconds) else 0.0

    def _affordable(
        self, table: EpisodeTable, run_seconds: float, build_seconds: float, runners: int
    ) -> tuple[list[int], str]:
        if not self._chosen:
            return [], "switched off by evaluation.determinism_check=0"
        if self._share == "auto":
            return affordable(table, self._chosen, run_seconds, build_seconds, runners)
        return [index for index in self._chosen if table.completed[index]], "no episode completed"

    def _origin(self, table: EpisodeTable, index: int) -> Origin:
        row = table.rows[index : index + 1]
        return Origin(row, -1 if self._former[index] else int(row["runner"][0]), self._traces.get(index))


def candidates(num_episodes: int, share: Share, seed: int) -> list[int]:
    """Choose the episodes to run again, before any has run.

    Args:
        num_episodes: Episodes of the plan.
        share: Share of the plan, at least one episode; ``auto`` is five, of which the longest is left out.
        seed: Root seed of the plan.

    Returns:
        Their indices, in random order; empty for a share of 0.
    """
    if not share:
        return []
    first, count = 0, 0
    if share == "auto":
        first = max(0, min(num_episodes - _TRACED, num_episodes // 2))
        count = min(_TRACED, num_episodes - first)
    else:
        count = max(1, math.ceil(share * num_episodes))
    chosen = np.random.default_rng(seed).choice(num_episodes - first, count, replace=False)
    return [first + int(index) for index in chosen]


def affordable(
    table: EpisodeTable, chosen: Sequence[int], run_seconds: float, construct_seconds: float, runners: int
) -> tuple[list[int], str]:
    """Return which episodes ``auto`` runs again, or why none.

    Args:
        table: The records.
        chosen: What :func:`candidates` chose.
        run_seconds: Wall-clock time of the evaluation so far.
        construct_seconds: How long it takes to build an environment.
        runners: Runners that would share the work.
    """
    seconds = _seconds(table) + construct_seconds
    completed = np.flatnonzero(table.completed)
    if not len(completed):
        return [], "no episode completed"
    budget = max(_FREE_SECONDS, _FREE_SHARE * run_seconds)
    cheapest = int(completed[np.argmin(seconds[completed])])
    if seconds[cheapest] > budget:
        return [], (
            f"one more episode would take {seconds[cheapest]:.1f} s, longer than {_FREE_SECONDS:g} s and "
            f"{100 * _FREE_SHARE:g} % of the run; evaluation.determinism_check=0.01 runs 1 % of the episodes again"
        )
    taken: list[int] = []
    for index in sorted((index for index in chosen if table.completed[index]), key=lambda index: seconds[index]):
        costs = seconds[[*taken, index]]
        if len(taken) < _EPISODES and max(costs.max(), costs.sum() / runners) <= budget:
            taken.append(index)
    return taken or [cheapest], ""


def _seconds(table: EpisodeTable) -> npt.NDArray[np.float64]:
    rows = table.rows
    return np.asarray(rows["reset_seconds"] + rows["step_seconds"] + rows["inference_seconds"], np.float64)

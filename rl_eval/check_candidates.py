"""Candidates of the determinism check: episodes that are chosen before any runs, and traced while they run.

They are drawn from the second half of the plan, where most environments have served other episodes before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, final

import numpy as np
import numpy.typing as npt

from rl_eval.determinism_check import Origin
from rl_eval.episode import EpisodeTable, Lease, RunReport

__all__ = ["CheckCandidates", "affordable", "candidates"]

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
class CheckCandidates:
    """Episodes to run again, with what was seen of their first run.

    Args:
        num_episodes: Episodes of the plan.
        share: ``evaluation.purity_check``.
        seed: Root seed of the plan.
    """

    def __init__(self, num_episodes: int, share: Share, seed: int) -> None:
        self._automatic = share == "auto"
        self._chosen = candidates(num_episodes, share, seed)
        self._traced = frozenset(self._chosen[:_TRACED])
        self._traces: dict[int, npt.NDArray[np.void]] = {}
        self._construct_seconds: float | None = None
        self._former: npt.NDArray[np.bool_] = np.zeros(num_episodes, bool)

    def begin(self, filled: npt.NDArray[np.bool_]) -> None:
        """Note which episodes a former process finished, shape (num_episodes,)."""
        self._former = filled

    def mark(self, leases: Sequence[Lease]) -> list[Lease]:
        """Ask for the traces of the first few candidates."""
        return [lease._replace(traced=True) if lease.index in self._traced else lease for lease in leases]

    def reported(self, report: RunReport, counted: npt.NDArray[np.void]) -> None:
        """Take the traces of the rows that count."""
        if report.construct_seconds is not None:
            self._construct_seconds = min(self._construct_seconds or math.inf, report.construct_seconds)
        if report.traces:
            indices = set(counted["index"].tolist())
            self._traces |= {index: trace for index, trace in report.traces.items() if index in indices}

    def to_check(self, table: EpisodeTable, run_seconds: float, runners: int) -> tuple[dict[int, Origin], str]:
        """Return what is to be run again, by index, or why nothing is.

        Args:
            table: The records.
            run_seconds: Wall-clock time of the evaluation so far.
            runners: Runners that share the work.
        """
        if not self._chosen:
            return {}, "switched off by evaluation.purity_check=0"
        if self._automatic:
            chosen, why = affordable(table, self._chosen, run_seconds, self._construct_seconds, runners)
        else:
            chosen, why = [index for index in self._chosen if table.completed[index]], "no episode completed"
        return {index: self._origin(table, index) for index in chosen}, why

    def patience_s(self, table: EpisodeTable, chosen: Sequence[int]) -> float:
        """Return the seconds after which their check is given up."""
        once = float(_seconds(table)[list(chosen)].sum()) + len(chosen) * (self._construct_seconds or 0.0)
        return max(_LEAST_PATIENCE_S, _PATIENCE * once)

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
    table: EpisodeTable, chosen: Sequence[int], run_seconds: float, construct_seconds: float | None, runners: int
) -> tuple[list[int], str]:
    """Return which episodes ``auto`` runs again, or why none.

    Args:
        table: The records.
        chosen: What :func:`candidates` chose.
        run_seconds: Wall-clock time of the evaluation so far.
        construct_seconds: How long it takes to build an environment; None, for not known, allows one episode.
        runners: Runners that would share the work.
    """
    seconds = _seconds(table) + (construct_seconds or 0.0)
    completed = np.flatnonzero(table.completed)
    if not len(completed):
        return [], "no episode completed"
    budget = max(_FREE_SECONDS, _FREE_SHARE * run_seconds)
    cheapest = int(completed[np.argmin(seconds[completed])])
    if seconds[cheapest] > budget:
        return [], (
            f"one more episode would take {seconds[cheapest]:.1f} s, longer than {_FREE_SECONDS:g} s and "
            f"{100 * _FREE_SHARE:g} % of the run; evaluation.purity_check=0.01 runs 1 % of the episodes again"
        )
    most = 1 if construct_seconds is None else _EPISODES
    taken: list[int] = []
    for index in sorted((index for index in chosen if table.completed[index]), key=lambda index: seconds[index]):
        costs = seconds[[*taken, index]]
        if len(taken) < most and max(costs.max(), costs.sum() / runners) <= budget:
            taken.append(index)
    return taken or [cheapest], ""


def _seconds(table: EpisodeTable) -> npt.NDArray[np.float64]:
    rows = table.rows
    return np.asarray(rows["reset_seconds"] + rows["step_seconds"] + rows["inference_seconds"], np.float64)

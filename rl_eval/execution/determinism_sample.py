"""Sample of the determinism check: which episodes run again.

They are chosen before any episode runs, from the second half of the plan, where most environments have served other
episodes before, and are traced while they run for the first time; when all have run, those are taken that the time
allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.config.settings import EvalSettings
from rl_eval.execution.determinism_reruns import Origin
from rl_eval.records.episode import EpisodeTable, Lease
from rl_eval.results.metrics import episode_seconds

__all__ = ["Choice", "DeterminismSample", "affordable", "candidates"]

Share = float | Literal["auto"]

_TRACED: Final = 6
"""Episodes that are traced at most: enough for four that are no longer than four average ones, nearly always."""

_EPISODES: Final = 4
"""Episodes that ``auto`` runs again."""
_FREE_SECONDS: Final = 2.0
_FREE_SHARE: Final = 0.02
"""``auto`` may take the longer of these two: seconds, and share of the run's."""


class Choice(NamedTuple):
    """Episodes to run again."""

    origins: dict[int, Origin]
    """What is recorded, by index."""
    remark: str
    """Why there are none; with some, why they run in environments that have served others, if they do."""
    seconds: float
    """Time that they took the first time, and building their environments."""


@final
class DeterminismSample:
    """Candidates of one evaluation, and what is known of them.

    Args:
        settings: What is evaluated.
        former: Mask of the episodes that a former process finished, shape (num_episodes,).
    """

    def __init__(self, settings: EvalSettings, former: npt.NDArray[np.bool_]) -> None:
        self._settings = settings
        self._share: Share = settings.evaluation.determinism_check
        self._candidates = candidates(len(former), self._share, settings.evaluation.seed)
        self._traced = frozenset(self._candidates[:_TRACED])
        self._former = former
        self._construct_seconds = math.inf
        self.traces: dict[int, npt.NDArray[np.void]] = {}
        """Traces of those that were asked for and whose rows count, by index."""

    def mark(self, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """Ask for the traces of the first few candidates."""
        if self._traced.isdisjoint([lease.index for lease in leases]):
            return leases
        return tuple(lease._replace(traced=True) if lease.index in self._traced else lease for lease in leases)

    def recorded(self, construct_seconds: float) -> None:
        """Note how long a runner took to build an environment, in seconds, at its quickest."""
        self._construct_seconds = min(self._construct_seconds, construct_seconds)

    def choose(self, table: EpisodeTable, run_seconds: float, runners: int, *, alone: bool = False) -> Choice:
        """Decide what runs again.

        Args:
            table: Records of the whole plan.
            run_seconds: Duration of the run.
            runners: Number of runners that are up, at least 1.
            alone: Whether the policy acts on each row alone, and not on those of all lanes at once.
        """
        build_seconds = self._construct_seconds if math.isfinite(self._construct_seconds) else 0.0
        lanes = 1 if alone else min(self._settings.runners.lanes, math.ceil(len(table.rows) / runners))
        chosen, remark = self._affordable(table, run_seconds, build_seconds, runners, lanes)
        if not chosen and self._settings.environment.env_reuse == "lane" and build_seconds:
            chosen, _ = self._affordable(table, run_seconds, 0.0, runners, lanes)
            if chosen:
                remark = f"in used environments, since a new one takes {build_seconds:.1f} s"
        seconds = float(episode_seconds(table.rows)[chosen].sum()) + len(chosen) * build_seconds
        return Choice({index: self._origin(table, index) for index in chosen}, remark, seconds)

    def _affordable(
        self, table: EpisodeTable, run_seconds: float, build_seconds: float, runners: int, lanes: int
    ) -> tuple[list[int], str]:
        if not self._candidates:
            return [], "switched off by evaluation.determinism_check=0"
        if self._share == "auto":
            return affordable(table, self._candidates, run_seconds, build_seconds, runners, lanes)
        chosen = [index for index in self._candidates if table.completed[index]]
        return chosen, "" if chosen else "no episode completed"

    def _origin(self, table: EpisodeTable, index: int) -> Origin:
        row, outcome = table.rows[index : index + 1], table.outcomes(slice(index, index + 1))
        return Origin(row, outcome, -1 if self._former[index] else int(row["runner"][0]), self.traces.get(index))


def candidates(num_episodes: int, share: Share, seed: int) -> list[int]:
    """Choose the episodes to run again, before any has run.

    Args:
        num_episodes: Episodes of the plan.
        share: Share of the plan, at least one episode; ``auto`` is six of the second half, or the last five of a plan
            that has less, of which four run again.
        seed: Root seed of the plan.

    Returns:
        Their indices, in random order; empty for a share of 0.
    """
    if not share:
        return []
    first, count = 0, 0
    if share == "auto":
        first = max(0, min(num_episodes - _EPISODES - 1, num_episodes // 2))
        count = min(_TRACED, num_episodes - first)
    else:
        count = max(1, math.ceil(share * num_episodes))
    chosen = np.random.default_rng(seed).choice(num_episodes - first, count, replace=False)
    return [first + int(index) for index in chosen]


def affordable(
    table: EpisodeTable, chosen: Sequence[int], run_seconds: float, construct_seconds: float, runners: int, lanes: int
) -> tuple[list[int], str]:
    """Return which episodes ``auto`` runs again, or why none.

    As many as fit, at most four, and of those sets the longest: together they take no longer than allowed, and have no
    more steps than four average episodes, so that the check of 200 episodes takes at most 2 % of their steps.

    Args:
        table: Records of the whole plan.
        chosen: Candidates.
        run_seconds: Duration of the run.
        construct_seconds: Time that an environment takes to build.
        runners: Number of runners.
        lanes: Number of episodes that shared a forward pass; one that runs again has it for itself.
    """
    shared = table.rows["inference_seconds"].astype(np.float64)
    policy = lanes * shared
    own = episode_seconds(table.rows) - shared + construct_seconds
    seconds = own + policy
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
    lengths = table.rows["length"]
    most_steps = _EPISODES * lengths[completed].mean()

    def fits(some: list[int]) -> bool:
        passes = math.ceil(len(some) / (runners * lanes)) * policy[some].max()
        longest = max(seconds[some].max(), own[some].sum() / runners + passes)
        return bool(longest <= budget and lengths[some].sum() <= most_steps)

    eligible = [index for index in chosen if table.completed[index]]
    for count in range(min(_EPISODES, len(eligible)), 0, -1):
        if fitting := [some for some in map(list, combinations(eligible, count)) if fits(some)]:
            return max(fitting, key=lambda some: int(lengths[some].sum())), ""
    return [cheapest], ""

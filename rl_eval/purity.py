"""Which finished episodes run a second time, where, and what comes of the comparison.

An environment that leaks state from one episode into the next makes the result depend on the layout. The check draws
a share of the completed episodes, runs each again in a fresh environment, on another runner than the first time where
there is one, and compares the outcomes bit by bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.episode import EpisodeTable, Lease, Outcome

__all__ = ["Purity", "PurityCheck"]

_MAX_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Purity:
    """What a purity check found."""

    checked: int
    """Episodes that completed a second time."""
    mismatched: tuple[int, ...]
    """Indices of those whose outcome differed."""

    def rate_below(self, confidence: float = 0.95) -> float:
        """Return the upper limit of the mismatch rate (Clopper & Pearson 1934, one-sided); 1 if nothing was checked.

        For 0 of k it is ``1 - (1 - confidence) ** (1 / k)``.
        """
        if len(self.mismatched) >= self.checked:
            return 1.0
        from scipy.special import betaincinv

        return float(betaincinv(len(self.mismatched) + 1, self.checked - len(self.mismatched), confidence))

    def __str__(self) -> str:
        return f"{len(self.mismatched)} of {self.checked} mismatched, rate below {self.rate_below():.2g} at 95 %"


@final
class PurityCheck:
    """Hands out the episodes to be run again, and takes their rows.

    Args:
        table: The records, every one of which is there.
        share: Share of the completed episodes to check; at least one.
        seed: Chooses them.
    """

    def __init__(self, table: EpisodeTable, share: float, seed: int) -> None:
        self._table = table
        completed = np.flatnonzero(table.completed)
        count = min(len(completed), max(1, math.ceil(share * len(table))))
        chosen = np.random.default_rng(seed).choice(completed, count, replace=False)
        self._waiting: dict[int, None] = dict.fromkeys(sorted(chosen.tolist()))
        self._held: dict[int, set[int]] = {}
        self._tries: Counter[int] = Counter()
        self._checked = 0
        self._mismatched: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return not self._waiting and not any(self._held.values())

    @property
    def result(self) -> Purity:
        """What has been found so far."""
        return Purity(self._checked, tuple(sorted(self._mismatched)))

    def holds(self, runner: int) -> bool:
        """Whether a runner has anything to do."""
        return bool(self._held.get(runner))

    def take(self, runner: int, position: int, lanes: int, positions: Collection[int]) -> tuple[Lease, ...]:
        """Give a runner as many episodes as it has lanes free.

        Args:
            runner: Its incarnation.
            position: Its position in the group.
            lanes: How many lanes it has.
            positions: Positions of all runners that are up: where there is another, no runner checks itself.
        """
        held, origins = self._held.setdefault(runner, set()), self._table.rows["runner"]
        others = set(positions) - {position}
        fit = [index for index in self._waiting if origins[index] != position or not others]
        taken = fit[: max(0, lanes - len(held))]
        for index in taken:
            del self._waiting[index]
            held.add(index)
            self._tries[index] += 1
        return tuple(Lease(index, int(self._table.rows["seed"][index]), 1, runner, fresh=True) for index in taken)

    def finished(self, runner: int, rows: npt.NDArray[np.void]) -> None:
        """Compare rows with the records; those that failed this time say nothing."""
        held = self._held.get(runner, set())
        mine = rows[[int(index) in held for index in rows["index"]]]
        held.difference_update(mine["index"].tolist())
        completed = mine[mine["outcome"] == Outcome.COMPLETED]
        self._checked += len(completed)
        self._mismatched.update(self._table.mismatches(completed))

    def lost(self, runner: int) -> None:
        """A runner is gone: what it held is tried again, a few times."""
        for index in sorted(self._held.pop(runner, ())):
            if self._tries[index] < _MAX_TRIES:
                self._waiting[index] = None

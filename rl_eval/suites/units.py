"""Units of the intervals: the runs of each task, or the episodes of each run.

``run``: the runs of a task are resampled, or left out by training seed. The interval is about the training method,
because other seeds could have been drawn. ``episode``: the episodes of each run are resampled. The interval is about
these trained policies only.

A *stratum* is a set of units that are resampled together. Each stratum has its own random generator, seeded with the
names of the policy and of the stratum. So equal scores give equal intervals, in any order, and another policy or task
does not change the existing intervals.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.suites.scores import Run, Scores

Unit = Literal["run", "episode"]

Counts: TypeAlias = npt.NDArray[np.float64]
"""Number of times that each unit was drawn in each resample, shape (batch, units)."""

RESAMPLES: Final = 2_000

MANY: Final = 10
"""Number of units per stratum from which on percentile intervals are used. They are at most 5 % too narrow then."""
WITHIN: Final[Mapping[Unit, str]] = {"run": "task", "episode": "run"}
"""Name of the stratum within which a unit is resampled."""

_BATCH_ELEMENTS: Final = 2**22
"""Number of units that are drawn at a time. It limits the memory, and does not change the draws."""


class Stratum(NamedTuple):
    """Units that are resampled together."""

    task: str
    name: str
    """Name of the task, with the training seed if episodes are resampled."""
    values: npt.NDArray[np.float64]
    """Scores in ascending order, shape (units,), so that the order of the training seeds has no effect."""
    seeds: npt.NDArray[np.int64]
    """Training seed of each unit, shape (units,)."""


@final
@dataclass(frozen=True, eq=False)
class Units:
    """Units of one policy, sorted by task."""

    policy: str
    unit: Unit
    strata: tuple[Stratum, ...]
    missing: tuple[Run, ...]
    """Missing runs of the policy; see :meth:`Scores.missing`."""

    def on(self, tasks: Collection[str]) -> Units:
        """Return the units of some tasks."""
        strata = tuple(stratum for stratum in self.strata if stratum.task in tasks)
        return replace(self, strata=strata)

    def with_seed(self, seed: int) -> Units:
        """Return the units of one training seed."""
        kept = ((stratum, stratum.seeds == seed) for stratum in self.strata)
        strata = (stratum._replace(values=stratum.values[mine], seeds=stratum.seeds[mine]) for stratum, mine in kept)
        return replace(self, strata=tuple(strata))

    def with_scores(self, score_of: Mapping[str, float], default: float) -> Units:
        """Return the same units with one score per task, or with a default score on tasks that are not in a mapping."""
        strata = (one._replace(values=np.full(len(one.values), score_of.get(one.task, default))) for one in self.strata)
        return replace(self, strata=tuple(strata))

    @cached_property
    def values(self) -> npt.NDArray[np.float64]:
        """Scores of the units, shape (units,)."""
        return np.concatenate([stratum.values for stratum in self.strata])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Position of the first unit of each task, shape (tasks,)."""
        tasks = np.repeat([stratum.task for stratum in self.strata], self.sizes)
        return np.asarray(np.unique(tasks, return_index=True)[1], np.int64)

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Weights of the units, shape (units,): equal sums for all tasks, and exactly 1 if all tasks have as many."""
        sizes = np.diff(self.starts, append=len(self.values))
        return np.repeat(len(self.values) / (len(sizes) * sizes), sizes)

    @cached_property
    def seeds(self) -> npt.NDArray[np.int64]:
        """Training seeds in ascending order, without duplicates."""
        return np.unique(np.concatenate([stratum.seeds for stratum in self.strata]))

    @property
    def once(self) -> Counts:
        """Counts of the sample itself, with each unit once, shape (1, units)."""
        return np.ones((1, len(self.values)))

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Positions of the units in ascending order of their scores, shape (units,)."""
        return np.asarray(np.argsort(self.values, kind="stable"), np.int64)

    @property
    def slices(self) -> list[slice]:
        """Positions of the units of each task."""
        return list(itertools.starmap(slice, itertools.pairwise([*self.starts.tolist(), len(self.values)])))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, sorted."""
        return tuple(dict.fromkeys(stratum.task for stratum in self.strata))

    @property
    def sizes(self) -> list[int]:
        """Number of units of each stratum."""
        return [len(stratum.values) for stratum in self.strata]

    @property
    def notes(self) -> list[str]:
        """Notes on the limits of an interval (few units, missing runs), each without a full stop."""
        single, notes = self.sizes.count(1), []
        if single:
            of_all = f"{single} of {len(self.strata)} {WITHIN[self.unit]}s"
            notes.append(f"{self.policy} has one {self.unit} in {of_all}, which has no spread")
        elif self.unit == "episode" and min(self.sizes) < MANY:
            notes.append(f"a percentile interval of fewer than {MANY} episodes per run is too narrow")
        if self.missing:
            one, also = self.missing[0], f" and {len(self.missing) - 1} more" if self.missing[1:] else ""
            notes.append(f"{self.policy} lacks runs: {one.task} with seed {one.seed}{also}")
        return notes

    def resamples(self, largest: int) -> Iterator[Counts]:
        """Yield batches of resamples, as counts of the units. There are :data:`RESAMPLES` resamples in total.

        Args:
            largest: Number of units that determines the number of resamples in a batch. To get equal batches for two
                policies, pass the larger number of units.
        """
        generators = [np.random.default_rng(_seed(self.policy, stratum.name)) for stratum in self.strata]
        firsts = np.cumsum([0, *self.sizes[:-1]])
        for batch in _batches(largest):
            rows = len(self.values) * np.arange(batch)[:, None]
            drawn = [
                (first + rows + generator.integers(0, size, (batch, size))).ravel()
                for generator, first, size in zip(generators, firsts, self.sizes, strict=True)
            ]
            counts = np.bincount(np.concatenate(drawn), minlength=batch * len(self.values))
            yield counts.reshape(batch, -1).astype(np.float64)

    def leave_outs(self) -> Counts:
        """Return counts of the runs, without those of one training seed in each row, shape (seeds, units).

        The other runs of a task count more, so that all runs of a task together count as often as before.
        """
        kept = np.concatenate([stratum.seeds for stratum in self.strata]) != self.seeds[:, None]
        left = np.add.reduceat(kept, self.starts, axis=1, dtype=np.float64)
        return np.asarray(kept * np.repeat(self.sizes / left, self.sizes, axis=1))


def units_of(scores: Scores, policy: str, unit: Unit) -> Units:
    """Return the units of a policy.

    Args:
        scores: Scores of all policies.
        policy: Name of the policy.
        unit: Unit that is resampled.
    """
    strata = {"run": _of_runs, "episode": _of_episodes}[unit](scores.of(policy))
    return Units(policy, unit, tuple(strata), scores.missing(policy))


def _of_runs(runs: Mapping[Run, npt.NDArray[np.float64]]) -> Iterator[Stratum]:
    for task, group in itertools.groupby(runs, lambda run: run.task):
        means = sorted((exact_mean(runs[run]), run.seed) for run in group)
        yield Stratum(task, task, np.array([mean for mean, _ in means]), np.array([seed for _, seed in means]))


def _of_episodes(runs: Mapping[Run, npt.NDArray[np.float64]]) -> Iterator[Stratum]:
    for run, scores in runs.items():
        yield Stratum(run.task, f"{run.task}\n{run.seed}", np.sort(scores), np.full(len(scores), run.seed))


def _batches(largest: int) -> list[int]:
    batch = max(1, _BATCH_ELEMENTS // largest)
    return [min(batch, RESAMPLES - start) for start in range(0, RESAMPLES, batch)]


def _seed(*names: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest(), "big")

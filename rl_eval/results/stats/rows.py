"""Mean of episodes with rows of initial conditions, its standard error, and a sign-flip test.

The mean over the episodes estimates one of two numbers. If these *rows* are all that matters, the spread between rows
is not an error, and only the spread within rows is (stratified sampling; Cochran 1977, chapter 5). If the rows are a
sample of a *population* of rows, each row is one observation (cluster sampling; Cochran 1977, chapter 9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.aggregate import exact_mean

Floats = npt.NDArray[np.float64]
Target = Literal["rows", "population"]
"""Target of intervals and tests: the mean over these rows, or over the population of which they are a sample."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of initial conditions of values, and the target of the mean."""

    of: npt.NDArray[np.int64]
    """Number of the row of each value, shape (n,)."""
    target: Target

    def take(self, places: npt.NDArray[np.int64]) -> Rows:
        """Return the rows of the values at some places."""
        return Rows(self.of[places], self.target)

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """Numbers of the rows without gaps, from 0 on, shape (n,)."""
        return np.unique(self.of, return_inverse=True)[1]

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of values of each row, shape (rows,)."""
        return np.bincount(self.codes)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def repeated(self) -> bool:
        """Whether each row has at least two values, so that the spread within rows is known."""
        return bool((self.counts > 1).all())

    @property
    def balanced(self) -> bool:
        """Whether all rows have the same number of values."""
        return len({*self.counts.tolist()}) == 1

    def means(self, sample: Floats) -> Floats:
        """Return the mean of each row, shape (rows,). If the values of a row are equal, it is exactly this value."""
        lowest, _, highest = self._ordered(sample)
        means = np.bincount(self.codes, sample) / self.counts
        return np.where(lowest == highest, lowest, means)

    def centers(self, sample: Floats) -> Floats:
        """Return the lower median of each row, shape (rows,). If most values of a row are equal, it is this value."""
        return self._ordered(sample)[1]

    def _ordered(self, sample: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the lowest value, the lower median and the highest value of each row."""
        ordered, ends = sample[np.lexsort((sample, self.codes))], np.cumsum(self.counts)
        starts = ends - self.counts
        return ordered[starts], ordered[starts + (self.counts - 1) // 2], ordered[ends - 1]


class MeanError(NamedTuple):
    """A mean with its standard error and degrees of freedom."""

    mean: float
    sem: float
    df: float


def error_within_rows(sample: Floats, rows: Rows) -> MeanError:
    """Return the error of the mean over these rows. Each row has at least two values.

    The degrees of freedom are those of Welch (1947) for several variances. Those of Satterthwaite (1946) are too few if
    rows have few values: for two values in each of 25 rows with equal variances, about 9 instead of 25.
    """
    deviations, counts = sample - rows.means(sample)[rows.codes], rows.counts
    variances = np.bincount(rows.codes, deviations**2) / (counts - 1)
    parts = counts * variances / len(sample) ** 2
    total = parts.sum()
    df = total**2 / (parts**2 / (counts + 1)).sum() - 2
    return MeanError(exact_mean(sample), float(np.sqrt(total)), float(df))


def error_between_rows(sample: Floats, rows: Rows) -> MeanError:
    """Return the error of the mean over a population of rows. There are at least two rows.

    Rows count by their numbers of values, as in the mean. With equal numbers, this is the standard error of the mean of
    the rows' means.
    """
    mean, weights = exact_mean(sample), rows.counts / len(sample)
    squares = (weights * (rows.means(sample) - mean)) ** 2
    return MeanError(mean, float(np.sqrt(squares.sum() * len(rows) / (len(rows) - 1))), len(rows) - 1)


def sign_flips(sample: Floats, rows: Rows, signs: Iterable[npt.NDArray[np.int8]]) -> Iterator[Floats]:
    """Yield the squared t statistics of the mean over these rows for patterns of signs, up to a constant factor.

    The statistic is studentized, so that the spread between rows does not hide a difference. If the two sides of each
    pair are exchangeable, the test is exact for any statistic (Janssen 1997).

    Args:
        sample: Differences, shape (n,).
        rows: Their rows; each has at least two values.
        signs: Batches of signs, shape (batch, n).
    """
    order, counts = np.argsort(rows.codes, kind="stable"), rows.counts
    starts, squares = np.cumsum(counts) - counts, np.bincount(rows.codes, sample**2)
    for batch in signs:
        sums = np.add.reduceat(batch[:, order] * sample[order], starts, axis=1)
        within = (np.maximum(squares - sums**2 / counts, 0.0) * counts / (counts - 1)).sum(axis=1)
        with np.errstate(all="ignore"):
            yield sums.sum(axis=1) ** 2 / within

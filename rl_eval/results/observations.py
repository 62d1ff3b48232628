"""Independent observations among the episodes of a plan.

Episodes with the same seed are not independent. With ``evaluation.symmetric``, each seed is played in all orders of the
seats. All episodes of a seed together are one observation. The value of an observation is the mean of its episodes. An
observation counts only if all of its episodes count. Intervals and tests are computed from observations. If each
episode has its own seed, each episode is an observation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_eval.results.stats.rows import Rows

Groups = npt.NDArray[np.int64] | None
"""Number of the observation of each episode, from 0 on, shape (episodes,); None if each episode is an observation."""


def observed(mask: npt.NDArray[np.bool_], groups: Groups) -> npt.NDArray[np.bool_]:
    """Return the mask of the observations whose episodes are all in ``mask``, shape (observations,)."""
    return mask if groups is None else np.bincount(groups, weights=mask) == np.bincount(groups)


def values_of(
    episodes: npt.NDArray[np.float64], chosen: npt.NDArray[np.bool_], groups: Groups
) -> npt.NDArray[np.float64]:
    """Return the values of observations.

    Args:
        episodes: Value of each episode, shape (episodes,).
        chosen: Mask of the observations.
        groups: Observation of each episode.
    """
    return episodes[chosen] if groups is None else (np.bincount(groups, weights=episodes) / np.bincount(groups))[chosen]


def rows_of(rows: Rows | None, counted: npt.NDArray[np.bool_], missing: npt.NDArray[np.bool_]) -> Rows | None:
    """Return the rows of initial conditions of counted episodes, and then of missing episodes.

    Args:
        rows: Row of each episode of the plan.
        counted: Mask of the episodes that have a value.
        missing: Mask of the episodes whose value is missing.
    """
    return None if rows is None else rows.take(np.concatenate([np.flatnonzero(counted), np.flatnonzero(missing)]))

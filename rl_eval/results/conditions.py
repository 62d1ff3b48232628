"""Numbers by condition, and by the values that several conditions share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.results.metrics import Numbers
from rl_eval.results.observations import Groups
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import Interval
from rl_eval.results.stats.rows import Rows
from rl_eval.scheduling.conditions import ID, distinct
from rl_eval.scheduling.plan import EpisodePlan


@dataclass(frozen=True, slots=True)
class ConditionNumbers:
    """Mean return and success rate of one condition, or of all conditions with the same value of an axis."""

    value: Any
    """Id of the condition, or value of the axis."""
    num_episodes: int
    """Number of completed episodes from which the numbers are computed."""
    num_missing: int
    """Number of episodes that have no return because they failed."""
    mean_return: float
    """Mean return; NaN if no episode completed."""
    interval: Interval
    """Interval for the mean return."""
    success_rate: float | None
    """Fraction of successful episodes; None if no episode reports it."""
    success_interval: Interval | None
    """Interval for the success rate; None if there is no success rate."""


def by_condition(numbers: Numbers, plan: EpisodePlan) -> dict[str, list[ConditionNumbers]]:
    """Return the numbers by the values of each axis, and by the ``id`` of the condition; empty without conditions."""
    found: dict[str, list[ConditionNumbers]] = {}
    for column, value, mask in condition_masks(plan):
        part = _Part(numbers, mask)
        found.setdefault(column, []).append(
            ConditionNumbers(
                value=value,
                num_episodes=len(part.counted_rows),
                num_missing=part.num_missing,
                mean_return=exact_mean(part.counted_rows["episode_return"]),
                interval=part.interval,
                success_rate=part.success_rate,
                success_interval=part.success_interval,
            )
        )
    return found


def condition_masks(plan: EpisodePlan) -> Iterator[tuple[str, Any, npt.NDArray[np.bool_]]]:
    """Yield (name, value, mask) for each value of each axis, and for each ``id``.

    The mask has shape (num_episodes,).
    """
    if plan.conditions is None:
        return
    rows = plan.conditions.rows
    place_of = {name: place for place, name in enumerate(rows)}
    places = np.array([place_of[name] for name in plan.condition_ids])
    columns = {axis: [row[axis] for row in rows.values()] for axis in plan.conditions.axes} | {ID: [*rows]}
    for column, values in columns.items():
        code_of = {key: code for code, key in enumerate(dict.fromkeys(map(distinct, values)))}
        codes = np.array([code_of[distinct(value)] for value in values])[places]
        for (_, value), code in code_of.items():
            yield column, value, codes == code


@final
class _Part(Numbers):
    """Numbers of some episodes of an evaluation."""

    def __init__(self, whole: Numbers, mask: npt.NDArray[np.bool_]) -> None:
        super().__init__(
            *(whole.table, whole.timing, whole.provenance, whole.confidence, whole.return_bounds),
            *(whole.audit_mismatches, whole.determinism, whole.ended_by),
        )
        self._mask, self._whole = mask, whole

    @property
    @override
    def seed_groups(self) -> Groups:
        return self._whole.seed_groups

    @cached_property
    @override
    def condition_rows(self) -> Rows | None:
        """Rows if the part has several; the numbers of a single row are those of an ordinary sample."""
        rows = self._whole.condition_rows
        return None if rows is None or len(np.unique(rows.of[self._mask])) < 2 else rows

    @cached_property
    @override
    def scope(self) -> npt.NDArray[np.bool_]:
        return self._whole.scope & self._mask

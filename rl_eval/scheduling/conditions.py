"""Initial conditions of episodes, as rows, and their order. The condition of an episode depends only on its index."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from rl_eval.errors import ConfigError, nearest
from rl_eval.records.episode import Condition
from rl_eval.records.plain import convert, typed

KEY: Final = "evaluation.conditions"
ID: Final = "id"
"""Column with the name of a row; all other columns are values for the environment."""
MAX_ROUND: Final = 100_000
"""Maximum number of conditions, and of episodes in one round of all conditions."""


@dataclass(frozen=True)
class Conditions:
    """Rows of initial conditions. Each round of episodes runs every condition as often as its count.

    Within a round, the conditions are interleaved: the number of episodes of a condition in any prefix of the sequence
    differs by less than one from its proportional share.

    Args:
        rows: Values of each condition, by its id; all have the same keys.
        counts: Number of episodes of a condition in one round, by its id; 1 for an id that is missing.
    """

    rows: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, described: Any) -> Conditions:
        """Create conditions from the output of :meth:`to_dict`.

        Raises:
            ValueError: The values are invalid; they can come from a foreign file.
        """
        found = typed(_Described, described)
        if not found.rows or not found.counts.keys() <= found.rows.keys():
            raise ValueError("the conditions have no rows, or have counts for unknown rows")
        return cls(found.rows, found.counts)

    def to_dict(self) -> dict[str, Any]:
        """Return rows and counts as plain JSON values, with their digest."""
        return {"sha256": self.digest, "rows": self.rows, "counts": self.counts}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over ids, values and counts, in their order."""
        return hashlib.sha256(json.dumps([[*self.rows.items()], self._counts], sort_keys=True).encode()).hexdigest()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the values that ``env.reset`` receives as options, without ``id``."""
        return tuple(next(iter(self.rows.values())))

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Different values of each name, in order.

        A name is left out if all conditions have different values for this name, or if a value is a list or a mapping.
        """
        columns = {key: [row[key] for row in self.rows.values()] for key in self.keys}
        scalars = {
            key: column for key, column in columns.items() if not any(isinstance(one, list | dict) for one in column)
        }
        found = {key: [value for _, value in dict.fromkeys(map(distinct, column))] for key, column in scalars.items()}
        return {key: values for key, values in found.items() if len(values) < len(self.rows)}

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Ids of the conditions of one round of episodes, in the order of the episodes."""
        names = tuple(self.rows)
        return tuple(names[place] for place in interleaved(self._counts))

    def condition(self, position: int) -> Condition:
        """Return the condition of the episode at a position (from 0) in an endless plan."""
        name = self.ids[position % len(self.ids)]
        return Condition(name, self.rows[name])

    @property
    def _counts(self) -> list[int]:
        return [self.counts.get(name, 1) for name in self.rows]


@dataclass(frozen=True)
class _Described:
    rows: dict[str, dict[str, Any]]
    counts: dict[str, Annotated[int, Field(ge=1, le=MAX_ROUND)]]


def distinct(value: Any) -> tuple[bool, Any]:
    """Return a key for a value of a condition. The keys of True and 1 differ, although these are equal in Python."""
    return isinstance(value, bool), value


def interleaved(counts: Sequence[int]) -> list[int]:
    """Return a sequence in which each index of ``counts`` appears as often as its count, with its copies spread evenly.

    In each prefix of length n, the number of copies of an index must differ by less than one from
    ``n * count / total``. So each copy has a first and a last possible slot. For each slot, the function compares the
    copies whose first slot has come, and chooses the copy with the earliest last slot. This rule always finds such a
    sequence (Baruah et al. 1996, fair scheduling of periodic tasks).
    """
    total = sum(counts)
    copies = ((copy, place, count) for place, count in enumerate(counts) for copy in range(count))
    windows = sorted((copy * total // n, -(-(copy + 1) * total // n), place) for copy, place, n in copies)
    order, ready, following = [], list[tuple[int, int]](), iter([*windows, (total, 0, 0)])
    start, end, place = next(following)
    for slot in range(total):
        while start == slot:
            heapq.heappush(ready, (end, place))
            start, end, place = next(following)
        order.append(heapq.heappop(ready)[1])
    return order


def make_conditions(*, rows: Any = None, axes: Any = None, counts: Any = None) -> Conditions:
    """Return the conditions that a config asks for, from rows or from axes.

    Args:
        rows: A list of mappings, each with an ``id``, or a mapping from id to the other values.
        axes: Values by name; every combination is a condition, with an id such as ``friction=0.5,light=a``.
        counts: Number of episodes of a condition in one round, by its id.

    Raises:
        ConfigError: Rows, axes or counts are invalid, counts name an unknown id, or a round has too many episodes.
    """
    named = _combined(axes) if rows is None else _named(rows)
    counts = {} if counts is None else counts
    if not isinstance(counts, Mapping) or not all(type(one) is int and one >= 1 for one in counts.values()):
        fix = "Map ids of conditions to whole numbers."
        raise _invalid("counts have a value that is not a whole number, or is below 1", counts, fix)
    counted = {str(name): count for name, count in counts.items()}
    if unknown := [name for name in counted if name not in named]:
        raise _invalid(f"counts name the unknown condition {unknown[0]!r}: {nearest(unknown[0], named)}", unknown[0])
    _check_size(len(named) - len(counted) + sum(counted.values()))
    return Conditions(named, counted)


def _named(rows: Any) -> dict[str, dict[str, Any]]:
    """Return the values of each row, without its id, by id."""
    if isinstance(rows, Mapping):
        rows = [{ID: name, **one} if isinstance(one, Mapping) else one for name, one in rows.items()]
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, Mapping) for row in rows):
        fix = "Pass a list of mappings from names to values."
        raise _invalid("the rows are not a list of mappings, or are empty", rows, fix)
    if any(row.get(ID) in (None, "") for row in rows):
        raise _invalid("a row has no id", fix="Add a column id with a different value in each row.")
    repeated = [name for name, count in Counter(str(row[ID]) for row in rows).items() if count > 1]
    if repeated:
        fix = "Give each row a different id; to run a condition more often, set its number in counts."
        raise _invalid(f"two rows have the id {repeated[0]!r}", repeated[0], fix)
    named = {str(row[ID]): {str(key): _plain(key, row) for key in row if key != ID} for row in rows}
    keys = {key for values in named.values() for key in values}
    for name, values in named.items():
        if lacking := sorted(keys - values.keys()):
            raise _invalid(f"row {name!r} has no value for {lacking[0]}", lacking[0], "Give all rows the same columns.")
    return named


def _plain(key: Any, row: Mapping[str, Any]) -> Any:
    """Return a value of a row as a plain JSON value."""
    value = row[key]

    def leaf(_: str, part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return convert(part.tolist(), leaf)
        if isinstance(part, bool | int | str) or (isinstance(part, float) and math.isfinite(part)):
            return part
        raise _invalid(f"{key} of row {row[ID]} is {part!r}: pass finite numbers, strings or lists of them", part)

    return leaf("", value) if value is None else convert(value, leaf)


def _combined(axes: Any) -> dict[str, dict[str, Any]]:
    """Return every combination of the values of axes, by id."""
    if not isinstance(axes, Mapping) or not axes or not all(isinstance(one, list | tuple) for one in axes.values()):
        raise _invalid("axes are not lists of values", axes, "Map each name to a list of its values.")
    _check_size(math.prod(map(len, axes.values())))
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return _named([{ID: ",".join(f"{key}={value}" for key, value in one.items()), **one} for one in combinations])


def _check_size(count: int) -> None:
    if not 1 <= count <= MAX_ROUND:
        raise _invalid(f"one round has {count:,} episodes", count, f"Set numbers with a sum from 1 to {MAX_ROUND:,}.")


def _invalid(problem: str, value: Any = None, fix: str = "") -> ConfigError:
    return ConfigError(f"{KEY}: {problem}", key=KEY, value=value, fix=fix)

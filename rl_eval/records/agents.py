"""Columns of a record for each agent of its episode, and conversion of these columns to one row per agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

AGENT_COLUMNS: Final = ("return", "length", "terminated", "truncated", "policy")
"""Names of the values of an agent, each in a column ``<name>/<agent>``. For an agent that did not appear, the values
are NaN."""

_LONGEST: Final = 128
"""Maximum number of characters of a name in a row. In the file of another program, a name could be larger than all
rows."""


def agent_columns(agents: Sequence[object]) -> tuple[str, ...]:
    """Return the names of the columns of agents: all columns of the first agent, then all of the next agent."""
    return tuple(f"{name}/{agent}" for agent in agents for name in AGENT_COLUMNS)


def agents_in(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the agents whose columns are complete, in the order of their seats; an empty tuple for a single agent."""
    named, there = [column.removeprefix("return/") for column in columns if column.startswith("return/")], {*columns}
    return tuple(agent for agent in named if there.issuperset(agent_columns([agent])))


def agent_rows(
    indices: npt.NDArray[np.int64],
    infos: npt.NDArray[np.float64],
    columns: Sequence[str],
    policies: Sequence[str],
    versions: Sequence[int],
) -> npt.NDArray[np.void]:
    """Return one row per episode and agent that appeared in the episode, sorted by index and seat.

    Args:
        indices: Indices of episodes, shape (n,).
        infos: Columns of the episodes, shape (n, len(columns)).
        columns: Names of the columns.
        policies: Ids of the policies. A number in a column ``policy/<agent>`` is a position in this list. If any number
            is outside the list, all ids in the rows are numbers, and all versions are 0.
        versions: Version of the weights of each policy.

    Returns:
        Structured array with the fields ``index``, ``seat``, ``agent``, ``policy``, ``weights_version``, ``return``,
        ``length``, ``terminated``, ``truncated`` and ``outcome``. The outcome is 1 for the highest return of the
        episode, 0 for a highest return that several agents share, and -1 for a lower return. It is 0 if no other agent
        appeared.
    """
    agents = agents_in(columns)
    place_of = {name: place for place, name in enumerate(columns)}
    places = [place_of[name] for name in agent_columns(agents)]
    values = infos[:, places].reshape(len(indices), len(agents), len(AGENT_COLUMNS))
    returns = values[:, :, 0]
    present = ~np.isnan(returns)
    episode, seat = np.nonzero(present)
    numbers, number = np.unique(_whole(values[:, :, -1][present]), return_inverse=True)
    known = all(0 <= each < len(policies) for each in numbers)
    names = [policies[each] if known else str(each) for each in numbers]
    text = [f"U{min(max([1, *map(len, given)]), _LONGEST)}" for given in (agents, policies if known else names)]
    kinds = [("index", "<i8"), ("seat", "<i4"), ("agent", text[0]), ("policy", text[1])]
    kinds += [("weights_version", "<i8"), ("return", "<f8")]
    kinds += [("length", "<i8"), ("terminated", "?"), ("truncated", "?"), ("outcome", "i1")]
    rows = np.zeros(len(seat), np.dtype(kinds))
    rows["index"], rows["seat"], rows["agent"] = indices[episode], seat, np.array(agents or [""], text[0])[seat]
    rows["return"] = returns[present]
    for place, name in enumerate(AGENT_COLUMNS[1:-1], 1):
        rows[name] = _whole(values[episode, seat, place])
    rows["policy"] = np.array(names or [""], text[1])[number]
    rows["weights_version"] = np.array([versions[each] for each in numbers] or [0])[number] if known else 0
    rows["outcome"] = _outcomes(returns, present)[episode, seat]
    return rows


def _whole(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return values as ints, with 0 for a value out of range. Other programs may have written such values."""
    return np.where(np.abs(values) < 2**53, values, 0).astype(np.int64)


def _outcomes(returns: npt.NDArray[np.float64], present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return 1 for a win, 0 for a draw and -1 for a loss, shape (episodes, agents)."""
    if not returns.size:
        return np.zeros(returns.shape, np.int8)
    best = np.where(present, returns, -np.inf) == np.where(present, returns, -np.inf).max(1, keepdims=True)
    shared = best.sum(1, keepdims=True) > 1
    alone = present.sum(1, keepdims=True) < 2
    return np.where(alone, 0, np.where(~best, -1, np.where(shared, 0, 1))).astype(np.int8)

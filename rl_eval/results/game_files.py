"""Files of games for other libraries: openskill's matches, and payoff tables for OpenSpiel's alpha-rank."""

from __future__ import annotations

import io
import json
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes, write_text
from rl_eval.errors import UsageError
from rl_eval.results.games import Games

__all__ = ["openskill_matches", "payoff_tables", "write_openskill", "write_payoffs"]

_LARGEST: Final = 10**7
"""Most entries of all payoff tables."""


def openskill_matches(games: Games) -> list[dict[str, Any]]:
    """Return the games as keyword arguments of ``rate`` of openskill's models, names in the place of ratings.

    Each seat is a team of one, and ``scores`` are returns, of which the greater wins. openskill updates its ratings
    match by match, so what it makes of them depends on this order, that of the plan.
    """
    return [
        {"teams": [[games.policies[policy]] for policy in seating], "scores": scores}
        for seating, scores in zip(games.seatings.tolist(), games.returns.tolist(), strict=True)
    ]


def payoff_tables(games: Games) -> npt.NDArray[np.float64]:
    """Return the mean return of each seat under every seating, as ``alpharank.compute`` of OpenSpiel takes them.

    Returns:
        One table for each seat, shape (seats, policies, ..., policies) with an axis for the policy of each seat; NaN
        for seatings that were not played.

    Raises:
        UsageError: The tables would be too large.
    """
    count, seats = len(games.policies), len(games.seats)
    if seats * count**seats > _LARGEST:
        raise UsageError(
            f"payoff tables of {count} policies in {seats} seats have {seats} times {count} to the {seats} entries: "
            "play fewer policies for them"
        )
    games, shape = games.sorted(), (count,) * seats
    seatings = np.ravel_multi_index(tuple(games.seatings.T), shape)
    played = np.bincount(seatings, minlength=count**seats)
    with np.errstate(invalid="ignore"):
        tables = [np.bincount(seatings, column, count**seats) / played for column in games.returns.T]
    return np.stack(tables).reshape(seats, *shape)


def write_openskill(path: str | os.PathLike[str], games: Games) -> None:
    """Write :func:`openskill_matches` and the names of the policies as JSON."""
    matches = ",\n    ".join(map(json.dumps, openskill_matches(games)))
    write_text(path, f'{{\n  "policies": {json.dumps(games.policies)},\n  "matches": [\n    {matches}\n  ]\n}}\n')


def write_payoffs(path: str | os.PathLike[str], games: Games) -> None:
    """Write :func:`payoff_tables` as ``payoffs`` of an ``.npz`` file, with the names of ``policies`` and ``seats``.

    Raises:
        UsageError: The tables would be too large.
    """
    tables, content = payoff_tables(games), io.BytesIO()
    np.savez(content, payoffs=tables, policies=np.array(games.policies), seats=np.array(games.seats))
    write_bytes(path, content.getvalue())

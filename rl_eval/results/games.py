"""Games of several policies: the episodes of an evaluation by seating and return, and files of them.

Other libraries read the files: matches for openskill, payoff tables for OpenSpiel's alpha-rank.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes, write_text
from rl_eval.errors import UsageError
from rl_eval.records.agents import agents_in
from rl_eval.results.metrics import policy_names
from rl_eval.results.result import EvalResult

_LARGEST: Final = 10**7
"""Most entries of all payoff tables."""


@dataclass(frozen=True)
class Games:
    """Games that were played on whole turns: each seed under all of its seatings."""

    policies: tuple[str, ...]
    seats: tuple[str, ...]
    """Agents in the order of their seats."""
    seeds: npt.NDArray[np.int64]
    """Seed of each game, shape (games,)."""
    seatings: npt.NDArray[np.int64]
    """Position in ``policies`` of the policy in each seat, shape (games, seats)."""
    returns: npt.NDArray[np.float64]
    """Undiscounted return of each seat, in the unit of the environment's rewards, shape (games, seats)."""
    num_missing: int = 0
    """Games of the plan that are not here: they failed or did not run, or another game of their seed did."""
    absent: tuple[str, ...] = ()
    """Policies that have none of the games that are here."""

    def __len__(self) -> int:
        return len(self.seeds)

    def sorted(self) -> Games:
        """Return the games in an order that depends on none: by seed, then by seating, then by returns."""
        order = np.lexsort((*self.returns.T[::-1], *self.seatings.T[::-1], self.seeds))
        return replace(self, seeds=self.seeds[order], seatings=self.seatings[order], returns=self.returns[order])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield every seat with every other one."""
        count = len(self.seats)
        yield from ((one, other) for one in range(count) for other in range(count) if one != other)


def games_of(result: EvalResult) -> Games:
    """Return the games of an evaluation with ``evaluation.matchups``, in the order of the plan.

    Raises:
        UsageError: Nobody was seated, a seat has no return, or no seed was played under all of its seatings.
    """
    if result.plan.matchups is None:
        raise UsageError("the result has no matchups, so nobody played anybody: set evaluation.matchups")
    whole = whole_games(result)
    if not whole.size:
        raise UsageError("no seed was played under all of its seatings, so there is nothing to compare")
    seats, names = agents_in(result.table.info_keys), policy_names(result.provenance)
    returns, players = (_columns(result, name, seats)[whole] for name in ("return", "policy"))
    _check_returns(seats, whole, returns)
    present, seatings = np.unique(players.astype(np.int64), return_inverse=True)
    return Games(
        policies=tuple(names[number] for number in present.tolist()),
        seats=seats,
        seeds=result.plan.seeds[whole],
        seatings=np.asarray(seatings.reshape(players.shape), np.int64),
        returns=returns,
        num_missing=len(result.plan) - len(whole),
        absent=tuple(name for number, name in enumerate(names) if number not in present),
    )


def _columns(result: EvalResult, name: str, seats: tuple[str, ...]) -> npt.NDArray[np.float64]:
    """Return a column of every seat, shape (episodes, seats)."""
    keys = result.table.info_keys
    return result.table.infos[:, [keys.index(f"{name}/{seat}") for seat in seats]]


def whole_games(result: EvalResult) -> npt.NDArray[np.int64]:
    """Return the indices of the counted episodes whose seed has no episode that does not count."""
    _, groups = np.unique(result.plan.seeds, return_inverse=True)
    incomplete = np.zeros(groups.max() + 1, bool)
    incomplete[groups[~result.counted]] = True
    return np.asarray(np.flatnonzero(~incomplete[groups]), np.int64)


def _check_returns(seats: tuple[str, ...], whole: npt.NDArray[np.int64], returns: npt.NDArray[np.float64]) -> None:
    absent = np.argwhere(~np.isfinite(returns))
    if absent.size:
        game, seat = absent[0]
        raise UsageError(
            f"agent {seats[seat]!r} has no finite return in episode {whole[game]} ({returns[game, seat]}): in a game "
            "every seat plays"
        )


# Files for other libraries


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

"""Games of several policies: the episodes of an evaluation by who sat where, and what each seat got."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.records.agents import agents_in
from rl_eval.results.agents import policy_names
from rl_eval.results.result import EvalResult

__all__ = ["Games", "games_of", "whole_games"]


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

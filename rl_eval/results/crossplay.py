"""Cross-play: statistics of games between several policies, for each pair of policies and for each seat.

All games with the same seed together are one observation. Every number is a mean over seeds: for each seed, the mean of
its games. Every interval is over seeds. If each seed was played in all orders of its seats, the advantage of a seat
cancels within an observation. A seat wins against another seat if its return is higher; equal returns are a draw.

The games can be written for other libraries: matches for openskill, payoff tables for OpenSpiel's alpha-rank.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes, write_text
from rl_eval.errors import UsageError
from rl_eval.records.agents import agents_in
from rl_eval.results.metrics import policy_names
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import Bounds, Interval, mean_interval
from rl_eval.results.stats.ratings import Rating, rate
from rl_eval.results.text import Printed

_RATE: Final = (0.0, 1.0)
"""Bounds of scores and of fractions of games."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with its interval."""

    mean: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Fractions of games won, drawn and lost; they add up to 1."""

    wins: float
    draws: float
    losses: float
    win_interval: Interval
    """Interval for the fraction of games won."""

    @property
    def score(self) -> float:
        """Fraction of games won, plus half the fraction of games drawn."""
        return self.wins + self.draws / 2


@dataclass(frozen=True, slots=True)
class Cell:
    """Numbers of one policy against another policy, or against itself."""

    row: str
    column: str
    num_games: int
    num_seeds: int
    outcomes: Outcomes
    """Outcomes of the policy of the row against the policy of the column."""
    score: Estimate
    """Score of the policy of the row: the fraction of games that it won, plus half the fraction of draws."""
    mean_return: Estimate
    """Return of the policy of the row."""
    difference: Estimate
    """Return of the policy of the row minus the return of the policy of the column, in the same games."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Numbers of one policy against all other policies."""

    policy: str
    rating: Rating
    outcomes: Outcomes
    """Outcomes of the policy's seats against seats of other policies; NaN if there were no such games."""
    mean_return: Estimate
    """Return per seat: for each game, the mean over the policy's seats."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Numbers of one seat, over all policies."""

    seat: str
    outcomes: Outcomes
    """Outcomes of the seat. A win is a return above the returns of all other seats. A draw is a shared highest
    return."""
    mean_return: Estimate


@dataclass(frozen=True, slots=True)
class LineUp:
    """Numbers of policies that play together in a game, over all orders of their seats."""

    policies: tuple[str, ...]
    """Policy of each seat, sorted."""
    num_games: int
    num_seeds: int
    team: Estimate
    """Return of the team: for each game, the sum over its seats."""
    per_capita: dict[str, Estimate]
    """Return per seat, by policy: for each game, the mean over the policy's seats."""


@dataclass(frozen=True)
class CrossPlay(Printed):
    """All numbers of the games of several policies."""

    policies: tuple[str, ...]
    num_games: int
    num_seeds: int
    num_missing: int
    """Number of planned games that do not count, because this game or another game with the same seed failed or did not
    run."""
    absent: tuple[str, ...]
    """Policies without numbers, because none of their games counts."""
    confidence: float
    cells: tuple[Cell, ...]
    """Cells of all pairs that played each other, row by row."""
    seats: tuple[Seat, ...]
    line_ups: tuple[LineUp, ...]
    standings: tuple[Standing, ...]
    """Numbers of each policy against all others, in the order of the policies."""

    def cell(self, row: str, column: str) -> Cell | None:
        """Return the numbers of one policy against another; None if they did not play each other."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def matrix(self, number: str = "score") -> npt.NDArray[np.float64]:
        """Return one number of all cells, shape (policies, policies); NaN for policies that did not play each other.

        Args:
            number: ``"score"``, ``"mean_return"`` or ``"difference"``.
        """
        values = np.full((len(self.policies),) * 2, np.nan)
        for cell in self.cells:
            values[self.policies.index(cell.row), self.policies.index(cell.column)] = getattr(cell, number).mean
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def crossplay(games: Games, confidence: float = 0.95) -> CrossPlay:
    """Compute the numbers of cross-play.

    Args:
        games: Games of at least two policies, in any order.
        confidence: Nominal coverage of the intervals.

    Raises:
        UsageError: There are fewer than two policies, or no games.
    """
    if len(games.policies) < 2:
        lost = f", and no game of {', '.join(games.absent)} counts" if games.absent else ""
        problem = f"cross-play needs two policies; there is only {', '.join(games.policies)}{lost}"
        raise UsageError(problem, key="policies", value=", ".join(games.policies), fix="Pass another policy.")
    if not len(games):
        raise UsageError("no game was completed, so there is nothing to compare", key="games", value=0)
    games = games.sorted()
    return CrossPlay(
        policies=games.policies,
        num_games=len(games),
        num_seeds=len(np.unique(games.seeds)),
        num_missing=games.num_missing,
        absent=games.absent,
        confidence=confidence,
        cells=tuple(_cells(games, confidence)),
        seats=tuple(_seats(games, confidence)),
        line_ups=tuple(_line_ups(games, confidence)),
        standings=tuple(_standings(games, confidence)),
    )


class _Meetings(NamedTuple):
    """Pairs of seats: one row for each ordered pair of seats in a game."""

    games: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    ours: npt.NDArray[np.float64]
    theirs: npt.NDArray[np.float64]

    @classmethod
    def of(cls, games: Games) -> _Meetings:
        pairs = list(itertools.permutations(range(len(games.seats)), 2))
        ones, others = [one for one, _ in pairs], [other for _, other in pairs]
        return cls(
            np.repeat(np.arange(len(games)), len(pairs)),
            np.repeat(games.seeds, len(pairs)),
            games.seatings[:, ones].ravel(),
            games.seatings[:, others].ravel(),
            games.returns[:, ones].ravel(),
            games.returns[:, others].ravel(),
        )

    def where(self, chosen: npt.NDArray[np.bool_]) -> _Meetings:
        return _Meetings._make(values[chosen] for values in self)

    @property
    def points(self) -> npt.NDArray[np.float64]:
        return (1 + np.sign(self.ours - self.theirs)) / 2


def _standings(games: Games, confidence: float) -> Iterator[Standing]:
    meetings = _Meetings.of(games)
    for number, rating in enumerate(rate(games.policies, _points(games), confidence)):
        met = meetings.where((meetings.rows == number) & (meetings.columns != number))
        seated = games.seatings == number
        plays = seated.any(axis=1)
        returns = _mean_where(games.returns[plays], seated[plays])
        mean_return = _estimate(games.seeds[plays], returns, confidence)
        yield Standing(rating.policy, rating, _outcomes(met.seeds, met.points, confidence), mean_return)


def _cells(games: Games, confidence: float) -> Iterator[Cell]:
    meetings = _Meetings.of(games)
    for row, ours in enumerate(games.policies):
        for column, theirs in enumerate(games.policies):
            met = meetings.where((meetings.rows == row) & (meetings.columns == column))
            if met.seeds.size:
                yield _cell(ours, theirs, met, confidence)


def _cell(row: str, column: str, met: _Meetings, confidence: float) -> Cell:
    return Cell(
        row=row,
        column=column,
        num_games=len(np.unique(met.games)),
        num_seeds=len(np.unique(met.seeds)),
        outcomes=_outcomes(met.seeds, met.points, confidence),
        score=_estimate(met.seeds, met.points, confidence, _RATE),
        mean_return=_estimate(met.seeds, met.ours, confidence),
        difference=_estimate(met.seeds, met.ours - met.theirs, confidence),
    )


def _seats(games: Games, confidence: float) -> Iterator[Seat]:
    best = games.returns == games.returns.max(axis=1, keepdims=True)
    shared = best.sum(axis=1) > 1
    for number, seat in enumerate(games.seats):
        points = np.where(best[:, number], np.where(shared, 0.5, 1.0), 0.0)
        mean_return = _estimate(games.seeds, games.returns[:, number], confidence)
        yield Seat(seat, _outcomes(games.seeds, points, confidence), mean_return)


def _line_ups(games: Games, confidence: float) -> Iterator[LineUp]:
    present, which = np.unique(np.sort(games.seatings, axis=1), axis=0, return_inverse=True)
    for number, seated in enumerate(present):
        chosen = which.reshape(-1) == number
        seeds, seatings, returns = games.seeds[chosen], games.seatings[chosen], games.returns[chosen]
        per_capita = {
            games.policies[policy]: _estimate(seeds, _mean_where(returns, seatings == policy), confidence)
            for policy in np.unique(seated).tolist()
        }
        names = tuple(games.policies[policy] for policy in seated.tolist())
        team = _estimate(seeds, returns.sum(axis=1), confidence)
        yield LineUp(names, int(chosen.sum()), len(np.unique(seeds)), team, per_capita)


def _points(games: Games) -> npt.NDArray[np.float64]:
    """Return the points of each policy against each other policy, by seed, shape (seeds, policies, policies)."""
    meetings, size = _Meetings.of(games), len(games.policies)
    seeds, which = np.unique(meetings.seeds, return_inverse=True)
    points = np.zeros((len(seeds), size, size))
    np.add.at(points, (which, meetings.rows, meetings.columns), meetings.points)
    return points


def _mean_where(values: npt.NDArray[np.float64], chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    return np.asarray(np.where(chosen, values, 0.0).sum(axis=1) / chosen.sum(axis=1))


def _by_seed(seeds: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the mean value of each seed, in the order of the seeds."""
    _, which, counts = np.unique(seeds, return_inverse=True, return_counts=True)
    return np.asarray(np.bincount(which, values) / counts)


def _estimate(
    seeds: npt.NDArray[np.int64], values: npt.NDArray[np.float64], confidence: float, bounds: Bounds | None = None
) -> Estimate:
    means = _by_seed(seeds, values)
    return Estimate(exact_mean(means), mean_interval(means, confidence, bounds=bounds))


def _outcomes(seeds: npt.NDArray[np.int64], points: npt.NDArray[np.float64], confidence: float) -> Outcomes:
    won, drawn, lost = (
        _estimate(seeds, (points == worth).astype(float), confidence, _RATE) for worth in (1.0, 0.5, 0.0)
    )
    return Outcomes(won.mean, drawn.mean, lost.mean, won.interval)


_LARGEST: Final = 10**7
"""Maximum number of entries of all payoff tables together."""


@dataclass(frozen=True)
class Games:
    """Games of complete seeds. A seed is complete if it was played with all of its seatings."""

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
    """Number of planned games left out: they, or another game of their seed, failed or did not run."""
    absent: tuple[str, ...] = ()
    """Policies without any of these games."""

    def __len__(self) -> int:
        return len(self.seeds)

    def sorted(self) -> Games:
        """Return the games sorted by seed, then by seating, then by returns.

        So the numbers of cross-play do not depend on the order of the games.
        """
        order = np.lexsort((*self.returns.T[::-1], *self.seatings.T[::-1], self.seeds))
        return replace(self, seeds=self.seeds[order], seatings=self.seatings[order], returns=self.returns[order])


def games_of(result: EvalResult) -> Games:
    """Return the games of an evaluation with ``evaluation.matchups``, in the order of the plan.

    Raises:
        UsageError: The plan has no matchups, a seat has no return, or no seed was played with all of its seatings.
    """
    if result.plan.matchups is None:
        fix = "Set evaluation.matchups."
        raise UsageError(
            "the result has no matchups, so there are no games between its policies", key="evaluation.matchups", fix=fix
        )
    whole = whole_games(result)
    if not whole.size:
        problem = "every seed has a game that failed or did not end, so there is nothing to compare"
        raise UsageError(problem, key="games", value=0)
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
    """Return the indices of the counted episodes of complete seeds."""
    _, groups = np.unique(result.plan.seeds, return_inverse=True)
    incomplete = np.zeros(groups.max() + 1, bool)
    incomplete[groups[~result.counted]] = True
    return np.asarray(np.flatnonzero(~incomplete[groups]), np.int64)


def _check_returns(seats: tuple[str, ...], whole: npt.NDArray[np.int64], returns: npt.NDArray[np.float64]) -> None:
    absent = np.argwhere(~np.isfinite(returns))
    if absent.size:
        game, seat = absent[0]
        value = float(returns[game, seat])
        problem = (
            f"the return of agent {seats[seat]!r} in episode {whole[game]} is {value}, but every seat needs a number"
        )
        raise UsageError(problem, key=str(seats[seat]), value=value, episode=int(whole[game]))


# Files for other libraries


def openskill_matches(games: Games) -> list[dict[str, Any]]:
    """Return the games as keyword arguments of ``rate``, a method of openskill's models, with names instead of ratings.

    Each seat is a team of one player. ``scores`` are returns; the highest return wins. openskill updates its ratings
    match by match, so the ratings depend on the order of the games. The games are in the order of the plan.
    """
    return [
        {"teams": [[games.policies[policy]] for policy in seating], "scores": scores}
        for seating, scores in zip(games.seatings.tolist(), games.returns.tolist(), strict=True)
    ]


def payoff_tables(games: Games) -> npt.NDArray[np.float64]:
    """Return the mean return of each seat for every seating, in the form for OpenSpiel's ``alpharank.compute``.

    Returns:
        One table for each seat, shape (seats, policies, ..., policies). A table has an axis for the policy of each
        seat, and NaN for seatings that were not played.

    Raises:
        UsageError: The tables would be too large.
    """
    count, seats = len(games.policies), len(games.seats)
    if seats * count**seats > _LARGEST:
        problem = f"payoff tables of {count} policies in {seats} seats have {seats} times {count}**{seats} entries"
        raise UsageError(problem, key="policies", value=count, fix="Use fewer policies.")
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
    """Write an ``.npz`` file with :func:`payoff_tables` as ``payoffs``, and the names as ``policies`` and ``seats``.

    Raises:
        UsageError: The tables would be too large.
    """
    tables, content = payoff_tables(games), io.BytesIO()
    np.savez(content, payoffs=tables, policies=np.array(games.policies), seats=np.array(games.seats))
    write_bytes(path, content.getvalue())

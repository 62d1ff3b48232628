"""Matchups: policies of the seats of an episode, as a pure function of the episode's index.

A *seating* names the policy of each seat. A *matchup* is one seating or, with ``symmetric``, all orders of one seating.
All orders are played with the same seed, so that the advantage of a seat cancels. The matchups take turns, and a
*round* has one turn of each matchup. So in each sequence of as many episodes as a round has, each seating is
played once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, nearest
from rl_eval.records.plain import typed

Seating = tuple[str, ...]
"""Name of the policy of each seat."""

MAX_SEATINGS: Final = 100_000
"""Maximum number of seatings in one round of all matchups."""

_NAMED: Final = ("self", "round_robin")
_POPULATIONS: Final = ("focal", "background", "focal_seats")


@dataclass(frozen=True)
class Matchups:
    """Matchups in the order of their turns.

    Args:
        turns: The seatings of each matchup; the seatings of one matchup share a seed. There is at least one matchup,
            and each has at least one seating.
    """

    turns: tuple[tuple[Seating, ...], ...]

    @classmethod
    def from_lists(cls, turns: Sequence[Sequence[Sequence[str]]]) -> Matchups:
        """Create matchups from the output of :meth:`to_lists`.

        Raises:
            ValueError: The lists are invalid; they can come from a foreign file.
        """
        matchups = cls(typed(tuple[tuple[Seating, ...], ...], turns))
        if not all(matchups.turns) or not matchups.turns:
            raise ValueError("the matchups contain no seating")
        return matchups

    def to_lists(self) -> list[list[list[str]]]:
        """Return the turns as plain JSON values."""
        return [[list(seating) for seating in turn] for turn in self.turns]

    @cached_property
    def round(self) -> tuple[Seating, ...]:
        """All seatings of one round, in order: one turn of every matchup."""
        return tuple(itertools.chain.from_iterable(self.turns))

    @cached_property
    def _turn_of(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.turns)), [len(turn) for turn in self.turns])

    @cached_property
    def _begins(self) -> npt.NDArray[np.intp]:
        """Positions in a round at which a turn begins."""
        return np.flatnonzero(np.diff(self._turn_of, prepend=-1))

    def seating(self, position: int) -> Seating:
        """Return the seating of the episode at a position (from 0) in an endless plan."""
        return self.round[position % len(self.round)]

    def seed_positions(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the seed's index for each position, as an array of the same shape.

        The positions of one turn share a seed.
        """
        rounds, places = np.divmod(positions.astype(np.int64), len(self.round))
        return np.asarray(rounds * len(self.turns) + self._turn_of[places], np.int64)

    def next_turn(self, position: int) -> int:
        """Return the first position, from ``position`` on, at which a turn begins."""
        rounds, place = divmod(position, len(self.round))
        later = self._begins[self._begins >= place]
        return rounds * len(self.round) + (int(later[0]) if len(later) else len(self.round))

    def turn_start(self, position: int) -> int:
        """Return the position at which the turn of ``position`` begins."""
        rounds, place = divmod(position, len(self.round))
        return rounds * len(self.round) + int(self._begins[self._begins <= place][-1])


def make_matchups(
    design: Any, policies: Sequence[str], *, symmetric: bool = False, seats: int | None = None
) -> Matchups:
    """Return the matchups that a config asks for.

    Args:
        design: ``"self"``: for each policy, a matchup with this policy in all seats. ``"round_robin"``: different
            policies in all seats, with a matchup for every choice of policies and, unless ``symmetric``, for every
            order of them. ``{"focal": [...], "background": [...], "focal_seats": [0]}``: each focal policy in the focal
            seats, each background policy in all others. Or a list of seatings (lists of names), which may also contain
            the other forms. Duplicates are removed.
        policies: Names of all policies.
        symmetric: Whether to play each seed of a matchup in all orders of its seating. Orders that only swap seats with
            the same policy count as one.
        seats: Number of seats; by default the length of the first seating in the list, or 2 if there is no list.

    Raises:
        ConfigError: The design is invalid, names an unknown policy or has another number of seats.
    """
    designs = [design] if isinstance(design, str | Mapping) else design
    if not isinstance(designs, list | tuple) or not designs:
        raise _not_a_design(design)
    if not policies:
        problem = "evaluation.matchups needs policies with names"
        raise ConfigError(problem, key="evaluation.matchups", value=design, fix="Set policy.policies.")
    listed = [entry for entry in designs if isinstance(entry, list | tuple)]
    seats = seats or (len(listed[0]) if listed else 2)
    expansion = _Expansion(tuple(policies), seats, symmetric)
    seatings = itertools.chain.from_iterable(expansion.seatings(entry) for entry in designs)
    return Matchups(_different(map(expansion.turn, seatings)))


@dataclass(frozen=True)
class _Expansion:
    policies: Seating
    seats: int
    symmetric: bool

    def seatings(self, entry: Any) -> Iterable[Seating]:
        """Return the seatings of one entry of a design."""
        if isinstance(entry, list | tuple):
            return [self._checked(entry)]
        if isinstance(entry, Mapping):
            return self._populations(entry)
        if entry == "self":
            return ((policy,) * self.seats for policy in self.policies)
        if entry == "round_robin":
            return self._round_robin()
        raise _not_a_design(entry)

    def turn(self, seating: Seating) -> tuple[Seating, ...]:
        """Return the matchup of a seating: the seating or, if ``symmetric``, all its orders, which share a seed."""
        if not self.symmetric:
            return (seating,)
        ordered = sorted(seating, key=self.policies.index)
        copies = math.prod(math.factorial(ordered.count(policy)) for policy in set(ordered))
        if math.factorial(self.seats) // copies > MAX_SEATINGS:
            problem = (
                f"evaluation.symmetric plays every order of {self.seats} seats, which are more than {MAX_SEATINGS:,}"
            )
            fix = "Set it to false, and list the seatings that matter in evaluation.matchups."
            raise ConfigError(problem, key="evaluation.symmetric", value=True, fix=fix)
        return tuple(_orders(ordered))

    def _round_robin(self) -> Iterator[Seating]:
        if len(self.policies) < max(2, self.seats):
            names = ", ".join(map(repr, self.policies)) or "none"
            problem = (
                f"evaluation.matchups is 'round_robin', which seats {self.seats} different policies, but the policies "
                f"are {names}"
            )
            fix = (
                "Add policies to policy.policies, list seatings in evaluation.matchups, or set evaluation.matchups "
                "to a mapping of focal and background."
            )
            raise ConfigError(problem, key="evaluation.matchups", value="round_robin", fix=fix)
        choose = itertools.combinations if self.symmetric else itertools.permutations
        return choose(self.policies, self.seats)

    def _populations(self, entry: Mapping[str, Any]) -> Iterator[Seating]:
        if unknown := [key for key in entry if key not in _POPULATIONS]:
            problem = f"evaluation.matchups has an unknown key {unknown[0]!r}: {nearest(unknown[0], _POPULATIONS)}"
            raise ConfigError(problem, key="evaluation.matchups", value=unknown[0])
        focal, background = (self._population(entry, key) for key in ("focal", "background"))
        focal_seats = self._focal_seats(entry.get("focal_seats", [0]))
        for ours, theirs in itertools.product(focal, background):
            yield tuple(ours if seat in focal_seats else theirs for seat in range(self.seats))

    def _population(self, entry: Mapping[str, Any], key: str) -> Sequence[str]:
        names = entry.get(key)
        if not isinstance(names, list | tuple) or not names:
            problem = f"evaluation.matchups.{key} is {names!r}"
            fix = f"Set it to a list of policies, such as {[*self.policies]}."
            raise ConfigError(problem, key=f"evaluation.matchups.{key}", value=names, fix=fix)
        return [self._known(name, f"evaluation.matchups.{key}") for name in names]

    def _focal_seats(self, given: Any) -> set[int]:
        if not isinstance(given, list | tuple) or not given or any(seat not in range(self.seats) for seat in given):
            problem = f"evaluation.matchups.focal_seats is {given!r}"
            fix = f"Set it to a list of seats from 0 to {self.seats - 1}."
            raise ConfigError(problem, key="evaluation.matchups.focal_seats", value=given, fix=fix)
        return set(given)

    def _checked(self, seating: Sequence[Any]) -> Seating:
        if len(seating) != self.seats:
            problem = (
                f"evaluation.matchups has the seating {[*seating]!r} of {len(seating)} seats, but the first seating, "
                f"or environment.agents, has {self.seats}"
            )
            fix = "Name one policy for each seat."
            raise ConfigError(problem, key="evaluation.matchups", value=[*seating], fix=fix)
        return tuple(self._known(name, "evaluation.matchups") for name in seating)

    def _known(self, name: Any, key: str) -> str:
        if name not in self.policies:
            raise ConfigError(
                f"{key} names an unknown policy {name!r}: {nearest(str(name), self.policies)}", key=key, value=name
            )
        return str(name)


def _orders(ordered: Sequence[str]) -> Iterator[Seating]:
    """Yield the different orders of some names, each order once, even if a name occurs several times."""
    if not ordered:
        yield ()
    for first in dict.fromkeys(ordered):
        rest = list(ordered)
        rest.remove(first)
        yield from ((first, *others) for others in _orders(rest))


def _different(turns: Iterable[tuple[Seating, ...]]) -> tuple[tuple[Seating, ...], ...]:
    kept: dict[tuple[Seating, ...], None] = {}
    room = MAX_SEATINGS
    for turn in turns:
        room -= 0 if turn in kept else len(turn)
        kept[turn] = None
        if room < 0:
            problem = f"evaluation.matchups has more than {MAX_SEATINGS:,} seatings"
            raise ConfigError(problem, key="evaluation.matchups", fix="List the seatings that matter.")
    return tuple(kept)


def _not_a_design(given: Any) -> ConfigError:
    return ConfigError(
        f"evaluation.matchups is {given!r}",
        key="evaluation.matchups",
        value=given,
        fix=f"Set it to {' or '.join(map(repr, _NAMED))}, a mapping of focal and background, or a list of seatings, "
        "such as [[a, b], [b, a]].",
    )

"""The laws of matchups: who sits where follows from the index alone, and seats are fair."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rl_eval.errors import ConfigError
from rl_eval.scheduling.matchups import Matchups, make_matchups
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused

NAMES = ("a", "b", "c", "d")
DESIGNS = st.sampled_from([
    "self", "round_robin", {"focal": ["a", "b"], "background": ["c", "a"]}, [["a", "b"]],
    [["b", "a"], ["c", "c"], ["a", "b"]],
    ["self", "round_robin"], [["d", "a", "a"], ["a", "b", "c"]], [["a", "b", "b", "a"]],
    {"focal": ["d"], "background": ["a", "b"], "focal_seats": [1]},
])  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> EpisodePlan:
    matchups = make_matchups(draw(DESIGNS), NAMES, symmetric=draw(st.booleans()))
    first = matchups.next_turn(draw(st.integers(0, 3 * len(matchups.round))))
    last = matchups.next_turn(first + draw(st.integers(len(matchups.round), 5 * len(matchups.round))))
    return EpisodePlan(last - first, draw(st.integers(0, 2**64 - 1)), first, matchups)


def groups_of(plan: EpisodePlan) -> list[list[tuple[str, ...]]]:
    """Return the seatings of consecutive episodes that share a seed."""
    return [[spec.seating for spec in group] for _, group in itertools.groupby(plan, lambda spec: spec.seed)]


# ------------------------------------------------------------------------------ laws


@given(plan=plans())
def test_every_matchup_is_played_as_often_as_any_other(plan: EpisodePlan) -> None:
    """Over any stretch of a plan the numbers of seeds of two matchups differ by one at most."""
    assert plan.matchups is not None
    played = Counter(tuple(sorted(group)) for group in groups_of(plan))
    assert set(played) == {tuple(sorted(turn)) for turn in plan.matchups.turns}
    assert max(played.values()) - min(played.values()) <= 1


@given(plan=plans())
def test_seeds_are_shared_within_a_turn_only(plan: EpisodePlan) -> None:
    """A seed belongs to consecutive episodes of one matchup, and comes never again."""
    groups = groups_of(plan)
    assert len(np.unique(plan.seeds)) == len(groups)
    assert all(group in map(list, plan.matchups.turns) for group in groups)


@given(design=DESIGNS, root=st.integers(0, 2**64 - 1))
def test_symmetric_matchups_have_all_orders(design: Any, root: int) -> None:
    """Every seed is played under every permutation of its seating, once each."""
    matchups = make_matchups(design, NAMES, symmetric=True)
    plan = EpisodePlan(len(matchups.round), root, 0, matchups)
    for group in groups_of(plan):
        assert sorted(group) == sorted(set(itertools.permutations(group[0])))


@given(plan=plans(), data=st.data())
def test_the_index_alone_decides(plan: EpisodePlan, data: st.DataObject) -> None:
    """A longer plan that begins earlier has the same episodes at the same places."""
    assert plan.matchups is not None
    end = plan.matchups.next_turn(plan.first_index + len(plan) + data.draw(st.integers(0, 30)))
    longer = EpisodePlan(end, plan.seed, 0, plan.matchups)
    index = data.draw(st.integers(0, len(plan) - 1))
    assert plan[index].at_position() == longer[plan.first_index + index]


@given(design=DESIGNS)
def test_symmetric_and_ordered_designs_seat_each_policy_equally_often(design: Any) -> None:
    """Under ``symmetric`` a policy is in each seat equally often, whatever the design."""
    seatings = make_matchups(design, NAMES, symmetric=True).round
    counts = Counter((seat, policy) for seating in seatings for seat, policy in enumerate(seating))
    for policy in NAMES:
        assert len({count for (_, name), count in counts.items() if name == policy}) <= 1


@given(plan=plans())
def test_matchups_survive_as_json(plan: EpisodePlan) -> None:
    """A plan survives the round trip through a file."""
    assert plan.matchups is not None
    again = EpisodePlan(len(plan), plan.seed, plan.first_index, Matchups.from_lists(plan.matchups.to_lists()))
    assert again.fingerprint == plan.fingerprint
    assert again[len(plan) - 1] == plan[len(plan) - 1]


@given(plan=plans(), other=plans())
def test_the_seatings_are_part_of_the_fingerprint(plan: EpisodePlan, other: EpisodePlan) -> None:
    """Plans with other seatings are different plans, and all differ from a plan without seats."""
    assume([*plan] != [*other])
    assert plan.fingerprint != other.fingerprint
    assert plan.fingerprint != EpisodePlan(len(plan), plan.seed, plan.first_index).fingerprint


# ------------------------------------------------------------------------------ designs


@pytest.mark.parametrize(
    ("design", "symmetric", "turns"),
    [
        ("self", False, "aa bb cc"),
        ("self", True, "aa bb cc"),
        ("round_robin", False, "ab ac ba bc ca cb"),
        ("round_robin", True, "ab,ba ac,ca bc,cb"),
        ({"focal": ["a", "b"], "background": ["c"]}, False, "ac bc"),
        ({"focal": ["a"], "background": ["a", "c"], "focal_seats": [1]}, False, "aa ca"),
        ({"focal": ["a", "c"], "background": ["c", "a"]}, True, "ac,ca aa cc"),
        ([["c", "a"], ["a", "c"]], True, "ac,ca"),
        ([["c", "a"], ["c", "a"], "self"], False, "ca aa bb cc"),
        (["self", "round_robin"], True, "aa bb cc ab,ba ac,ca bc,cb"),
        ([["b", "a", "b"]], True, "abb,bab,bba"),
    ],
)
def test_designs(design: Any, symmetric: bool, turns: str) -> None:
    """Every design, with its matchups in the order of their turns."""
    made = make_matchups(design, "abc", symmetric=symmetric).turns
    assert " ".join(",".join("".join(seating) for seating in turn) for turn in made) == turns


def test_more_than_two_seats() -> None:
    """The number of seats is that of the listed seatings, else as given, else two."""
    assert make_matchups("self", NAMES, seats=3).turns[0] == (("a", "a", "a"),)
    assert len(make_matchups("round_robin", NAMES, seats=3).turns) == math.perm(4, 3)
    assert len(make_matchups("round_robin", NAMES, seats=3, symmetric=True).turns) == math.comb(4, 3)
    focal = {"focal": ["a"], "background": ["b"], "focal_seats": [0, 2]}
    assert make_matchups(focal, NAMES, seats=4).round == (("a", "b", "a", "b"),)
    assert {len(seating) for seating in make_matchups([["a", "b", "c"], "self"], NAMES).round} == {3}


@pytest.mark.parametrize(
    ("design", "kwargs", "key", "value"),
    [
        ("roundrobin", {}, "matchups", "roundrobin"),
        (7, {}, "matchups", 7),
        ([], {}, "matchups", "[]"),
        (["a", "b"], {}, "matchups", "a"),
        ([["a", "bb"]], {}, "matchups", "bb"),
        ([["a", "b"], ["a", "b", "c"]], {}, "matchups", "['a', 'b', 'c']"),
        ([["a", "b"]], {"seats": 3}, "matchups", "['a', 'b']"),
        ([["a", ["b"]]], {}, "matchups", "['b']"),
        ("round_robin", {"seats": 5}, "matchups", "round_robin"),
        ({"focal": ["a"]}, {}, "matchups.background", None),
        ({"focal": "a", "background": ["b"]}, {}, "matchups.focal", "a"),
        ({"focal": ["a"], "background": ["x"]}, {}, "matchups.background", "x"),
        ({"focal": ["a"], "backgrund": ["b"]}, {}, "matchups", "backgrund"),
        ({"focal": ["a"], "background": ["b"], "focal_seats": [2]}, {}, "matchups.focal_seats", "[2]"),
        ([["a", "b", "c", "d"] * 3], {"symmetric": True}, "symmetric", True),
    ],
)
def test_a_wrong_design_is_refused(design: Any, kwargs: dict[str, Any], key: str, value: Any) -> None:
    """The error names the key and the value."""
    with refused(ConfigError, f"evaluation.{key}", value=value):
        make_matchups(design, NAMES, **kwargs)


def test_a_round_robin_needs_two_policies_and_any_matchup_a_policy() -> None:
    """A single policy has no opponent; without names no seat can be filled."""
    with refused(ConfigError, "evaluation.matchups", value="round_robin"):
        make_matchups("round_robin", ["a"])
    with refused(ConfigError, "evaluation.matchups", value="self"):
        make_matchups("self", [])


def test_a_design_without_end_is_refused_at_once() -> None:
    """The error comes before all of the trillions of seatings are built."""
    with refused(ConfigError, "evaluation.matchups"):
        make_matchups("round_robin", [f"p{i}" for i in range(60)], seats=8)


# ------------------------------------------------------------------------------ plans of whole turns


@pytest.mark.parametrize(
    ("args", "key", "wrong", "right"),
    [
        ((7, 0, 0), "num_episodes", 7, 8),
        ((6, 0, 3), "first_index", 3, 4),
        ((7, 0, 4), "num_episodes", 7, 8),
        ((4, 0, 0), "num_episodes", 4, 6),
    ],
)
def test_a_plan_takes_whole_turns(args: tuple[int, int, int], key: str, wrong: int, right: int) -> None:
    """A seed without some of its seatings would not be fair; the fix names a fair number."""
    with refused(ConfigError, f"evaluation.{key}", value=wrong) as caught:
        EpisodePlan(*args, make_matchups("round_robin", "abc", symmetric=True))
    assert str(right) in caught.value.fix


def test_held_out_plans_share_no_seed() -> None:
    """Ranges of whole turns that do not overlap have no seed in common."""
    matchups = make_matchups(["self", "round_robin"], "abc", symmetric=True)
    ours, theirs = EpisodePlan(18, 3, 0, matchups), EpisodePlan(9, 3, 18, matchups)
    assert not set(ours.seeds) & set(theirs.seeds)
    assert repr(theirs) == "EpisodePlan(num_episodes=9, seed=3, first_index=18, 6 matchups)"

"""The laws of the plan: which seeds an evaluation uses, and what its fingerprint guards."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeSpec
from rl_eval.scheduling.plan import MAX_EPISODES, EpisodePlan, episode_seeds
from tests.refused import refused

ROOTS = (0, 1, 2, 12_345, 2**63, 2**64 - 1)

roots = st.one_of(st.sampled_from(ROOTS), st.integers(0, 2**64 - 1))
indices = st.one_of(st.sampled_from([0, 1, MAX_EPISODES - 1]), st.integers(0, MAX_EPISODES - 1))


def seeds_of(root: int, chosen: list[int]) -> npt.NDArray[np.int64]:
    return episode_seeds(root, np.array(chosen, dtype=np.int64))


def chi_square(buckets: npt.NDArray[np.int64], count: int) -> float:
    """Return how far a histogram over ``count`` buckets is from flat, in standard deviations."""
    observed = np.bincount(buckets, minlength=count)
    expected = len(buckets) / count
    statistic = float((((observed - expected) ** 2) / expected).sum())
    return (statistic - (count - 1)) / float(np.sqrt(2 * (count - 1)))


# ------------------------------------------------------------------------------ a permutation


def test_a_million_episodes_have_a_million_seeds() -> None:
    """Seeds never collide and fit a non-negative int32."""
    for root in ROOTS:
        seeds = EpisodePlan(1_000_000, root).seeds
        assert seeds.dtype == np.int64
        assert seeds.min() >= 0
        assert seeds.max() < 2**31
        assert np.diff(np.sort(seeds)).min() > 0


@given(root=roots, chosen=st.lists(indices, min_size=1, max_size=100))
def test_seeds_come_from_the_index_alone(root: int, chosen: list[int]) -> None:
    """An index has the same seed alone and among others, in any order; distinct indices have distinct seeds."""
    together = seeds_of(root, chosen).tolist()
    assert together == [int(seeds_of(root, [index])[0]) for index in chosen]
    assert len(set(together)) == len(set(chosen))
    assert 0 <= min(together) <= max(together) < 2**31


def test_the_width_of_the_indices_does_not_matter() -> None:
    """Indices of any integer type have the same seeds."""
    for dtype in (np.uint8, np.int32, np.uint32, np.uint64):
        assert (episode_seeds(7, np.arange(200).astype(dtype)) == EpisodePlan(200, 7).seeds).all()


# ------------------------------------------------------------------------------ held-out episodes


@given(root=roots, first=st.integers(0, 300), count=st.integers(1, 300))
def test_a_plan_that_begins_later_has_the_seeds_of_those_places(root: int, first: int, count: int) -> None:
    """Its positions count from 0, and its seeds are a stretch of the plan that begins at the beginning."""
    plan, whole = EpisodePlan(count, root, first), EpisodePlan(first + count, root)
    assert plan.seeds.tolist() == whole.seeds[first:].tolist()
    assert plan[0] == EpisodeSpec(0, whole[first].seed, first_index=first)
    assert plan[0].at_position() == whole[first]
    assert (plan.fingerprint == whole.fingerprint) == (first == 0)


@given(
    ours=st.tuples(st.integers(1, 20), roots, st.integers(0, 20)),
    theirs=st.tuples(st.integers(1, 20), roots, st.integers(0, 20)),
)
def test_the_beginning_is_part_of_the_fingerprint(ours: tuple[int, int, int], theirs: tuple[int, int, int]) -> None:
    """Results over other episodes of the same root are not compared, nor continued, by mistake."""
    assert (EpisodePlan(*ours).fingerprint == EpisodePlan(*theirs).fingerprint) == (ours == theirs)


# ------------------------------------------------------------------------------ as good as random


def test_neighbouring_roots_share_no_more_seeds_than_chance() -> None:
    """Two plans of 200000 under neighbouring roots share about 200000**2 / 2**31 = 19 seeds."""
    plans = [EpisodePlan(200_000, root).seeds for root in (2**64 - 1, 0, 1, 2, 3, 4)]
    shared = [len(np.intersect1d(ours, theirs, assume_unique=True)) for ours, theirs in pairwise(plans)]
    assert max(shared) < 50
    assert sum(shared) > 30


@pytest.mark.parametrize("root", ROOTS)
def test_seeds_look_uniform(root: int) -> None:
    """High bits, low bits and differences of neighbours are flat, within five standard deviations."""
    seeds = EpisodePlan(100_000, root).seeds
    differences = np.diff(seeds) % 2**31
    for values in (seeds >> 21, seeds & 1023, differences >> 21, differences & 1023):
        assert abs(chi_square(values, 1024)) < 5


GOLDEN = {
    0: [2_123_091_767, 1_308_995_565, 412_483_141, 1_256_137_155, 301_096_069],
    1: [1_612_073_542, 1_732_839_173, 1_062_459_767, 381_112_919, 646_415_277],
    2**64 - 1: [1_979_649_859, 513_761_537, 57_374_851, 220_012_785, 757_798_067],
}


@pytest.mark.parametrize(("root", "expected"), GOLDEN.items())
def test_seeds_never_change_between_releases(root: int, expected: list[int]) -> None:
    """The permutation is part of the format: a change of it changes every published result."""
    assert seeds_of(root, [0, 1, 2, 1_000_000, MAX_EPISODES - 1]).tolist() == expected


# ------------------------------------------------------------------------------ the fingerprint


def test_the_fingerprint_never_changes_between_releases() -> None:
    """A log written by an earlier release can be resumed."""
    assert EpisodePlan(1_000, 42).fingerprint == "66de89a35c3b7f7c465ccf7265b1d6fc11dd2570f934aa57e457e052612d83e3"


def test_the_fingerprint_is_the_hash_of_the_seeds() -> None:
    """Anyone can recompute the fingerprint: SHA-256 of a tag and the seeds as little-endian int64."""
    plan = EpisodePlan(5, 3)
    expected = hashlib.sha256(b"rl_eval plan 1" + plan.seeds.astype("<i8").tobytes()).hexdigest()
    assert plan.fingerprint == expected


# ------------------------------------------------------------------------------ as a sequence


def test_a_plan_is_a_sequence_of_specs() -> None:
    """Its items are index and seed, in order, as plain ints."""
    plan = EpisodePlan(4, 8)
    specs = [plan[index] for index in range(len(plan))]
    assert specs == [EpisodeSpec(index, int(seed)) for index, seed in enumerate(plan.seeds)]
    assert all(type(value) is int for spec in specs for value in spec[:2])
    assert repr(plan) == "EpisodePlan(num_episodes=4, seed=8)"
    assert repr(EpisodePlan(4, 8, 2)) == "EpisodePlan(num_episodes=4, seed=8, first_index=2)"


def test_an_episode_outside_is_an_error() -> None:
    """A negative index is a bug, and counts from nowhere."""
    for index in (-1, 4, 10**12):
        with pytest.raises(IndexError):
            EpisodePlan(4)[index]


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("num_episodes", (0, 0)), ("num_episodes", (-1, 0)), ("num_episodes", (MAX_EPISODES + 1, 0)),
        ("seed", (3, -1)), ("seed", (3, 2**64)), ("first_index", (10, 0, -1)),
        ("first_index", (10, 0, MAX_EPISODES - 9)), ("first_index", (10, 0, 2**40)),
    ],
)  # fmt: skip
def test_a_plan_has_limits(key: str, wrong: tuple[int, ...]) -> None:
    """The error names the key and the value; the limits themselves are allowed, and no seed is computed for them."""
    with refused(ConfigError, f"evaluation.{key}", value=wrong[{"num_episodes": 0, "seed": 1}.get(key, 2)]):
        EpisodePlan(*wrong)
    assert "seeds" not in vars(EpisodePlan(MAX_EPISODES, 2**64 - 1))
    assert len(EpisodePlan(10, 0, MAX_EPISODES - 10).seeds) == 10

"""The randomness of a sampling policy belongs to its episode: to seed, step and element, and to nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_eval.policies import noise as noise_module
from rl_eval.policies.noise import EpisodeNoise

seed_values = st.one_of(st.sampled_from([0, 1, 2**31 - 1]), st.integers(0, 2**31 - 1))
step_values = st.one_of(st.sampled_from([0, 1, 2**40]), st.integers(0, 2**40))
lanes = st.lists(st.tuples(seed_values, step_values), min_size=1, max_size=20)


def noise_of(*pairs: tuple[int, int]) -> EpisodeNoise:
    seeds, steps = np.array(pairs, np.int64).T
    return EpisodeNoise(seeds, steps)


# ------------------------------------------------------------------------------ of what it is a function


@given(pairs=lanes, count=st.integers(1, 5))
@settings(deadline=None)
def test_a_lane_draws_the_same_numbers_alone_or_among_others(pairs: list[tuple[int, int]], count: int) -> None:
    """Position in the batch and neighbours do not matter, to the last bit."""
    for kind in ("uniform", "normal"):
        together = getattr(noise_of(*pairs), kind)(count)
        assert together.shape == (len(pairs), count)
        assert together.dtype == np.float64
        for row, pair in enumerate(pairs):
            alone = getattr(noise_of(pair), kind)(count)
            assert together[row].tobytes() == alone[0].tobytes()


@given(pairs=lanes, counts=st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(deadline=None)
def test_elements_are_counted_through_a_step(pairs: list[tuple[int, int]], counts: list[int]) -> None:
    """Several small draws of one step are one large draw: no element is used twice, none is skipped."""
    source = noise_of(*pairs)
    pieces = [source.uniform(count) for count in counts]
    assert (np.concatenate(pieces, axis=1) == noise_of(*pairs).uniform(sum(counts))).all()


def test_drawing_does_not_change_what_others_draw() -> None:
    """There is no generator behind it; a second source for the same step starts at its first element.

    The arrays that a source is made of are only read, and may change afterwards.
    """
    seeds, steps = np.array([5]), np.array([9])
    source = EpisodeNoise(seeds, steps)
    steps += 1
    seeds[:] = 3
    first = source.uniform(100)
    assert (first == noise_of((5, 9)).uniform(100)).all()
    assert not np.isin(source.uniform(100), first).any()


def test_no_two_of_seed_step_and_element_share_a_number() -> None:
    """Neighbouring seeds, steps and elements draw distinct numbers."""
    seeds, steps = np.meshgrid(np.arange(100), np.arange(100))
    drawn = EpisodeNoise(seeds.ravel(), steps.ravel()).uniform(30)
    assert len(np.unique(drawn)) == drawn.size


def test_normal_numbers_are_quantiles_of_the_uniform_ones() -> None:
    """Both kinds count the same elements, and each normal number comes from one uniform number."""
    pairs = [(seed, 3) for seed in range(50)]
    np.testing.assert_allclose(stats.norm.cdf(noise_of(*pairs).normal(4)), noise_of(*pairs).uniform(4), rtol=1e-12)


def test_the_stream_never_changes_between_releases() -> None:
    """The numbers are part of the format: other ones change every published sampled result."""
    drawn = noise_of((0, 0), (1, 0), (0, 1), (2**31 - 1, 10**6)).uniform(2)
    expected = [
        [0.9184459935678752, 0.4933315838039526],
        [0.5932293595727994, 0.2569473540889765],
        [0.6646348606834848, 0.3324082743494533],
        [0.8780863972467227, 0.3933752111235155],
    ]
    assert drawn.tolist() == expected


# ------------------------------------------------------------------------------ as good as random


def draws(varying: str, count: int = 50_000) -> npt.NDArray[np.float64]:
    """Return numbers along one of the three counters, the other two fixed."""
    numbers, zeros = np.arange(count), np.zeros(count, np.int64)
    if varying == "seed":
        return EpisodeNoise(numbers, zeros + 3).uniform(1)[:, 0]
    if varying == "step":
        return EpisodeNoise(zeros + 3, numbers).uniform(1)[:, 0]
    return noise_of((3, 3)).uniform(count)[0]


@pytest.mark.parametrize("varying", ["seed", "step", "element"])
def test_numbers_are_as_good_as_random_along_every_counter(varying: str) -> None:
    """They are uniform by Kolmogorov-Smirnov, and so are ten low bits by chi-square; neighbours are independent."""
    drawn = draws(varying)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-6
    low = (drawn * 2.0**43).astype(np.int64) & 1023  # The 34th to the 43rd.
    statistic = ((np.bincount(low, minlength=1024) - len(low) / 1024) ** 2 / (len(low) / 1024)).sum()
    assert abs(statistic - 1023) < 5 * np.sqrt(2 * 1023)
    for lag in (1, 2):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / np.sqrt(len(drawn))


def test_normal_numbers_are_standard_normal() -> None:
    """The Kolmogorov-Smirnov distance of 50000 fixed draws is that of a normal sample."""
    drawn = EpisodeNoise(np.arange(10_000), np.arange(10_000)).normal(5).ravel()
    assert stats.kstest(drawn, "norm").pvalue > 1e-6


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_even_the_extreme_draws_are_inside_the_open_interval(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever 64 bits come out, the uniform number is neither 0 nor 1, and the normal number is finite."""
    monkeypatch.setattr(noise_module, "mix", lambda z: np.full_like(z, bits))
    assert 0.0 < noise_of((1, 1)).uniform(1)[0, 0] < 1.0
    assert np.isfinite(noise_of((1, 1)).normal(1)).all()

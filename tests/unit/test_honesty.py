"""Failed episodes never mislead: when crashing depends on the outcome, the interval still covers the truth."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from rl_eval.results.stats import interval
from rl_eval.results.stats.interval import mean_interval
from rl_eval.scheduling.plan import EpisodePlan

sys.path.append(str(Path(__file__).parents[2]))  # The benchmarks are not part of the package.
from benchmarks import honesty

RUNS = 100
EPISODES = 100
SLACK = 5 * (0.05 * 0.95 / RUNS) ** 0.5
"""Five standard errors of a coverage of 95 %."""


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage needs many intervals, each of which may be coarse."""
    monkeypatch.setattr(interval, "_RESAMPLES", 999)


def worlds(*links: str) -> list[honesty.World]:
    """Worlds by their link, without the costs, which mirror another distribution."""
    wanted = (world for world in honesty.WORLDS if "costs" not in world.name)
    return [world for world in wanted if any(link in world.link for link in links)]


def name(world: honesty.World) -> str:
    return f"{world.name}: {world.link}"


@pytest.mark.parametrize("world", worlds("90 %", "1 %"), ids=name)
def test_the_interval_covers_the_truth_and_that_of_the_survivors_does_not(world: honesty.World) -> None:
    """Where many episodes fail because of their outcome, ours covers in 95 % of runs; dropping them would not."""
    ours = survivors = 0
    for seed in range(RUNS):
        result = honesty.simulated(world, EpisodePlan(EPISODES, seed))
        ours += world.truth in result.interval
        survivors += world.truth in mean_interval(result.counted_rows["episode_return"])
    assert ours / RUNS >= 0.95 - SLACK
    assert survivors / RUNS < 0.95 - SLACK


@pytest.mark.parametrize("world", worlds("40 %", "0.2 %"), ids=name)
def test_few_failures_cost_little_and_hide_nothing(world: honesty.World) -> None:
    """Where few episodes fail, the mean that is reported lies between the bounds, and the truth in the interval."""
    covered = 0
    for seed in range(RUNS):
        result = honesty.simulated(world, EpisodePlan(EPISODES, seed))
        worst, best = result.mean_return_bounds
        returns, _ = world.episodes(result.plan.seeds)
        assert worst - 1e-9 <= returns.mean() <= best + 1e-9
        covered += world.truth in result.interval
    assert covered / RUNS >= 0.95 - SLACK


@pytest.mark.parametrize("world", honesty.WORLDS, ids=name)
def test_a_real_evaluation_gives_the_simulated_table(world: honesty.World) -> None:
    """Outcomes, attempts and interval of an evaluation are those that the simulation says, bit for bit."""
    plan = EpisodePlan(30, 11)
    simulated, real = honesty.simulated(world, plan), honesty.evaluated(world, plan)
    assert real.fingerprint == simulated.fingerprint
    assert real.table.rows["attempts"].tolist() == simulated.table.rows["attempts"].tolist()
    assert real.interval == simulated.interval
    assert real.status == simulated.status


@pytest.mark.parametrize("world", worlds("the better, the likelier, to 90 %"), ids=name)
def test_rerolling_has_the_bias_that_theory_says(world: honesty.World) -> None:
    """A seed survives a re-roll with the probability that its attempt does: the mean is the weighted one."""
    u = (np.arange(200_000) + 0.5) / 200_000
    returns, lengths = world.outcome(u)
    low, high = world.bounds
    weights = 1.0 - world.crash((returns - low) / (high - low), lengths)
    expected = float((returns * weights).sum() / weights.sum())
    means = [honesty.rerolled(world, EpisodePlan(EPISODES, seed)).mean() for seed in range(RUNS)]
    error = float(np.std(means)) / RUNS**0.5
    assert abs(np.mean(means) - expected) < 5 * error
    assert abs(expected - world.truth) > 10 * error

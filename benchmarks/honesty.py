"""Whether the interval covers the truth when failing depends on the outcome, beside the usual ways out.

A *world* is a distribution of outcomes, whose mean is known, and a probability that an attempt crashes,
which depends on the outcome. Outcomes are a function of an episode's seed and crashes of (seed, attempt),
so a whole run is a few array operations; a part of the runs is also made by ``rl_eval.evaluate`` with a
real environment, and must give the same table. What is judged is ``EvalResult.interval`` itself; beside
it stand the means and intervals of evaluators that drop failed episodes, score them 0, or re-roll crashed ones.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from benchmarks.runner import Row
from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.records.episode import ROW, EpisodeTable, Outcome
from rl_eval.results.result import Timing
from rl_eval.results.stats.interval import mean_interval
from rl_eval.scheduling.plan import EpisodePlan, episode_seeds

__all__ = ["ATTEMPTS", "WORLDS", "World", "evaluated", "measure", "rerolled", "simulated"]

Floats = npt.NDArray[np.float64]
Seeds = npt.NDArray[np.int64]
Link = Callable[["Floats", Seeds], "Floats"]

ATTEMPTS: Final = 3
"""Attempts of one episode; after the last it has failed."""

_SHORT, _LONG = 5, 200
_NO_TIME: Final = Timing(0.0, 0, 0.0, 0.0, 0.0, 0)


class Crash(RuntimeError):
    """What the environment raises."""


@dataclass(frozen=True, slots=True)
class World:
    """Outcomes with a known mean, and how likely an attempt crashes given its outcome."""

    name: str
    link: str
    """In words, which episodes crash."""
    truth: float
    """Mean return over all seeds."""
    bounds: tuple[float, float]
    outcome: Callable[[Floats], tuple[Floats, Seeds]]
    """Uniform numbers to returns and lengths."""
    crash: Link
    """Quality (0 at the worst bound, 1 at the best) and length to the probability that an attempt crashes."""

    def episodes(self, seeds: Seeds) -> tuple[Floats, Seeds]:
        """Return and length of the episodes with these seeds, if they complete; both of shape (n,)."""
        return self.outcome(_uniform(seeds, 0))

    def crashes(self, seeds: Seeds, attempt: int) -> npt.NDArray[np.bool_]:
        """Which of these episodes crash in this attempt, shape (n,)."""
        returns, lengths = self.episodes(seeds)
        low, high = self.bounds
        return _uniform(seeds, attempt) < self.crash((returns - low) / (high - low), lengths)


def _uniform(seeds: Seeds, stream: int) -> Floats:
    """Number in [0, 1) of each seed in a stream, by SplitMix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        z = (seeds.astype(np.uint64) + np.uint64(stream << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53, np.float64)


# ---------------------------------------------------------------------- worlds


def _one_step(returns: Floats) -> tuple[Floats, Seeds]:
    return returns, np.ones(len(returns), np.int64)


def _binary(u: Floats) -> tuple[Floats, Seeds]:
    return _one_step((u < 0.7).astype(np.float64))


def _skewed(u: Floats) -> tuple[Floats, Seeds]:
    return _one_step(100.0 * (u * u) * (u * u))


def _costs(u: Floats) -> tuple[Floats, Seeds]:
    return _one_step(-100.0 * (u * u) * (u * u))


def _two_length(u: Floats) -> tuple[Floats, Seeds]:
    long = u < 0.5
    return long.astype(np.float64), np.where(long, _LONG, _SHORT)


def _linear(at_worst: float, at_best: float, quality: Floats, lengths: Seeds) -> Floats:
    return at_worst + (at_best - at_worst) * quality


def _per_step(rate: float, quality: Floats, lengths: Seeds) -> Floats:
    survive = {steps: (1.0 - rate) ** steps for steps in (_SHORT, _LONG)}
    return 1.0 - np.where(lengths == _LONG, survive[_LONG], survive[_SHORT])


_DISTRIBUTIONS: Final = (
    ("0 or 1", 0.7, (0.0, 1.0), _binary),
    ("skewed, 0 to 100", 20.0, (0.0, 100.0), _skewed),
    ("skewed costs, -100 to 0", -20.0, (-100.0, 0.0), _costs),
)
_LINKS: Final = (
    ("none crash", functools.partial(_linear, 0.0, 0.0)),
    ("the better, the likelier, to 40 %", functools.partial(_linear, 0.0, 0.4)),
    ("the better, the likelier, to 90 %", functools.partial(_linear, 0.0, 0.9)),
    ("the worse, the likelier, to 90 %", functools.partial(_linear, 0.9, 0.0)),
)
_LENGTH_LINKS: Final = (
    ("0.2 % of steps", functools.partial(_per_step, 0.002)),
    ("1 % of steps", functools.partial(_per_step, 0.01)),
)


def _worlds() -> Iterator[World]:
    for name, truth, bounds, outcome in _DISTRIBUTIONS:
        for link, crash in _LINKS:
            yield World(name, link, truth, bounds, outcome, crash)
    for link, crash in _LENGTH_LINKS:
        yield World("5 steps worth 0, or 200 worth 1", link, 0.5, (0.0, 1.0), _two_length, crash)


WORLDS: Final = tuple(_worlds())


# ---------------------------------------------------------------------- runs


def simulated(world: World, plan: EpisodePlan) -> EvalResult:
    """What an evaluation of this plan reports: the table that ``evaluate`` would fill, and its real result."""
    seeds = plan.seeds
    crashes = np.stack([world.crashes(seeds, attempt) for attempt in range(1, ATTEMPTS + 1)])
    failed = crashes.all(axis=0)
    returns, lengths = world.episodes(seeds)
    rows = np.zeros(len(plan), ROW)
    rows["index"], rows["seed"] = np.arange(len(plan)), seeds
    rows["episode_return"] = rows["discounted_return"] = np.where(failed, np.nan, returns)
    rows["length"], rows["terminated"] = np.where(failed, 0, lengths), ~failed
    rows["success_once"] = rows["success_at_end"] = -1
    rows["outcome"] = np.where(failed, Outcome.FAILED, Outcome.COMPLETED)
    rows["attempts"] = np.where(failed, ATTEMPTS, crashes.argmin(axis=0) + 1)
    table = EpisodeTable(len(plan))
    table.fill(rows)
    return EvalResult(
        table=table,
        plan=plan,
        status="partial" if failed.any() else "complete",
        reason="episodes failed" if failed.any() else "",
        timing=_NO_TIME,
        provenance={},
        return_bounds=world.bounds,
    )


def rerolled(world: World, plan: EpisodePlan) -> Floats:
    """Returns of an evaluator that answers each crash with an episode of another seed, shape (num_episodes,)."""
    found = np.full(len(plan), np.nan)
    left, offset = np.arange(len(plan)), 0
    while left.size:
        seeds = episode_seeds(plan.seed, left + offset)
        done = ~world.crashes(seeds, 1)
        found[left[done]] = world.episodes(seeds)[0][done]
        left, offset = left[~done], offset + len(plan)
    return found


class WorldEnv(gym.Env[npt.NDArray[np.float32], np.int64]):
    """A world as an environment: an attempt that crashes does so in its last step."""

    def __init__(self, world: World) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._world = world
        self._attempt = self._steps = 0
        self._seeds = np.zeros(1, np.int64)

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Take note of the attempt."""
        self._attempt = attempt

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        assert seed is not None
        self._seeds[0], self._steps = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        returns, lengths = self._world.episodes(self._seeds)
        self._steps += 1
        done = self._steps >= int(lengths[0])
        if done and self._world.crashes(self._seeds, self._attempt)[0]:
            raise Crash("the simulator went down")
        return np.zeros(1, np.float32), float(returns[0]) * done, done, False, {}


def evaluated(world: World, plan: EpisodePlan) -> EvalResult:
    """The same run, made by rl_eval in this process."""
    config = (
        EvalConfig()
        .environment(functools.partial(_world_env, world))
        .runners(num_runners=0, num_envs_per_runner=4)
        .evaluation(num_episodes=len(plan), seed=plan.seed, return_bounds=world.bounds)
        .fault_tolerance(max_attempts_per_episode=ATTEMPTS)
    )
    return evaluate(config, policy=_idle)


def _world_env(world: World, context: Any) -> WorldEnv:
    return WorldEnv(world)


def _idle(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.zeros(len(observations), np.int64)


# ---------------------------------------------------------------------- measuring


def measure(runs: int, real_runs: int, num_episodes: int, progress: Callable[[str], None]) -> list[Row]:
    """One row per world, over ``runs`` simulated evaluations; the first ``real_runs`` are made for real too."""
    workers = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(_row, number, runs, real_runs, num_episodes) for number in range(len(WORLDS))]
        rows = []
        for future, world in zip(futures, WORLDS, strict=True):
            rows.append(future.result())
            progress(f"{world.name}: {world.link}")
    return rows


def _row(number: int, runs: int, real_runs: int, num_episodes: int) -> Row:
    world = WORLDS[number]
    pairs = [_run(world, EpisodePlan(num_episodes, seed), seed < real_runs) for seed in range(runs)]
    reported, ways = [first for first, _ in pairs], [second for _, second in pairs]
    return {
        "label": world.name,
        "link": world.link,
        "status": "ok",
        "truth": world.truth,
        "runs": runs,
        "failed_share": float(np.mean([run["failed"] for run in reported])),
        "coverage": float(np.mean([run["covered"] for run in reported])),
        "width": float(np.nanmean([run["width"] for run in reported])),
        "real_runs": min(real_runs, runs),
        "real_runs_equal": sum(run["real_equal"] for run in reported),
        "ways": {
            way: {
                "bias": float(np.mean([run[way][0] for run in ways])) - world.truth,
                "coverage": float(np.mean([run[way][1] for run in ways])),
            }
            for way in ways[0]
        },
    }


def _run(world: World, plan: EpisodePlan, real: bool) -> tuple[dict[str, float], dict[str, tuple[float, bool]]]:
    """What rl_eval reports for one run, and what each other way of treating failed episodes would."""
    result = simulated(world, plan)
    interval = result.interval
    completed = result.counted_rows["episode_return"]
    reported = {
        "failed": result.num_failed / len(plan),
        "covered": world.truth in interval,
        "width": interval.high - interval.low,
        "real_equal": real and _same(result, evaluated(world, plan)),
    }
    samples = {
        "dropped": completed,
        "scored 0": np.append(completed, np.zeros(result.num_failed)),
        "re-rolled": rerolled(world, plan),
    }
    ways = {way: (float(sample.mean()), world.truth in mean_interval(sample)) for way, sample in samples.items()}
    return reported, ways


def _same(ours: EvalResult, theirs: EvalResult) -> bool:
    """Whether two results agree in outcomes, attempts and interval."""
    attempts = np.array_equal(ours.table.rows["attempts"], theirs.table.rows["attempts"])
    intervals = ours.interval.to_dict(), theirs.interval.to_dict()
    return bool(ours.fingerprint == theirs.fingerprint and attempts and repr(intervals[0]) == repr(intervals[1]))

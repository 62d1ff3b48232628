"""Numbers that are computed from a table of records: the episodes that count, the metrics, and notes on them.

If a run finished its plan, its numbers are computed from all completed episodes. If a run was stopped early, its
numbers are computed from the completed episodes that come before the first unfinished episode in the plan. Short
episodes finish first, so a mean over all finished episodes would be biased. Failed episodes are always reported. They
widen the interval if the return bounds are known; otherwise, there is no interval. Metrics have RLlib's names if RLlib
has the same metric, so that dashboards and stopping rules for RLlib work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rl_eval.records.agents import agent_columns, agent_rows, agents_in
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import EpisodeTable, Outcome, RuleEnd
from rl_eval.results.observations import Groups, observed, rows_of, values_of
from rl_eval.results.stats.aggregate import Aggregates, aggregate, exact_mean
from rl_eval.results.stats.interval import (
    Bounds,
    Interval,
    mean_interval,
    no_interval,
    outside,
    success_interval,
    wrong_bounds,
)
from rl_eval.results.stats.rows import Rows
from rl_eval.results.text import counted

_OUTCOMES: Final = {"win": 1, "draw": 0, "loss": -1}
_SHORT: Final = {"minimum": "min", "maximum": "max"}
_TIMES: Final = ("wall_seconds", "reset_seconds", "step_seconds", "inference_seconds")
_BUSY: Final = 0.95
"""Fraction of the time with a row at the server from which the server is the limit."""
_ROUNDING: Final = 1e-9
"""Largest sum of returns, relative to the largest return, that counts as 0."""
_OF_PREFIX: Final = "too few long episodes, because the run was stopped early"
"""Note for an interval of a run that was stopped early. The prefix ends before the first unfinished episode, which is
rather a long one."""

_OF_RULE: Final = "a rule chose the number of episodes, which the interval does not take into account"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one evaluation took, by activity, and its numbers of steps and runners."""

    wall_seconds: float
    """Seconds from the first lease to the last record, by the clock of the calling process."""
    env_steps: Annotated[int, Field(ge=0, lt=2**63)]
    """Number of environment steps, including those of failed attempts."""
    reset_seconds: float
    """Seconds in ``env.reset``, summed over runners. The next two fields are sums over runners, too."""
    step_seconds: float
    inference_seconds: float
    num_runners: Annotated[int, Field(ge=0, lt=2**31)]
    """Number of runner processes; 0 if the caller's process ran the episodes."""
    answer_seconds: float = 0.0
    """Seconds for which rows waited for late answers; 0 with ``policy.chunk``."""

    @classmethod
    def of_totals(cls, totals: Mapping[str, float], num_runners: int) -> Timing:
        """Create a timing from sums by field name. Missing sums are 0."""
        times = {name: totals.get(name, 0.0) for name in (*_TIMES, "answer_seconds")}
        return cls(env_steps=int(totals.get("env_steps", 0)), num_runners=num_runners, **times)

    @property
    def waiting(self) -> str:
        """Sentence about who waits for whom, the simulators or the server of the policy; empty if it is unknown."""
        slots_s = self.step_seconds + self.inference_seconds + self.reset_seconds
        if not (self.answer_seconds > 0 and self.wall_seconds > 0):
            return ""
        rate, busy = (
            self.env_steps / self.wall_seconds,
            self.answer_seconds / self.wall_seconds / max(1, self.num_runners),
        )
        if busy >= _BUSY:
            share = self.inference_seconds / slots_s
            return f"simulators wait {share:.0%} of their time for the server, which answers {rate:,.0f} rows/s"
        more = math.ceil(slots_s / self.wall_seconds * (1 / busy - 1))
        # The slots of a runner in one process take turns, so more of them would not ask more.
        what = "slot" if slots_s > self.wall_seconds * max(1, self.num_runners) else "runner"
        idle = f"the server waits {1 - busy:.0%} of the time for simulators"
        return f"{idle}, which ask {rate:,.0f} rows/s: add {counted(more, what)}"

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the runners' time by activity. Their sum is 1. Empty if no time was measured."""
        spent = {"step": self.step_seconds, "inference": self.inference_seconds, "reset": self.reset_seconds}
        total = max(self.wall_seconds * max(1, self.num_runners), sum(spent.values()))
        if not total > 0:
            return {}
        return {**{name: value / total for name, value in spent.items()}, "other": 1 - sum(spent.values()) / total}


@dataclass(eq=False, repr=False)
class Numbers:
    """Numbers of one evaluation. Each number is computed once, from the table and a few settings.

    Args:
        table: The records and faults of the evaluation.
        timing: Seconds by activity, and numbers of steps and runners.
        provenance: Names and versions of the policies, and notes.
        confidence: Nominal coverage of every interval.
        return_bounds: Lowest and highest possible return, if known.
        audit_mismatches: Indices of episodes that ran twice with different outcomes.
        determinism: Outcome of the determinism check.
        ended_by: End of the evaluation by a rule; None if it ran its whole plan, or was stopped early.
    """

    table: EpisodeTable
    timing: Timing
    provenance: dict[str, Any]
    confidence: float
    return_bounds: Bounds | None
    audit_mismatches: tuple[int, ...]
    determinism: Determinism
    ended_by: RuleEnd | None

    # Episodes of the numbers

    @property
    def seed_groups(self) -> Groups:
        """Number of the seed of each episode; None if no episodes share a seed."""
        return None

    @property
    def condition_rows(self) -> Rows | None:
        """Row of initial conditions of each episode, and the target of intervals; None without conditions."""
        return None

    @property
    def stopped_early(self) -> bool:
        """Whether some episodes have no record: of the plan, or of its part before the end by a rule."""
        return self.table.prefix() < (len(self.table) if self.ended_by is None else self.ended_by.after)

    @cached_property
    def scope(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows in scope of the numbers, shape (num_episodes,).

        If the run was stopped early, only the finished prefix of the plan is in scope. Otherwise, all rows are in
        scope.
        """
        return np.arange(len(self.table)) < self.table.prefix()

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows from which the numbers are computed: completed episodes in scope."""
        return self.scope & self.table.completed

    @cached_property
    def counted_rows(self) -> npt.NDArray[np.void]:
        """The rows from which the numbers are computed, as an array of ``ROW``."""
        return np.asarray(self.table.rows[self.counted])

    @cached_property
    def agents(self) -> npt.NDArray[np.void]:
        """One row per completed episode and agent that appeared in it; empty if episodes have a single agent.

        A structured array with the fields ``index``, ``seat``, ``agent``, ``policy``, ``weights_version``
        (of that policy), ``return``, ``length`` (actions of the agent), ``terminated``, ``truncated`` and ``outcome``:
        1 for a win, 0 for a draw, -1 for a loss, by the returns of the episode.
        """
        table, names = self.table, policy_names(self.provenance)
        rows, infos = table.rows["index"][table.completed], table.infos[table.completed]
        return agent_rows(rows, infos, table.info_keys, names, policy_versions(self.provenance))

    @property
    def counted_agents(self) -> npt.NDArray[np.void]:
        """The rows of :attr:`agents` that belong to counted episodes."""
        return self.agents[np.isin(self.agents["index"], self.counted_rows["index"])]

    @cached_property
    def is_zero_sum(self) -> bool:
        """Whether several agents have returns, and they sum to 0 in every counted episode."""
        if not agents_in(self.table.info_keys):
            return False
        largest = np.abs(self.counted_agents["return"]).max(initial=0.0)
        sums = np.abs(self.counted_rows["episode_return"]).max(initial=0.0)
        return bool(0 < largest < math.inf and sums <= _ROUNDING * largest)

    def win_interval(self, agents: npt.NDArray[np.void]) -> Interval:
        """Return an interval for the fraction of wins among some rows of :attr:`counted_agents`.

        All rows of an episode, or of episodes that share a seed, are one observation. A failed episode may have been a
        win or not.
        """
        groups = self.seed_groups
        counted, scope = observed(self.counted, groups), observed(self.scope, groups)
        units = agents["index"] if groups is None else groups[agents["index"]]
        wins, rows = (np.bincount(units, weights, len(counted)) for weights in (agents["outcome"] == 1, None))
        known = counted & (rows > 0)
        missing = int((scope & ~counted).sum())
        return mean_interval(wins[known] / rows[known], self.confidence, num_missing=missing, bounds=(0.0, 1.0))

    # Numbers

    @cached_property
    def aggregates(self) -> Aggregates:
        """Numbers that describe the returns of the counted episodes."""
        return aggregate(self.counted_rows["episode_return"])

    @property
    def mean_return(self) -> float:
        """Mean return of the counted episodes; NaN if there are none."""
        return self.aggregates.mean

    @cached_property
    def interval(self) -> Interval:
        """Interval for the mean return. Episodes that share a seed are one observation."""
        groups, bounds = self.seed_groups, self.return_bounds
        if bounds and (why := wrong_bounds(self.counted_rows["episode_return"], bounds)):
            return no_interval(self.confidence, why)
        counted = observed(self.counted, groups)
        missing = observed(self.scope, groups) & ~counted
        returns = values_of(self.table.rows["episode_return"], counted, groups)
        rows, count = rows_of(self.condition_rows, counted, missing), int(missing.sum())
        found = mean_interval(returns, self.confidence, num_missing=count, bounds=bounds, rows=rows, of="returns")
        return self._noted(found)

    def _noted(self, interval: Interval) -> Interval:
        """Return an interval with a note if the run was stopped early, or if a rule ended it."""
        noted = interval.noted(_OF_PREFIX) if self.stopped_early else interval
        return noted if self.ended_by is None else noted.noted(_OF_RULE)

    def returns_by(self, column: Literal["policy", "agent"]) -> dict[str, tuple[float, Interval]]:
        """Return the mean return and its interval, by policy or by agent.

        The value of an episode is the mean over its agents with this policy, as in ``policy_per_capita_return_mean``.
        """
        rows, size, groups = self.counted_agents, len(self.table), self.seed_groups
        found = {}
        for name in np.unique(rows[column]).tolist():
            own = rows[rows[column] == name]
            counts = np.bincount(own["index"], minlength=size)
            means = np.bincount(own["index"], own["return"], size) / np.maximum(counts, 1)
            values = values_of(means, observed(counts > 0, groups), groups)
            interval = mean_interval(values, self.confidence, num_missing=self.num_missing)
            found[name] = exact_mean(means[counts > 0]), self._noted(interval)
        return found

    @cached_property
    def mean_return_bounds(self) -> tuple[float, float] | None:
        """Mean return if all failed episodes in scope had the lowest, or highest, possible return; None if unknown."""
        if not self.num_missing:
            return self.aggregates.mean, self.aggregates.mean
        if self.return_bounds is None or self.num_outside_bounds or not self.counted.any():
            return None
        worst, best = (
            exact_mean(np.append(self.counted_rows["episode_return"], [bound] * self.num_missing))
            for bound in self.return_bounds
        )
        return worst, best

    @property
    def success_rate(self) -> float | None:
        """Fraction of counted episodes that were successful at their end; None if no episode reports success."""
        successes, reporting = success_counts(self.counted_rows["success_at_end"])
        return successes / len(self.counted_rows) if reporting else None

    @cached_property
    def success_interval(self) -> Interval | None:
        """Interval for the success rate. Episodes that failed, or did not report success, are treated as unknown."""
        successes, reporting = success_counts(self.counted_rows["success_at_end"])
        if not reporting:
            return None
        if self.seed_groups is not None:
            return no_interval(self.confidence, "episodes share seeds, so their successes are not independent")
        unknown = int(self.scope.sum()) - reporting
        if self.condition_rows is not None and self.condition_rows.target == "population":
            column = self.table.rows["success_at_end"]
            known = self.counted & (column >= 0)
            rows = rows_of(self.condition_rows, known, self.scope & ~known)
            values = np.asarray(column[known] > 0, np.float64)
            found = mean_interval(values, self.confidence, num_missing=unknown, bounds=(0.0, 1.0), rows=rows)
            return self._noted(found)
        return self._noted(success_interval(successes, reporting, self.confidence, num_unknown=unknown))

    @property
    def num_missing(self) -> int:
        """Number of episodes in scope that have no return because they failed."""
        return int(self.scope.sum() - self.counted.sum())

    @property
    def num_outside_bounds(self) -> int:
        """Number of counted episodes whose return is outside of ``return_bounds``."""
        if self.return_bounds is None:
            return 0
        return int(outside(self.counted_rows["episode_return"], self.return_bounds).sum())

    @property
    def num_failed(self) -> int:
        """Number of episodes that failed in all attempts, in scope or not."""
        return int((self.table.rows["outcome"] == Outcome.FAILED).sum())

    @property
    def num_retried(self) -> int:
        """Number of episodes with more than one attempt, including failed episodes."""
        return int((self.table.rows["attempts"][self.table.filled] > 1).sum())

    @cached_property
    def metrics(self) -> dict[str, float]:
        """All metrics by name. All keys are always present; undefined values are NaN."""
        numbers = {**_return_metrics(self), **_episode_metrics(self.counted_rows), **_run_metrics(self)}
        return {**numbers, **_by_info(self), **_by_agent(self)}

    @property
    def notes(self) -> list[str]:
        """Notes that limit the use of the numbers; empty for an ordinary result."""
        return [*scope_notes(self), *value_notes(self), *determinism_notes(self)]


def success_counts(column: npt.NDArray[np.int8]) -> tuple[int, int]:
    """Return the number of successful episodes, and the number of episodes that report success."""
    return int((column > 0).sum()), int((column >= 0).sum())


def episode_seconds(rows: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Return the seconds of each episode, as the sum over reset, step and inference, shape (n,)."""
    spent = [rows[f"{name}_seconds"].astype(np.float64) for name in ("reset", "step", "inference")]
    return np.asarray(spent[0] + spent[1] + spent[2])


def policy_names(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the policies of an evaluation, in the order of their numbers in records."""
    found = _mapping(provenance, "config", "policy", "policies")
    return tuple(sorted(map(str, found))) if found else ("default_policy",)


def policy_versions(provenance: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the weights version of each policy of an evaluation, in the order of :func:`policy_names`."""
    versions = _mapping(provenance, "weights", "versions")
    numbers = (versions.get(name, 0) for name in policy_names(provenance))
    return tuple(number if isinstance(number, int) and abs(number) < 2**63 else 0 for number in numbers)


def _mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys in nested mappings; an empty mapping if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


# Notes


def scope_notes(numbers: Numbers) -> Iterator[str]:
    """Yield the notes on the episodes from which the numbers are computed."""
    scope, counted = int(numbers.scope.sum()), numbers.aggregates.count
    finished = int(numbers.table.filled.sum())
    if numbers.stopped_early:
        why = "episodes are set aside" if numbers.table.set_aside.any() else "stopped early"
        yield (
            f"{why}: the numbers are those of episodes 0 to {scope - 1} of {len(numbers.table)} planned; long "
            "episodes are less likely to be among them, so a return that grows with the length is too low"
            if scope
            else f"{why}, and episode 0 has no record: there are no numbers"
        )
        if finished > scope:
            yield f"finished episodes, not counted because an earlier episode has no record: {finished - scope}"
    if numbers.ended_by is not None:
        yield str(numbers.ended_by)
    if scope and not counted:
        yield "no episode completed: there are no numbers"


def value_notes(numbers: Numbers) -> Iterator[str]:
    """Yield all notes on the numbers, except those on their scope and on determinism."""
    if numbers.num_outside_bounds:
        returns = numbers.counted_rows["episode_return"]
        seen = f"the returns are {returns.min():g} to {returns.max():g}"
        yield f"returns outside return_bounds {numbers.return_bounds}: {numbers.num_outside_bounds} ({seen})"
    if numbers.is_zero_sum:
        yield "zero-sum game: the returns of the agents sum to 0 in every episode"
    _, reporting = success_counts(numbers.counted_rows["success_at_end"])
    silent = len(numbers.counted_rows) - reporting
    if reporting and silent:
        yield f"episodes that completed without reporting success, counted as not successful: {silent}"
    table, agents = numbers.table, agents_in(numbers.table.info_keys)
    reported = ~np.isnan(table.infos[table.completed])
    for key, column in zip(table.info_keys, reported.T, strict=True):
        agent = key.removeprefix("return/")
        if not len(column) or column.any():
            continue
        if agent in agents:
            yield f"agent {agent!r} appeared in no completed episode"
        elif key not in agent_columns(agents):
            yield f"no completed episode has a number for {key!r}: evaluation.info_keys may be misspelt"
    told = numbers.provenance.get("notes")
    yield from map(str, told if isinstance(told, list) else ())


def determinism_notes(numbers: Numbers) -> Iterator[str]:
    """Yield the notes on episodes that differ when they run again."""
    if mismatches := numbers.audit_mismatches:
        shown = ", ".join(map(str, mismatches[:5])) + (", ..." if len(mismatches) > 5 else "")
        yield f"not deterministic: two runs of the same episode differ, for episodes {shown}"
    if numbers.determinism.passed is False:
        advice = f"; {numbers.determinism.advice}" if numbers.determinism.advice else ""
        yield f"{numbers.determinism}, so another run may have other numbers{advice}"


# Metrics by name


def _return_metrics(numbers: Numbers) -> dict[str, float]:
    named = {_SHORT.get(name, name): value for name, value in asdict(numbers.aggregates).items() if name != "count"}
    return {f"episode_return_{name}": value for name, value in named.items()} | {
        "episode_return_ci_low": numbers.interval.low,
        "episode_return_ci_high": numbers.interval.high,
        "discounted_return_mean": exact_mean(numbers.counted_rows["discounted_return"]),
    }


def _episode_metrics(rows: npt.NDArray[np.void]) -> dict[str, float]:
    lengths = aggregate(rows["length"])
    successes_once, reporting = success_counts(rows["success_once"])
    return {
        "episode_len_mean": lengths.mean,
        "episode_len_min": lengths.minimum,
        "episode_len_max": lengths.maximum,
        "episode_duration_sec_mean": exact_mean(episode_seconds(rows)),
        "terminated_rate": exact_mean(rows["terminated"]),
        "truncated_rate": exact_mean(rows["truncated"]),
        "success_once_rate": successes_once / len(rows) if reporting else math.nan,
        "num_episodes": len(rows),
        "weights_version": int(rows["weights_version"][0]) if len(rows) else math.nan,
    }


def _run_metrics(numbers: Numbers) -> dict[str, float]:
    timing, rate, interval = numbers.timing, numbers.success_rate, numbers.success_interval
    return {
        "success_rate": math.nan if rate is None else rate,
        "success_ci_low": interval.low if interval else math.nan,
        "success_ci_high": interval.high if interval else math.nan,
        "num_failed_episodes": numbers.num_failed,
        "num_retried_episodes": numbers.num_retried,
        "num_faults": sum(map(len, numbers.table.faults.values())),
        "num_determinism_checked": numbers.determinism.checked,
        "num_determinism_mismatched": len(numbers.determinism.mismatched) + len(numbers.determinism.failed),
        "num_env_steps_sampled": timing.env_steps,
        "env_steps_per_second": timing.env_steps / timing.wall_seconds if timing.wall_seconds > 0 else math.nan,
        **{name: getattr(timing, name) for name in _TIMES},
    }


def _by_info(numbers: Numbers) -> dict[str, float]:
    """Return the mean of each ``info`` scalar and metric over the counted episodes that have a value."""
    table, by_agent = numbers.table, agent_columns(agents_in(numbers.table.info_keys))
    named = {}
    for key, column in zip(table.info_keys, table.infos[numbers.counted].T, strict=True):
        if key not in by_agent:
            named[f"info_mean/{key}"] = exact_mean(column[~np.isnan(column)])
    return named


def _by_agent(numbers: Numbers) -> dict[str, float]:
    """Return the numbers by agent and by policy; empty for episodes of a single agent."""
    agents, rows = agents_in(numbers.table.info_keys), numbers.counted_agents
    named = {}
    for seat, agent in enumerate(agents):
        own = rows[rows["seat"] == seat]
        named[f"agent_episode_returns_mean/{agent}"] = exact_mean(own["return"])
        named[f"agent_episode_len_mean/{agent}"] = exact_mean(own["length"])
    for policy in policy_names(numbers.provenance) if agents else ():
        own = rows[rows["policy"] == policy]
        wins = numbers.win_interval(own)
        ends = {"win_rate_ci_low": wins.low, "win_rate_ci_high": wins.high}
        named |= {f"{name}/{policy}": value for name, value in (_of_policy(own) | ends).items()}
    return named


def _of_policy(own: npt.NDArray[np.void]) -> dict[str, float]:
    mean = exact_mean(own["return"])
    _, episode, counts = np.unique(own["index"], return_inverse=True, return_counts=True)
    sums = np.bincount(episode, own["return"], len(counts))
    return {
        # RLlib's two spellings, of its new and its old API: the mean over episodes and agents.
        "module_episode_returns_mean": mean,
        "policy_reward_mean": mean,
        "policy_team_return_mean": exact_mean(sums),
        "policy_per_capita_return_mean": exact_mean(sums / counts),
        "policy_episode_len_mean": exact_mean(own["length"]),
        "policy_terminated_rate": exact_mean(own["terminated"]),
        "policy_truncated_rate": exact_mean(own["truncated"]),
        **{f"{name}_rate": exact_mean(own["outcome"] == value) for name, value in _OUTCOMES.items()},
    }

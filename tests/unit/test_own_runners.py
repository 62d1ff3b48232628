"""Two runners written against the public contract alone: a simulator that steps 64 slots at once, and two agents.

Neither derives from ``EvalRunner``, and the loop, the schedule, the log and the backends know nothing of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, VectorEvalRunner, evaluate
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.records.episode import PROGRESS, ROW, EpisodeSpec, EpisodeTable, Fault, Lease, Outcome, RunReport
from rl_eval.runners import Runner, RunnerFacts
from rl_eval.weights import WeightsSnapshot
from tests.refused import refused


class Slots:
    """What both have in common: slots that hold a lease each, in arrays."""

    facts: ClassVar[RunnerFacts] = RunnerFacts(default_lanes=64, conditions=False)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        self.count, self.runner_index = self.facts.lanes(settings), runner_index
        self.width = len(self.columns(settings))
        self.queue: deque[Lease] = deque()
        self.leases: list[Lease | None] = [None] * self.count
        self.seeds = np.zeros(self.count, np.int64)
        self.steps = np.zeros(self.count, np.int64)
        self.returns = np.zeros((self.count, max(1, self.width)))
        self.episodes = 0

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        return ()

    @property
    def weights_version(self) -> int:
        return 0

    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        raise WeightsError("this policy has no weights")

    def apply(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def metrics(self) -> dict[str, float]:
        return {"episodes": self.episodes}

    def stop(self) -> None:
        """Nothing is open."""

    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        returned, rows, total = self.drop() if abort else [], [], 0
        self.queue.extend(leases)
        returned += [lease.index for lease in self.queue if lease.index in set(reclaim)]
        self.queue = deque(lease for lease in self.queue if lease.index not in set(reclaim))
        faults: list[Fault] = []
        while self.fill() and not (total and perf_counter() > deadline):
            live = np.array([lease is not None for lease in self.leases])
            try:
                ended = self.step(live)
            except ArithmeticError as error:
                faults = self.drop_live(error)
                break
            total += int(live.sum())
            rows += [self.finish(slot) for slot in np.flatnonzero(ended & live)]
        self.episodes += len(rows)
        infos = np.array([info for _, info in rows]).reshape(len(rows), self.width)
        return RunReport(
            rows=np.array([row for row, _ in rows], ROW),
            infos=infos,
            faults=tuple(faults),
            progress=np.array(
                [
                    (lease.index, lease.attempt, self.steps[slot])
                    for slot, lease in enumerate(self.leases)
                    if lease is not None
                ],
                PROGRESS,
            ),
            returned=tuple(returned),
            env_steps=total,
            reset_seconds=0.0,
            step_seconds=0.0,
            inference_seconds=0.0,
            weights_version=0,
            numerics={"numpy": np.__version__},
        )

    def drop(self) -> list[int]:
        dropped = [lease.index for lease in (*self.queue, *self.leases) if lease is not None]
        self.queue.clear()
        self.leases = [None] * self.count
        return dropped

    def drop_live(self, error: Exception) -> list[Fault]:
        """End all live attempts; each is suspected, or charged if it is the only one."""
        leases = [(slot, lease) for slot, lease in enumerate(self.leases) if lease is not None]
        self.leases = [None] * self.count
        place = {"cause": "env", "phase": "step", "runner": self.runner_index, "node": "here", "seconds": 0.0}
        error_type, message, traceback = Fault.describe(error)
        text = {"error_type": error_type, "message": message, "traceback": traceback}
        return [
            Fault(one.index, one.seed, one.attempt, step=int(self.steps[at]), charged=len(leases) == 1, **place, **text)  # type: ignore[arg-type]
            for at, one in leases
        ]

    def fill(self) -> bool:
        """Start episodes in free slots, all at once; return whether any slot is live."""
        for slot, lease in enumerate(self.leases):
            if lease is None and self.queue:
                self.leases[slot] = self.queue.popleft()
                self.seeds[slot], self.steps[slot], self.returns[slot] = self.leases[slot].seed, 0, 0.0
        return any(lease is not None for lease in self.leases)

    def finish(self, slot: int) -> tuple[tuple[Any, ...], list[float]]:
        lease = self.leases[slot]
        assert lease is not None
        self.leases[slot] = None
        row = np.zeros((), ROW)
        row["index"], row["seed"], row["attempts"] = lease.index, lease.seed, lease.attempt
        row["episode_return"] = row["discounted_return"] = self.returns[slot].sum()
        row["length"], row["terminated"], row["outcome"] = self.steps[slot], True, Outcome.COMPLETED
        row["success_once"] = row["success_at_end"] = -1
        row["runner"] = self.runner_index
        return row.item(), self.returns[slot][: self.width].tolist()

    def step(self, live: Any) -> Any:
        """Step all live slots; return which have ended."""
        raise NotImplementedError


class BatchedToy(Slots):
    """One numpy expression steps all slots; the reward of a step follows from seed and step."""

    def step(self, live: Any) -> Any:
        self.steps += live
        self.returns[:, 0] += np.where(live, np.sin(self.seeds % 1000 + self.steps), 0.0)
        return self.steps >= self.seeds % 20 + 2


class FragileToy(BatchedToy):
    """A step raises while the seed of one episode is live: in its first ``bad`` attempts."""

    bad: ClassVar[int] = 1000

    def step(self, live: Any) -> Any:
        for lease in self.leases:
            if lease is not None and lease.index == POISONED and lease.attempt <= self.bad:
                raise FloatingPointError("a NaN somewhere in the batch")
        return super().step(live)


class PassingToy(FragileToy):
    bad = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = True

    def step(self, live: Any) -> Any:
        """Raise once, and never again."""
        if self.first and live[5:].any():
            self.first = False
            raise FloatingPointError("once")
        return super().step(live)


class BrokenToy(FragileToy):
    def step(self, live: Any) -> Any:
        raise FloatingPointError("always")


POISONED = 17


def test_a_fault_of_the_batch_is_charged_only_to_the_episode_that_causes_it() -> None:
    """The others run again, without a used attempt, and have the same records as ever."""
    whole = evaluate(config(BatchedToy))
    part = evaluate(config(FragileToy))
    assert part.status == "partial"
    assert [record.index for record in part.episodes if record.outcome == "failed"] == [POISONED]
    assert {record.attempts for record in part.episodes if record.outcome == "completed"} == {1}
    same = [record.episode_return for record in whole.episodes if record.index != POISONED]
    assert [record.episode_return for record in part.episodes if record.index != POISONED] == same
    faults = part.episodes[POISONED].faults
    assert [fault.attempt for fault in faults if fault.charged] == [1, 2, 3]
    assert next(fault.attempt for fault in faults if not fault.charged) == 1


def test_a_batch_that_fails_once_loses_nothing() -> None:
    whole = evaluate(config(PassingToy))
    assert whole.status == "complete"
    assert whole.fingerprint == evaluate(config(BatchedToy)).fingerprint


def test_a_batch_that_always_fails_ends_the_evaluation() -> None:
    """Suspects do not count towards fail-fast, but episodes that failed alone do."""
    result = evaluate(config(BrokenToy))
    assert result.status == "failed"
    assert "fault_tolerance.fail_fast" in result.reason


class SilentToy(BatchedToy):
    """Its ``run`` forgets to return a report."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        super().run(*args, **kwargs)


def test_a_run_without_a_report_is_named() -> None:
    config = EvalConfig().environment("CartPole-v1").policy("random", deterministic=False).runners(runner=SilentToy)
    with refused(ConfigError, "SilentToy.run"):
        evaluate(config.evaluation(num_episodes=3))


class TwoAgentToy(Slots):
    """Two agents; the second leaves half way. Their returns are columns of their own."""

    facts: ClassVar[RunnerFacts] = RunnerFacts(default_lanes=2, conditions=False)

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        return "return_a", "return_b"

    def step(self, live: Any) -> Any:
        self.steps += live
        length = self.seeds % 20 + 2
        rewards = {"a": np.cos(self.seeds % 7 + self.steps), "b": np.where(2 * self.steps <= length, 1.0, 0.0)}
        for number, agent in enumerate("ab"):
            self.returns[:, number] += np.where(live, rewards[agent], 0.0)
        return self.steps >= length


def config(runner: type, lanes: int | None = None, runners: int = 0) -> EvalConfig:
    made = EvalConfig().environment("CartPole-v1").policy(np.asarray)
    return made.runners(runner=runner, num_envs_per_runner=lanes, num_runners=runners).evaluation(num_episodes=300)


@pytest.mark.parametrize("cls", [BatchedToy, TwoAgentToy])
def test_a_runner_of_its_own_is_evaluated_as_any_other(cls: Any, tmp_path: Path) -> None:
    """Exactly N, the same in every layout, with a log that is continued, a check and a cancelled evaluation."""
    whole = evaluate(config(cls), output=tmp_path / "log")
    assert whole.status == "complete"
    assert {record.index for record in whole.episodes} == set(range(300))
    for lanes in (1, 7, 1000):
        assert evaluate(config(cls, lanes)).fingerprint == whole.fingerprint
    assert evaluate(config(cls), output=tmp_path / "log").fingerprint == whole.fingerprint
    with EvalRunnerGroup(config(cls)) as group:
        group.submit().cancel()
        assert group.evaluate().fingerprint == whole.fingerprint
        assert group.foreach_runner(lambda runner: runner.count) == [cls.facts.default_lanes]


def test_the_columns_of_a_runner_are_in_every_record_and_in_the_log(tmp_path: Path) -> None:
    """Per-agent returns add up to the return, also when they are read back."""
    evaluate(config(TwoAgentToy), output=tmp_path)
    for record in evaluate(config(TwoAgentToy), output=tmp_path).episodes:
        assert set(record.info) == {"return_a", "return_b"}
        assert sum(record.info.values()) == record.episode_return


def test_both_are_runners_to_the_type_checker() -> None:
    """What mypy accepts here is what the loop calls."""
    runners: list[Runner] = [cls(config(cls).build(), 0) for cls in (BatchedToy, TwoAgentToy)]
    table = EpisodeTable(3)
    table.fill(runners[0].run([Lease(EpisodeSpec(index, index), 1) for index in range(3)], 1.0).rows)
    assert table.filled.all()


class Measured(VectorEvalRunner):
    """Keeps a number of ``info`` that the config does not name."""

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        return (*super().columns(settings), "height")

    def make_env(self, lane_index: int) -> Any:
        return Height(super().make_env(lane_index))


class Height(gym.Wrapper):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"height": float(observation[2])}


def test_a_runner_may_have_a_column_of_its_own() -> None:
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=3)

    def policy(observations: Any) -> Any:
        return (observations[:, 2] > 0).astype(int)

    result = evaluate(config.copy().runners(runner=Measured), policy)
    assert result.table.info_keys == ("height",)
    assert np.isfinite(result.table.infos).all()
    assert result.fingerprint == evaluate(config, policy).fingerprint

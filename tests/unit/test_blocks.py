"""Blocks: exactly N episodes on simulators that only restart as a whole, bound to width and block, not to runners."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from typing_extensions import override

import rl_eval.scheduling.blocks
from rl_eval import EvalConfig, EvalResult, compare, evaluate, load, replay
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ComparisonError, ConfigError, EvalError, UsageError
from rl_eval.execution import determinism_check
from rl_eval.log import read_log
from rl_eval.records.determinism import FirstDifference
from rl_eval.records.episode import EpisodeSpec, Lease
from rl_eval.runners.batched import blocks as batched_blocks
from rl_eval.runners.batched.blocks import BlockEvalRunner
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.scheduling import events
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision import flight_recorder
from rl_eval.supervision.flight_recorder import FlightRecorder, Moment, read_moment
from rl_eval.weights import weights_of
from tests.refused import refused, result_of, untold
from tests.unit.log_world import cut
from tests.unit.vector_world import OneSeed, Walk, as_class, follow, walks

EPISODES = 150


def blocks(env: Any, width: int = 7, block: int = 4, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(follow).evaluation(num_episodes=EPISODES, **evaluation)
    return made.runners(runner="batched", num_envs_per_runner=width, block=block)


def plain_loop(width: int, block: int, num_episodes: int = EPISODES) -> list[tuple[float, int]]:
    """Return return and length of each episode: per block one reset, and starts counted in the order (step, slot)."""
    plan, found = EpisodePlan(num_episodes, 0), [(0.0, 0)] * num_episodes
    for first in range(0, num_episodes, width * block):
        last, env = min(first + width * block, num_episodes), walks(width)
        observations, _ = env.reset(seed=plan[first].seed)
        running: dict[int, list[Any]] = {slot: [first + slot, 0.0, 0] for slot in range(min(width, last - first))}
        following, ended = first + len(running), np.zeros(width, bool)
        while running or following < last:
            before = ended
            observations, rewards, terminated, truncated, _ = env.step(follow(observations))
            ended = terminated | truncated
            for slot in [*running]:
                running[slot][1] += rewards[slot]
                running[slot][2] += 1
                if ended[slot]:
                    index, total, length = running.pop(slot)
                    found[index] = total, length
            for slot in np.flatnonzero(before):
                if following < last:
                    running[int(slot)], following = [following, 0.0, 0], following + 1
    return found


def outcomes(result: EvalResult) -> list[tuple[float, int]]:
    return [(record.episode_return, record.length) for record in result.episodes]


def block_of(*seeds: int) -> Lease:
    block = tuple(EpisodeSpec(index, seed) for index, seed in enumerate(seeds))
    return Lease(block[0], 1).with_how(block=block)


def test_weights_and_observers_do_not_change_within_a_block() -> None:
    """Also between two episodes, while no slot has one."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 3)
    runner = BlockEvalRunner(blocks(walks, 1, 4).policy(module).build(), 0)
    report = runner.run([block_of(11, 12, 13, 14)], 0.0)
    for _ in range(200):
        if len(report.rows):
            break
        with refused(EvalError, "weights"):
            runner.set_weights(weights_of(module))
        with refused(EvalError, "observers"):
            runner.observe({})
        report = runner.run((), 0.0)
    assert len(report.rows) == 4
    runner.set_weights(weights_of(module))


def test_an_aborted_block_leaves_nothing_behind() -> None:
    lease = block_of(11, 12, 13, 14)
    runners = [BlockEvalRunner(blocks(walks, width=1).build(), 0) for _ in range(2)]
    for steps in range(1, 20):
        report = runners[0].run([lease], 0.0)
        for _ in range(steps):
            if len(report.rows):
                break
            assert set(report.progress["index"].tolist()) <= {0, 1, 2, 3}
            assert len(report.progress)
            report = runners[0].run((), 0.0)
        aborted = runners[0].run((), 0.0, abort=True)
        assert (aborted.returned == (0,)) or len(report.rows)
        assert not len(aborted.progress)
    plain, again = (runner.run([lease], 60.0) for runner in runners)
    for name in ("index", "episode_return", "length"):
        assert plain.rows[name].tolist() == again.rows[name].tolist()


def test_a_step_limit_far_below_that_of_the_simulator_is_named() -> None:
    made = blocks(lambda num_envs: gym.make_vec("Pendulum-v1", num_envs, max_episode_steps=2_000), 2, 2)
    result = result_of(evaluate, made.policy("random"), num_episodes=4, max_episode_steps=5)
    assert result.status == "failed"
    assert not untold(result.faults[0].message, "step limit")


@pytest.mark.parametrize(("width", "block"), [(1, 1), (1, 5), (7, 4), (32, 2), (64, 64)])
def test_records_are_those_of_a_plain_loop(width: int, block: int) -> None:
    result = evaluate(blocks(walks, width, block))
    assert (result.status, result.guarantee) == ("complete", "layout")
    assert outcomes(result) == plain_loop(width, block)
    assert result.determinism.passed
    # Without a dead step, slots restart a step earlier, so others may come first.
    same_step = evaluate(blocks(partial(walks, mode="SameStep"), width, block))
    assert outcomes(same_step)[:width] == outcomes(result)[:width]
    assert (outcomes(same_step) == outcomes(result)) or width > 1


def test_a_simulator_with_one_seed_needs_blocks() -> None:
    with refused(ConfigError, "environment.env"):
        evaluate(blocks(as_class(OneSeed)).runners(block=None))
    assert outcomes(evaluate(blocks(as_class(OneSeed)))) == plain_loop(7, 4)


class TwoLengths(VectorEnv[Any, Any, Any]):
    """Episodes of 5 steps worth 0 or 40 steps worth 1, by one generator for all slots; the true mean return is 0.5."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.autoreset_mode = num_envs, AutoresetMode.NEXT_STEP
        self.single_observation_space, self.single_action_space = gym.spaces.Box(0, 1e3, (3,)), gym.spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self.long = self.rng.random(self.num_envs) < 0.5
        self.steps, self.ended = np.zeros(self.num_envs, int), np.zeros(self.num_envs, bool)
        return self.seen(), {}

    def seen(self) -> Any:
        return np.stack([self.steps, self.long, self.long], 1).astype(np.float32)

    def step(self, actions: Any) -> Any:
        dead = self.ended
        self.steps = np.where(dead, 0, self.steps + 1)
        self.long = np.where(dead, self.rng.random(self.num_envs) < 0.5, self.long)
        self.ended = ~dead & (self.steps >= np.where(self.long, 40, 5))
        return self.seen(), (self.ended & self.long).astype(float), self.ended, np.zeros(self.num_envs, bool), {}


@pytest.mark.parametrize("width", [8, 64, 1024])
def test_short_episodes_are_not_preferred(width: int) -> None:
    """The quota is by first started; the first to end would have a mean near 0."""
    result = evaluate(blocks(TwoLengths, width, 8).evaluation(num_episodes=1500))
    assert len(result.episodes) == 1500
    assert abs(result.mean_return - 0.5) < 3 * 0.5 / 1500**0.5


class NoRestart(BatchSimulator):
    """Slots that end and never start another episode."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.observation_space, self.action_space = (
            num_envs,
            gym.spaces.Box(0, 1),
            gym.spaces.Discrete(2),
        )

    def reset(self, seed: int) -> Any:
        return np.zeros((self.num_envs, 1), np.float32)

    def step(self, actions: Any) -> BatchStep:
        ended = np.ones(self.num_envs, bool)
        return BatchStep(np.zeros((self.num_envs, 1), np.float32), np.zeros(self.num_envs), ended, ~ended)

    def close(self) -> None: ...


def test_slots_that_never_restart_fail_their_block_instead_of_running_for_ever() -> None:
    result = result_of(evaluate, blocks(NoRestart, width=2, block=2).policy(lambda seen: [0] * len(seen)))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {"EnvError"}


def test_a_block_with_a_poisoned_episode_fails_and_the_others_are_as_ever() -> None:
    sound, struck = evaluate(blocks(walks)), EpisodePlan(EPISODES, 0)[28].seed
    left: list[int] = []
    built: list[int] = []

    class Poisoned(Walk):
        """Raises in the block that is reset with the seed of episode 28; the first slot gets that seed."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.struck = seed == struck if seed is not None else self.struck
            return super().reset(seed=seed, options=options)

        def step(self, action: Any) -> Any:
            if self.struck and self.steps == 0:
                left.append(1)
                raise RuntimeError("the simulator diverged")
            return super().step(action)

    def make(num_envs: int) -> Any:
        built.append(num_envs)
        return gym.vector.SyncVectorEnv([Poisoned] * num_envs)

    result = evaluate(blocks(make).evaluation(determinism_check=0))
    failed = [record.index for record in result.episodes if record.outcome == "failed"]
    assert (result.status, failed) == ("partial", list(range(28, 56)))
    assert len(left) == 3
    assert len(built) == 1 + len(left)  # A simulator that raised is not used again.
    assert {fault.index for fault in result.faults} == {28}
    for ours, theirs in zip(result.episodes, sound.episodes, strict=True):
        assert ours.index in failed or ours.episode_return == theirs.episode_return


def test_a_log_continues_and_widths_are_not_compared(tmp_path: Path) -> None:
    result = evaluate(blocks(walks), output=tmp_path)
    assert evaluate(blocks(walks), output=tmp_path).fingerprint == result.fingerprint
    assert compare(result, evaluate(blocks(walks))).difference.mean == 0
    with refused(ComparisonError, "numerics.num_envs"):
        compare(result, evaluate(blocks(walks, 8)))
    with refused(UsageError, "runners.block", episode=3):
        replay(result, 3, config=blocks(walks))


def test_a_log_of_single_environments_is_not_continued_with_blocks(tmp_path: Path) -> None:
    """CartPole's vector environment has the same id, but other episodes."""
    made = blocks("CartPole-v1", 4, 2).policy(lambda seen: (seen[:, 2] > 0).astype(np.int64))
    lanes = evaluate(made.copy().runners(runner="vector", block=None), output=tmp_path / "whole")
    partial_log = cut(tmp_path / "whole", tmp_path / "part", 10)
    assert (evaluate(made, output=partial_log).status, len(read_log(partial_log).rows)) == ("partial", 10)
    again = evaluate(made.copy().runners(runner="vector", block=None), output=partial_log)
    assert (again.fingerprint, again.guarantee) == (lanes.fingerprint, "exact")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (blocks(Walk).runners(runner="vector"), "runners.block"),
        (blocks(partial(walks, mode="Disabled")), "runners.block"),
    ],
)
def test_blocks_need_slots_that_restart_by_themselves(config: EvalConfig, key: str) -> None:
    with refused(ConfigError, key):
        evaluate(config)


class Driver:
    """A random history of a block schedule, with books of its own.

    Args:
        seed: Seed of the history.
        module: Module of the schedule, which may be a mutant.
    """

    def __init__(self, seed: int, module: ModuleType = rl_eval.scheduling.blocks) -> None:
        self.rng, self.module = random.Random(seed), module
        self.count, self.size = self.rng.randint(1, 90), self.rng.randint(1, 16)
        self.plan = EpisodePlan(self.count, seed)
        done = {index for index in range(self.count) if self.rng.random() < 0.3}
        self.blocks = [range(at, min(at + self.size, self.count)) for at in range(0, self.count, self.size)]
        whole = [block for block in self.blocks if done.issuperset(block)]
        self.recorded = {index for block in whole for index in block}
        used = {index: self.rng.randint(1, 3) for index in range(self.count) if self.rng.random() < 0.1}
        self.used = [max([used.get(index, 0) for index in block]) for block in self.blocks]
        """Number of attempts that each block has used up."""
        arguments = {"expected_runners": 2, "done": sorted(done), "attempts": used, "pardoned": {}}
        self.schedule = module.schedule_of(self.plan, self.size, **arguments)
        self.history: list[Any] = [{"plan": self.plan.to_dict(), "block_size": self.size, **arguments}]
        self.decisions: list[events.Decision] = []
        self.given_up: set[int] = set()
        self.held: dict[int, list[Any]] = {}

    def handle(self, event: events.Event) -> None:
        decision = self.schedule.handle(event)
        self.schedule.validate()
        self.history.append(events.to_list(event))
        self.decisions.append(decision)
        indices = [event.finished[position] for position in decision.verdict.record]
        assert self.recorded.isdisjoint(indices)
        self.recorded.update(indices)
        for index, attempt in decision.verdict.charge:
            assert index == self.blocks[index // self.size].start
            assert attempt == self.used[index // self.size] + 1
            self.used[index // self.size] = attempt
        for command in decision.commands:
            match command:
                case events.Grant(runner, leases):
                    for lease in leases:
                        block = self.blocks[lease.index // self.size]
                        assert lease.index == block.start
                        assert lease.how.block == tuple(self.plan[index] for index in block)
                        assert self.recorded.isdisjoint(block)
                        assert lease.attempt == self.used[lease.index // self.size] + 1
                    self.held.setdefault(runner, []).extend(leases)
                    assert len(self.held[runner]) <= 3, "one lane and its queue, whatever the slots"
                case events.GiveUp(index, seed, attempts):
                    assert attempts == self.used[index // self.size]
                    assert seed == self.plan.seeds[index]
                    self.given_up.add(index)

    def run(self) -> None:
        runners = 0
        for _ in range(10_000):
            if self.schedule.complete:
                break
            if len(self.held) < 2:
                self.held[runners] = []
                self.handle(events.RunnerJoined(runners, 8))
                runners += 1
            runner = self.rng.choice(list(self.held))
            leases = self.held[runner]
            roll = self.rng.random()
            if roll < 0.05:
                del self.held[runner]
                pairs = [(lease.index, lease.attempt) for lease in leases[:1]]
                self.handle(events.RunnerLost(runner, (), pairs))
            elif leases and roll < 0.1 and len(self.blocks[leases[0].index // self.size]) > 1:
                del self.held[runner]  # It reports a part of a block, and dies.
                self.handle(events.RunnerReported(runner, [*self.blocks[leases[0].index // self.size]][:-1]))
                self.handle(events.RunnerLost(runner))
            elif leases and roll < 0.2:
                lease = leases.pop(0)
                self.handle(events.RunnerReported(runner, (), [(lease.index, lease.attempt)]))
            elif leases:
                rows = list(self.blocks[leases.pop(0).index // self.size])
                self.rng.shuffle(rows)
                self.handle(events.RunnerReported(runner, rows))
        assert self.schedule.complete
        assert self.schedule.unfinished == 0
        assert self.recorded | self.given_up == set(range(self.count))
        assert self.recorded.isdisjoint(self.given_up)
        assert [*self.module.repeat_decisions(json.loads(json.dumps(self.history)))] == self.decisions


def test_no_history_of_blocks_breaks_a_law() -> None:
    """Every episode has one record or is given up, whole blocks at a time."""
    for seed in range(300):
        Driver(seed).run()


class WrongStart(NoRestart):
    """Its slots start other episodes, whose first observations are not those of the space."""

    @override
    def step(self, actions: Any) -> BatchStep:
        step = super().step(actions)
        return replace(step, started=(step.terminated, np.zeros((self.num_envs, 5))))


def test_first_observations_of_a_wrong_shape_are_a_fault_of_their_block() -> None:
    result = result_of(evaluate, blocks(WrongStart, width=2, block=2).policy(lambda seen: [0] * len(seen)))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {"EnvError"}


class Forgets(TwoLengths):
    """Seeds only the episodes that start in a reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        first = super().reset(seed=seed)
        self.rng = np.random.default_rng()
        return first


def test_a_block_runs_again_in_the_determinism_check(tmp_path: Path) -> None:
    """The trial of a few steps does not see later episodes. Results that do not repeat are not compared."""
    repeats, differs = evaluate(blocks(TwoLengths, 8, 8)), evaluate(blocks(Forgets, 8, 8), output=tmp_path)
    assert repeats.determinism.passed
    found = differs.determinism
    assert (differs.guarantee, found.passed, found.mismatched) == ("layout", False, (64,))
    assert min(found.steps, repeats.determinism.steps) > 40
    assert found.first is not None
    assert found.first.step > 0  # The episodes that a reset starts are the same.
    assert load(tmp_path).determinism == found
    with refused(ComparisonError, "determinism", value="a"):
        compare(differs, differs)
    assert evaluate(blocks(TwoLengths, 8, 8, determinism_check=0)).determinism.checked == 0
    assert evaluate(blocks(TwoLengths, 8, 8, determinism_check=1.0)).determinism.checked == EPISODES


@pytest.mark.parametrize("spoils", [False, True])
def test_the_first_steps_of_a_long_block_run_again(spoils: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new simulator, which is not stepped further; a difference has its place."""
    steps: list[int] = []

    class Counted(TwoLengths):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            steps.append(0)

        def step(self, actions: Any) -> Any:
            steps[-1] += 1
            seen, reward, *rest = super().step(actions)
            if spoils and len(steps) > 1 and steps[-1] == 5:
                reward[3] += 1.0
            return seen, reward, *rest

    monkeypatch.setattr(batched_blocks, "_TRACED_STEPS", 20)
    found = evaluate(blocks(Counted, 8, 32).evaluation(num_episodes=256)).determinism
    assert (found.passed, found.steps, found.checked, steps[1:]) == (not spoils, 20, 0, [20])
    if spoils:
        assert found.first == FirstDifference(0, 5, "reward", "environment")


def test_a_block_that_takes_too_long_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism_check, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(determinism_check, "_FREE_SHARE", 0.0)
    found = evaluate(blocks(TwoLengths, 8, 8)).determinism
    assert (found.passed, found.checked) == (None, 0)
    assert not untold(found.remark, "block", 64)


def test_a_block_that_fails_when_it_runs_again_is_a_finding() -> None:
    class Fails(TwoLengths):
        def step(self, action: Any) -> Any:
            if len(built) > 1:
                raise RuntimeError("the simulator diverged")
            return super().step(action)

    def make(num_envs: int) -> Any:
        built.append(num_envs)
        return Fails(num_envs)

    built: list[int] = []
    found = evaluate(blocks(make, 8, 8).evaluation(num_episodes=64)).determinism
    assert (found.passed, found.checked, found.failed) == (False, 0, (0,))
    assert built == [8] * 4


class NotRepeatable(TwoLengths):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None)


@pytest.mark.parametrize(("make", "level"), [(TwoLengths, "ok"), (NotRepeatable, "warning")])
def test_doctor_runs_a_block_twice(make: Any, level: str) -> None:
    (finding,) = check_simulator(blocks(make, 64, 2).build())
    assert finding.level == level
    assert bool(untold(finding.text, "reset", "episode 0")) == (level == "ok")


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_a_death_would_be_attributed(block: int | None, width: int, monkeypatch: Any, tmp_path: Path) -> None:
    """A block is live even while all its slots are idle; a call convicts an episode only in a simulator of one slot."""
    buffer, recording = bytearray(FlightRecorder.size(width)), tmp_path / "recording"
    monkeypatch.setattr(flight_recorder, "_installed", FlightRecorder(width, buffer))
    seen: list[Moment | None] = []

    class Watched(Walk):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            recording.write_bytes(buffer)
            seen.append(read_moment(str(recording)))
            return super().reset(seed=seed, options=options)

    config = blocks(as_class(gym.vector.SyncVectorEnv, walk=Watched), width).runners(block=block)
    evaluate(config.evaluation(num_episodes=20, determinism_check=0))
    assert len(seen) >= 20
    for moment in seen:
        assert moment is not None
        assert moment.shared == (width > 1)
        assert any(lane.live for lane in moment.lanes)

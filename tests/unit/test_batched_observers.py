"""Observers in a batch: trajectories equal those of single environments, for any width, autoreset mode and fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError
from rl_eval.recording.export import export_trajectories
from rl_eval.recording.video import record_videos
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from tests.refused import refused
from tests.unit.vector_world import Parts, Walk, as_class, follow, walks

EPISODES = 24
MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
WIDTHS = pytest.mark.parametrize("width", [1, 4, 7])


class Loud:
    """Policy with outputs besides actions."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        place = observations["place"] if isinstance(observations, dict) else observations
        self.outputs = {"place": place[:, 0] * 2, "pair": place[:, :2].astype(np.float64)}
        return follow(observations), None


def config(env: Callable[..., Any], runner: str, width: int = 4, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(Loud()).runners(runner=runner, num_envs_per_runner=width)
    return made.evaluation(num_episodes=EPISODES, **evaluation)


def sampled(made: EvalConfig, **options: Any) -> dict[str, Any]:
    """Return the steps of two batches."""
    with EvalRunnerGroup(made) as group:
        both = [group.sample(num_episodes=EPISODES, as_arrays=True, **options) for _ in range(2)]
    return {key: np.concatenate([one[key] for one in both]) for key in both[0]}


def same(ours: dict[str, Any], theirs: dict[str, Any], *but: str) -> None:
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - set(but):
        assert ours[key].dtype == theirs[key].dtype
        np.testing.assert_array_equal(ours[key], theirs[key], key)


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return sampled(config(Walk, "vector"))


@WIDTHS
@MODES
def test_steps_are_those_of_single_environments(steps: dict[str, Any], mode: str, width: int) -> None:
    """Whether the log of sweeps has them, or the recorder receives each, as it does for infos and parts."""
    assert {"observation", "next.observation", "action", "next.reward", "place", "pair"} <= steps.keys()
    same(sampled(config(partial(walks, mode=mode), "batched", width)), steps)


@WIDTHS
@MODES
def test_steps_with_infos_and_parts_are_too(mode: str, width: int) -> None:
    make = partial(walks, mode=mode, wrap=Parts)
    single = sampled(config(lambda: Parts(Walk()), "vector", info_keys=["height"]))
    assert {"step", "next.info.height"} <= single.keys()
    same(sampled(config(make, "batched", width, info_keys=["height"])), single)


@MODES
@pytest.mark.parametrize("info_keys", [[], ["height"]])
def test_a_fault_of_a_neighbour_leaves_no_trace(steps: dict[str, Any], mode: str, info_keys: list[str]) -> None:
    struck: set[int] = set()

    def raise_once(walk: Walk) -> None:
        if walk.steps == 3 and walk.seed is not None and walk.seed % 2 and walk.seed not in struck:
            struck.add(walk.seed)
            raise RuntimeError("the simulator diverged")

    found = sampled(config(partial(walks, mode=mode, on_step=raise_once), "batched", 4, info_keys=info_keys))
    assert struck
    found.pop("next.info.height", None)
    same(found, steps, "collector.attempt")
    assert found["collector.attempt"].max() > 1


class Reporter(Walk):
    """Infos of each kind: always, at some steps, at the end, and nested."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {"nested": {"place": self.place, "odd": {}}, "array": np.array([self.place, self.steps])}
        if self.steps % 2:
            info["nested"]["odd"] = {"step": self.steps}
            info["text"] = "odd"
        if terminated or truncated:
            info["last"] = self.steps
        return observation, reward, terminated, truncated, info


class Diary:
    """Observer that returns all that it received."""

    def __init__(self, env: Any) -> None:
        assert env.action_space == Walk.action_space

    def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
        self.seen: list[Any] = [(spec.index, spec.seed), observation]

    def on_step(self, *step: Any) -> None:
        self.seen.append(step)

    def on_episode_end(self, record: Any) -> Any:
        return (*self.seen, record.episode_return, record.length)


@MODES
def test_observers_receive_the_same(mode: str) -> None:
    """Also the infos of each slot."""
    results = [
        evaluate(config(env, runner, observers=[Diary], info_keys=["height"], determinism_check=1.0))
        for env, runner in ((Reporter, "vector"), (as_class(gym.vector.SyncVectorEnv, mode, Reporter), "batched"))
    ]
    single, batched = [result.artifacts for result in results]
    assert batched.keys() == single.keys() == set(range(EPISODES))
    for index in single:
        np.testing.assert_equal(batched[index]["Diary"], single[index]["Diary"])


def test_observers_keep_infos_that_are_reused_and_miss_those_of_no_slot() -> None:
    class Reused(gym.vector.SyncVectorEnv):
        pairs = np.zeros((4, 2))

        def step(self, actions: Any) -> Any:
            *result, _ = super().step(actions)
            self.pairs += 1
            return (*result, {"pair": self.pairs, "speed": 60.0})

    result = evaluate(config(as_class(Reused), "batched", observers=[Diary], determinism_check=0))
    assert result.status == "complete"
    for artifacts in result.artifacts.values():
        _, _, *steps, _, _ = artifacts["Diary"]
        assert np.ptp([step[5]["pair"] for step in steps], axis=0).tolist() == [len(steps) - 1] * 2


def test_all_rows_of_one_pass_are_logged() -> None:
    """With ``batched`` inference, a pass has no rows that pad a block."""
    made = config(walks, "batched").policy(follow, inference="batched")
    same(sampled(made), sampled(config(Walk, "vector").policy(follow)))


def test_a_block_is_observed_once() -> None:
    """An attempt of a block that failed leaves no artifact, although some of its episodes had completed."""
    struck: list[int] = []

    def raise_once(walk: Walk) -> None:
        struck.append(walk.steps)
        if len(struck) == 60:
            raise RuntimeError("the simulator diverged")

    made = config(partial(walks, on_step=raise_once), "batched", observers=[Diary]).runners(block=6)
    result = evaluate(made)
    assert len(result.faults) == 1
    for record in result.episodes:
        (index, seed), *steps, total, length = result.artifacts[record.index]["Diary"]
        assert (index, seed, total, length) == (record.index, record.seed, record.episode_return, record.length)
        assert len(steps) == record.length + 1


def test_export_runs_the_batch_again(tmp_path: Any) -> None:
    for made, name in ((config(walks, "batched"), "batch.npz"), (config(Walk, "vector"), "single.npz")):
        export_trajectories(evaluate(made), "npz", tmp_path / name, config=made, indices=[3, 0, 17])
    with np.load(tmp_path / "batch.npz") as ours, np.load(tmp_path / "single.npz") as theirs:
        same(dict(ours), dict(theirs))


def test_log_probabilities_are_too() -> None:
    """Those of actions that a network draws, with the noise of each episode."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    single, *batched = [
        sampled(config(env, runner, width).policy(module, deterministic=False))
        for env, runner, width in ((Walk, "vector", 4), (walks, "batched", 4), (walks, "batched", 7))
    ]
    assert "action_log_prob" in single
    for one in batched:
        same(one, single)


def test_without_observers_nothing_is_kept() -> None:
    """And the observers that a sample adds are removed after it."""

    def watched(runner: Any) -> Any:
        return runner._watched

    with EvalRunnerGroup(config(walks, "batched")) as group:
        for _ in range(2):
            group.evaluate()
            assert group.foreach_runner(watched) == [None]
            group.sample(num_episodes=3)


def test_what_only_single_environments_can_do_is_refused(tmp_path: Any) -> None:
    with EvalRunnerGroup(config(walks, "batched").runners(block=6)) as group, refused(ConfigError, "runners.block"):
        group.sample(num_episodes=3)
    made = config(walks, "batched")
    with refused(ConfigError, "runners.runner"):
        record_videos(evaluate(made), "best", tmp_path, config=made)


class Counter(BatchSimulator):
    """Episodes of three steps, with infos of two names; each slot with an odd number reports ``odd``."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.steps = num_envs, np.zeros(num_envs, np.int64)
        self.observation_space, self.action_space = Walk.observation_space, Walk.action_space

    def restart(self, slots: Any, specs: Any) -> Any:
        self.steps[slots] = 0
        return np.zeros((len(slots), 3), np.float32)

    def step(self, actions: Any) -> BatchStep:
        self.steps += 1
        count, odd = self.num_envs, np.arange(self.num_envs) % 2 == 1
        values = {"steps": (self.steps, np.ones(count, bool)), "odd": (np.arange(count), odd)}
        flags = self.steps == 3, np.zeros(count, bool)
        return BatchStep(np.zeros((count, 3), np.float32), np.ones(count), *flags, values.get, keys=("steps", "odd"))

    def close(self) -> None:
        """Nothing is open."""


def test_an_observer_sees_the_infos_that_a_simulator_names() -> None:
    for artifacts in evaluate(config(Counter, "batched", 4, observers=[Diary])).artifacts.values():
        _, _, *steps, _, _ = artifacts["Diary"]
        infos = [info for *_, info, _ in steps]
        assert [info["steps"] for info in infos] == [1, 2, 3]
        assert all(info.keys() == infos[0].keys() and info.get("odd", 1) % 2 for info in infos)


def test_episodes_of_the_determinism_check_are_not_observed() -> None:
    starts: list[int] = []

    class Counts(Diary):
        def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
            super().on_episode_start(spec, attempt, observation)
            starts.append(spec.index)

    result = evaluate(config(walks, "batched", observers=[Counts], determinism_check=1.0))
    assert result.determinism.checked == EPISODES
    assert sorted(starts) == list(range(EPISODES))

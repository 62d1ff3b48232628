"""Observers: what they see, what is kept of them, and that nothing of theirs touches an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.runners import SingleAgentEvalRunner, VectorEvalRunner
from tests.refused import refused
from tests.unit.test_runners import calm, make, seeded, steer, troubled, walk

BOTH = pytest.mark.parametrize(("kind", "lanes"), [("single_agent", 1), ("vector", 3)])


class Diary:
    """Writes down all it is shown."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
        self.start = (spec.index, spec.seed, attempt)
        self.seen, self.rewards, self.infos = [np.array(observation)], [], []

    def on_step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        assert action == steer(self.seen[-1][None])[0]
        self.seen.append(np.array(observation))
        self.rewards.append(reward)
        self.last = rest

    def on_episode_end(self, record: Any) -> Any:
        assert (record.index, record.seed, record.attempts) == self.start
        assert record.episode_return == np.cumsum(self.rewards)[-1]
        assert record.info["speed"] == self.last[2]["speed"]
        assert self.last == (record.terminated, record.truncated, self.last[2], None)
        return len(self.seen)


class Raises(Diary):
    """Fails in one of its methods, with something that runners survive from environments too."""

    def __init__(self, env: Any, where: str) -> None:
        if where == "its factory":
            raise OSError("disk full")
        setattr(self, where, self.fail)

    def fail(self, *args: Any) -> None:
        raise OSError("disk full")


def config(kind: str, lanes: int, *observers: Any, env: Any = walk, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(steer).runners(runner=kind, num_envs_per_runner=lanes)
    return made.evaluation(num_episodes=12, info_keys=["speed"], observers=observers, **evaluation)


@BOTH
def test_observers_see_every_attempt_and_artifacts_are_those_that_count(kind: str, lanes: int) -> None:
    """Through faults and the determinism check, the artifact of an episode is that of its record's attempt."""
    result = evaluate(config(kind, lanes, Diary, env=troubled(seeded("raise")), determinism_check=1.0))
    assert result.num_retried > 0
    assert not result.notes
    assert result.artifacts == {record.index: {"Diary": record.length + 1} for record in result.episodes}
    assert result.fingerprint == evaluate(config(kind, lanes)).fingerprint


@BOTH
@pytest.mark.parametrize("where", ["its factory", "on_episode_start", "on_step", "on_episode_end"])
def test_what_an_observer_raises_is_its_own(kind: str, lanes: int, where: str) -> None:
    """The result names it in one note, another one goes on, and no episode has a fault."""

    def broken(env: Any) -> Any:
        return Raises(env, where)

    result = evaluate(config(kind, lanes, Diary, broken, determinism_check=0))
    assert not result.faults
    assert all(artifacts.keys() == {"Diary"} for artifacts in result.artifacts.values())
    assert len(result.artifacts) == 12
    (note,) = result.notes
    assert all(named in note for named in (broken.__qualname__, where, "disk full"))


def test_an_observer_of_a_policy_sees_its_outputs() -> None:
    """A policy that keeps what it computed in ``outputs`` shows each slot its own row."""
    seen: list[Any] = []

    class Loud:
        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
            self.outputs = {"sums": observations.sum(1)}
            return steer(observations), None

    class Reads(Diary):
        def on_step(self, observation: Any, action: Any, *rest: Any) -> None:
            seen.append(rest[-1]["sums"] == self.seen[-1].sum())
            self.seen.append(np.array(observation))

        def on_episode_end(self, record: Any) -> None:
            """Keep nothing."""

    assert not evaluate(config("vector", 3, Reads).policy(Loud())).artifacts
    assert seen
    assert all(seen)


@pytest.mark.parametrize("cls", [SingleAgentEvalRunner, VectorEvalRunner])
def test_without_observers_a_step_is_the_environments_own(cls: Any) -> None:
    """After the first episode nothing stands between runner and environment: what is not used costs nothing."""
    envs: list[Any] = []

    def factory(context: Any) -> Any:
        envs.append(walk(context))
        return envs[-1]

    runner = make(factory, kind=cls)
    runner.run([], 0.1)
    from tests.unit.test_runners import leases_of

    runner.run(leases_of(1), 60.0)
    runner.run(leases_of(3)[1:], 0.0)
    assert runner.slots[0].lease is not None
    assert runner.slots[0].step == envs[0].step


@pytest.mark.parametrize("observers", [["no_such:thing"], [3], [Diary, Diary]])
def test_observers_that_cannot_be_are_a_config_error(observers: Any) -> None:
    with refused(ConfigError, "evaluation.observers"):
        evaluate(config("vector", 1, *observers, env=troubled(calm)))

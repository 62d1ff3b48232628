"""The ring of the last events: what it tells of one episode, what it forgets, and what it costs."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.errors import UsageError
from rl_eval.execution.handle import EventRing
from rl_eval.scheduling import events
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule
from tests.refused import refused
from tests.unit.test_evaluation import World, dying


def kinds(world: World, index: int) -> list[tuple[str, int, int | None]]:
    return [(event.kind, event.attempt, event.runner) for event in world.handle.story(index)]


def test_an_episode_that_killed_its_runner_has_its_moves_and_its_fault_in_order() -> None:
    """Live, before anything ends, and from the kept handle of a finished evaluation."""
    world = World(determinism_check=0)
    (index, other) = world.given(0)
    world.lose(0, dying("step", seed=int(world.outcome.plan.seeds[index]), index=index))
    world.replace()
    assert kinds(world, index)[:3] == [("planned", 0, None), ("granted", 1, 0), ("fault", 1, 0)]
    assert kinds(world, other)[:3] == [("planned", 0, None), ("granted", 1, 0), ("lost", 1, 0)]
    world.finish_all()
    story = world.handle.story(index)
    assert [event.kind for event in story] == ["planned", "granted", "fault", "granted", "completed"]
    assert [event.attempt for event in story[:-1]] == [0, 1, 1, 2]
    times = [event.at for event in story if event.at is not None]
    assert times == sorted(times)
    assert len(times) == 4
    assert story[2].fault == world.handle.result().faults[0]
    with refused(UsageError, "episode", value=4):
        world.handle.story(4)


def test_a_returned_lease_and_a_failed_attempt_are_told() -> None:
    """One event after the other."""
    ring = EventRing()
    schedule = Schedule(EpisodePlan(4), 2)

    def happen(now: float, event: Any) -> None:
        ring.append(now, event, schedule.handle(event).commands)

    ring.positions |= {10: 0, 11: 1}
    happen(5.0, events.RunnerJoined(10, 2))
    happen(6.0, events.RunnerJoined(11, 2))
    (given,) = ring.moves(0)
    assert (given.kind, given.runner, given.attempt, given.at) == ("granted", 0, 1, 0.0)
    happen(7.0, events.RunnerReported(10, failed_attempts=[(0, 1)], returned=[1]))
    happen(7.5, events.RunnerLost(10))  # It does not hold episode 0 any more.
    happen(8.0, events.RunnerReported(11, finished=[2, 3]))
    told = [(event.kind, event.runner, event.at) for event in ring.moves(0)]
    assert told == [("granted", 0, 0.0), ("fault", 0, 2.0), ("granted", 1, 3.0)]
    assert [event.kind for event in ring.moves(1)][:2] == ["granted", "returned"]


@pytest.mark.parametrize("seed", range(5))
def test_the_ring_is_bounded_and_keeps_the_last(seed: int) -> None:
    """Whatever comes, in reports of any size; the newest entry stays even if it is larger than the ring."""
    rng = random.Random(seed)
    ring = EventRing(capacity=50)
    for number in range(500):
        finished = list(range(rng.choice([0, 1, 7, 80])))
        ring.append(float(number), events.RunnerReported(0, finished), [])
        assert ring._size == sum(entry[1] for entry in ring._entries)
        assert ring._size <= 50 or len(ring._entries) == 1
        assert ring._entries[-1][0] == number


def test_a_story_can_be_had_while_the_evaluation_goes_on() -> None:
    """From another thread than the one that appends."""
    config = EvalConfig().environment("CartPole-v1")
    config.runners(num_envs_per_runner=4).evaluation(num_episodes=300, determinism_check=0)
    with EvalRunnerGroup(config, lambda observations: np.zeros(len(observations), int)) as group:
        handle = group.submit()
        first = handle.story(0)
        while not handle.done():
            handle.story(299)
        assert first[0].kind == "planned"
        assert threading.current_thread() is threading.main_thread()
        assert [event.kind for event in handle.story(0)] == ["planned", "granted", "completed"]

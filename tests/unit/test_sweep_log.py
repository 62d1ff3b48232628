"""Log of sweeps: the steps of each episode, however many episodes come and go in other slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval.policies.inference.sweep_log import SweepLog

ROWS = 4


class Reader:
    """Recorder that is known by its name alone."""

    reads_sweeps = True

    def read_sweeps(self, steps: Any) -> Any:
        return steps


READERS = {"reader": Reader()}


def sweep(number: int, rows: int = ROWS) -> Any:
    """Return observations, actions and an output, whose values tell sweep and row."""
    places = number * 10 + np.arange(rows)
    return places[:, None] * np.ones(2, np.float32), places, places / 8


def begun() -> SweepLog:
    observations, actions, _ = sweep(0)
    return SweepLog(observations.astype(np.float32), actions)


def finish(log: SweepLog, slot: int, name: int, rewards: Any = ()) -> None:
    log.finish(slot, (name,), rewards, [-name, -name], READERS)


def taken(log: SweepLog) -> dict[int, dict[str, Any]]:
    """Return the steps of each episode that was cut out, by the first column of its row."""
    found = {}
    for recorders, steps in log.take():
        assert recorders is READERS
        stops = steps.lengths.cumsum()
        assert len(steps.observations) == stops[-1] + len(stops)
        for place, ((name,), stop) in enumerate(zip(steps.rows, stops, strict=True)):
            held = slice(stop - steps.lengths[place], stop)
            outputs = {key: rows[held] for key, rows in steps.outputs.items()}
            observations = steps.observations[held.start + place : stop + place + 1]
            found[name] = {"observations": observations, "actions": steps.actions[held]}
            found[name] |= {"rewards": steps.rewards[held], "outputs": outputs}
    return found


@pytest.mark.parametrize("longest", [5, 500])
def test_each_episode_has_its_own_sweeps(longest: int) -> None:
    """Episodes that begin, finish and fail at any time are the rows of their slot, through what is dropped or grows."""
    log, rng = begun(), np.random.default_rng(longest)
    starts, due, found = dict.fromkeys(range(ROWS), 0), {}, {}
    for slot in starts:
        log.begin(slot)
    for number in range(1500):
        observations, actions, told = sweep(number)
        log.add(observations, actions, [(slice(0, 2), {"told": told[:2]}), (slice(2, 4), {"told": told[2:]})])
        observations[:] = actions[:] = told[:] = -1
        rewards = number + np.arange(ROWS) / 8
        log.reward(rewards[:3])
        rewards[:] = -1
        for slot in np.flatnonzero(rng.random(ROWS) < 1 / longest).tolist():
            if rng.random() < 0.8:
                due[len(due)] = np.arange(starts[slot], number + 1) * 10 + slot
                finish(log, slot, len(due) - 1, (due[len(due) - 1] // 10 + 3 / 8).tolist() if slot == 3 else ())
            log.end(slot)
            log.begin(slot)
            starts[slot] = number + 1
        if rng.random() < 0.01:
            found |= taken(log)
    found |= taken(log)
    assert len(due) > ROWS
    assert found.keys() == due.keys()
    for name, ran in due.items():
        np.testing.assert_array_equal(found[name]["actions"], ran)
        np.testing.assert_array_equal(found[name]["observations"][:-1], ran[:, None] * np.ones(2))
        np.testing.assert_array_equal(found[name]["observations"][-1], [-name, -name])
        np.testing.assert_array_equal(found[name]["rewards"], ran // 10 + ran % 10 / 8)
        np.testing.assert_array_equal(found[name]["outputs"]["told"], ran / 8)
    assert len(log._columns["actions"]) <= 4 * 12 * longest


def test_finished_episodes_take_no_room() -> None:
    """Room is for the longest episode, however many have finished since they were last asked for."""
    log = begun()
    for name in range(500):
        log.begin(1)
        log.add(*sweep(name)[:2], [])
        finish(log, 1, name)
    assert len(log._columns["actions"]) == 64
    assert [one["actions"].item() for one in taken(log).values()] == [10 * name + 1 for name in range(500)]
    assert not log.take()


def test_an_output_that_is_not_told_at_every_step_is_left_out() -> None:
    """Also where it is told in another form from some step on, and where its neighbours tell more."""
    log = begun()
    log.begin(0)
    for number in range(4):
        observations, actions, told = sweep(number)
        outputs = {"always": told, "other": told.astype(np.float32 if number > 1 else np.float64)}
        if number != 2:
            outputs["sometimes"] = told
        log.add(observations, actions, [(slice(None), outputs)])
        if number == 0:
            log.begin(2)
        if number == 1:
            finish(log, 2, 2)
            log.begin(1)
    for slot in (0, 1):
        finish(log, slot, slot)
    found = taken(log)
    told_of = {name: set(one["outputs"]) for name, one in found.items()}
    assert told_of == {0: {"always"}, 1: {"always", "other"}, 2: {"always", "other", "sometimes"}}
    assert found[2]["outputs"]["other"] == 12 / 8
    np.testing.assert_array_equal(found[1]["outputs"]["other"], np.float32([21 / 8, 31 / 8]))

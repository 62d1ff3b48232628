"""Log of sweeps: the steps of each episode, however many episodes come and go in other slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval.runners.sweep_log import SweepLog

ROWS = 4


def sweep(number: int, rows: int = ROWS) -> Any:
    """Return observations, actions and an output, whose values tell sweep and row."""
    places = number * 10 + np.arange(rows)
    return places[:, None] * np.ones(2, np.float32), places, places / 8


def begun() -> SweepLog:
    observations, actions, _ = sweep(0)
    return SweepLog(observations.astype(np.float32), actions)


@pytest.mark.parametrize("longest", [5, 500])
def test_each_episode_has_its_own_sweeps(longest: int) -> None:
    """Episodes that begin and end at any time are the rows of their slot, through what is dropped and what grows."""
    log, rng = begun(), np.random.default_rng(longest)
    starts, seen = dict.fromkeys(range(ROWS), 0), 0
    for slot in starts:
        log.begin(slot)
    for number in range(1500):
        observations, actions, told = sweep(number)
        log.add(observations, actions, [(slice(0, 2), {"told": told[:2]}), (slice(2, 4), {"told": told[2:]})])
        observations[:] = actions[:] = told[:] = -1
        for slot in np.flatnonzero(rng.random(ROWS) < 1 / longest).tolist():
            steps, ran = log.steps(slot), np.arange(starts[slot], number + 1) * 10 + slot
            np.testing.assert_array_equal(steps.actions, ran)
            np.testing.assert_array_equal(steps.observations, ran[:, None] * np.ones(2))
            np.testing.assert_array_equal(steps.outputs["told"], ran / 8)
            log.end(slot)
            log.begin(slot)
            starts[slot], seen = number + 1, seen + 1
    assert seen > ROWS
    assert len(log._columns["actions"]) <= 4 * 12 * longest


def test_an_output_that_is_not_told_at_every_step_is_left_out() -> None:
    log = begun()
    log.begin(0)
    for number in range(3):
        observations, actions, told = sweep(number)
        outputs = {"always": told, "other": told.astype(np.float32 if number else np.float64)}
        if number != 1:
            outputs["sometimes"] = told
        log.add(observations, actions, [(slice(None), outputs)])
        if number == 0:
            log.begin(1)
    assert set(log.steps(0).outputs) == {"always"}
    assert set(log.steps(1).outputs) == {"always", "other"}


def test_nothing_is_wanted_without_an_episode() -> None:
    log = begun()
    log.begin(2)
    assert log.wanted
    log.end(2)
    log.end(2)
    assert not log.wanted

"""When a pass of a slow policy begins, and how many rows it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig
from rl_eval.policies.inference.pass_times import SLOW_S, PassTimes
from rl_eval.records.episode import Lease
from rl_eval.runners.subprocess_slots import SubprocessEvalRunner

ONE_S = 10 * SLOW_S


def times_of(*, whole_s: float, lanes: int = 64, patient: bool = True) -> PassTimes:
    """Return times of a policy with this time of a pass over all lanes."""
    times = PassTimes(lanes, patient=patient)
    for rows, seconds in ((3, ONE_S), (16, ONE_S), (lanes, whole_s)):
        times.note(rows, seconds)
    return times


def test_a_pass_has_a_block_if_more_rows_take_as_much_more_time() -> None:
    assert times_of(whole_s=4 * ONE_S).full(None) == 16
    assert times_of(whole_s=ONE_S).full(None) == 64
    assert times_of(whole_s=2 * ONE_S).full(None) == 64
    assert times_of(whole_s=ONE_S).full(1) == 1


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_time_of_the_other_kind_of_pass_is_measured_again(blocks: int) -> None:
    times = times_of(whole_s=blocks * ONE_S)
    sizes = []
    for _ in range(300):
        sizes.append(times.full(None))
        times.note(sizes[-1], ONE_S if sizes[-1] == 16 else blocks * ONE_S)
    assert 2 <= sum(size != sizes[0] for size in sizes) <= 20


def test_both_kinds_of_passes_are_tried() -> None:
    times = PassTimes(64, patient=True)
    times.note(1, ONE_S)
    assert times.full(None) == 16
    times.note(16, ONE_S)
    assert times.full(None) == 64


def test_a_fast_pass_takes_all_rows_and_so_does_one_whose_rows_depend_on_each_other() -> None:
    assert times_of(whole_s=SLOW_S / 2).full(16) == 64
    assert times_of(whole_s=4 * ONE_S, patient=False).full(None) == 64
    assert times_of(whole_s=ONE_S, lanes=8).full(None) == 8


class Places:
    """Policy whose rows depend on their places in the batch, so that each row has a pass of its own."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        return (1.0 + np.arange(len(observations), dtype=np.float32))[:, None] * observations[:, :1], None


@pytest.mark.process
def test_the_slot_that_waits_longest_acts_first() -> None:
    made = EvalConfig().environment("Pendulum-v1").runners(runner="subprocess", num_envs_per_runner=3)
    settings = made.evaluation(num_episodes=3, max_episode_steps=5).build()
    plan = settings.plan()
    runner = SubprocessEvalRunner(settings, 0, Places())
    try:
        runner.accept([Lease(plan[index], 1) for index in range(3)])
        runner._refill()
        while len(runner._asking) < 3:
            runner._receive(1.0)
        runner._asking = dict.fromkeys([1, 2, 0])
        acted = []
        while runner._asking:
            runner._times.note(1, ONE_S)
            acted += [lane.index for lane, _ in runner._acted()]
        assert acted == [1, 2, 0]
    finally:
        runner.stop()

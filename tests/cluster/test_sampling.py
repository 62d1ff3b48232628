"""Sampling with runners in processes of their own: the same trajectories in every layout, through lost runners."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from numpy_world import config
from waiting import eventually

from rl_eval import EvalRunnerGroup
from rl_eval.errors import ClusterError
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("ray_cluster")


def die(runner: Any) -> None:
    os._exit(1)


def test_trajectories_do_not_depend_on_the_layout() -> None:
    """Batches of one slot, of eight, and of two runners with four are equal bit by bit, after a loss too."""
    batches: list[list[dict[str, Any]]] = []
    for runners, lanes in ((0, 1), (0, 8), (2, 4)):
        with EvalRunnerGroup(config(runners, lanes)) as group:
            found = [group.sample(20, as_arrays=True)]
            if runners:
                with refused(ClusterError) as caught:
                    group.apply_to_one(die)
                assert caught.value.runner in range(runners)
            found += list(
                group.iter_samples(num_env_steps=333, mode="truncate_episodes", as_arrays=True, num_batches=3)
            )
            batches.append(found)
            returns = [record.episode_return for record in group.evaluate(20).episodes]
    first = batches[0]
    ends = first[0]["next.done"].nonzero()[0][:-1] + 1
    assert [part.sum() for part in np.split(first[0]["next.reward"], ends)] == returns
    assert [len(batch["action"]) for batch in first[1:]] == [333] * 3
    for others in batches[1:]:
        for ours, theirs in zip(first, others, strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours:
                if key != "collector.attempt":
                    np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)


def test_runners_that_come_while_it_samples_change_nothing() -> None:
    """A batch that was begun with one runner ends with two."""
    with EvalRunnerGroup(config(0, 4)) as group:
        expected = list(group.iter_samples(8, as_arrays=True, num_batches=4))
    with EvalRunnerGroup(config(1, 4)) as group:
        batches = group.iter_samples(8, as_arrays=True, num_batches=4)
        found = [next(batches)]
        group.add_runners()
        found += batches
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
    for ours, theirs in zip(found, expected, strict=True):
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)

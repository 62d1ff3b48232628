"""Worker interface on real actors: filters of several runners, callbacks of restarts, and a runner driven by hand."""

from __future__ import annotations

import os
import signal

import pytest
import ray
from numpy_world import config
from waiting import eventually

from rl_eval import EvalRunnerGroup, VectorEvalRunner
from rl_eval.execution.worker_calls import GroupCallbacks
from rl_eval.records.episode import Lease

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Diary(GroupCallbacks):
    def __init__(self) -> None:
        self.restarts: list[int] = []

    def on_runner_restart(self, runner_index: int) -> None:
        self.restarts.append(runner_index)


def test_filters_are_the_same_for_any_number_of_runners_and_reach_a_replaced_one(ray_cluster: None) -> None:
    """Statistics, results and the filters of a runner that came later; its replacement is told."""
    made = config().policy(observation_filter="MeanStdFilter").evaluation(determinism_check=0, num_episodes=12)
    with EvalRunnerGroup(made.copy().runners(num_runners=0), threaded=False) as group:
        due = group.warm_up_filters(10)
        fingerprint = group.evaluate().fingerprint
    diary = Diary()
    with EvalRunnerGroup(made.copy().runners(num_runners=2), callbacks=diary) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        assert group.warm_up_filters(10) == due
        assert group.evaluate().fingerprint == fingerprint
        os.kill(group.foreach_runner(lambda runner: os.getpid())[1], signal.SIGKILL)
        assert group.evaluate().fingerprint == fingerprint
        assert eventually(lambda: diary.restarts == [1] and group.healthy_runner_ids == [0, 1])
        assert group.foreach_runner(lambda runner: runner.get_filters()) == [due, due]


def test_a_runner_can_be_driven_by_hand_as_an_actor(ray_cluster: None) -> None:
    """With the resources asked for; its rows are those of one in this process."""
    settings = config().runners(num_runners=0).evaluation(num_episodes=3).build()
    plan = settings.plan()
    leases = [Lease(index, plan[index].seed, 1, 0) for index in range(3)]
    actor = VectorEvalRunner.as_remote(num_cpus=0.5, memory=2**20).remote(settings, 0)
    local = VectorEvalRunner(settings, 0)
    rows = []
    for run in (lambda *args: ray.get(actor.run.remote(*args)), local.run):
        played = [*run(leases, 60.0).rows]
        while len(played) < 3:
            played += [*run((), 60.0).rows]
        rows.append(sorted((int(row["index"]), float(row["episode_return"])) for row in played))
    assert rows[0] == rows[1]
    state = ray.get(actor.save.remote())
    assert isinstance(state, bytes)
    assert ray.get(actor.find_free_port.remote()) > 0
    assert ray.get(actor.creation_args.remote())["runner_index"] == 0
    local.stop()
    ray.kill(actor)

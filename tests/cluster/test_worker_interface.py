"""Names of rollout workers on real actors: filters of several runners, callbacks of restarts, a runner by hand."""

from __future__ import annotations

import os
import signal

import pytest
import ray
from numpy_world import config
from waiting import eventually

from rl_eval import EvalRunnerGroup, VectorEvalRunner
from rl_eval.execution.group import GroupCallbacks
from rl_eval.integrations.rllib.filters import warm_up_filters
from rl_eval.integrations.rllib.workers import RolloutWorkers, as_remote
from rl_eval.records.episode import Lease
from rl_eval.wrappers import Normalized, frozen

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Diary(GroupCallbacks):
    def __init__(self) -> None:
        self.restarts: list[int] = []

    def on_runner_restart(self, runner_index: int) -> None:
        self.restarts.append(runner_index)


@pytest.mark.slow
def test_filters_are_the_same_for_any_number_of_runners_and_reach_a_replaced_one(ray_cluster: None) -> None:
    """Statistics, results and the filters of a runner that came later; its replacement is told."""
    made = config().evaluation(determinism_check=0, num_episodes=12)
    alone, two = made.copy().runners(num_runners=0), made.copy().runners(num_runners=2)
    due = warm_up_filters(alone, num_episodes=10)
    assert warm_up_filters(two, num_episodes=10) == due
    filtered = Normalized("numpy_world:lean", **frozen(due["default_policy"]))
    with EvalRunnerGroup(alone, filtered, threaded=False) as group:
        fingerprint = group.evaluate().fingerprint
    diary = Diary()
    with EvalRunnerGroup(two, filtered, callbacks=diary) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        workers = RolloutWorkers(group)
        assert group.evaluate().fingerprint == fingerprint
        workers.sync_filters(due, version=5)
        os.kill(group.foreach_runner(lambda runner: os.getpid())[1], signal.SIGKILL)
        assert group.evaluate().provenance["weights"]["version"] == 5
        assert eventually(lambda: diary.restarts == [1] and group.healthy_runner_ids == [0, 1])
        assert workers.get_filters() == due
        assert len(workers.find_free_port()) == len(workers.get_node_ip()) == 2


def test_a_runner_can_be_driven_by_hand_as_an_actor(ray_cluster: None) -> None:
    """With the resources asked for; its rows are those of one in this process."""
    settings = config().runners(num_runners=0).evaluation(num_episodes=3).build()
    plan = settings.plan()
    leases = [Lease(plan[index], 1) for index in range(3)]
    actor = as_remote(VectorEvalRunner, num_cpus=0.5, memory=2**20).remote(settings, 0)
    local = VectorEvalRunner(settings, 0)
    rows = []
    for run in (lambda *args: ray.get(actor.run.remote(*args)), local.run):
        played = [*run(leases, 60.0).rows]
        while len(played) < 3:
            played += [*run((), 60.0).rows]
        rows.append(sorted((int(row["index"]), float(row["episode_return"])) for row in played))
    assert rows[0] == rows[1]
    local.stop()
    ray.kill(actor)

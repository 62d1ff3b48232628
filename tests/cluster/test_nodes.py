"""Nodes that go and come: three nodes in one machine, as Ray's own tests have them."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from machines import add_node, many_nodes
from waiting import eventually
from workloads import cartpole

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate

pytestmark = pytest.mark.ray

EPISODES = 2_000


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for runners, and two nodes with room for one each."""
    with many_nodes(2) as nodes:
        yield nodes


def config(runners: int = 2) -> EvalConfig:
    settings = cartpole().runners(num_runners=runners, num_envs_per_runner=1).evaluation(num_episodes=EPISODES)
    return settings.runners(runner_start_timeout_s=60.0) if runners else settings.runners(num_envs_per_runner=16)


def nodes_of(group: EvalRunnerGroup) -> set[str]:
    """Return the nodes that runners live on."""

    def where(runner: Any) -> str:
        return ray.get_runtime_context().get_node_id()

    return set(group.foreach_runner(where))


@pytest.mark.slow
def test_a_node_goes_and_another_comes(cluster: Any) -> None:
    """The runner of the lost node is replaced on the new one; the result is the same, bit for bit."""
    expected = evaluate(config(runners=0)).fingerprint
    with EvalRunnerGroup(config()) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        handle = group.submit()
        assert eventually(lambda: handle.progress().num_finished > 20)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert eventually(lambda: len(group.healthy_runner_ids) == 1 or handle.done())
        newcomer = add_node(cluster)
        assert eventually(lambda: group.healthy_runner_ids == [0, 1] or handle.done())
        result = handle.result(timeout=240)
        again = group.evaluate(num_episodes=50)
        assert newcomer.node_id in nodes_of(group)
    assert result.status == "complete"
    assert result.fingerprint == expected
    assert result.provenance["runners_lost"] >= 1
    assert [record.index for record in result.episodes] == list(range(EPISODES))
    assert {record.attempts for record in result.episodes} == {1}
    assert again.status == "complete"


@pytest.mark.slow
def test_a_cluster_smaller_than_asked_does_what_it_can(cluster: Any) -> None:
    """Runners that find no room wait; the others do their work."""
    expected = evaluate(config(runners=0)).fingerprint
    with EvalRunnerGroup(config(runners=4)) as group:
        handle = group.submit()
        assert eventually(lambda: len(group.healthy_runner_ids) == 2)
        add_node(cluster, num_cpus=2)
        assert eventually(lambda: len(group.healthy_runner_ids) == 4 or handle.done())
        result = handle.result(timeout=240)
    assert result.status == "complete"
    assert result.fingerprint == expected


@pytest.mark.slow
def test_all_runners_dead_at_once(cluster: Any) -> None:
    """With every worker node gone the evaluation waits for a new one, and goes on."""
    expected = evaluate(config(runners=0)).fingerprint
    with EvalRunnerGroup(config()) as group:
        handle = group.submit()
        assert eventually(lambda: handle.progress().num_finished > 20)
        for node in cluster.list_all_nodes()[-2:]:
            cluster.remove_node(node, allow_graceful=False)
        assert eventually(lambda: not group.healthy_runner_ids or handle.done())
        add_node(cluster, num_cpus=2)
        result = handle.result(timeout=240)
    assert result.status == "complete"
    assert result.fingerprint == expected
    assert result.provenance["runners_lost"] >= 2

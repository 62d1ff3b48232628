"""Ray clusters of this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster
from waiting import eventually

_TESTS = Path(__file__).parents[1]
SYSTEM = {"metrics_report_interval_ms": 1000}
"""The default of ten seconds is what tests of metrics would wait."""
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@contextmanager
def shared_cluster() -> Iterator[Cluster]:
    """A cluster to which one module of tests after another connects; its workers import what tests import."""
    paths = [_TESTS / "cluster", _TESTS / "integrations", os.environ.get("PYTHONPATH", "")]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(str(path) for path in paths if str(path))):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 16,
                "num_gpus": 1,
                "resources": {"simulator": 2},
                "labels": {"zone": "lab"},
                "include_dashboard": False,
                # No driver of the tests asks for the workers' output, and the cluster does not grow.
                "include_log_monitor": False,
                "no_monitor": True,
                "object_store_memory": 300 * 1024**2,
                "_system_config": SYSTEM,
            },
        )
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def connected(cluster: Any) -> Iterator[None]:
    """A connection to a cluster, after which no actor of its tests is left there.

    Raises:
        AssertionError: Some are.
    """
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
    assert eventually(lambda: not actors_of(cluster), limit_s=30), f"left on the cluster: {actors_of(cluster)}"


def actors_of(cluster: Any) -> list[str]:
    """Return the titles of all processes in which an actor lives."""
    raylets = cluster.head_node.all_processes[ray._private.ray_constants.PROCESS_TYPE_RAYLET]
    titles = [_title(pid) for raylet in raylets for pid in _children(raylet.process.pid)]
    return [title for title in titles if title.startswith("ray::") and not title.startswith(_RAYS_OWN)]


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def _title(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except OSError:
        return ""


@contextmanager
def many_nodes(workers: int) -> Iterator[Any]:
    """A head without room for runners, and nodes with room for one each."""
    ray.shutdown()
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 1024**2},
    )
    for _ in range(workers):
        add_node(nodes)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def add_node(cluster: Any, num_cpus: int = 1) -> Any:
    """Start another node."""
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=80 * 1024**2)

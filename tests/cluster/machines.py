"""Ray clusters of this machine, and waiting for what happens in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster


@contextmanager
def local_cluster(**options: Any) -> Iterator[None]:
    """A cluster with four logical CPUs, whatever the machine has."""
    ray.init(
        **{
            "address": "local",
            "num_cpus": 4,
            "num_gpus": 0,
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
            **options,
        }
    )
    try:
        yield
    finally:
        ray.shutdown()


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


def eventually(condition: Callable[[], bool], limit_s: float = 120.0) -> bool:
    """Wait for a condition; the limit is far beyond what it takes."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

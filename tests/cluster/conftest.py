"""A real Ray cluster of this machine, started and stopped by the tests that use it."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Start Ray with four logical CPUs, whatever the machine has."""
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=300 * 1024**2,
    )
    yield
    ray.shutdown()

"""A real Ray cluster of this machine, started and stopped by the tests that use it."""

from collections.abc import Iterator

import pytest
from machines import local_cluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Start Ray with four logical CPUs, whatever the machine has."""
    with local_cluster(object_store_memory=300 * 1024**2):
        yield

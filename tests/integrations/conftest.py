"""What the tests of all integrations share: their helper modules can be imported, and a Ray cluster of their own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Start Ray with four logical CPUs, whatever the machine has."""
    from machines import local_cluster

    with local_cluster(object_store_memory=300 * 1024**2):
        yield

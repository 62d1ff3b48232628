"""Pages of the docs whose Python needs a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_world import echo

from rl_eval.training.service.client import end_service, list_services
from tests.unit.pages_world import DOCS, Reader, pages

pytestmark = pytest.mark.usefixtures("ray_cluster")


def service() -> dict[str, Any]:
    """A training under way."""
    config, policy = echo()
    return {"config": config, "policy": policy, "module": policy, "other_module": policy, "step": 10_000, "loggers": []}


@pytest.fixture
def _no_service_is_left() -> Iterator[None]:
    """A detached service outlives the reader."""
    yield
    for namespace, name in list_services():
        end_service(name, namespace)


@pytest.mark.parametrize("page", pages("tests/cluster/test_pages.py"), ids=lambda page: page.stem)
def test_a_page_can_be_followed(reader: Reader, page: Path) -> None:
    """All its Python runs, and its commands."""
    reader.follow(page)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_service_is_left")
def test_the_python_of_a_service_runs(reader: Reader) -> None:
    """Other tests do on one machine what the commands of the page do."""
    reader.names |= service()
    reader.python(DOCS / "cluster.md")

"""Pages of the docs whose Python needs a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from service_world import echo

from rl_eval import EvalConfig
from rl_eval.training.service.client import end_service, list_services
from tests.unit.pages_world import Reader, pages

pytestmark = pytest.mark.usefixtures("ray_cluster")


def service() -> dict[str, Any]:
    """A training under way."""
    config, policy = echo()
    return {"config": config, "policy": policy, "module": policy, "other_module": policy, "step": 10_000, "loggers": []}


def cartpole() -> dict[str, Any]:
    """A small evaluation."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2)
    return {"config": config, "policy": torch.nn.Linear(4, 2)}


BEFORE: dict[str, Callable[[], dict[str, Any]]] = {"loggers": cartpole, "service": service}
"""What a page takes for granted: it makes the files, and returns the names."""


@pytest.fixture
def _no_service_is_left() -> Iterator[None]:
    """A detached service outlives the reader."""
    yield
    for namespace, name in list_services():
        end_service(name, namespace)


@pytest.mark.usefixtures("_no_service_is_left")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem == "service" else [])
        for page in pages("tests/cluster/test_pages.py")
    ],
)
def test_a_page_can_be_followed(reader: Reader, page: Path) -> None:
    """All its Python runs, and its commands."""
    reader.names |= BEFORE.get(page.stem, dict)()
    reader.follow(page)

"""The runner that the docs show, on two actors, with an environment that fails."""

from __future__ import annotations

from typing import Any

import pytest
from numpy_world import config

from rl_eval import EvalRunner, evaluate
from rl_eval.testing import EvalRunnerContract
from tests.unit.pages_world import DOCS, blocks

pytestmark = pytest.mark.usefixtures("ray_cluster")


def textbook() -> type[EvalRunner]:
    """Return the class of the page."""
    (code,) = (block.text for block in blocks(DOCS / "extending.md") if block.title == "textbook.py")
    assert len(code.splitlines()) < 40
    names: dict[str, Any] = {"__name__": "__main__"}  # So that actors get the class by value.
    exec(code, names)
    return names["Textbook"]  # type: ignore[no-any-return]


def test_faults_on_two_actors_change_no_record() -> None:
    """Records are those of the vector runner without faults, and every fault is reported."""
    expected = evaluate(config(runners=0))
    faulty = {"env": "CartPole-v1", "episodes": [0, 7, 30, 59], "attempts": [1], "step": 3}
    made = config(lanes=3).environment("rl_eval.testing:faulty", env_kwargs=faulty).runners(runner=textbook())
    result = evaluate(made)
    assert (result.status, result.fingerprint) == ("complete", expected.fingerprint)
    assert sorted(fault.index for fault in result.faults) == [0, 7, 30, 59]
    assert {row.runner for row in result.episodes} == {0, 1}


class TestTextbook(EvalRunnerContract):
    """It keeps the contract."""

    runner = textbook()
    lane_counts = (1, 3)
    num_episodes = 5

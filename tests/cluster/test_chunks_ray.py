"""Action chunks in the runners of a cluster: the episodes of a loop by hand, whatever dies on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_eval import EvalRunnerGroup
from tests.chunk_world import (
    CASES,
    Answer,
    Arm,
    by_hand,
    by_hand_of,
    config,
    net_answer,
    numpy_answer,
    plan_ahead,
    played,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

RUNNERS: dict[str, Any] = {"num_runners": 2, "lanes": 4}


@pytest.fixture(scope="module")
def warm(ray_cluster: None) -> Iterator[EvalRunnerGroup]:
    """A group that each test gives other settings."""
    with EvalRunnerGroup(config(1, 0, **RUNNERS)) as group:
        yield group


@pytest.mark.parametrize(("execute", "delay"), CASES)
@pytest.mark.parametrize(("policy", "answer"), [(plan_ahead, numpy_answer), (None, net_answer)], ids=["numpy", "torch"])
def test_episodes_are_those_of_a_loop_by_hand(
    warm: EvalRunnerGroup, policy: Any, answer: Answer, execute: int, delay: int
) -> None:
    warm.reconfigure(config(execute, delay, **RUNNERS), policy)
    result = warm.evaluate()
    assert played(result) == by_hand_of(result, execute, delay, answer)


def test_a_killed_runner_costs_nothing(warm: EvalRunnerGroup, tmp_path: Path) -> None:
    """Its episodes begin again in another process, with chunks of their own."""
    made = config(4, 3, **RUNNERS)
    plan = made.build().plan()
    struck = next(index for index in range(20) if by_hand(plan[index].seed, 4, 3, numpy_answer)[1] > 6)
    kills = {"env": Arm, "kind": "sigkill", "phase": "step", "step": 6, "episodes": [struck], "folder": str(tmp_path)}
    warm.reconfigure(made.environment("rl_eval.testing:faulty", env_kwargs=kills))
    result = warm.evaluate()
    assert result.provenance["runners_lost"] == 1
    assert played(result) == by_hand_of(result, 4, 3, net_answer)

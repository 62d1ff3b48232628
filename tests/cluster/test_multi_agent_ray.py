"""Several agents on a cluster: one result per evaluation, whatever the layout and whatever dies."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from agents_world import WORLDS, faulty_config

from rl_eval import EvalResult, evaluate

RUNNERS, SLOTS, FAULTS = (0, 1, 2, 3), (1, 3, 8, 16), ("none", "raise", "kill")


def bits(result: EvalResult) -> tuple[str, bytes]:
    """The team's outcomes, and what each agent did."""
    assert result.status == "complete", result.reason
    return result.fingerprint, result.table.infos.tobytes()


@cache
def reference(world: str) -> tuple[str, bytes]:
    return bits(evaluate(faulty_config(world).runners(num_envs_per_runner=1)))


def check(world: str, runners: int, slots: int, fault: str, folder: Path) -> None:
    if fault == "kill" and not runners:
        fault = "raise"  # There is no actor to kill, and this process is the test.
    kwargs = {"none": {}, "raise": {"raising": True}, "kill": {"folder": str(folder)}}[fault]
    result = evaluate(faulty_config(world, **kwargs).runners(num_runners=runners, num_envs_per_runner=slots))
    assert bits(result) == reference(world)
    assert any("policy.inference is batched" in note for note in result.notes) == (world == "one policy in batches")
    assert (len(result.faults) == 20) == (fault == "raise")
    assert result.provenance["runners_lost"] == (fault == "kill")
    assert len(list(folder.iterdir())) == (fault == "kill")


@pytest.mark.slow
def test_records_survive_two_runners_and_a_killed_one(ray_cluster: None, tmp_path: Path) -> None:
    """What a killed runner had under way is run again elsewhere, with the same agents in the same seats."""
    check("policies that take turns", 2, 8, "kill", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("runners", "slots", "fault"), [*product(RUNNERS, SLOTS, FAULTS)])
def test_records_do_not_depend_on_layout_or_faults(
    ray_cluster: None, world: str, runners: int, slots: int, fault: str, tmp_path: Path
) -> None:
    """The whole matrix."""
    check(world, runners, slots, fault, tmp_path)

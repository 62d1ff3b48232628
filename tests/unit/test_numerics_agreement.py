"""Which numerics key an evaluation has: that of most runners while nothing is recorded, then that of the records."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_eval.errors import NumericsMismatch
from rl_eval.execution.session import EpisodeSession
from rl_eval.records.episode import ROW
from tests.refused import refused
from tests.unit.test_evaluation import World, report

OLD, NEW = {"cpu_capability": "AVX2"}, {"cpu_capability": "AVX512"}


def tell(world: World, index: int, key: dict[str, str], *episodes: int) -> None:
    """Have a runner report its key, and episodes that it finished."""
    member = world.member(index)
    member.pending.clear()
    told = report(list(episodes), index)
    session_of(world).replied(member, replace(told, numerics=key), 1.0)


def session_of(world: World) -> EpisodeSession:
    return next(job for job in world.loop._active.values() if isinstance(job, EpisodeSession))


def world_of(runners: int) -> World:
    world = World()
    world.pool.grow(runners - 2, 0.0)
    world.come_up(runners)
    return world


def test_the_fastest_runner_does_not_decide() -> None:
    """One old processor that answers first is the one that takes no part."""
    world = world_of(3)
    mine = world.given(0)
    tell(world, 0, OLD)
    tell(world, 1, NEW)
    tell(world, 2, NEW)
    with refused(NumericsMismatch, "cpu_capability", value="AVX2", runner=0):
        tell(world, 0, OLD, *mine[:1])
    assert not world.outcome.store.table.filled.any()
    assert "runner 0" in "".join(world.outcome.store.notes)


def test_of_two_runners_the_first_decides() -> None:
    """Without a majority the first key counts; the other runner does not take part, and a note names it."""
    world = world_of(2)
    mine = world.given(1)
    tell(world, 1, NEW)
    tell(world, 0, OLD)
    tell(world, 1, NEW, *mine[:1])
    with refused(NumericsMismatch, "cpu_capability", value="AVX2", runner=0):
        tell(world, 0, OLD)
    assert world.outcome.store.table.filled.sum() == 1
    assert "runner 0" in "".join(world.outcome.store.notes)


def test_what_is_recorded_decides() -> None:
    """Records cannot be taken back, however many runners come up later."""
    world = world_of(3)
    mine = world.given(0)
    tell(world, 0, OLD, *mine[:1])
    tell(world, 1, OLD)
    with refused(NumericsMismatch, "cpu_capability", runner=2):
        tell(world, 2, NEW)
    assert world.outcome.store.table.filled.sum() == 1


@pytest.mark.parametrize(
    ("first", "later", "different"),
    [
        ({}, {"guarantee": "layout", "block": 4}, "guarantee"),
        (
            {"guarantee": "conditions", "num_envs": 4},
            {"guarantee": "conditions", "num_envs": 4, "adapter": "Sim"},
            "adapter",
        ),
        ({}, {"cuda": "13"}, ""),
    ],
    ids=["weaker guarantee", "simulator", "a fact that older versions do not record"],
)
def test_a_weaker_guarantee_is_another_key(first: dict[str, Any], later: dict[str, Any], different: str) -> None:
    """Episodes of blocks do not join records that are exact, which have no guarantee in their key."""
    world = world_of(2)
    mine = world.given(0)
    tell(world, 0, OLD | first, *mine[:1])
    with refused(NumericsMismatch, different, runner=1) if different else nullcontext():
        tell(world, 1, OLD | later)


def test_a_lost_runner_has_no_vote() -> None:
    """Its key died with it."""
    world = world_of(3)
    tell(world, 0, OLD)
    tell(world, 1, OLD)
    world.lose(0)
    world.lose(1)
    mine = world.given(2)
    tell(world, 2, NEW, *mine[:1])
    assert world.outcome.store.table.filled.sum() == 1


def test_rows_without_a_key_are_taken() -> None:
    """A user's runner class may have no numerics key."""
    world = world_of(2)
    mine = world.given(0)
    tell(world, 0, {}, *mine[:1])
    assert np.array_equal(world.outcome.store.table.rows["index"][mine[:1]], np.array(mine[:1], ROW["index"]))

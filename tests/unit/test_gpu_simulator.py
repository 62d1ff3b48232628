"""Traps of simulators on a GPU: each gives the right result, a labelled one, or an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.errors import ConfigError
from rl_eval.scheduling.plan import EpisodePlan
from tests.gpu_simulator import TRAPS, GpuAdapter, GpuSimulator, Trap
from tests.refused import refused

EPISODES, STRUCK = 24, 17
WIDTHS = (1, 5, 32)


def policy(observations: Any) -> Any:
    return (observations[:, 0] > 0).astype(np.int64) + 1


def config(trap: Trap, width: int = 7, **options: Any) -> EvalConfig:
    made = partial(GpuAdapter, trap=trap, struck=EpisodePlan(EPISODES, 0)[STRUCK].seed, **options)
    plan = EvalConfig().environment(made).policy(policy).evaluation(num_episodes=EPISODES)
    return plan.runners(runner="batched", num_envs_per_runner=width)


@pytest.fixture(scope="module")
def truth() -> list[tuple[float, int]]:
    """Return and length of each episode, from a plain loop over a simulator of one slot."""
    found, env = [], GpuSimulator(1)
    for spec in EpisodePlan(EPISODES, 0):
        observations, total, done = env.reset(spec.seed, [0]), 0.0, False
        while not done:
            observations, rewards, ended, _ = env.step(torch.as_tensor(policy(observations.numpy())))
            total, done = total + rewards.double().item(), bool(ended)
        found.append((total, int(env.steps)))
    return found


def outcomes(result: EvalResult) -> list[tuple[float, int]]:
    return [(record.episode_return, record.length) for record in result.episodes]


def is_right(trap: Trap, truth: list[tuple[float, int]]) -> None:
    for width in WIDTHS:
        result = evaluate(config(trap, width))
        assert (result.status, result.guarantee, outcomes(result)) == ("complete", "exact", truth)
        assert result.determinism.passed


def is_rejected(trap: Trap, truth: list[tuple[float, int]]) -> None:
    """At every width with neighbours."""
    for width in WIDTHS[1:]:
        with refused(ConfigError, "environment.env", value="GpuAdapter"):
            evaluate(config(trap, width))


def strikes_one_episode(trap: Trap, truth: list[tuple[float, int]]) -> None:
    for width in WIDTHS:
        result = evaluate(config(trap, width))
        assert [record.index for record in result.episodes if record.outcome == "failed"] == [STRUCK]
        found = outcomes(result)
        assert found[:STRUCK] + found[STRUCK + 1 :] == truth[:STRUCK] + truth[STRUCK + 1 :]


def has_one_start(trap: Trap, truth: list[tuple[float, int]]) -> None:
    """The records are right, since they are functions of the index; the note says how few episodes they are."""
    result = evaluate(config(trap))
    assert len({*outcomes(result)}) == 1
    assert any("distinct" in note for note in result.notes)


VERDICTS: dict[Trap, Callable[[Trap, list[tuple[float, int]]], None]] = {
    "": is_right,
    "auto_reset": is_right,
    "no_final_observation": is_right,
    "aliases": is_right,
    "couples_slots": is_rejected,
    "next_as_last": is_rejected,
    "ignores_seeds": is_rejected,
    "ignores_masks": is_rejected,
    "resets_neighbour": is_rejected,
    "reversed_rows": is_rejected,
    "noisy_steps": is_rejected,
    "one_start": has_one_start,
    "nan": strikes_one_episode,
    "raises": strikes_one_episode,
}


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap not in ("dies", "hangs")])
def test_no_trap_gives_a_wrong_number(trap: Trap, truth: list[tuple[float, int]]) -> None:
    VERDICTS[trap](trap, truth)

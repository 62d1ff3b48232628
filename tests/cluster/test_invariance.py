"""The promise: one fingerprint per evaluation, whatever the layout and whatever dies."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import eventually
from workloads import WORKLOADS

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate

RUNNERS = (0, 1, 2, 3)
LANES = (1, 3, 8, 16, 64)
RAISING = {"attempt_rates": [0.5, 0.25]}
KILLING = {"kind": "sigkill", "step": 3}
FAULTS: tuple[dict[str, Any], ...] = ({}, RAISING, KILLING | {"episodes": [7]}, KILLING | {"episodes": [7, 13]})

# All 20 pairs of runners and lanes; the fault walks along, so that each of its values meets each value of both.
COVERING = [
    (r, lanes, FAULTS[(i + j) % len(FAULTS)]) for (i, r), (j, lanes) in product(enumerate(RUNNERS), enumerate(LANES))
]
COVERING.append((2, 8, FAULTS[2]))  # Without runners there is no actor to kill, which leaves out this pair.
COVERING += [(2, 3, RAISING), (0, 3, RAISING), (2, 16, FAULTS[3]), (0, 8, RAISING), (1, 8, FAULTS[2]), (3, 3, RAISING)]
QUICK = [(0, 3, RAISING), (0, 3, RAISING), (2, 16, FAULTS[3]), (0, 8, RAISING)]
"""For each workload in turn; new processes that load a simulator or a network take longest.

A network in two runners is in ``test_group.py``, exceptions in two runners are in the test of lengths below.
"""


@cache
def reference(workload: str) -> EvalResult:
    """What one environment in this process comes to, undisturbed."""
    result = evaluate(WORKLOADS[workload]().runners(num_runners=0, num_envs_per_runner=1))
    assert result.status == "complete"
    return result


def check(workload: str, runners: int, lanes: int, faults: dict[str, Any], folder: Path) -> None:
    if runners == 0 and "episodes" in faults:
        faults = RAISING  # There is no actor to kill, and this process is the test.
    if "episodes" in faults:
        faults = {**faults, "folder": str(folder)}
    config = WORKLOADS[workload](**faults).runners(num_runners=runners, num_envs_per_runner=lanes)
    result = evaluate(config)
    assert result.status == "complete", result.reason
    assert [record.index for record in result.episodes] == list(range(len(result.episodes)))
    assert (result.fingerprint, result.mean_return) == (
        reference(workload).fingerprint,
        reference(workload).mean_return,
    )
    if faults == RAISING:
        assert sum(record.attempts > 1 for record in result.episodes) > 3
    assert result.provenance["runners_lost"] == len(faults.get("episodes", ()))
    assert len(list(folder.iterdir())) == len(faults.get("episodes", ()))


@pytest.mark.parametrize(
    ("workload", "runners", "lanes", "faults"),
    [(workload, *case) for workload, case in zip(WORKLOADS, QUICK, strict=True)],
)
def test_fingerprint_survives_layout_and_faults(
    ray_cluster: None, workload: str, runners: int, lanes: int, faults: dict[str, Any], tmp_path: Path
) -> None:
    """Runners, lanes, raising simulators and killed actors do not change the result."""
    check(workload, runners, lanes, faults, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("runners", "lanes", "faults"), COVERING)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_fingerprint_over_a_covering_set(
    ray_cluster: None, workload: str, runners: int, lanes: int, faults: dict[str, Any], tmp_path: Path
) -> None:
    """As above, over every pair of runners, lanes and faults."""
    check(workload, runners, lanes, faults, tmp_path)


def test_the_workloads_can_tell() -> None:
    """Every workload's returns vary, so that a lost, swapped or repeated episode changes its fingerprint."""
    for result in map(reference, WORKLOADS):
        assert len({record.episode_return for record in result.episodes}) > len(result.episodes) // 4


@pytest.mark.parametrize(
    ("runners", "lanes", "step_rate"),
    [
        (0, 32, 0.0),
        (2, 8, 0.001),
        *(
            pytest.param(*layout, step_rate, marks=pytest.mark.slow)
            for layout in [(0, 1), (0, 32), (2, 8), (3, 64)]
            for step_rate in (0.0, 0.001)
        ),
    ],
)
def test_length_does_not_bias_the_mean(ray_cluster: None, runners: int, lanes: int, step_rate: float) -> None:
    """Short worthless and long valuable episodes, equally likely: every layout reports the same mean, close to 0.5."""
    config = (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "two_length", "step_rate": step_rate})
        .policy("workloads:zeros")
        .runners(num_runners=runners, num_envs_per_runner=lanes)
        .evaluation(num_episodes=400, seed=1)
        .fault_tolerance(max_attempts_per_episode=20)
    )
    result = evaluate(config)
    assert result.status == "complete", result.reason
    assert result.mean_return == two_length_mean()
    assert abs(result.mean_return - 0.5) < 3 * 0.5 / 400**0.5
    assert bool(result.faults) == bool(step_rate)


@cache
def two_length_mean() -> float:
    """The mean over the same seeds, by a plain loop."""
    from rl_eval import EpisodePlan
    from rl_eval.testing import TwoLengthEnv

    env, total = TwoLengthEnv(), 0.0
    for seed in EpisodePlan(400, 1).seeds:
        env.reset(seed=int(seed))
        done = False
        while not done:
            _, reward, done, _, _ = env.step(0)
            total += reward
    return total / 400


def on_one_old_cpu(claim: Path) -> Callable[[], None]:
    """Return an ``init_fn`` with which one runner, the first to claim a file, computes as a CPU without AVX does."""

    def initialize() -> None:
        with suppress(FileExistsError):
            claim.touch(exist_ok=False)
            os.environ["ATEN_CPU_CAPABILITY"] = "default"

    return initialize


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there is no older CPU to be")
def test_runners_on_different_cpus_do_not_share_an_evaluation(ray_cluster: None, tmp_path: Path) -> None:
    """All records are of runners with one key, and a note names the key that the others have."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=200, seed=0)
    config = config.runners(num_runners=2, init_fn=on_one_old_cpu(tmp_path / "claim"))
    with EvalRunnerGroup(config, torch.nn.Linear(4, 2)) as group:
        assert eventually(lambda: len(group.healthy_runner_ids) == 2)
        found = group.foreach_runner(lambda _: os.environ.get("ATEN_CPU_CAPABILITY", ""))
        result = group.evaluate()
    assert result.status == "complete"
    [taken] = {record.runner for record in result.episodes}
    old = result.provenance["numerics"]["cpu_capability"] == "DEFAULT"
    assert found[taken] == ("default" if old else "")
    [note] = [note for note in result.notes if "cpu_capability" in note]
    assert f"runner {1 - taken} " in note

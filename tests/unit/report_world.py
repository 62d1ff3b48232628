"""Results of any size for the tests of the report: returns, successes, faults and truncations, made from seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import ROW, EpisodeTable, Fault
from rl_eval.results.result import EvalResult, Timing
from rl_eval.scheduling.plan import EpisodePlan

TRACEBACK = 'Traceback (most recent call last):\n  File "sim.py", line 12, in step\nRuntimeError: diverged'
FAILED = {"outcome": 2, "episode_return": np.nan, "length": 0, "success_at_end": -1, "success_once": -1, "attempts": 2}


def make_result(
    num_episodes: int,
    seed: int = 0,
    *,
    failed: Sequence[int] = (),
    shift: float = 0.0,
    version: int = 7,
    policy: str = "my_pkg.policies:make",
    env: str = "Hopper-v5",
    info_keys: Sequence[str] = ("distance",),
    traceback: str = TRACEBACK,
    **arguments: Any,
) -> EvalResult:
    """Return a result whose returns share the difficulty of their episodes over all seeds."""
    rng, easy = np.random.default_rng(seed), np.random.default_rng(99).normal(0, 40, num_episodes)
    plan, rows = EpisodePlan(num_episodes, seed=3), np.zeros(num_episodes, ROW)
    rows["index"], rows["seed"], rows["outcome"], rows["attempts"] = np.arange(num_episodes), plan.seeds, 1, 1
    rows["episode_return"] = 250 + easy + rng.gamma(3, 12, num_episodes) + shift
    rows["length"] = rng.integers(40, 1000, num_episodes)
    rows["truncated"] = rows["truncated_by"] = rows["length"] > 950
    rows["terminated"] = ~rows["truncated"]
    rows["success_once"], rows["success_at_end"] = 1, rows["episode_return"] > 280
    rows["runner"], rows["weights_version"] = rng.integers(0, 8, num_episodes), version
    rows["step_seconds"] = rng.random(num_episodes)
    for name, value in FAILED.items():
        rows[name][list(failed)] = value
    table = EpisodeTable(num_episodes, info_keys)
    table.fill(rows, rng.normal(size=(num_episodes, len(info_keys))))
    for index in failed:
        for attempt in (1, 2):
            message = f"diverged at {index / 7:.4f}"
            table.add_fault(
                Fault(
                    index,
                    int(plan.seeds[index]),
                    attempt,
                    "env",
                    "step",
                    12,
                    "RuntimeError",
                    message,
                    traceback,
                    1,
                    "host",
                    0.5,
                )
            )
    identity = {"environment": {"env": env}, "policy": policy, "actions": "clip", "max_episode_steps": None}
    provenance = {"identity": identity, "config": {}, "weights": {"version": version, "digest": f"{version:032x}"}}
    described = {
        "status": "partial" if failed else "complete",
        "reason": f"{len(failed)} of {num_episodes} episodes failed" if failed else "",
        "timing": Timing(4.0, 1000, 0.5, 20.0, 5.0, 8),
        "determinism": Determinism(checked=20, elsewhere=20),
        "provenance": provenance,
    }
    return EvalResult(table=table, plan=plan, **(described | arguments))

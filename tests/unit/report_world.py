"""Results of any size: returns, successes, faults and truncations, made from seeds, or as a test gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import ROW, EpisodeTable, Fault
from rl_eval.results.result import EvalResult, Timing
from rl_eval.scheduling.plan import EpisodePlan

TRACEBACK = 'Traceback (most recent call last):\n  File "sim.py", line 12, in step\nRuntimeError: diverged'


def make_fault(index: int, attempt: int = 1, error_type: str = "RuntimeError", traceback: str = TRACEBACK) -> Fault:
    message = f"diverged at {index / 7:.4f}"
    return Fault(index, 11, attempt, "env", "step", 12, error_type, message, traceback, 1, "host", 0.5)


def make_result(
    returns: int | npt.ArrayLike = 40,
    draw: int = 0,
    *,
    seed: int = 3,
    rows: Mapping[str, npt.ArrayLike] | None = None,
    failed: Sequence[int] = (),
    missing: Sequence[int] = (),
    attempts: int = 2,
    shift: float = 0.0,
    version: int = 7,
    policy: str = "my_pkg.policies:make",
    env: str = "Hopper-v5",
    info_keys: Sequence[str] = ("distance",),
    traceback: str = TRACEBACK,
    **arguments: Any,
) -> EvalResult:
    """Return a result.

    Args:
        returns: Those of the episodes, or how many there are: returns share their difficulty over all draws.
        draw: Seed of everything that is not given.
        seed: That of the plan.
        rows: Columns of the records.
        failed: Episodes that failed, after so many ``attempts``.
        missing: Episodes without a record.
        attempts: See ``failed``.
        shift: Added to drawn returns.
        version: Version of the weights.
        policy: Name in the identity.
        env: Likewise.
        info_keys: Names of info scalars.
        traceback: That of all faults.
        **arguments: Other arguments of the result.
    """
    count, rng = returns if isinstance(returns, int) else len(np.asarray(returns)), np.random.default_rng(draw)
    plan, table = EpisodePlan(count, seed), np.zeros(count, ROW)
    table["index"], table["seed"], table["outcome"], table["attempts"] = np.arange(count), plan.seeds, 1, 1
    drawn = 250 + np.random.default_rng(99).normal(0, 40, count) + rng.gamma(3, 12, count) + shift
    table["episode_return"] = drawn if isinstance(returns, int) else returns
    table["length"] = rng.integers(40, 1000, count)
    table["truncated"] = table["truncated_by"] = table["length"] > 950
    table["terminated"] = ~table["truncated"]
    table["success_once"], table["success_at_end"] = 1, table["episode_return"] > 280
    table["runner"], table["weights_version"] = rng.integers(0, 8, count), version
    table["step_seconds"] = rng.random(count)
    lost = {"outcome": 2, "episode_return": np.nan, "discounted_return": np.nan, "length": 0, "success_at_end": -1}
    lost |= {"success_once": -1, "attempts": attempts, "weights_version": -1}
    for name, values in (rows or {}).items():
        table[name] = values
    for name, value in lost.items():
        table[name][list(failed)] = value
    present = np.setdiff1d(np.arange(count), missing)
    records = EpisodeTable(count, info_keys)
    records.fill(table[present], rng.normal(size=(count, len(info_keys)))[present])
    for index in failed:
        for attempt in range(1, attempts + 1):
            records.add_fault(make_fault(index, attempt, traceback=traceback))
    identity = {"environment": {"env": env}, "policy": policy, "actions": "clip", "max_episode_steps": None}
    described = {
        "status": "partial" if failed or missing else "complete",
        "reason": f"{len(failed)} of {count} episodes failed" if failed else "some did not run" if missing else "",
        "timing": Timing(4.0, 1000, 0.5, 20.0, 5.0, 8),
        "determinism": Determinism(checked=20, elsewhere=20),
        "provenance": {
            "identity": identity,
            "config": {},
            "weights": {"version": version, "digest": f"{version:032x}"},
        },
    }
    return EvalResult(**{"table": records, "plan": plan, **described, **arguments})

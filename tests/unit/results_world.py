"""Results whose numbers are known by hand, of given returns, with failed and missing episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import ROW, EpisodeTable, Fault, Outcome
from rl_eval.results.metrics import Timing
from rl_eval.results.result import EvalResult
from rl_eval.scheduling.plan import EpisodePlan

TIMING = Timing(
    wall_seconds=2.0, env_steps=300, reset_seconds=0.1, step_seconds=1.5, inference_seconds=0.4, num_runners=2
)
IDENTITY: dict[str, Any] = {
    "environment": {"env": "CartPole-v1", "env_kwargs": {"gravity": 9.8, "wind": [0, 1]}},
    "policy": "pkg:champion",
    "actions": "clip",
    "max_episode_steps": None,
}


def make_fault(index: int, attempt: int = 1, error_type: str = "RuntimeError") -> Fault:
    """Return a fault with every field set."""
    return Fault(index, 11, attempt, "env", "step", 12, error_type, "bad\nthing", "traceback", 1, "host", 0.5)


def make_rows(plan: EpisodePlan, returns: npt.NDArray[np.float64], failed: Sequence[int]) -> npt.NDArray[np.void]:
    """Return one row per episode; episode i has i + 1 steps, success if i is even, and a cut every fifth."""
    count = np.arange(len(plan))
    rows = np.zeros(len(plan), ROW)
    rows["index"], rows["seed"], rows["length"] = count, plan.seeds, count + 1
    rows["episode_return"], rows["discounted_return"] = returns, returns / 2
    rows["truncated"], rows["truncated_by"] = count % 5 == 0, np.where(count % 5 == 0, 1 + count % 2, 0)
    rows["terminated"] = ~rows["truncated"]
    rows["success_once"], rows["success_at_end"] = 1, count % 2 == 0
    rows["outcome"], rows["attempts"], rows["runner"], rows["weights_version"] = Outcome.COMPLETED, 1, count % 3, 7
    rows["reset_seconds"], rows["step_seconds"], rows["inference_seconds"] = 0.125, 0.25, 0.5
    for name, value in {"outcome": 2, "episode_return": np.nan, "discounted_return": np.nan, "length": 0}.items():
        rows[name][list(failed)] = value
    for name, value in {"success_once": -1, "success_at_end": -1, "attempts": 3, "weights_version": -1}.items():
        rows[name][list(failed)] = value
    return rows


def make_result(
    num_episodes: int = 40,
    *,
    returns: npt.ArrayLike | None = None,
    failed: Sequence[int] = (),
    missing: Sequence[int] = (),
    success: npt.ArrayLike | None = None,
    seed: int = 3,
    identity: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> EvalResult:
    """Return a result whose table is :func:`make_rows`.

    Args:
        num_episodes: Without ``returns``, which are drawn then.
        returns: One for each episode.
        failed: Episodes that used up three attempts.
        missing: Episodes without a record.
        success: Success of each episode, -1 for none reported; by default that of the rows.
        seed: Seed of the plan.
        identity: What differs from the usual one.
        **arguments: Of the result, instead of its own.
    """
    drawn = np.random.default_rng(12).exponential(10, num_episodes)
    given = drawn if returns is None else np.asarray(returns, np.float64)
    plan = EpisodePlan(len(given), seed)
    rows = make_rows(plan, given, failed)
    if success is not None:
        rows["success_once"] = rows["success_at_end"] = success
    present = np.setdiff1d(np.arange(len(plan)), missing)
    table = EpisodeTable(len(plan), ("height", "x"))
    table.fill(rows[present], np.arange(2.0 * len(present)).reshape(-1, 2))
    for index in failed:
        for attempt in (1, 2, 3):
            table.add_fault(make_fault(index, attempt))
    whole = not (failed or missing)
    provenance = {"identity": {**IDENTITY, **(identity or {})}, "weights": {"version": 7, "digest": "ab" * 16}}
    state = {"status": "complete" if whole else "partial", "reason": "" if whole else "something went wrong"}
    return EvalResult(
        **{"table": table, "plan": plan, "timing": TIMING, "provenance": provenance, **state, **arguments}
    )


def result_of(returns: npt.ArrayLike, *, success: npt.ArrayLike = -1, **others: Any) -> EvalResult:
    """Return a result of returns, without success; keywords that are no arguments of it are parts of its identity."""
    known = {key: others.pop(key) for key in ("failed", "missing", "seed", "provenance") if key in others}
    return make_result(returns=returns, success=success, identity=others, **({"seed": 0} | known))

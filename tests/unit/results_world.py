"""Results without an evaluation: numbers known by hand, or drawn from a seed, with failed and missing episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import ROW, EpisodeTable, Fault, Outcome
from rl_eval.results.metrics import Timing
from rl_eval.results.result import EvalResult
from rl_eval.scheduling.plan import EpisodePlan

RESULT_KEYS = ("failed", "missing", "seed", "provenance", "return_bounds")
TIMING = Timing(
    wall_seconds=2.0, env_steps=300, reset_seconds=0.1, step_seconds=1.5, inference_seconds=0.4, num_runners=2
)
IDENTITY: dict[str, Any] = {
    "environment": {"env": "CartPole-v1", "env_kwargs": {"gravity": 9.8, "wind": [0, 1]}},
    "policy": "pkg:champion",
    "actions": "clip",
    "max_episode_steps": None,
}
TRACEBACK = 'Traceback (most recent call last):\n  File "sim.py", line 12, in step\nRuntimeError: diverged'


def make_fault(index: int, attempt: int = 1, error_type: str = "RuntimeError", traceback: str = TRACEBACK) -> Fault:
    """Return a fault with every field set, and a number in its message."""
    message = f"diverged at {index / 7:.4f}"
    return Fault(index, 11, attempt, "env", "step", 12, error_type, message, traceback, 1, "host", 0.5)


def make_result(
    num_episodes: int = 40,
    *,
    returns: npt.ArrayLike | None = None,
    failed: Sequence[int] = (),
    missing: Sequence[int] = (),
    attempts: int = 3,
    success: npt.ArrayLike | None = None,
    seed: int = 3,
    rows: Mapping[str, npt.ArrayLike] | None = None,
    infos: npt.NDArray[np.float64] | None = None,
    info_keys: Sequence[str] = ("height", "x"),
    identity: Mapping[str, Any] | None = None,
    version: int = 7,
    traceback: str = TRACEBACK,
    **arguments: Any,
) -> EvalResult:
    """Return a result where episode i has i + 1 steps, success if i is even, and a cut every fifth.

    Args:
        num_episodes: Without ``returns``, which are drawn then.
        returns: One for each episode.
        failed: Episodes that used up their ``attempts``.
        missing: Episodes without a record.
        attempts: Faults of each failed episode.
        success: Success of each episode, -1 for none reported.
        seed: Seed of the plan.
        rows: Columns of the records that are different.
        infos: Info scalars, shape (n, len(info_keys)).
        info_keys: Names of these.
        identity: Parts of the identity that are different.
        version: Version of the weights.
        traceback: Traceback of all faults.
        **arguments: Of the result, instead of its own.
    """
    drawn = np.random.default_rng(12).exponential(10, num_episodes)
    given = drawn if returns is None else np.asarray(returns, np.float64)
    plan, count = EpisodePlan(len(given), seed), np.arange(len(given))
    table = np.zeros(len(plan), ROW)
    columns = {"index": count, "seed": plan.seeds, "length": count + 1}
    columns |= {"episode_return": given, "discounted_return": given / 2}
    columns |= {"truncated": count % 5 == 0, "truncated_by": np.where(count % 5 == 0, 1 + count % 2, 0)}
    columns |= {"terminated": count % 5 != 0, "success_once": 1, "success_at_end": count % 2 == 0}
    columns |= {"outcome": Outcome.COMPLETED, "attempts": 1, "runner": count % 3, "weights_version": version}
    columns |= {"reset_seconds": 0.125, "step_seconds": 0.25, "inference_seconds": 0.5}
    if success is not None:
        columns |= {"success_once": success, "success_at_end": success}
    for name, values in (columns | dict(rows or {})).items():
        table[name] = values
    lost = {"outcome": Outcome.FAILED, "episode_return": np.nan, "discounted_return": np.nan, "length": 0}
    lost |= {"success_once": -1, "success_at_end": -1, "attempts": attempts, "weights_version": -1}
    for name, value in lost.items():
        table[name][list(failed)] = value
    present = np.setdiff1d(count, missing)
    records = EpisodeTable(len(plan), info_keys)
    numbers = np.arange(float(len(info_keys) * len(plan))).reshape(len(plan), -1) if infos is None else infos
    records.fill(table[present], numbers[present])
    for index in failed:
        for attempt in range(1, attempts + 1):
            records.add_fault(make_fault(index, attempt, traceback=traceback))
    state = {"status": "complete", "reason": ""}
    if failed or missing:
        state = {"status": "partial", "reason": f"{len(failed)} of {len(plan)} failed, {len(missing)} did not run"}
    provenance = {
        "identity": {**IDENTITY, **(identity or {})},
        "config": {},
        "weights": {"version": version, "digest": f"{version:032x}"},
    }
    return EvalResult(
        **{"table": records, "plan": plan, "timing": TIMING, "provenance": provenance, **state, **arguments}
    )


def result_of(returns: npt.ArrayLike, *, success: npt.ArrayLike = -1, **others: Any) -> EvalResult:
    """Return a result of returns, without success; keywords that are no arguments of it are parts of its identity."""
    known = {key: others.pop(key) for key in RESULT_KEYS if key in others}
    return make_result(returns=returns, success=success, identity=others, **({"seed": 0} | known))


def drawn_result(
    num_episodes: int = 40,
    draw: int = 0,
    *,
    shift: float = 0.0,
    policy: str = "my_pkg.policies:make",
    env: str = "Hopper-v5",
    info_keys: Sequence[str] = ("distance",),
    **arguments: Any,
) -> EvalResult:
    """Return a result as a simulator's: returns share the difficulty of their episodes over all draws.

    Args:
        num_episodes: How many.
        draw: Seed of lengths, returns, runners and info scalars.
        shift: Added to the returns.
        policy: Policy in the identity.
        env: Environment in the identity.
        info_keys: Names of info scalars.
        **arguments: Of :func:`make_result`.
    """
    rng = np.random.default_rng(draw)
    difficulty = 250 + np.random.default_rng(99).normal(0, 40, num_episodes)
    returns = difficulty + rng.gamma(3, 12, num_episodes) + shift
    length = rng.integers(40, 1000, num_episodes)
    rows = {"length": length, "truncated": length > 950, "truncated_by": length > 950, "terminated": length <= 950}
    rows |= {"success_at_end": returns > 280, "runner": rng.integers(0, 8, num_episodes)}
    rows |= {"reset_seconds": 0.0, "step_seconds": rng.random(num_episodes), "inference_seconds": 0.0}
    drawn: dict[str, Any] = {
        "returns": returns,
        "rows": rows,
        "infos": rng.normal(size=(num_episodes, len(info_keys))),
        "identity": {"environment": {"env": env}, "policy": policy},
        "attempts": 2,
        "determinism": Determinism(checked=20, elsewhere=20),
        "timing": Timing(4.0, 1000, 0.5, 20.0, 5.0, 8),
    }
    return make_result(info_keys=info_keys, **(drawn | arguments))

"""Policies of every kind in three layouts: is each one's number right, refused, or labelled?

A policy that is a function of its observations has one fingerprint in all layouts. One that is not must not give a
number without a word: it is refused, or the result says that it may depend on the layout. What differs
without saying so is a *silent mismatch*, which nothing but this comparison would find.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.policy_kinds import FACTORIES
from benchmarks.runner import Row
from rl_eval import EvalConfig, EvalError, EvalResult, EvalRunnerGroup
from rl_eval.supervision.process_environment import reproducible_environment

__all__ = ["LAYOUTS", "SILENT", "measure", "verdict"]

LAYOUTS: Final = ((0, 1), (0, 8), (2, 4))
"""Runners, and environments of each."""
SILENT: Final = "SILENT MISMATCH"

_EPISODES: Final = 24
_STEPS: Final = 60
_START_S: Final = 120.0
_QUICK: Final = ("network", "dropout_in_training_mode", "normalizes_across_rows")
_PENDULUM: Final = "Pendulum-v1"
_ENVIRONMENTS: Final = {
    "logits": "CartPole-v1",
    "sampled_logits": "CartPole-v1",
    "declared_recurrent": "CartPole-v1",
    "integer_observation": "FrozenLake-v1",
    "dict_observation": "benchmarks.policies:nested_cartpole",
}
_SAMPLED: Final = ("sampled_network", "sampled_logits", "declared_recurrent", "declared_noise")
_LABEL: Final = "the result cannot be reproduced"
"""Start of the note on a policy that does not repeat its results."""


@dataclass(frozen=True)
class Outcome:
    """What one layout gave: a number, perhaps with a label, or an error."""

    fingerprint: str = ""
    label: str = ""
    error: str = ""


def nested_cartpole(context: Any) -> Any:
    """CartPole with nested observations."""
    import gymnasium as gym

    from rl_eval.testing import DictObservation

    return DictObservation(gym.make("CartPole-v1", **context))


def measure(only: str, *, quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Evaluate each policy in every layout, on one Ray cluster of this machine.

    Args:
        only: Pattern of the policies' names.
        quick: Few policies instead of all.
        progress: Told what came out.
    """
    names = [name for name in (_QUICK if quick else FACTORIES) if re.search(only, name)]
    # Where this process computes floats in another way than actors do, fingerprints are not comparable; torch reads
    # the variables when it loads, so another process evaluates.
    os.environ.update(reproducible_environment(), RAY_AUTH_MODE="disabled", RAY_IGNORE_UNHANDLED_ERRORS="1")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, _start_ray) as process:
        rows = []
        for name in names:
            rows.append(process.submit(_row, name).result())
            progress(f"{name}: {rows[-1]['verdict']}")
        process.submit(_stop_ray).result()
    return rows


def _start_ray() -> None:
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Judge what all layouts gave: ``same``, ``refused``, ``labelled``, or a silent mismatch."""
    numbers = [outcome for outcome in outcomes if not outcome.error]
    if len({outcome.fingerprint for outcome in numbers if not outcome.label}) > 1:
        return SILENT
    if len({outcome.fingerprint for outcome in numbers}) > 1:
        return "labelled"
    return "same" if len(numbers) == len(outcomes) else "refused"


def _outcome(name: str, runners: int, envs: int) -> Outcome:
    config = (
        EvalConfig()
        .environment(_ENVIRONMENTS.get(name, _PENDULUM))
        .policy("benchmarks.policy_kinds:build", policy_kwargs={"name": name}, deterministic=name not in _SAMPLED)
        .runners(num_runners=runners, num_envs_per_runner=envs)
        .evaluation(num_episodes=_EPISODES, max_episode_steps=_STEPS)
    )
    try:
        result = _evaluated(config, runners)
    except EvalError as error:
        return Outcome(error=str(error))
    if result.status != "complete":
        return Outcome(error=f"{result.status}: {result.reason}")
    return Outcome(result.fingerprint, _label(result))


def _evaluated(config: EvalConfig, runners: int) -> EvalResult:
    """Evaluate with all runners up, or the first would do everything alone."""
    with EvalRunnerGroup(config) as group:
        deadline = time.monotonic() + _START_S
        while runners and len(group.healthy_runner_ids) < runners and time.monotonic() < deadline:
            time.sleep(0.05)
        return group.evaluate()


def _label(result: EvalResult) -> str:
    """What the result itself says against its number."""
    if result.determinism.passed is False:
        return str(result.determinism)
    return next((note for note in result.notes if note.startswith(_LABEL)), "")


def _row(name: str) -> Row:
    outcomes = [_outcome(name, *layout) for layout in LAYOUTS]
    said = next((text for outcome in outcomes if (text := outcome.error or outcome.label)), "")
    return {
        "label": name.replace("_", " "),
        "status": "ok",
        "verdict": verdict(outcomes),
        "said": said,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }

"""Check that runners come up on Ray and run episodes as this process does; it starts all that an evaluation would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.results.result import EvalResult

__all__ = ["check_cluster"]

_EPISODES_PER_RUNNER: Final = 2
_MAX_STEPS: Final = 100


def check_cluster(settings: EvalSettings) -> Iterator[Finding]:
    """Run a few short episodes on Ray, and the same ones here."""
    if not settings.runners.num_runners:
        yield note("runners.num_runners is 0: there is nothing to try on Ray")
        return
    short = _shortened(settings)
    try:
        with EvalRunnerGroup(short) as group:
            result = group.evaluate()
            up = len(group.healthy_runner_ids)
    except Exception as error:
        yield raised("an evaluation on Ray", error)
        return
    text = f"{up} of {settings.runners.num_runners} runners came up before {len(result.plan)} short episodes were done"
    yield problem(f"{text}: {result.reason}") if result.status == "failed" else ok(text)
    if settings.policy.device == "cpu":
        yield _compare(result, EvalRunnerGroup(_inline(short), threaded=False))


def _compare(there: EvalResult, group: EvalRunnerGroup) -> Finding:
    with group:
        here = group.evaluate()
    if there.fingerprint == here.fingerprint:
        return ok("they give the same records there as in this process")
    return problem(
        f"they give other records there ({there.fingerprint[:16]}) than in this process ({here.fingerprint[:16]})",
        "look for what differs between the machines: versions of packages, files, or what the environment reads from "
        "its surroundings",
    )


def _shortened(settings: EvalSettings) -> EvalSettings:
    steps = min(settings.evaluation.max_episode_steps or _MAX_STEPS, _MAX_STEPS)
    episodes = _EPISODES_PER_RUNNER * settings.runners.num_runners
    return with_values(settings, evaluation={"num_episodes": episodes, "max_episode_steps": steps})


def _inline(settings: EvalSettings) -> EvalSettings:
    """Return settings that run in this process: nothing of Ray in them."""
    runners = RunnersSection(num_envs_per_runner=settings.runners.num_envs_per_runner, runner=settings.runners.runner)
    return with_values(settings, fault_tolerance={"step_timeout_s": None}).model_copy(update={"runners": runners})

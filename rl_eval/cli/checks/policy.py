"""Checks of a policy: it builds, its weights and its actions fit, and how it will be computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rl_eval.adapters import loader_of
from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised, warning
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.policies import adapt_policy
from rl_eval.policies.inference.inference import BLOCK, Inference
from rl_eval.policies.inference.policy_memory import likely_cause_at
from rl_eval.policies.live import configured_weights
from rl_eval.records.episode import Lease
from rl_eval.runners import EvalRunner, runner_class
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import module_of

__all__ = ["check_policy"]

_CALLS: Final = 3
_CALL_S: Final = 0.3
_EPISODES: Final = 2


def check_policy(settings: EvalSettings) -> Iterator[Finding]:
    """Build a runner as an evaluation would, give it the weights and let it run for about a second."""
    try:
        runner = runner_class(settings.runners.runner)(settings, 0)
        if not isinstance(runner, EvalRunner):
            yield warning(f"{type(runner).__name__} is not an rl_eval.EvalRunner, so its policy is not checked")
            return
    except Exception as error:
        yield raised("building the policy", error)
        return
    yield ok(f"builds ({type(runner.policy).__name__})")
    try:
        yield _check_weights(settings, runner)
        try:
            judged = list(_act(settings, runner))
        except ConfigError as error:
            yield problem(str(error), f"the likely cause: {cause}" if (cause := likely_cause_at(runner)) else "")
            return
        if worst := next((finding for finding in judged if finding.level == "problem"), None):
            yield worst
            return
        yield from judged[:1]
        yield ok(f"acts in the environment, with policy.deterministic: {str(settings.policy.deterministic).lower()}")
        yield from (warning(text) for text in runner.inference.notes)
        if isinstance(runner.inference, Inference):  # Else there are several, each with a form of its own.
            yield _describe_inference(runner)
            if cause := likely_cause_at(runner):
                yield warning(f"{cause}; where actions depend on it, an episode is not a function of its seed")
            yield _try_other_mode(settings, runner)
    except Exception as error:
        yield raised("the policy", error)
    finally:
        runner.stop()


def _check_weights(settings: EvalSettings, runner: EvalRunner) -> Finding:
    """Set the configured weights; an :class:`EvalError` says that they cannot be read, or do not fit."""
    section = settings.policy
    snapshot = configured_weights(section)
    if snapshot is not None:
        runner.set_weights(snapshot)
        size = f"{len(snapshot.entries)} tensors, {snapshot.buffer.nbytes / 2**20:.2g} MiB"
        return ok(f"weights fit: {size}, digest {snapshot.digest[:16]}")
    if section.file_digests and loader_of(section.policy):
        files = ", ".join(f"{name} (digest {digest[:16]})" for name, digest in section.file_digests.items())
        return ok(f"made from {files}")
    module = module_of(runner.policy)
    if module is None or not any(True for _ in module.parameters()):
        return ok("has no weights to set")
    return warning(
        "has weights, but policy.weights is not set: it is evaluated with those that its factory gives it",
        "set policy.weights to a file",
    )


def _act(settings: EvalSettings, runner: EvalRunner) -> Iterator[Finding]:
    """Run two episodes for a moment, which also lets the runner decide how it computes; yield what went wrong."""
    plan, most = EpisodePlan(_EPISODES, settings.evaluation.seed), settings.fault_tolerance.max_attempts_per_episode
    leases = [Lease(index, plan[index].seed, 1, 0) for index in range(_EPISODES)]
    for _ in range(_CALLS):
        faults = runner.run(leases, _CALL_S).faults
        leases = [Lease(one.index, one.seed, one.attempt + 1, 0) for one in faults if one.attempt < most]
        for fault in faults:
            text, subject = f"{fault.error_type}: {fault.message}", "attempt of an episode under the policy's actions"
            if fault.cause == "policy":
                yield problem(f"cannot act: {text}")
            elif fault.attempt < most:
                yield warning(f"an {subject} failed: {text}", "repair the environment")
            else:
                yield problem(f"every {subject} failed; the last: {text}")


def _describe_inference(runner: EvalRunner) -> Finding:
    """Say what the runner's probe decided."""
    rows, lanes = runner.inference.rows_per_pass, runner.settings.runners.lanes
    if rows is None:
        return ok(f"a row's result does not depend on its batch: one forward pass for all {lanes} environments")
    if rows == BLOCK:
        return ok(f"a row's result does not depend on its place among {BLOCK}: forward passes of {BLOCK} rows")
    return warning(
        "each environment has its own forward pass: exact, but slow",
        "leave MKL_CBWR unset, so that rl-eval chooses it; do without layers that mix rows",
    )


def _try_other_mode(settings: EvalSettings, runner: EvalRunner) -> Finding:
    """Try the mode that is not configured; not being able to is no fault."""
    deterministic = not settings.policy.deterministic
    setting = f"policy.deterministic: {str(deterministic).lower()}"
    section = settings.policy.model_copy(update={"deterministic": deterministic})
    spaces = runner.spaces
    try:
        policy = adapt_policy(section, *spaces)
        inference = Inference(policy, *spaces, 1, section)
        inference.live[0] = True
        errors = inference.act()[1]
    except Exception as error:
        errors = {0: error}
    return note(f"{setting} would not work: {errors[0]}" if errors else f"{setting} would work too")

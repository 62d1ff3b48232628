"""Checks of the machine, the policy and Ray for ``rl-eval doctor``."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, Literal

from rl_eval.adapters import loader_of
from rl_eval.config.settings import EvalSettings, RunnersSection, needs_interruption, with_values
from rl_eval.errors import EvalError, summary_of
from rl_eval.policies import adapt_policy
from rl_eval.policies.chunks import ChunkedPolicy
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.probe import BLOCK
from rl_eval.policies.subject import configured_weights
from rl_eval.records.episode import Lease
from rl_eval.results.source_code import package_version
from rl_eval.runners import class_of
from rl_eval.runners.core import RunnerCore
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import module_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of ``rl-eval doctor``."""

    level: Literal["ok", "note", "warning", "problem"]
    text: str
    fix: str = ""
    """Suggested action, or empty."""


ok: Final = partial(Finding, "ok")
"""A check passed."""
note: Final = partial(Finding, "note")
"""Information, neither good nor bad."""
warning: Final = partial(Finding, "warning")
"""An evaluation works, but its result may be unexpected."""
problem: Final = partial(Finding, "problem")
"""An evaluation would fail, or its result would be misleading."""


def raised(what: str, error: Exception, fix: str = "") -> Finding:
    """Return the finding for an exception.

    An ``EvalError`` is reported by its message alone. Any other exception is reported as "``what`` raised TYPE: TEXT".
    """
    return problem(str(error) if isinstance(error, EvalError) else f"{what} raised {summary_of(error)}", fix)


_SHORT_STEPS: Final = 100
_TESTED: Final = {
    "Python": "3.11",
    "gymnasium": "1.2 to 1.4",
    "numpy": "2.4",
    "ray": "2.60",
    "tensordict": "0.14 to 0.15",
    "torch": "2.13",
}
"""Tested version of each package, or its oldest and its newest tested version."""


def check_machine() -> Iterator[Finding]:
    """Report the versions of Python and the packages, with a note if they differ from the tested versions."""
    versions = {name: _version(name) for name in _TESTED}
    installed = {name: version for name, version in versions.items() if version is not None}
    if installed:
        yield ok(", ".join(f"{name} {version}" for name, version in installed.items()))
    for name in versions.keys() - installed.keys():
        yield problem(f"{name} is not installed", f"pip install {name}")
    if others := [f"{name} {_TESTED[name]}" for name, version in installed.items() if not _is_tested(name, version)]:
        yield note(f"tested with {', '.join(others)}")


def check_address(settings: EvalSettings) -> Iterator[Finding]:
    """Check that a server listens at the Ray address, if an address is set. Do not join or start a cluster."""
    runners = settings.runners
    if not runners.num_runners:
        yield ok("runners.num_runners is 0, so Ray is not needed")
        return
    address = runners.address or os.environ.get("RAY_ADDRESS", "")
    found = re.fullmatch(r"(?:ray://)?(\[[^]]+\]|[^:/]+):(\d+)", address)
    if not found:
        where = f"the cluster {address!r}" if address else "a local cluster, which stops after the evaluation"
        yield note(f"{runners.num_runners} runners on {where}: not checked; pass --ray to check")
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=3.0).close()
    except (OSError, OverflowError) as error:
        yield problem(
            f"no answer from the Ray address {address!r}: {error}",
            "start a cluster with `ray start --head`, or correct or omit runners.address and RAY_ADDRESS",
        )
    else:
        yield ok(f"a server listens at the Ray address {address!r}; pass --ray to check that it is Ray")


def check_cluster(settings: EvalSettings) -> Iterator[Finding]:
    """Run a few short episodes on Ray, as an evaluation would.

    If the policy's device is the CPU, run them in this process, too, and compare the records.
    """
    from rl_eval.execution.group import EvalRunnerGroup

    runners = settings.runners
    if not runners.num_runners:
        yield note("runners.num_runners is 0, so Ray is not used")
        return
    steps = min(settings.evaluation.max_episode_steps or _SHORT_STEPS, _SHORT_STEPS)
    short = with_values(settings, evaluation={"num_episodes": 2 * runners.num_runners, "max_episode_steps": steps})
    try:
        with EvalRunnerGroup(short) as group:
            there = group.evaluate()
            up = len(group.healthy_runner_ids)
    except Exception as error:
        yield raised("an evaluation on Ray", error)
        return
    text = f"{up} of {runners.num_runners} runners started before {len(there.plan)} short episodes were finished"
    yield problem(f"{text}: {there.reason}") if there.status == "failed" else ok(text)
    if settings.policy.device != "cpu":
        return
    inline = RunnersSection(num_envs_per_runner=runners.num_envs_per_runner, runner=runners.runner)
    without_deadline = with_values(short, fault_tolerance=dict.fromkeys(needs_interruption("fault_tolerance")))
    try:
        with EvalRunnerGroup(without_deadline.model_copy(update={"runners": inline}), threaded=False) as group:
            here = group.evaluate()
    except Exception as error:
        yield raised("an evaluation in this process", error)
        return
    if there.fingerprint == here.fingerprint:
        yield ok("episodes on Ray have the same records as in this process")
    else:
        yield problem(
            f"episodes have other records on Ray (fingerprint {there.fingerprint[:16]}) than in this process "
            f"({here.fingerprint[:16]})",
            "search for package versions, files or environment variables that differ between the machines",
        )


def _is_tested(name: str, version: str) -> bool:
    oldest, _, newest = _TESTED[name].partition(" to ")
    return _release(oldest) <= _release(version) <= _release(newest or oldest)


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _version(name: str) -> str | None:
    return platform.python_version() if name == "Python" else package_version(name)


_CALLS: Final = 3
_CALL_S: Final = 0.3
_EPISODES: Final = 2
_REQUESTS: Final = 4


def check_policy(settings: EvalSettings) -> Iterator[Finding]:
    """Build a runner as an evaluation would, set its weights and run it for about a second."""
    try:
        runner = class_of(settings)(settings, 0)
        if not isinstance(runner, RunnerCore):
            yield warning(
                f"{type(runner).__name__} is not a subclass of rl_eval.EvalRunner, so its policy is not checked"
            )
            return
    except Exception as error:
        yield raised("building the policy", error)
        return
    yield ok(f"the policy can be built ({type(runner.policy).__name__})")
    try:
        yield _check_weights(settings, runner)
        judged = list(_act(settings, runner))
        if worst := next((finding for finding in judged if finding.level == "problem"), None):
            yield worst
            return
        yield from judged[:1]
        yield ok(
            f"the policy acts in the environment, with policy.deterministic: "
            f"{str(settings.policy.deterministic).lower()}"
        )
        yield from (warning(text) for text in runner.inference.notes)
        yield from (note(text) for text in getattr(runner.policy, "speed_notes", ()))
        if isinstance(runner.inference, RowInference):  # Multi-agent runners have one inference per policy.
            if settings.policy.inference != "batched":  # The notes explain batched inference.
                yield _describe_inference(runner.inference, runner.lanes)
            yield _try_other_mode(settings, runner)
            if isinstance(runner.policy, ChunkedPolicy):
                yield _measure_delay(settings, runner, runner.policy)
    except Exception as error:
        yield raised("the policy", error)
    finally:
        runner.stop()


def _check_weights(settings: EvalSettings, runner: RunnerCore) -> Finding:
    """Set the configured weights.

    Raises:
        EvalError: The weights cannot be read or do not fit.
    """
    section = settings.policy
    snapshot = configured_weights(section)
    if snapshot is not None:
        runner.set_weights(snapshot)
        size = f"{len(snapshot.entries)} tensors, {snapshot.buffer.nbytes / 2**20:.2g} MiB"
        return ok(f"the weights fit the policy: {size}, digest {snapshot.digest[:16]}")
    if section.file_digests and loader_of(section.policy):
        files = ", ".join(f"{name} (digest {digest[:16]})" for name, digest in section.file_digests.items())
        return ok(f"the policy is loaded from {files}")
    module = module_of(runner.policy)
    if module is None or not any(True for _ in module.parameters()):
        return ok("the policy has no weights to set")
    return warning(
        "policy.weights is not set, so the policy keeps the weights that its factory sets",
        "set policy.weights to a file",
    )


def _act(settings: EvalSettings, runner: RunnerCore) -> Iterator[Finding]:
    """Run two episodes for about a second; yield warnings and problems. The runner also runs its probe."""
    plan = EpisodePlan(_EPISODES, settings.evaluation.seed, conditions=settings.evaluation.conditions)
    most = settings.fault_tolerance.max_attempts_per_episode
    leases = [Lease(plan[index], 1) for index in range(_EPISODES)]
    for _ in range(_CALLS):
        faults = runner.run(leases, _CALL_S).faults
        leases = [Lease(plan[one.index], one.attempt + 1) for one in faults if one.attempt < most]
        for fault in faults:
            text, subject = f"{fault.error_type}: {fault.message}", "attempt of an episode with the policy's actions"
            if fault.cause == "policy":
                yield problem(f"cannot act: {text}")
            elif fault.attempt < most:
                yield warning(f"an {subject} failed: {text}", "fix the environment")
            else:
                yield problem(f"every {subject} failed; last error: {text}")


def _describe_inference(inference: RowInference, lanes: int) -> Finding:
    """Return the result of the runner's probe: how many observations share a forward pass."""
    rows = inference.rows_per_pass
    if rows is None:
        return ok(f"an action does not depend on its batch: one forward pass for all {lanes} environments")
    if rows == BLOCK:
        return ok(
            f"an action does not depend on its position in a batch of {BLOCK}: forward passes of at most {BLOCK} rows"
        )
    return warning(
        "each environment needs its own forward pass, which is exact but slow",
        "unset MKL_CBWR, so that rl-eval sets it; avoid layers that mix the rows of a batch",
    )


def _measure_delay(settings: EvalSettings, runner: RunnerCore, policy: ChunkedPolicy) -> Finding:
    """Measure a request for a chunk in steps of the environment, and propose this number as the delay."""
    report = runner.run([Lease(EpisodePlan(1, conditions=settings.evaluation.conditions)[0], 1)], _CALL_S)
    inference, seconds = RowInference(policy, *runner.spaces, 1, settings.policy), []
    for _ in range(_REQUESTS):
        inference.begin(0, 0)
        started = perf_counter()
        inference.act()
        seconds.append(perf_counter() - started)
    request, step = min(seconds), report.step_seconds / report.env_steps
    delay = math.ceil(request / step)
    text = f"a request for a chunk takes {request * 1e3:.3g} ms; a step of the environment takes {step * 1e3:.3g} ms"
    if delay > policy.horizon // 2:
        most = f"at most {policy.horizon // 2} for chunks of {policy.horizon} actions"
        return note(f"{text}. The policy is late by {delay} steps, but policy.chunk.delay is {most}")
    if delay == policy.delay:
        return ok(f"{text}, as policy.chunk.delay: {delay} assumes")
    execute = max(delay, min(policy.execute, policy.horizon - delay))
    proposed = f"set policy.chunk: {{execute: {execute}, delay: {delay}}}"
    return note(text, f"for an environment that does not wait for the policy, {proposed}")


def _try_other_mode(settings: EvalSettings, runner: RunnerCore) -> Finding:
    """Try the other value of ``policy.deterministic``; a failure is only a note."""
    deterministic = not settings.policy.deterministic
    setting = f"policy.deterministic: {str(deterministic).lower()}"
    section = settings.policy.model_copy(update={"deterministic": deterministic})
    spaces = runner.spaces
    try:
        policy = adapt_policy(section, *spaces)
        inference = RowInference(policy, *spaces, 1, section)
        inference.live[0] = True
        errors = inference.act()[1]
    except Exception as error:
        errors = {0: error}
    return note(f"{setting} would not work: {errors[0]}" if errors else f"{setting} would work too")

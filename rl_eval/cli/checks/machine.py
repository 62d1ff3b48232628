"""Checks of the machine and of Ray: versions, the address, and with ``--ray`` whether runners come up and agree."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from typing import Final

from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.results.source_code import package_version

__all__ = ["check_address", "check_cluster", "check_machine"]

_SHORT_STEPS: Final = 100
_TESTED: Final = {
    "Python": "3.11",
    "gymnasium": "1.2 to 1.4",
    "numpy": "2.4",
    "ray": "2.60",
    "tensordict": "0.14 to 0.15",
    "torch": "2.13",
}
"""Version, or oldest and newest, that the tests have run with."""


def check_machine() -> Iterator[Finding]:
    """Look at the versions of Python and the packages; other ones than the tested are worth a line, and no warning."""
    versions = {name: _version(name) for name in _TESTED}
    installed = {name: version for name, version in versions.items() if version is not None}
    if installed:
        yield ok(", ".join(f"{name} {version}" for name, version in installed.items()))
    for name in versions.keys() - installed.keys():
        yield problem(f"{name} is not installed", f"pip install {name}")
    if others := [f"{name} {_TESTED[name]}" for name, version in installed.items() if not _is_tested(name, version)]:
        yield note(f"tested with {', '.join(others)}")


def check_address(settings: EvalSettings) -> Iterator[Finding]:
    """Check the port of the configured Ray cluster, if there is one, without joining or starting anything."""
    runners = settings.runners
    if not runners.num_runners:
        yield ok("Ray is not needed: runners.num_runners is 0")
        return
    address = runners.address or os.environ.get("RAY_ADDRESS", "")
    found = re.fullmatch(r"(?:ray://)?(\[[^]]+\]|[^:/]+):(\d+)", address)
    if not found:
        where = f"the cluster {address!r}" if address else "a local cluster, which starts and ends with the evaluation"
        yield note(f"{runners.num_runners} runners on {where}: not tried, --ray does")
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=3.0).close()
    except (OSError, OverflowError) as error:
        yield problem(
            f"nothing answers at the Ray address {address!r}: {error}",
            "start a cluster with `ray start --head`, correct runners.address or RAY_ADDRESS, or leave them out",
        )
    else:
        yield ok(f"something listens at the Ray address {address!r}; --ray finds out what")


def check_cluster(settings: EvalSettings) -> Iterator[Finding]:
    """Run a few short episodes on Ray, which starts all that an evaluation would, and the same ones here."""
    from rl_eval.execution.group import EvalRunnerGroup

    runners = settings.runners
    if not runners.num_runners:
        yield note("runners.num_runners is 0: there is nothing to try on Ray")
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
    text = f"{up} of {runners.num_runners} runners came up before {len(there.plan)} short episodes were done"
    yield problem(f"{text}: {there.reason}") if there.status == "failed" else ok(text)
    if settings.policy.device != "cpu":
        return
    inline = RunnersSection(num_envs_per_runner=runners.num_envs_per_runner, runner=runners.runner)
    without_deadline = with_values(short, fault_tolerance={"step_timeout_s": None})
    with EvalRunnerGroup(without_deadline.model_copy(update={"runners": inline}), threaded=False) as group:
        here = group.evaluate()
    if there.fingerprint == here.fingerprint:
        yield ok("they give the same records there as in this process")
    else:
        yield problem(
            f"they give other records there ({there.fingerprint[:16]}) than in this process ({here.fingerprint[:16]})",
            "look for versions of packages, files, or surroundings that differ between the machines",
        )


def _is_tested(name: str, version: str) -> bool:
    oldest, _, newest = _TESTED[name].partition(" to ")
    return _release(oldest) <= _release(version) <= _release(newest or oldest)


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _version(name: str) -> str | None:
    return platform.python_version() if name == "Python" else package_version(name)

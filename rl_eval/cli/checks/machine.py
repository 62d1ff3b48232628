"""Check of the machine: versions of Python and the packages, and the address of Ray; imports nothing."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from typing import Final

from rl_eval.cli.checks.finding import Finding, note, ok, problem
from rl_eval.config.settings import EvalSettings
from rl_eval.results.source_code import package_version

__all__ = ["check_address", "check_machine"]

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


def _is_tested(name: str, version: str) -> bool:
    oldest, _, newest = _TESTED[name].partition(" to ")
    return _release(oldest) <= _release(version) <= _release(newest or oldest)


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _version(name: str) -> str | None:
    return platform.python_version() if name == "Python" else package_version(name)

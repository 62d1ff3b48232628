"""The tiers of the tests, and the watch that keeps every test in its own.

An unmarked test starts no process and no Ray. ``process`` marks a test that starts child processes, ``ray`` one that
runs on a real Ray cluster; whoever uses the fixture ``ray_cluster`` has that mark without writing it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})
_SYSTEM = frozenset({"fc-list", "git", "lscpu", "uname"})
"""Programs that describe this machine, its fonts and its sources; they take milliseconds."""
_LIBRARIES = ("/glfw/",)
"""Libraries that look for what they load with a process of a moment, when they are imported first."""
_BESIDE = re.compile(r"tests/cluster/test_(address|cli|resume)\.py")
"""Tests in ``tests/cluster`` that start clusters of their own, or none: another worker has them."""
_ON_RAY = re.compile(r"tests/cluster/|.*[\[-](ray|service)(-.*)?\]$")
_DYNAMO = re.compile(
    r"(?i).*(tensordict|compiled|unit/test_(sampling|trainer_untouched|weights)\.py|test_wrappers_are_taken_off)"
)
"""Tests that load tensordict or compile, which takes five seconds once: one worker has them."""
_WITH_CLUSTERS = ("tests/integrations/", "tests/learners/", "tests/simulators/")
"""Tests that take long by themselves: each worker has its own cluster for them."""
_ROOT = Path(__file__).parents[1]
_OWN = (str(_ROOT / "tests"), str(_ROOT / "rl_eval"))


def is_marked(item: pytest.Item) -> bool:
    """Whether a test may start processes."""
    return any(item.get_closest_marker(name) for name in ("process", "ray"))


def scope_of(nodeid: str) -> str:
    """Return what one worker of pytest-xdist runs as a whole: a test, all tests on the shared cluster, or a file.

    These are in ``tests/cluster``, or have a parameter that says so. Marks do not reach the process that distributes.
    """
    if beside := _BESIDE.match(nodeid):
        return beside[0]
    if _ON_RAY.match(nodeid):
        return "ray"
    return "dynamo" if _DYNAMO.match(nodeid) else nodeid


def with_derived_marks(items: list[pytest.Item]) -> list[pytest.Item]:
    """Mark the tests that use the shared cluster, and put all tests on Ray first.

    Raises:
        pytest.UsageError: One of them would not be on the same worker as the others.
    """
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
            if scope_of(item.nodeid) != "ray" and not item.nodeid.startswith(_WITH_CLUSTERS):
                raise pytest.UsageError(
                    f"{item.nodeid} uses ray_cluster: move it to tests/cluster, or call its parameter ray or service"
                )
    return sorted(items, key=lambda item: item.get_closest_marker("ray") is None)


class TierWatch:
    """What the running test has started that its marks do not allow."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._connected = False
        self._started: list[str] = []
        sys.addaudithook(self._audit)
        _also_report_spawned(self._note)

    @contextlib.contextmanager
    def over(self, item: pytest.Item) -> Iterator[None]:
        """Watch one test, with its fixtures."""
        self._item, self._connected = None if is_marked(item) else item, _on_ray()
        self._started.clear()
        try:
            yield
        finally:
            self._item = None

    def complaint(self) -> str:
        """Return what is wrong so far, and what to do; empty if nothing is."""
        if self._item is not None and not self._connected and _on_ray():
            self._started.append("a connection to Ray")
            self._connected = True
        if not self._started:
            return ""
        listed = "\n".join(f"  {line}" for line in dict.fromkeys(self._started))
        self._started.clear()
        return f"an unmarked test starts processes: mark it with pytest.mark.process or pytest.mark.ray\n{listed}"

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS and self._item is not None and Path(_program(args)).name not in _SYSTEM:
            self._note(f"{event} {_program(args)}".strip())

    def _note(self, what: str) -> None:
        if self._item is not None:
            stack = traceback.extract_stack()
            if any(library in frame.filename for frame in stack for library in _LIBRARIES):
                return
            own = [frame for frame in stack if frame.filename.startswith(_OWN)]
            places = [f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}" for frame in own]
            self._started.append(f"{what} at {' <- '.join(_ends(places))}")


def _program(args: tuple[Any, ...]) -> str:
    """Return the program of an event of the audit, which is its first argument where there is one."""
    return os.fsdecode(args[0]) if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""


def _ends(places: list[str]) -> list[str]:
    """Return the innermost place and that of the test."""
    places = [place for place in reversed(places) if not place.startswith(("tests/tiers.py", "tests/conftest.py"))]
    tests = [place for place in places if place.startswith("tests/")]
    return list(dict.fromkeys([*places[:1], *tests[-1:]]))


def _on_ray() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _also_report_spawned(note: Any) -> None:
    """Report processes of ``multiprocessing`` too: those that are spawned raise no event of the audit."""
    start = BaseProcess.start

    def reported(self: BaseProcess) -> None:
        note("multiprocessing.Process")
        start(self)

    BaseProcess.start = reported  # type: ignore[method-assign]

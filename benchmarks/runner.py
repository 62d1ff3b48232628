"""Runs one contender per subprocess, and ends whatever it started.

A contender that fails, hangs or is not installed becomes a row that says so. Every process that a
contender starts inherits a tag in its environment; after the contender has ended, or has outlived its
limit, the processes that still carry the tag are killed by id, Ray's daemons among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.scenarios import REPO

__all__ = [
    "NOT_INSTALLED",
    "TAG",
    "Cell",
    "Finished",
    "Interpreters",
    "Launched",
    "Row",
    "launched",
    "remaining",
    "run_cell",
    "run_command",
]

Row = dict[str, Any]

NOT_INSTALLED: Final = "not installed: pip install -c constraints-integrations.txt '.[integrations]'"
TAG: Final = "RL_EVAL_BENCHMARK"
_SWEEP_S: Final = 10.0
_GRACE_S: Final = 5.0
"""Time for daemons to end by themselves once their starter has."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: which contender, in which interpreter, with which settings."""

    label: str
    contender: str
    params: dict[str, Any]
    column: str = ""
    """Which column of a table with several the cell belongs to."""
    peers: bool = False
    """Whether it runs in the peers' interpreter."""
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Interpreters:
    """The Python that holds rl_eval, and the Python that holds its peers."""

    peers: Path
    core: Path = field(default_factory=lambda: Path(sys.executable))


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended: ``code`` is None when it outlived its limit."""

    code: int | None
    seconds: float
    stdout: str
    stderr: str
    left: int
    """Processes that it had started and that outlived it, before they were killed."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A command that runs in a session and a scratch folder of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    tag: str
    """Value of the variable :data:`TAG` in the environment of everything that it starts."""

    def stdout(self) -> str:
        """What it has printed so far."""
        return _text(self.folder / "stdout.txt")

    def rows(self) -> list[Row]:
        """The JSON lines that it has printed so far."""
        return _json_lines(self.stdout())

    def stderr(self) -> str:
        """What it has complained about so far."""
        return _text(self.folder / "stderr.txt")


def run_cell(cell: Cell, interpreters: Interpreters) -> Row:
    """Run a contender once; never raises because of what the contender does."""
    python = interpreters.peers if cell.peers else interpreters.core
    if not python.exists():
        return {"status": "not installed", "error": f"no interpreter at {python}"}
    command = [str(python), "-m", f"benchmarks.contenders.{cell.contender}", json.dumps(cell.params)]
    done = run_command(command, cell.timeout_s)
    rows = _json_lines(done.stdout)
    found = {"printed": rows[-1]} if rows else {}
    if done.code is None:
        return {"status": "timeout", "error": f"no result after {cell.timeout_s:g} s", **found}
    if not rows or "versions" not in rows[-1]:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"status": "died", "error": f"exit status {done.code}: {last}"[:200], **found}
    return {**rows[-1], "wall_seconds": done.seconds, "left": done.left}


def _json_lines(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def run_command(command: Sequence[str], timeout_s: float) -> Finished:
    """Run a command in a session and a scratch folder of its own, and leave no process behind."""
    with launched(command) as started:
        begin = time.perf_counter()
        try:
            code: int | None = started.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.perf_counter() - begin
        left = 0 if code is None else len(remaining(started.tag, _GRACE_S))
        return Finished(code, seconds, started.stdout(), started.stderr(), left)


@contextlib.contextmanager
def launched(command: Sequence[str], path: str = "") -> Iterator[Launched]:
    """Start a command, and end it with everything that it started when the block ends.

    Output goes to files: a daemon that outlives the command would keep a pipe open.

    Args:
        command: What to start.
        path: Folder that comes first on ``PYTHONPATH``.
    """
    tag = uuid.uuid4().hex
    with _scratch() as folder, (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=_environment(folder, tag, path),
            start_new_session=True,
        )
        try:
            yield Launched(process, folder, tag)
        finally:
            _end(process, tag)


def remaining(tag: str, grace_s: float) -> list[int]:
    """Ids of other processes with this tag, once they are gone or ``grace_s`` seconds have passed."""
    deadline = time.monotonic() + grace_s
    while (left := [pid for pid in _tagged(tag) if pid != os.getpid()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rlb-"))  # short: Ray puts sockets below it
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path, tag: str, first: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    path = os.pathsep.join(filter(None, [first, str(REPO), os.environ.get("PYTHONPATH", "")]))
    ours = {
        TAG: tag,
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return kept | ours


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _end(process: subprocess.Popen[bytes], tag: str) -> None:
    """Kill the command's process group and every process with its tag, until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    deadline = time.monotonic() + _SWEEP_S
    while (left := _tagged(tag)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _tagged(tag: str) -> list[int]:
    """Processes whose environment carries the tag; found through /proc, so on Linux only."""
    needle, found = f"{TAG}={tag}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found

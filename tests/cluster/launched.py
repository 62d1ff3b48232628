"""Ray clusters as users start them, by command: every process carries a mark by which it is found and ended.

``ray stop`` would end every Ray cluster of the machine.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "RL_EVAL_TEST_PROCESSES"


class Machine:
    """An environment in which programs run, and all processes that came of them.

    Args:
        folder: Holds the programs' temporary files and a ``rl-eval`` command of this interpreter.
        variables: Environment variables besides.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.name = f"rl-eval-test-{uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[bytes]] = []
        commands = folder / "bin"
        commands.mkdir()
        write_command(commands / "rl-eval", f'exec {sys.executable} -m rl_eval "$@"')
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            **kept,
            "PATH": f"{commands}:{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_TMPDIR": str(folder / "ray"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # No program runs tasks without a runtime environment, which is what these workers would be for.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "TMPDIR": str(folder),
            MARK: self.name,
            **variables,
        }

    def run(
        self, *command: str | Path, cwd: Path | None = None, timeout_s: float = 180, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its two outputs come as one."""
        return subprocess.run(
            [str(word) for word in command],
            check=False,
            cwd=cwd,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def start(self, *command: str | Path, log: Path) -> None:
        """Start a command that goes on until :meth:`end`; ``log`` gets its outputs."""
        with log.open("wb") as output:
            words = [str(word) for word in command]
            self._started.append(
                subprocess.Popen(
                    words, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            )

    def processes(self) -> list[int]:
        """Return the pids of all living processes that carry the mark, or come from one started here."""
        wanted = f"{MARK}={self.name}".encode()
        found = {pid for process in self._started if process.poll() is None for pid in _family(process.pid)}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def end(self) -> None:
        """Kill them all."""
        deadline = time.monotonic() + 30
        while pids := self.processes():
            assert time.monotonic() < deadline, f"processes {pids} do not end"
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants; sshd hides its environment."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


@contextmanager
def machine(**variables: str) -> Iterator[Machine]:
    """Have a :class:`Machine` in a short path, since Ray's sockets lie below; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="rle", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Machine(Path(folder), variables)
        try:
            yield made
        finally:
            made.end()


def write_command(path: Path, line: str) -> None:
    """Write an executable shell script of one line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def start_options(ports: Sequence[int]) -> list[str]:
    """Return options of ``ray start`` with which it disturbs no other cluster; the first port is Ray's own."""
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    return [
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
        *("--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4", "--num-gpus=0"),
        *("--object-store-memory=200000000", "--disable-usage-stats"),
    ]


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: It does not come true.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)

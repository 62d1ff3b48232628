"""Runs that are killed at any time: the next run leaves no process, no folder and no shared memory of theirs.

``python -m tests.cluster.test_killed_runs 200 7`` kills 200 runs, chosen by the seed 7.
"""

import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launched import Machine, free_ports, machine, start_options, wait_until

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.ray, pytest.mark.slow]

KINDS = ("Plain", "Threads", "Deaf", "HangsInClose", "Stuck", "Raises", "Dies", "Parents")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LAYOUTS = {
    "in process": [["--num-runners", "0", "--envs-per-runner", "2"]],
    "slots": [["--num-runners", "0", "--envs-per-runner", "2", "--set", "runners.runner=subprocess"]],
    "local": [["--num-runners", "1", "--envs-per-runner", "2"]],
    "cluster": [
        ["--num-runners", "2", "--envs-per-runner", "2", "--address", "{address}"],
        ["--num-runners", "2", "--address", "{address}", "--set", "fault_tolerance.step_timeout_s=30"],
    ],
}
NOT_IN_PROCESS = {"in process": ("Dies",), "slots": ()}
"""Kinds that would kill the test's own subject."""
AT_ONCE = 4
"""Runs at the same time."""
GENTLE_S = 40.0
"""Time that a run has to end after a signal that it can handle; then it is killed."""


@contextmanager
def cluster() -> Iterator[tuple[Machine, str]]:
    """A machine with a Ray cluster of one node, and its address."""
    with machine(RAY_AUTH_MODE="disabled", PYTHONPATH=f"{Path(__file__).parents[2]}:{Path(__file__).parent}") as made:
        ports = free_ports(4)
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        made.run(*ray, "start", "--head", *start_options(ports), "--include-dashboard=false")
        yield made, f"127.0.0.1:{ports[0]}"


def options(kind: str, extra: list[str], address: str, folder: Path, episodes: int) -> list[str]:
    given = [word.format(address=address) for word in extra]
    common = ["--env", f"killed_world:{kind}", "--policy", "killed_world:policy", "-n", str(episodes), "--seed", "1"]
    return [sys.executable, "-m", "rl_eval", "run", *common, *given, "--output", str(folder)]


def kill_one(made: Machine, address: str, seed: int, number_of_run: int) -> str:
    """Start a run, and end it by a signal at a random time; return what was done."""
    draw, folder = random.Random(f"{seed} {number_of_run}"), made.folder / f"run{number_of_run}"
    layout = draw.choice(list(LAYOUTS))
    kind = draw.choice([kind for kind in KINDS if kind not in NOT_IN_PROCESS.get(layout, ())])
    number, after = draw.choice(SIGNALS), draw.uniform(0.3, 9.0)
    command = options(kind, draw.choice(LAYOUTS[layout]), address, folder, episodes=100_000)
    with folder.with_suffix(".txt").open("w") as output:
        run = subprocess.Popen(
            command, env=made.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=made.folder
        )
    try:
        run.wait(after)
    except subprocess.TimeoutExpired:
        run.send_signal(number)
    try:
        run.wait(GENTLE_S)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
    done = f"{layout} {kind} {number.name} after {after:.1f} s: exit {run.returncode}"
    log.info("%d: %s", number_of_run, done)
    return done


def shared_memory() -> set[str]:
    """Return the names of segments that rl_eval, Python or torch made; other programs of this machine make others."""
    return {place.name for place in Path("/dev/shm").iterdir() if place.name.startswith(("psm_", "rl", "torch_"))}


def check(count: int, seed: int) -> None:
    """Kill runs, make two ordinary runs, and look for what is left."""
    with cluster() as (made, address):
        time.sleep(5)
        before, memory = set(made.processes()), shared_memory()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            killed = list(pool.map(partial(kill_one, made, address, seed), range(count)))
        for layout in ("in process", "cluster"):
            ended = made.run(
                *options("Plain", LAYOUTS[layout][0], address, made.folder / f"ordinary {layout}", episodes=4)
            )
            assert ended.returncode == 0, ended.stdout

        def left() -> list[str]:
            return [word for pid in made.processes() if pid not in before and is_ours(word := command_of(pid))]

        wait_until(lambda: not left(), f"processes of killed runs end: {left()}; {killed}", timeout_s=30)
        folders = [place.name for place in made.folder.iterdir() if place.name.startswith(("rl_eval", ".rl_eval"))]
        assert not folders, (folders, killed)
        assert shared_memory() <= memory, killed


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_ours(command: str) -> bool:
    """Whether a process belongs to a run: not an idle worker or a daemon of the cluster."""
    return bool(command) and not command.startswith(("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"))


def test_after_killed_runs_nothing_is_left() -> None:
    check(8, seed=1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    check(int(sys.argv[1]), int(sys.argv[2]))

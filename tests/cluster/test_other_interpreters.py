"""Environments in other interpreters that this machine has, each with packages of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate

pytestmark = pytest.mark.slow

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = [
    (OWN, ("numpy", "gymnasium")),
    ("3.8", ("numpy", "gymnasium")),
    ("3.8", ("numpy", "gym==0.25.2")),
    ("3.10", ("numpy", "gymnasium")),
    ("3.13", ("numpy", "gymnasium")),
]
LAYOUTS = [(0, 1), (0, 8), (2, 4)]
PRINTING = """
import random, sys

class Discrete:
    def __init__(self, n): self.n = n

class Prints:
    observation_space, action_space = Discrete(9), Discrete(2)
    def reset(self, seed=None, options=None): self.random = random.Random(seed); self.left = 9; return 0, {}
    def step(self, action):
        print("stepped"); sys.stdout.flush()
        self.left -= 1
        return self.random.randrange(9), self.random.random(), self.left == 0, False, {}

class Sleeps(Prints):
    def step(self, action):
        import time
        time.sleep(600)
"""


def config(runners: int, lanes: int) -> EvalConfig:
    made = EvalConfig().environment("CartPole-v1").policy("random", deterministic=False)
    made.evaluation(num_episodes=24, determinism_check=0.1)
    return made.runners(num_runners=runners, num_envs_per_runner=lanes)


@pytest.mark.parametrize(("version", "packages"), PACKAGES)
def test_records_do_not_depend_on_the_interpreter(
    ray_cluster: Any, interpreter: Any, version: str, packages: tuple[str, ...]
) -> None:
    here = evaluate(config(0, 8))
    for runners, lanes in LAYOUTS:
        there = evaluate(config(runners, lanes).environment(python=interpreter(version, *packages)))
        assert there.fingerprint == here.fingerprint
        assert there.determinism.checked > 0 == len(there.determinism.mismatched)
        assert there.provenance["numerics"]["environment/python"].startswith(f"{version}.")


def test_an_interpreter_of_2016_without_packages(tmp_path: Path, ray_cluster: Any, interpreter: Any) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    for lanes in (1, 4):
        made = config(0, lanes).environment("printing:Prints", python_path=[str(tmp_path)])
        pythons = sys.executable, interpreter("3.6")
        here, there = (evaluate(made.copy().environment(python=one)) for one in pythons)
        assert (there.status, there.faults) == ("complete", [])
        assert there.fingerprint == here.fingerprint


def test_the_death_of_a_runner_on_ray_ends_its_workers(tmp_path: Path, ray_cluster: Any, interpreter: Any) -> None:
    """While their simulators sleep in a call, and behind a shell."""
    (tmp_path / "printing.py").write_text(PRINTING)
    python = ["sh", "-c", '"$0" "$@"; true', interpreter(OWN)]
    made = config(1, 2).environment("printing:Sleeps", python=python, python_path=[str(tmp_path)])
    with EvalRunnerGroup(made) as group:
        (runner,) = group.foreach_runner(lambda runner: os.getpid(), timeout_s=120.0)
        handle = group.submit()
        assert eventually(lambda: len(workers(python[-1])) >= 2)
        before = workers(python[-1])
        os.kill(runner, signal.SIGKILL)
        assert eventually(lambda: not before & workers(python[-1]))
        handle.cancel()
    assert eventually(lambda: not workers(python[-1]))


def workers(python: str) -> set[int]:
    """Return the ids of processes of an interpreter that are alive."""
    found = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()]
    return {int(pid) for pid, state, args in lines if args.startswith(python) and "Z" not in state}

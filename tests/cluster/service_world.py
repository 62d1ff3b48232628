"""Evaluations whose return is the weights that made it, and processes that start a service or use one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from evaluator_modules import Scale
from evaluator_world import config

from rl_eval import EvalConfig

ROOT = Path(__file__).parents[2]

PRELUDE = """
import json, sys, time
import ray, torch
from service_world import echo
from rl_eval import Evaluator

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")


def weights(value):
    return {"weight": torch.full((1, 1), float(value))}


def say(*words):
    print(json.dumps(words), flush=True)
"""
"""Beginning of every program that :func:`program` runs."""


def echo(gate: str = "", num_episodes: int = 2, **runners: Any) -> tuple[EvalConfig, Any]:
    """Return a config and a policy of one weight, which is the return of every episode.

    Args:
        gate: File without which no episode ends.
        num_episodes: Episodes of an evaluation.
        **runners: More settings of the runners.
    """
    runners = {"num_runners": 1, "num_envs_per_runner": 2, **runners}
    return config(until=gate).runners(**runners).evaluation(num_episodes=num_episodes), Scale()


class Program:
    """A running process whose output is lines of JSON."""

    def __init__(self, path: Path, *words: str) -> None:
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
        self.errors = path.with_suffix(".err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(path), ray.get_runtime_context().gcs_address, *words],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def hear(self) -> Any:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        return json.loads(line)

    def kill(self) -> None:
        """Kill it: it has no chance to say goodbye."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def program(folder: Path, text: str, *words: str) -> Iterator[Program]:
    """Run a program; it is killed at the end if it lives.

    Args:
        folder: Where it is written to.
        text: What follows :data:`PRELUDE`.
        *words: Its arguments, after the address of the cluster.
    """
    path = folder / f"program{len(list(folder.glob('program*.py')))}.py"
    path.write_text(PRELUDE + text)
    running = Program(path, *words)
    try:
        yield running
    finally:
        running.kill()
        assert running.process.stdout is not None
        running.process.stdout.close()

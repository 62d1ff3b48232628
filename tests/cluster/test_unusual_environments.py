"""Environments that change their process: the result of two runners is that of an undisturbed run."""

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import killed_world
import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def first_time(folder: Path) -> bool:
    """Whether no process has been here before."""
    try:
        folder.joinpath("struck").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def close_standard_streams(folder: Path) -> None:
    for descriptor in (0, 1, 2):
        try:
            os.close(descriptor)
        except OSError:
            continue


def close_all_descriptors(folder: Path) -> None:
    if first_time(folder):
        os.closerange(3, 4096)


def end_the_process(folder: Path) -> None:
    if first_time(folder):
        os._exit(0)


def leave_the_actor(folder: Path) -> None:
    if first_time(folder):
        import ray

        ray.actor.exit_actor()


def disconnect(folder: Path) -> None:
    if first_time(folder):
        import ray

        ray.shutdown()


def stop_the_clocks(folder: Path) -> None:
    time.time = lambda: 0.0
    time.monotonic = lambda: 5.0
    time.perf_counter = lambda: 1.0
    time.sleep = lambda seconds: None


def break_modules(folder: Path) -> None:
    import json
    import pickle

    json.dumps = lambda *_, **__: "{}"  # type: ignore[assignment]
    pickle.dumps = lambda *_, **__: b"x"  # type: ignore[assignment]


def limit_recursion(folder: Path) -> None:
    sys.setrecursionlimit(80)


def remove_streams(folder: Path) -> None:
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]


def seed_generators(folder: Path) -> None:
    random.seed(0)
    np.seterr(all="raise")
    socket.setdefaulttimeout(0.0001)


def start_threads(folder: Path) -> None:
    if first_time(folder):
        threading.Thread(target=lambda: threading.Event().wait(1000)).start()


def fork_and_return(folder: Path) -> None:
    if first_time(folder):
        os.fork()


STRIKES = [
    close_standard_streams,
    close_all_descriptors,
    end_the_process,
    leave_the_actor,
    disconnect,
    stop_the_clocks,
    break_modules,
    limit_recursion,
    remove_streams,
    seed_generators,
    start_threads,
    fork_and_return,
]


class Struck(killed_world.Plain):
    """Calls a function in each third step."""

    def __init__(self, strike: Callable[[Path], object], folder: Path) -> None:
        self.strike, self.folder = strike, folder

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            self.strike(self.folder)
        return super().step(action)


def config(strike: Callable[[Path], object], folder: Path) -> EvalConfig:
    return (
        EvalConfig()
        .environment(lambda context: Struck(strike, folder))
        .policy(killed_world.policy)
        .evaluation(num_episodes=12, determinism_check=0)
    )


@cache
def undisturbed() -> str:
    return evaluate(config(lambda folder: None, Path())).fingerprint


@pytest.mark.parametrize("strike", STRIKES)
def test_the_result_is_that_of_an_undisturbed_run(strike: Callable[[Path], object], tmp_path: Path) -> None:
    runners = config(strike, tmp_path).runners(num_runners=2, num_envs_per_runner=2)
    result = evaluate(runners)
    assert result.status == "complete", result.reason
    assert result.fingerprint == undisturbed()

"""Evaluations in this process where torch has 1, 2 and all threads, with cores that are idle or taken by others."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.runner import Row
from rl_eval import EvalConfig, EvalRunnerGroup, evaluate

__all__ = ["LOOP", "measure"]

LOOP: Final = "loop of forward passes, without rl_eval"
_SLOTS: Final = 16
_PASSES: Final = 500
_SPIN: Final = "while True: pass"


def measure(episodes: int, repeat: int, progress: Callable[[str], None]) -> list[Row]:
    """Time all contenders with all numbers of threads, in turns.

    Args:
        episodes: Episodes of an evaluation.
        repeat: Turns.
        progress: Called with the name of each turn.
    """
    import torch

    contenders = _contenders(episodes, _network(torch))
    rows: list[Row] = []
    for cores, load in (("idle", 0), ("busy", os.cpu_count() or 1)):
        seconds: dict[tuple[str, int], list[float]] = {}
        with _spinning(load):
            for turn in range(repeat + 1):
                progress(f"cores {cores}, turn {turn} of {repeat}")
                for threads in sorted({1, 2, os.cpu_count() or 1}):
                    torch.set_num_threads(threads)
                    for label, contender in contenders.items():
                        begun = time.perf_counter()
                        contender()
                        if turn:
                            seconds.setdefault((label, threads), []).append(time.perf_counter() - begun)
        rows += [_row(label, cores, threads, found) for (label, threads), found in seconds.items()]
    return sorted(rows, key=lambda row: row["label"])


def _row(label: str, cores: str, threads: int, seconds: list[float]) -> Row:
    turns = [{"seconds": one} for one in seconds]
    shared = {"label": label, "cores": cores, "threads": threads, "status": "ok"}
    return {**shared, "seconds": statistics.median(seconds), "turns": turns}


def _network(torch: Any) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 2))


def _contenders(episodes: int, network: Any) -> dict[str, Callable[[], object]]:
    """Return what is timed, by label: in the calling thread, in a thread of a group, and with nothing of ours."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=episodes, seed=0)
    config = config.runners(num_envs_per_runner=_SLOTS)

    def by_group() -> None:
        with EvalRunnerGroup(config, network) as group:
            group.evaluate()

    def by_loop() -> None:
        import torch

        batch = torch.zeros(_SLOTS, 4)
        with torch.no_grad():
            for _ in range(_PASSES):
                network(batch)

    return {"evaluate": lambda: evaluate(config, network), "EvalRunnerGroup": by_group, LOOP: by_loop}


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Take so many cores."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN]))
            stack.callback(process.kill)
        yield
